"""An IterableDataset that shares its samples out among the workers."""

import lightning.pytorch as pl
from pieces import Model, fit, make_image
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Stream(IterableDataset):
    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for index in range(first, 640, step):
            yield make_image(index), index


if __name__ == "__main__":
    pl.seed_everything(1)
    fit(Model(), DataLoader(Stream(), 16, num_workers=2))

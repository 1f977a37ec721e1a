"""A sample that comes again in its epoch draws anew, alike by every executor and after a resume."""

from __future__ import annotations

import enum
from collections import defaultdict

import albumentations as A
import numpy as np
import pytest
import torch
from misses import each
from PIL import Image
from resilience.runs import warned
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from trainers import Learner, quiet_trainer, trained

from lightning_fastdata import FastDataLoader, FastDataModule, FastImageFolder, Mixture
from lightning_fastdata.data import SharedSampler

LENGTH = 6
TIMES = 4
WEIGHTS = [9.0, *[1.0] * (LENGTH - 1)]
EXECUTORS = ["inline", "workers", "torch"]


class Drawing(Dataset):
    """Draws from each kind of generator that is keyed, and says how it was asked."""

    def __init__(self):
        self.compose = A.Compose([A.RandomCrop(2, 2)])
        self.own = np.random.default_rng(3)

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        ramp = np.arange(4096, dtype=np.float32).reshape(64, 64, 1)
        plain = type(index) in (int, np.int64)
        return index, plain, self.compose(image=ramp)["image"], torch.rand(()), self.own.random()


def center(image):
    return {"image": image[31:33, 31:33]}


class Together(Drawing):
    """Reads the samples of a batch in one call."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def generator():
    return torch.Generator().manual_seed(5)


ORDERS = {
    "weighted": lambda: WeightedRandomSampler(WEIGHTS, 24, generator=generator()),
    "long": lambda: RandomSampler(range(LENGTH), num_samples=TIMES * LENGTH, generator=generator()),
    "views": lambda: [index for index in range(LENGTH) for _ in range(TIMES)],
    "numpy": lambda: np.arange(LENGTH).repeat(TIMES),
}


def loader_of(order, executor="inline", dataset=None, **options):
    return FastDataLoader(
        Drawing() if dataset is None else dataset,
        **{"batch_size": 4, **options},
        sampler=ORDERS[order](),
        executor=executor,
        num_workers=0 if executor == "inline" else 2,
        seed=7,
    )


def rows(batches):
    """Index, crop, and draws of each sample, in their order; each index was a plain one."""
    found = []
    for indices, plain, crops, *drawn in batches:
        assert plain.all()
        columns = indices, crops[:, 0, 0, 0], *drawn
        found += zip(*(column.tolist() for column in columns), strict=True)
    return found


def drawn_by_sample(found):
    by_sample = defaultdict(list)
    for index, *drawn in found:
        by_sample[index].append(drawn)
    return by_sample


@each("order", ORDERS)
def test_each_time_draws_anew_and_the_first_time_as_in_any_order(order):
    once = {index: drawn for index, *drawn in rows(loader_of("views", batch_size=3))[::TIMES]}
    assert len(once) == LENGTH
    for index, drawn in drawn_by_sample(rows(loader_of(order))).items():
        assert drawn[0] == once[index]
        for kind in zip(*drawn, strict=True):
            assert len(set(kind)) == len(drawn), (index, kind)


@each("executor", EXECUTORS)
@each("order", ORDERS)
def test_every_executor_draws_the_same(order, executor):
    kinds = 1 if executor == "torch" else 3  # torch's own workers key Albumentations' draws alone
    loader = loader_of(order, executor)
    found = [row[: 1 + kinds] for row in rows(loader)]
    loader.close()
    assert found == [row[: 1 + kinds] for row in rows(loader_of(order))]


@each("executor", ["inline", "workers"])
@each("compose", [A.RandomCrop(2, 2), A.CenterCrop(2, 2), None])
def test_samples_that_are_read_together_draw_anew(compose, executor):
    dataset = Together()
    dataset.compose = compose or center
    loader = loader_of("views", executor, dataset, batch_size=2)
    drawn = drawn_by_sample(rows(loader))
    loader.close()
    for of in drawn.values():
        assert len({(torchs, own) for _, torchs, own in of}) == TIMES


@each("size", [4, 3])
@each("taken", [1, 3])
@each("order", ORDERS)
def test_a_resume_within_an_epoch_counts_what_came_before(order, taken, size):
    whole = loader_of(order)
    straight, broken = rows(whole), loader_of(order)
    batches = iter(broken)
    for _ in range(taken):
        next(batches)
    resumed = loader_of(order, batch_size=size)
    resumed.load_state_dict(broken.state_dict())
    with warned() as told:
        assert rows(resumed) == straight[4 * taken :]
    assert len(told) == (size != 4)


class Module(FastDataModule):
    def train_dataloader(self):
        return self.make_loader(Drawing(), stage="train", sampler=ORDERS["weighted"]())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_training_that_goes_on_draws_as_one_without_a_break(tmp_path):
    module = {"batch_size": 4, "seed": 7, "num_workers": 0}
    straight = rows(trained(Module(**module), folder=tmp_path, max_epochs=2))
    trainer, model = quiet_trainer(tmp_path, max_epochs=2, max_steps=4), Learner()
    trainer.fit(model, Module(**module))
    trainer.save_checkpoint(tmp_path / "within.ckpt")
    how = {"folder": tmp_path, "max_epochs": 2, "resume": tmp_path / "within.ckpt"}
    assert rows(model.seen) + rows(trained(Module(**module), **how)) == straight


@each("ranks", [2, 4])
def test_ranks_count_together(ranks):
    parts = [rows(loader_of_rank(rank, ranks)) for rank in range(ranks)]
    one = rows(loader_of_rank(0, 1))
    assert sorted(row for part in parts for row in part) == sorted(one)


def loader_of_rank(rank, ranks):
    size = 4 // ranks
    share = SharedSampler(
        ORDERS["weighted"](), batch_size=size, num_replicas=ranks, rank=rank, seed=7
    )
    return FastDataLoader(Drawing(), size, sampler=share, executor="inline", seed=7)


def folder_of(path):
    (path / "only").mkdir(exist_ok=True)
    pixels = np.arange(90 * 90 * 3, dtype=np.int64).reshape(90, 90, 3) % 251
    Image.fromarray(pixels.astype(np.uint8)).save(path / "only" / "0.png")
    return FastImageFolder(path, size=32, seed=3)


def crops_of(dataset, executor, epochs=1, **how):
    workers = 2 * (executor != "inline")
    loader = FastDataLoader(dataset, **how, executor=executor, num_workers=workers, seed=3)
    batches = [batch for _ in range(epochs) for batch in loader]
    loader.close()
    return [image.numpy().tobytes() for images, _ in batches for image in images]


@each("within", [None, Subset])
@each("executor", ["inline", "workers", "torch"])
def test_a_folder_of_images_crops_anew(tmp_path, executor, within):
    folder = folder_of(tmp_path)
    folder = folder if within is None else within(folder, [0])
    order = {"batch_sampler": [[0, 0], [0, 0]]}
    crops = [crops_of(folder, who, **order) for who in ("inline", executor)]
    assert crops[0] == crops[1]
    assert len(set(crops[0])) == 4


class Held(Dataset):
    """Reads samples of another dataset, which it does not hold itself, several times an epoch."""

    def __init__(self, **parts):
        self.parts = parts

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.parts["images"][index % len(self.parts["images"])]


AROUND = {
    "held in a dict": lambda folder: Held(images=folder),
    "held by another": lambda folder: Held(images=Subset(Held(images=folder), [0, 0])),
    "a mixture": lambda folder: Mixture({"a": folder}, length=4),
    "a part of a mixture": lambda folder: Mixture({"a": Subset(folder, [0])}, length=4),
    "a subset": lambda folder: Subset(folder, [0, 0, 0, 0]),
    "joined": lambda folder: ConcatDataset([folder] * 4),
}


@each("executor", ["inline", "workers", "torch"])
@each("around", AROUND)
def test_a_folder_of_images_below_another_dataset_crops_anew_for_each_sample(
    tmp_path, around, executor
):
    dataset = AROUND[around](folder_of(tmp_path))
    crops = crops_of(dataset, executor, 2, batch_size=2)
    assert crops == crops_of(AROUND[around](folder_of(tmp_path)), "inline", 2, batch_size=2)
    assert len(set(crops)) == 2 * 4


def test_rows_of_a_tensor_are_taken_as_they_were():
    data = TensorDataset(torch.arange(LENGTH))
    found = torch.cat([part for (part,) in loader_of("weighted", "gather", data)])
    assert found.tolist() == [*ORDERS["weighted"]()]


class Asked(Dataset):
    """Says how it was asked for a sample."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        whole = index if isinstance(index, list | tuple) else [index]
        return repr(index), [type(each).__name__ for each in (index, *whole)]


class Color(enum.IntEnum):
    RED, BLUE = range(2)


GIVEN = {
    "tensors": {"sampler": torch.tensor([1, 1, 2, 1]), "batch_size": 2},
    "tensors in tensors": {"batch_sampler": [*torch.tensor([[1, 1, 0], [2, 1, 0]])]},
    "numbers of NumPy": {"sampler": np.array([1, 1, 2, 1], np.uint8), "batch_size": 2},
    "members": {"sampler": [Color.RED, Color.BLUE, Color.RED, Color.RED], "batch_size": 2},
    "truths": {"sampler": [True, True, False, True], "batch_size": 2},
    "lists": {"sampler": [[1, 2], [2, 1], [1, 2]], "batch_size": None},
    "tuples": {"sampler": [(1, 2), (2, 1), (1, 2)], "batch_size": None},
    "arrays of one": {"sampler": torch.tensor([[1], [1], [2]]), "batch_size": None},
    "batches of one": {"batch_sampler": [*torch.tensor([[1], [1], [2]])]},
}


@each("executor", ["inline", "workers"])
@each("given", GIVEN)
def test_a_dataset_gets_each_index_as_the_sampler_gave_it(given, executor):
    how = {"collate_fn": list, **GIVEN[given]}
    workers = 2 * (executor == "workers")
    loader = FastDataLoader(Asked(), **how, executor=executor, num_workers=workers)
    found = [*loader]
    loader.close()
    assert found == [*DataLoader(Asked(), **how)]

"""FastDataLoader over each executor is still the DataLoader that tools expect."""

from __future__ import annotations

import copy
import multiprocessing
import pickle

import pytest
import torch
from alike import alike
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_fastdata import FastImageFolder
from lightning_fastdata.batches.staged import StagedBatch
from lightning_fastdata.errors import FastDataWarning, WorkerError
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.position import Passes

DATA = TensorDataset(torch.arange(40.0).reshape(20, 2), torch.arange(20))


def test_a_running_loader_can_be_copied_and_pickled() -> None:
    how = {"num_workers": 1, "persistent_workers": True, "executor": "workers"}
    loader = FastDataLoader(DATA, batch_size=4, **how)
    running = iter(loader)
    next(running)
    assert list(copy.deepcopy(running)) == []
    assert len(list(pickle.loads(pickle.dumps(loader)))) == 5
    assert len(list(running)) == 4
    loader.close()


def test_what_reads_keeps_nothing_of_who_takes_alive() -> None:
    """Else a pass, and what is noted of it, would live as long as workers that are kept."""
    loader = FastDataLoader(DATA, batch_size=4, executor="inline")
    next(iter(loader))
    assert not any(isinstance(held, Passes) for held in vars(loader.as_set_up()).values())
    assert len(list(loader)) == 5


@pytest.mark.parametrize("executor", ["inline", "gather", "workers"])
@pytest.mark.parametrize("persistent", [False, True])
def test_closing_ends_an_epoch_with_an_error_and_not_as_if_it_were_over(
    executor: str, persistent: bool
) -> None:
    before = set(multiprocessing.active_children())
    how = {"num_workers": 1, "persistent_workers": persistent, "executor": executor}
    loader = FastDataLoader(DATA, batch_size=4, **how)
    running = iter(loader)
    next(running)
    loader.close()
    assert not set(multiprocessing.active_children()) - before
    with pytest.raises(WorkerError, match="its loader was closed"):
        next(running)
    assert len(list(loader)) == 5
    loader.close()


@pytest.mark.parametrize("executor", ["inline", "gather", "workers"])
def test_two_epochs_at_once_do_not_mix(executor: str) -> None:
    loader = FastDataLoader(DATA, batch_size=4, num_workers=1, executor=executor)
    pairs = [(one[1].tolist(), two[1].tolist()) for one, two in zip(loader, loader, strict=True)]
    assert pairs == [(list(range(i, i + 4)),) * 2 for i in range(0, 20, 4)]


def test_a_persistent_loader_ends_the_older_iterator_aloud() -> None:
    how = {"num_workers": 1, "persistent_workers": True, "executor": "workers"}
    loader = FastDataLoader(DATA, batch_size=4, **how)
    older = iter(loader)
    next(older)
    assert len(list(loader)) == 5
    with pytest.raises(WorkerError, match="another epoch"):
        next(older)
    loader.close()


@pytest.mark.parametrize("executor", ["inline", "workers"])
def test_no_workers_means_the_calling_process(executor: str) -> None:
    before = set(multiprocessing.active_children())
    running = iter(FastDataLoader(DATA, batch_size=4, num_workers=0, executor=executor))
    next(running)
    assert set(multiprocessing.active_children()) <= before


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


@pytest.mark.parametrize(
    ("dataset", "executor"),
    [
        *((DATA, executor) for executor in ("inline", "gather", "workers")),
        *((Stream(), executor) for executor in ("inline", "workers")),
    ],
)
def test_a_staged_batch_without_draws_is_the_plain_one_wrapped(dataset, executor) -> None:
    how = {"batch_size": 4, "num_workers": 1}
    ours = list(FastDataLoader(dataset, **how, executor=executor, staged="val"))
    for one, two in zip(ours, DataLoader(dataset, **how), strict=True):
        assert type(one) is StagedBatch
        assert (one.stage, one.draws) == ("val", None)
        assert alike(one.batch, two)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is something to pin for")
def test_without_an_accelerator_nothing_is_pinned_and_that_is_said() -> None:
    loader = FastDataLoader(DATA, batch_size=20, pin_memory=True, executor="inline")
    with pytest.warns(FastDataWarning, match="no accelerator"):
        (batch,) = loader
    assert torch.equal(batch[1], DATA.tensors[1])


@pytest.mark.cases(2)
@pytest.mark.parametrize("persistent", [False, True])
def test_a_folder_of_images_is_decoded_as_by_torch(tmp_path, persistent) -> None:
    for number in range(14):
        folder = tmp_path / f"class{number % 3}"
        folder.mkdir(exist_ok=True)
        noise = Image.effect_noise((40 + 5 * number, 49 + 5 * number), 80)
        noise.convert("RGB").save(folder / f"{number}.jpg")

    def folder() -> FastImageFolder:
        return FastImageFolder(tmp_path, size=32, horizontal_flip=0.5, seed=3)

    how = {"batch_size": 4, "num_workers": 2, "persistent_workers": persistent, "shuffle": True}
    orders = [torch.Generator().manual_seed(2) for _ in range(2)]
    ours, data = FastDataLoader(folder(), **how, executor="workers", generator=orders[0]), folder()
    theirs = DataLoader(data, **how, generator=orders[1])
    first = list(ours)
    assert alike(first, list(theirs))
    data.set_epoch(1)
    second = list(ours)
    assert alike(second, list(theirs))
    assert not torch.equal(first[0][0], second[0][0])
    ours.close()


WAS_READ = multiprocessing.Array("b", 40)
READS = multiprocessing.Semaphore(0)


class Large(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        WAS_READ[index] = 1
        READS.release()
        return torch.full((24, 2**20), index, dtype=torch.uint8)


@pytest.mark.parametrize(("prefetch_factor", "ahead"), [(None, 5), (8, 16)])
def test_large_batches_are_fetched_as_far_ahead_as_was_asked(prefetch_factor, ahead):
    loader = FastDataLoader(
        Large(), 2, num_workers=2, executor="workers", prefetch_factor=prefetch_factor
    )
    WAS_READ[:] = [0] * 40
    batches = iter(loader)
    assert [int(next(batches)[0, 0, 0]) for _ in range(2)] == [0, 2]
    while not all(WAS_READ[: 2 * (ahead + 1)]):  # those two are taken, and one is waited for
        assert READS.acquire(timeout=60)
    assert [int(batch[0, 0, 0]) for batch in batches] == list(range(4, 40, 2))

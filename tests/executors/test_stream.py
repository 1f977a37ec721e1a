"""Streams are read by side processes as torch's workers read them, and nothing is lost unsaid."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import until
from thoroughness import max_examples
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.kinds import Resources, open_executor
from lightning_fastdata.executors.stream import StreamExecutor
from lightning_fastdata.loading.loader import FastDataLoader


def share() -> tuple[int, int]:
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


class Lengths(IterableDataset):
    """Worker w gives the numbers of its own length; each sample draws from all generators."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[Any]:
        worker, workers = share()
        for at in range(self.lengths[worker % len(self.lengths)]):
            draws = random.random(), np.random.rand(2), torch.rand(1)
            yield {"x": torch.full((3, 50), worker * 1000 + at), "draws": draws, "of": workers}


def same(ours: Any, theirs: Any) -> bool:
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return list(ours) == list(theirs) and all(same(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


def seeded() -> None:
    random.seed(3), np.random.seed(3), torch.manual_seed(3)


def epochs_of(loader: Any, count: int = 2) -> Any:
    seeded()
    batches = [list(loader) for _ in range(count)]
    return batches, torch.rand(1)  # what the model would draw next


@max_examples(12)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    batch_size=st.one_of(st.none(), st.integers(1, 4)),
    drop_last=st.booleans(),
    workers=st.integers(0, 3),
    persistent=st.booleans(),
    prefetch=st.integers(1, 3),
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_batches_and_their_order_and_random_numbers_are_those_of_torch(
    lengths, batch_size, drop_last, workers, persistent, prefetch
) -> None:
    how: dict[str, Any] = {"batch_size": batch_size, "num_workers": workers}
    if batch_size is not None:
        how["drop_last"] = drop_last
    if workers:
        how |= {"persistent_workers": persistent, "prefetch_factor": prefetch}
    ours = FastDataLoader(Lengths(lengths), **how, executor="workers")
    mine = epochs_of(ours)
    ours.close()
    assert same(mine, epochs_of(DataLoader(Lengths(lengths), **how)))


@pytest.mark.parametrize("executor", ["gather"])
def test_an_executor_that_needs_an_index_gives_way_to_workers(executor: str) -> None:
    how = {"batch_size": 3, "num_workers": 1}
    ours = FastDataLoader(Lengths([7]), **how, executor=executor)
    assert same(epochs_of(ours), epochs_of(DataLoader(Lengths([7]), **how)))
    plan = FetchPlan(dataset=Lengths([7]), collate_fn=default_collate)
    with pytest.raises(OptionsError, match="is a stream"):
        open_executor(plan, Resources(executor=executor))


class Told(Lengths):
    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("executor", ["torch", "inline", "workers"])
def test_more_batches_than_told_are_warned_of_once_each(executor: str) -> None:
    loader = FastDataLoader(Told([6]), num_workers=1, executor=executor)
    assert sum(1 for _ in loader) == 6  # nobody has asked for the length
    assert len(loader) == 4
    with pytest.warns(UserWarning, match="IterableDataset.* reported to be 4") as seen:
        assert sum(1 for _ in loader) == 6
    assert len([w for w in seen if "reported to be" in str(w.message)]) == 2


class Breaking(IterableDataset):
    """An iterator that goes on after it has raised."""

    def __iter__(self) -> Iterator[Any]:
        return iter(Numbers())


class Numbers:
    def __init__(self) -> None:
        self.at = -1

    def __iter__(self) -> Numbers:
        return self

    def __next__(self) -> int:
        self.at += 1
        if self.at == 5:
            raise KeyError("torn page")
        if self.at > 9:
            raise StopIteration
        return self.at


def outcomes(loader: Any) -> list[Any]:
    seen: list[Any] = []
    running = iter(loader)
    while True:
        try:
            seen.append(next(running).tolist())
        except StopIteration:
            return seen
        except KeyError as error:
            seen.append("torn page" in str(error))


@pytest.mark.parametrize("executor", ["inline", "workers"])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_comes_in_its_turn_and_the_stream_goes_on_as_in_torch(executor, workers) -> None:
    how = {"batch_size": 2, "num_workers": 0 if executor == "inline" else workers}
    ours = outcomes(FastDataLoader(Breaking(), **how, executor=executor))
    assert ours == outcomes(DataLoader(Breaking(), **how))
    assert True in ours


def test_an_error_shows_the_traceback_of_the_worker_and_the_sample() -> None:
    loader = FastDataLoader(Breaking(), batch_size=4, num_workers=1, executor="workers")
    with pytest.raises(KeyError, match=r"(?s)process 0 .*sample 5 of its stream.*in __next__"):
        list(loader)


def no_licence(number: int) -> None:
    raise ValueError(f"no licence for {number}")


def test_an_error_at_the_start_is_raised_in_each_epoch() -> None:
    loader = FastDataLoader(
        Lengths([3]),
        num_workers=2,
        persistent_workers=True,
        worker_init_fn=no_licence,
        executor="workers",
    )
    for _ in range(2):
        with pytest.raises(ValueError, match="no licence for 0"):
            next(iter(loader))
    loader.close()


def stretch(number: int) -> None:
    info = get_worker_info()
    assert (info.id, info.num_workers) == (number, 2)
    info.dataset.lengths = [number + 1]


def test_worker_init_fn_configures_the_copy_of_its_worker() -> None:
    how = {"num_workers": 2, "worker_init_fn": stretch}
    ours = FastDataLoader(Lengths([9]), **how, executor="workers")
    assert same(epochs_of(ours), epochs_of(DataLoader(Lengths([9]), **how)))


@pytest.mark.parametrize("persistent", [False, True])
def test_an_abandoned_epoch_leaves_nothing_in_the_next(persistent: bool) -> None:
    loader = FastDataLoader(
        Lengths([40, 30]),
        batch_size=2,
        num_workers=2,
        persistent_workers=persistent,
        executor="workers",
    )
    for _ in range(4):
        running = iter(loader)
        assert [int(next(running)["x"][0, 0, 0]) for _ in range(3)] == [0, 1000, 2]
    rest = [int(x) for batch in loader for x in batch["x"][:, 0, 0]]
    assert sorted(rest) == [*range(40), *range(1000, 1030)]
    loader.close()


class Waiting(IterableDataset):
    """Worker 0 waits for a file before its second sample."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __iter__(self) -> Iterator[int]:
        worker, _ = share()
        yield worker * 100
        if worker == 0:
            until(lambda: os.path.exists(self.path))
        yield from range(worker * 100 + 1, worker * 100 + 12)


def test_out_of_order_a_slow_process_holds_nobody_back(tmp_path) -> None:
    path = str(tmp_path / "go")
    loader = FastDataLoader(
        Waiting(path),
        batch_size=None,
        num_workers=2,
        in_order=False,
        timeout=60,
        executor="workers",
    )
    running = iter(loader)
    first = [int(next(running)) for _ in range(13)]
    assert [x for x in first if x >= 100] == list(range(100, 112))
    open(path, "w").close()
    assert sorted([*first, *map(int, running)]) == [*range(12), *range(100, 112)]


def pool(dataset: Any, processes: int = 2, **how: Any) -> StreamExecutor:
    plan = FetchPlan(dataset=dataset, collate_fn=default_collate, look_ahead=4, **how)
    return StreamExecutor(plan, processes=processes)


def test_batches_that_are_kept_are_never_overwritten() -> None:
    executor = pool(Lengths([60]), memory_limit_bytes=2**16)
    executor.start_epoch([16], 0)
    kept = [batch["x"] for batch in executor]
    assert [int(x[0, 0, 0]) for x in kept] == [w + at for at in range(0, 60, 16) for w in (0, 1000)]
    for x in kept:
        first = int(x[0, 0, 0])
        assert x.eq(torch.arange(first, first + len(x))[:, None, None]).all()
    executor.close()


class Pictures(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        for at in range(6):
            yield np.full((8, 8, 3), at, np.uint8), at


@pytest.mark.parametrize("executor", ["inline", "workers"])
def test_a_stream_is_staged_for_the_device_as_with_torch(executor: str) -> None:
    how = {"batch_size": 4, "num_workers": 1, "staged": "train"}
    ours = list(FastDataLoader(Pictures(), **how, executor=executor))
    for one, two in zip(ours, FastDataLoader(Pictures(), **how), strict=True):
        assert (one.stage, one.draws) == (two.stage, two.draws) == ("train", None)
        assert same(one.batch, two.batch)


class Rotated(IterableDataset):
    def __init__(self) -> None:
        import albumentations as A

        self.pipeline = A.Compose([A.RandomBrightnessContrast(p=1)])

    def __iter__(self) -> Iterator[Any]:
        for _ in range(9):
            yield self.pipeline(image=np.full((4, 4, 3), 90, np.uint8))["image"]


@pytest.mark.parametrize("persistent", [False, True])
def test_pipelines_in_a_stream_draw_by_epoch_and_position_with_every_executor(
    persistent: bool,
) -> None:
    found = []
    for executor in ("torch", "inline", "workers"):
        how = {"num_workers": 1, "persistent_workers": persistent, "executor": executor}
        loader = FastDataLoader(Rotated(), batch_size=3, seed=2, **how)
        found.append([list(loader) for _ in range(2)])
    assert same(found[0], found[1])
    assert same(found[0], found[2])
    assert not same(found[0][0], found[0][1])

"""Streams are read by side processes as torch's workers read them, and nothing is lost unsaid."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from alike import alike
from hypothesis import given
from hypothesis import strategies as st
from processes import until
from thoroughness import max_examples
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from lightning_fastdata.errors import WorkerError
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.kinds import Resources
from lightning_fastdata.executors.pool.scheduler import StreamExecutor
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


def pool(dataset: Any, processes: int = 2, **how: Any) -> StreamExecutor:
    plan = FetchPlan(dataset=dataset, collate_fn=default_collate, look_ahead=4, **how)
    return StreamExecutor(plan, Resources(executor="workers", workers=processes))


def epochs_of(loader: Any) -> Any:
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    batches = [list(loader) for _ in range(2)]
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
    assert alike(mine, epochs_of(DataLoader(Lengths(lengths), **how)))


class KeepsItsPlace(IterableDataset):
    """A stream that goes on in the next pass where the reading of the last one ended."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        worker, workers = share()
        self.at += 1
        if self.at % 40 == 0:
            raise StopIteration
        return worker + workers * self.at


@max_examples(12)
@given(
    leave_after=st.lists(st.integers(1, 12), min_size=2, max_size=4),
    batch_size=st.sampled_from((None, 3)),
    workers=st.integers(1, 3),
    prefetch=st.sampled_from((None, 1, 3)),
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_stream_whose_epochs_are_left_early_goes_on_as_in_workers_of_torch(
    leave_after, batch_size, workers, prefetch
) -> None:
    def read(make: Any, **how: Any) -> list[list[Any]]:
        how |= {"num_workers": workers, "prefetch_factor": prefetch, "persistent_workers": True}
        loader = make(KeepsItsPlace(), batch_size, **how)
        return [[batch for _, batch in zip(range(n), loader, strict=False)] for n in leave_after]

    assert alike(read(FastDataLoader, executor="workers"), read(DataLoader))


def test_an_executor_that_needs_an_index_gives_way_to_workers() -> None:
    how = {"batch_size": 3, "num_workers": 1}
    ours = FastDataLoader(Lengths([7]), **how, executor="gather")
    assert alike(epochs_of(ours), epochs_of(DataLoader(Lengths([7]), **how)))


class Meaningful(torch.Tensor):
    """Of a library, which reads more into an index than the place of a number, as MONAI's does."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            raise ValueError("no such place")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "collate_fn",
    [
        lambda rows: default_collate([row["x"].as_subclass(Meaningful) for row in rows]),
        lambda rows: torch.nested.nested_tensor([row["x"] for row in rows]),
        lambda rows: torch.empty(len(rows), device="meta"),
    ],
    ids=["class of a library", "nested", "without memory"],
)
def test_batches_of_any_kind_of_tensor_come_as_from_torch(collate_fn: Any, workers: int) -> None:
    how: Any = {"batch_size": 2, "collate_fn": collate_fn, "num_workers": workers}
    batches, torchs = (
        [(type(batch), batch.is_nested, batch.device) for batch in make(Lengths([3]), **how)]
        for make in (FastDataLoader, DataLoader)
    )
    assert batches == torchs


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

    def __iter__(self) -> Breaking:
        self.at = -1
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


@pytest.mark.parametrize("dataset", [Lengths([3]), range(3)], ids=["stream", "rows"])
def test_an_error_at_the_start_is_raised_in_each_epoch(dataset: Any) -> None:
    how = {"num_workers": 2, "persistent_workers": True, "executor": "workers"}
    loader = FastDataLoader(dataset, worker_init_fn=no_licence, **how)
    for _ in range(2):
        with pytest.raises(ValueError, match="no licence for"):
            next(iter(loader))
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
    how = {"num_workers": 2, "in_order": False, "timeout": 60, "executor": "workers"}
    running = iter(FastDataLoader(Waiting(path), batch_size=None, **how))
    first = [int(next(running)) for _ in range(13)]
    assert [x for x in first if x >= 100] == list(range(100, 112))
    open(path, "w").close()
    assert sorted([*first, *map(int, running)]) == [*range(12), *range(100, 112)]


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
    one, *others = found
    assert all(alike(one, other) for other in others)
    assert not alike(*one)


# What is lost is said, and nothing else is lost


@pytest.mark.parametrize("in_order", [False, True])
def test_a_killed_stream_is_an_error_that_counts_what_was_delivered(in_order: bool) -> None:
    executor = pool(Lengths([400]), in_order=in_order)
    executor.start_epoch([2], 0)
    seen = [int(x) for _ in range(6) for x in next(executor)["x"][:, 0, 0]]
    executor.children[1].process.kill()
    with contextlib.suppress(WorkerError):
        for batch in executor:
            seen += [int(x) for x in batch["x"][:, 0, 0]]
    with pytest.raises(WorkerError, match="process 1 was ended by SIGKILL") as caught:
        next(executor)
    delivered = [x for x in seen if x >= 1000]
    assert delivered == [*range(1000, 1000 + len(delivered))]
    assert f"The {len(delivered) // 2} batches" in str(caught.value)
    executor.start_epoch([2], 1)
    assert len(list(executor)) == 400
    executor.close()


def test_a_process_killed_after_its_last_batch_is_not_missed() -> None:
    executor = pool(Lengths([30, 1]))
    for epoch in range(2):
        executor.start_epoch([1], epoch)
        first = next(executor)
        until(lambda: executor._lanes[1].ended or executor._receive())
        process = executor.children[1].process
        process.kill()
        process.join()
        assert len([first, *executor]) == 31
    executor.close()


def dies_at_once(number: int) -> None:
    os._exit(7)


def test_a_process_that_never_starts_is_named() -> None:
    executor = pool(Lengths([5]), worker_init_fn=dies_at_once)
    executor.start_epoch([1], 0)
    with pytest.raises(WorkerError, match=r"exit code 7 .*__main__"):
        next(executor)
    executor.close()


def test_kills_at_random_never_lose_a_batch_unsaid() -> None:
    executor = pool(Lengths([60]), 2)
    expected = [[w * 1000 + at for at in range(60)] for w in range(2)]
    rng = random.Random(0)
    broken = 0
    for epoch in range(200):
        executor.start_epoch([3], epoch)
        children = list(executor.children.values())
        killer = threading.Timer(rng.uniform(0, 0.02), rng.choice(children).process.kill)
        killer.start()
        seen: list[list[int]] = [[], []]
        try:
            for batch in executor:
                for x in batch["x"][:, 0, 0].tolist():
                    seen[x // 1000].append(x)
        except WorkerError:
            broken += 1
            assert all(x == full[: len(x)] for x, full in zip(seen, expected, strict=True))
        else:
            assert seen == expected
        killer.cancel()
        killer.join()
        if broken >= 15:
            break
    assert broken >= 15
    executor.close()

"""What torch promises of its workers holds for side processes: seeds, errors, life and death."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import until
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lightning_fastdata.loading.loader import FastDataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SIDE = ("workers",)
ENGINE = ("inline", *SIDE)


class Made(Dataset):
    """Samples are what a function makes of their index."""

    def __init__(self, make: Any, length: int = 12) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.make(index)


def children() -> set[int]:
    gc.collect()
    return {child.pid for child in psutil.Process().children(recursive=True)}


def gone(pids: set[int]) -> bool:
    """Wait for processes to end; whoever waited for them too may have reaped them."""
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    return True


def facts(index: int) -> Any:
    info = get_worker_info()
    met = Path(os.environ["FASTDATA_TEST_GATE"])
    (met / str(os.getpid())).touch()
    until(lambda: len(list(met.iterdir())) == 2)  # or one takes all samples before another wakes
    return (info.id, info.num_workers, info.seed - info.id, os.getpid(), type(info.dataset) is Made)


def test_worker_info_is_that_of_torch_and_there_is_none_in_the_caller(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("FASTDATA_TEST_GATE", str(tmp_path))
    ours = FastDataLoader(Made(facts, 40), batch_size=None, num_workers=2, executor="workers")
    theirs = DataLoader(Made(facts, 40), batch_size=None, num_workers=2)
    mine = list(ours)
    for met in tmp_path.iterdir():
        met.unlink()
    other = list(theirs)
    assert {row[0] for row in mine} == {row[0] for row in other} == {0, 1}
    assert {row[1] for row in mine} == {2}
    assert len({row[2] for row in mine}) == 1  # one seed for all, of which each adds its number
    assert len({row[3] for row in mine}) == 2
    assert os.getpid() not in {row[3] for row in mine}
    assert all(row[4] for row in mine)
    assert get_worker_info() is None
    alone = FastDataLoader(
        Made(lambda i: get_worker_info() is None), batch_size=None, executor="inline"
    )
    assert all(alone)


class Picky(Exception):
    """Cannot be made from a message alone."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


def picky(index: int) -> None:
    raise Picky(7, "no such row")


def missing(index: int) -> None:
    raise KeyError("a\nkey of two lines")


def divided(index: int) -> float:
    return 1 / (index - 3)


@pytest.mark.parametrize("executor", SIDE)
@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (picky, RuntimeError, "Picky: 7: no such row"),
        (missing, KeyError, "a\\nkey of two lines"),
        (divided, ZeroDivisionError, "division"),
    ],
)
def test_an_error_keeps_its_class_its_text_and_the_traceback_of_its_worker(
    executor, make, kind, text
) -> None:
    loader = FastDataLoader(Made(make), batch_size=4, num_workers=1, executor=executor)
    with pytest.raises(kind) as ours:
        list(loader)
    said = str(ours.value)
    assert text in said
    assert f", in {make.__name__}\n" in said  # lines stay lines, also in a KeyError


def refuses(samples: list[Any]) -> Any:
    raise LookupError(f"cannot collate {len(samples)}")


@pytest.mark.parametrize("executor", ENGINE)
def test_an_error_in_collate_fn_says_where_it_was(executor: str) -> None:
    loader = FastDataLoader(
        Made(float), batch_size=5, num_workers=1, collate_fn=refuses, executor=executor
    )
    with pytest.raises(LookupError, match=r"(?s)cannot collate 5") as caught:
        next(iter(loader))
    assert executor == "inline" or "in collate_fn" in str(caught.value)


@pytest.mark.parametrize("executor", ENGINE)
def test_every_batch_with_an_error_raises_and_then_the_epoch_ends(executor: str) -> None:
    running = iter(FastDataLoader(Made(missing), batch_size=5, num_workers=2, executor=executor))
    for _ in range(3):
        with pytest.raises(KeyError):
            next(running)
    with pytest.raises(StopIteration):
        next(running)
    with pytest.raises(StopIteration):
        next(running)


@pytest.mark.cases(1)
@pytest.mark.parametrize("executor", SIDE)
@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterator_that_is_dropped_midway_ends_its_processes(executor, persistent) -> None:
    before = children()
    loader = FastDataLoader(
        Made(float, 400),
        num_workers=2,
        persistent_workers=persistent,
        executor=executor,
    )
    running = iter(loader)
    next(running)
    started = children() - before
    assert started
    del running
    if persistent:
        assert not started - children()
    del loader
    gc.collect()
    assert gone(started)


def with_daemons(index: int) -> float:
    return sum(1 for _ in FastDataLoader(Made(float, 6), num_workers=1, executor="workers"))


@pytest.mark.parametrize("executor", SIDE)
def test_side_processes_have_no_side_processes_as_workers_of_torch_have_none(executor) -> None:
    loader = FastDataLoader(Made(with_daemons, 5), num_workers=1, executor=executor)
    with pytest.raises(AssertionError, match="daemonic processes are not allowed"):
        next(iter(loader))


@pytest.mark.cases(2)
@pytest.mark.parametrize("executor", [*ENGINE, "torch"])
def test_several_loaders_run_side_by_side(executor: str) -> None:
    loaders = [
        FastDataLoader(Made(lambda i, k=k: 100 * k + i), 2, num_workers=1, executor=executor)
        for k in range(3)
    ]
    for number, batches in enumerate(zip(*loaders, strict=True)):
        expected = [[100 * k + 2 * number, 100 * k + 2 * number + 1] for k in range(3)]
        assert [batch.tolist() for batch in batches] == expected


@pytest.mark.parametrize("executor", SIDE)
def test_a_process_may_be_bound_to_a_cpu_by_worker_init_fn(executor: str) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    loader = FastDataLoader(
        Made(lambda i: sorted(os.sched_getaffinity(0)) == allowed[:1]),
        num_workers=1,
        worker_init_fn=lambda number: os.sched_setaffinity(0, allowed[:1]),
        executor=executor,
    )
    assert all(loader)
    assert sorted(os.sched_getaffinity(0)) == allowed

"""What torch promises of its workers holds for side processes: seeds, errors, life and death."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from open_files import open_files
from processes import until
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from virtual_time import HurriedClock

from lightning_fastdata.errors import FastDataError, FastDataWarning
from lightning_fastdata.host import clock
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


class Seeds(IterableDataset):
    def __iter__(self) -> Any:
        info = get_worker_info()
        yield info.seed, torch.initial_seed(), int(torch.randint(2**40, ()))


@pytest.mark.parametrize("seeded", [False, True])
def test_workers_of_a_stream_have_the_seeds_of_torch(seeded: bool) -> None:
    found = []
    for kind, how in ((FastDataLoader, {"executor": "workers"}), (DataLoader, {})):
        torch.manual_seed(5)
        order = torch.Generator().manual_seed(9) if seeded else None
        loader = kind(Seeds(), batch_size=None, num_workers=2, generator=order, **how)
        found.append([list(loader), list(loader)])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


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


def first_gate(index: int) -> int:
    """Wait with sample 0 until another sample has been delivered."""
    if index == 0:
        until(Path(os.environ["FASTDATA_TEST_GATE"]).exists)
    return index


@pytest.mark.parametrize("executor", SIDE)
def test_out_of_order_a_ready_batch_is_not_held_back_and_none_is_lost(
    executor, tmp_path, monkeypatch
) -> None:
    gate = tmp_path / "gate"
    monkeypatch.setenv("FASTDATA_TEST_GATE", str(gate))
    loader = FastDataLoader(
        Made(first_gate, 41), 3, num_workers=2, in_order=False, executor=executor, timeout=60
    )
    running = iter(loader)
    first = next(running).tolist()
    assert 0 not in first
    gate.touch()
    rest = [batch.tolist() for batch in running]
    expected = [batch.tolist() for batch in DataLoader(Made(int, 41), 3)]
    assert sorted([first, *rest]) == expected


@pytest.mark.cases(1)
@pytest.mark.parametrize("executor", SIDE)
def test_a_timeout_is_an_error_of_ours_that_is_also_the_runtime_error_of_torch(
    executor, tmp_path, monkeypatch
) -> None:
    gate = tmp_path / "gate"
    monkeypatch.setenv("FASTDATA_TEST_GATE", str(gate))
    loader = FastDataLoader(Made(first_gate), num_workers=1, timeout=30, executor=executor)
    batches = iter(loader)
    error = pytest.raises(RuntimeError, match="30 s")  # whichever comes first of what it may be
    late = pytest.warns(FastDataWarning, match="15 s|30 s")
    with error as caught, late, clock.installed(HurriedClock()):
        next(batches)
    assert isinstance(caught.value, FastDataError)
    gate.touch()


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


@pytest.mark.cases(1)
@pytest.mark.parametrize("executor", ["inline", "gather", "workers"])
@pytest.mark.parametrize("persistent", [False, True])
def test_loaders_that_come_and_go_leave_no_open_file(executor: str, persistent: bool) -> None:
    before, counts = open_files(), []
    for _ in range(6):
        loader = FastDataLoader(
            torch.utils.data.TensorDataset(torch.rand(16, 20_000)),
            batch_size=4,
            num_workers=1,
            persistent_workers=persistent,
            executor=executor,
        )
        batches = list(loader)
        assert len(batches) == 4
        del loader, batches
        counts.append(len(open_files() - before))
    assert counts[-1] <= counts[1]

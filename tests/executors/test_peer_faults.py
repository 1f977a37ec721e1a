"""What other loaders are known to get wrong, as laws that every executor keeps."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from misses import each
from open_files import open_files
from processes import until
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from lightning_fastdata.host.memory import HostMemory
from lightning_fastdata.loading.loader import FastDataLoader

torch.set_num_threads(1)
ALL = ("inline", "workers")


def loader_of(dataset: Any, executor: str, **how: Any) -> FastDataLoader:
    settings = {"batch_size": 3, "num_workers": 2, "executor": executor, **how}
    return FastDataLoader(dataset, **settings)


class Faulty(Dataset):
    """A user's own dataset whose transform fails for one sample."""

    def __init__(self, error: Callable[[], BaseException]) -> None:
        self.error = error

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 10:
            raise self.error()
        return torch.full((4,), index)


class Awkward(Exception):
    """An exception that cannot be made again from its arguments, nor pickled."""

    def __init__(self, code: int, *, where: str) -> None:
        super().__init__(f"code {code} at {where}")
        self.lock = threading.Lock()


FAULTS = {
    "value": (lambda: ValueError("bad box"), ValueError, "bad box"),
    "key": (lambda: KeyError("a\nkey of two lines"), KeyError, r"a\\nkey of two lines"),
    "stop": (lambda: StopIteration("no more"), RuntimeError, "no more"),
    "awkward": (lambda: Awkward(7, where="disk 1"), RuntimeError, "Awkward: code 7 at disk 1"),
    "exit": (lambda: SystemExit(3), RuntimeError, "SystemExit in side process"),
}


@pytest.mark.cases(6)
@pytest.mark.parametrize("executor", ALL)
@pytest.mark.parametrize(
    ("fault", "persistent"),
    [("value", False), ("exit", False), ("value", True), ("key", True), ("stop", False),
     ("awkward", True)],
)  # fmt: skip
def test_a_transform_that_raises_is_told_with_its_sample_and_hangs_nothing(
    executor, fault, persistent
) -> None:
    if (executor, fault) == ("inline", "exit"):
        pytest.skip("it ends the program")
    make, kind, said = FAULTS[fault]
    loader = loader_of(Faulty(make), executor, batch_size=4, persistent_workers=persistent)
    for _ in range(3):
        epoch = iter(loader)
        seen = [next(epoch), next(epoch)]
        with pytest.raises(Exception, match=said if executor == "workers" else "") as raised:
            next(epoch)
        assert not isinstance(raised.value, StopIteration)  # it would end the epoch
        told = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
        assert "sample 10" in told
        if executor == "workers":
            assert type(raised.value) is kind
            assert ", in __getitem__\n" in told  # lines stay lines, also in a KeyError
        seen += epoch
        assert torch.cat(seen)[:, 0].tolist() == [*range(8), *range(12, 24)]
    loader.close()


class Mute(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


@dataclass(frozen=True)
class Frozen(Exception):
    """An exception to which Python can add no note."""

    where: str = "disk 1"


class ByName(Exception):
    """An exception that is made by name alone, as torch's loader makes those of such classes."""

    message = "none yet"

    def __init__(self, *, message: str = "") -> None:
        super().__init__(message)


ODD = (Mute, Frozen, ByName)


@each("executor", ALL)
@each("kind", ODD)
def test_an_error_that_can_hardly_be_told_keeps_its_class(executor, kind) -> None:
    loader = loader_of(Faulty(kind), executor, batch_size=4)
    with closing(loader), pytest.raises(kind):
        list(loader)


@pytest.mark.filterwarnings("ignore::lightning_fastdata.errors.FastDataWarning")
@each("executor", ALL)
@each("kind", ODD)
def test_a_sample_whose_error_can_hardly_be_told_is_replaced(executor, kind) -> None:
    with closing(loader_of(Faulty(kind), executor, on_bad_sample="replace")) as loader:
        got = torch.cat(list(loader))[:, 0].tolist()
    assert [at for at in range(24) if got[at] != at] == [10]


class Plain(Dataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((40, 40), index, dtype=torch.int32), index


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return islice(map(Plain(64).__getitem__, range(64)), info.id, None, info.num_workers)


COLUMNS = TensorDataset(
    torch.arange(64, dtype=torch.int32)[:, None, None].repeat(1, 40, 40), torch.arange(64)
)


@pytest.mark.cases(6)
@pytest.mark.parametrize(
    ("executor", "dataset"),
    [("inline", Plain(64)), ("workers", Plain(64)), ("workers", Stream()), ("gather", COLUMNS)],
)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("memory_bytes", [None, 2**20])
def test_what_is_kept_of_a_batch_outlives_epochs_and_the_loader(
    executor, dataset, persistent, memory_bytes, monkeypatch
) -> None:
    if memory_bytes:  # of which not all batches have room
        monkeypatch.setattr(HostMemory, "available_bytes", memory_bytes)
    loader = loader_of(dataset, executor, batch_size=4, persistent_workers=persistent)
    kept = []
    for _ in range(3):
        for images, labels in loader:
            kept.append((images[1:], images[2].numpy(), labels.tolist()))
    loader.close()
    del loader, images, labels
    assert len(kept) == 48
    for rows, array, values in kept:
        assert rows[:, 5, 5].tolist() == values[1:]
        assert (rows.amin((1, 2)) == rows.amax((1, 2))).all()
        assert (array == values[2]).all()


@pytest.mark.cases(1)
@pytest.mark.parametrize("finished", [False, True])
def test_iterators_made_again_leave_nothing_behind(finished) -> None:
    def alive() -> tuple[set[Any], ...]:
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        mappings = {(place, inode) for place, _, _, _, inode, *name in maps if "memfd" in str(name)}
        children = set(multiprocessing.active_children())
        return open_files(), mappings, set(threading.enumerate()), children

    before = alive()

    def held() -> list[int]:
        epoch = iter(loader)
        batches = list(epoch) if finished else [next(epoch)]
        assert batches[0][1].tolist() == [0, 1, 2]
        del epoch, batches
        return [len(now - then) for now, then in zip(alive(), before, strict=True)]

    loader = loader_of(Plain(12), "workers")
    most = [torch.tensor([held() for _ in range(3)]).amax(0) for _ in range(3)]
    assert (most[-1] <= most[0]).all(), most


class Meeting(Dataset):
    """In the second batch, the first sample ends only after the last one was begun."""

    def __init__(self, sign: Path) -> None:
        self.sign = sign

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        time.sleep(0.005)  # no less than that, or cheap samples may share a task
        if index == 7:
            self.sign.touch()
        if index == 4:
            until(self.sign.exists)  # sample 7 is begun while this one is under way
        return index


def test_a_slow_sample_does_not_hold_up_the_rest_of_its_batch(tmp_path) -> None:
    batches = list(loader_of(Meeting(tmp_path / "sign"), "workers", batch_size=4))
    assert torch.cat(batches).tolist() == list(range(8))

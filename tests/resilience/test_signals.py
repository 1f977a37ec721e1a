"""A signal that comes while a process is started is delivered, and to this process alone."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from misses import each
from torch.utils.data import Dataset, IterableDataset

from lightning_fastdata import FastDataLoader
from lightning_fastdata.ext.sources import files
from lightning_fastdata.loading.facts import try_apart

armed: dict[str, int] = {}


def _fork_at(moment: str) -> None:
    number = armed.pop(moment, None)
    if number is not None:
        signal.raise_signal(number)


os.register_at_fork(before=lambda: _fork_at("before"), after_in_parent=lambda: _fork_at("after"))


class Interrupted(BaseException):
    """What the handler of a program raises."""


def interrupt(number: int, frame: object) -> None:
    raise Interrupted(number)


@contextlib.contextmanager
def handled(*numbers: int) -> Iterator[None]:
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
        assert [signal.getsignal(number) for number in numbers] == [interrupt] * len(numbers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Rows(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


def workers() -> Any:
    with contextlib.closing(FastDataLoader(Rows(), 2, num_workers=2, executor="workers")) as loader:
        return torch.cat(list(loader)).tolist()


def stream() -> Any:
    how = {"num_workers": 1, "executor": "workers"}
    with contextlib.closing(FastDataLoader(Stream(), 2, **how)) as loader:
        return torch.cat(list(loader)).tolist()


def trial() -> Any:
    return try_apart(lambda tell: tell("six", list(range(6))), start_method="fork").values["six"]


def question() -> Any:
    return files.asked_apart(lambda: list(range(6)))


PLACES = (workers, stream, trial, question)


@pytest.fixture(autouse=True)
def not_asked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have questions asked in a process of their own, whatever was read in this one."""
    monkeypatch.setattr(files, "_users", set())


@each("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
@each("moment", ["before", "after"])
@each("place", PLACES)
def test_a_signal_in_the_middle_of_a_fork_is_delivered(
    place: Callable[[], Any], moment: str, number: int
) -> None:
    with handled(number):
        armed[moment] = number
        with pytest.raises(Interrupted):
            place()
        assert not armed
        assert place() == list(range(6))
    for process in multiprocessing.active_children():
        process.join()  # whoever answered was killed, which takes the kernel a while

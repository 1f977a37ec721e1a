"""Whether a stream shares itself out is tried in a process that is thrown away, if at all."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from planning.planned import machine
from torch.utils.data import ChainDataset, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from lightning_fastdata import LoaderOptions
from lightning_fastdata.host import clock
from lightning_fastdata.planning.facts import (
    DatasetFacts,
    Questions,
    StreamSplit,
    inspect_dataset,
    read_as_worker,
)
from lightning_fastdata.planning.plan_for import LoaderSpec, Planner

COUNT = 9


class Stream(IterableDataset):
    inner: Any = None

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner


class Asks(Stream):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return iter(range(info.id, COUNT, info.num_workers))


class Shares(Asks):
    """Its first worker has some samples, its second one others."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, second = self.inner
        parts = [range(first), range(second)] if info.num_workers > 1 else [range(first + second)]
        return iter(parts[info.id])


class Around(Stream):
    def __iter__(self) -> Iterator[Any]:
        yield from self.inner


class OneLeavesOut(Stream):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return iter(range(info.id, COUNT - 1, info.num_workers) if info.num_workers > 1 else "ab")


@pytest.mark.usefixtures("virtual")
def test_a_trial_ends_when_it_has_taken_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Stream):
        def __iter__(self) -> Iterator[Any]:
            for number in itertools.count():
                clock.sleep(0.3)
                taken.append(number)
                yield number

    monkeypatch.setattr(torch_worker, "_worker_info", None)  # and back afterwards
    taken: list[int] = []
    told: dict[str, Any] = {}
    read_as_worker(Slow(), 0, 2, None, told.__setitem__)
    assert (len(taken), told) == (4, {})


# -- in a process of its own -----------------------------------------------------------------------


class Elsewhere(Asks):
    """May not be read in this process."""

    def __init__(self) -> None:
        self.process = os.getpid()

    def __iter__(self) -> Iterator[Any]:
        assert os.getpid() != self.process
        return super().__iter__()


def found(stream: Any, start: Any = None, **options: Any) -> StreamSplit | None:
    how = {"options": LoaderOptions(**options), "batch_size": 2, "worker_init_fn": start}
    spec = LoaderSpec(dataset=stream, name="Stream", **how)
    return inspect_dataset(spec, Questions(cost=True)).stream


def test_a_stream_is_tried_in_a_process_that_is_thrown_away() -> None:
    assert found(Elsewhere()) == StreamSplit(
        splits=True, why="Elsewhere asks get_worker_info() for its part"
    )
    assert get_worker_info() is None


class Exits(Stream):
    def __iter__(self) -> Iterator[Any]:
        os._exit(3)


def test_a_trial_that_ends_the_process_means_that_it_does_not() -> None:
    assert found(Exits()).why == "Exits, tried as one of two workers, left with exit code 3"


@pytest.mark.parametrize("parts", [(16, 15), (16, 16), (31, 31), (32, 31), (20, 70), (3, 0)])
def test_a_stream_of_any_length_that_divides_itself_is_recognised(parts: tuple[int, int]) -> None:
    assert found(Shares(parts)).splits


def test_one_alone_has_the_time_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Stream):
        def __iter__(self) -> Iterator[Any]:
            for number in range(6):
                now[0] += 300_000_000
                yield number

    class Planned(clock.Clock):
        def monotonic_ns(self) -> int:
            return now[0]

    monkeypatch.setattr(torch_worker, "_worker_info", None)  # and back afterwards
    now: list[int] = [0]
    told: dict[str, Any] = {}
    with clock.installed(Planned()):
        read_as_worker(Slow(), 0, 1, None, told.__setitem__)
    assert told == {"samples": 6}


def configures(worker: int) -> None:
    info = get_worker_info()
    info.dataset.inner = range(worker, COUNT, info.num_workers)


class Reader(Asks):
    """Stands for one that holds a dataset of Ray, by the module of what it holds."""

    def __init__(self) -> None:
        self.rows = type("Dataset", (), {"__module__": "ray.data"})()


@pytest.mark.parametrize("start", [None, configures])
def test_a_chain_with_a_part_of_ray_is_read_in_the_training_process(start: Any) -> None:
    assert found(ChainDataset([Asks(), Reader()]), start).here
    assert found(ChainDataset([Asks(), ChainDataset((Reader(),))]), start).here
    assert not found(ChainDataset([Asks(), Asks()])).here


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        (Asks([socket.socket]), "from which a trial would take samples"),
        (Asks([multiprocessing.SimpleQueue]), "from which a trial would take samples"),
        (OneLeavesOut(), "give 8 samples, and one alone 2"),
    ],
)
def test_any_doubt_means_that_it_does_not(stream: Any, why: str) -> None:
    if isinstance(stream.inner, list):
        stream.inner = [make() for make in stream.inner]
    told = found(stream)
    assert not told.splits
    assert why in told.why


def seeds(worker: int) -> None:
    get_worker_info().dataset.inner = range(COUNT - worker)


def test_a_worker_init_fn_that_configures_the_copy_of_its_worker_shares_out() -> None:
    for configure, splits in ((configures, True), (seeds, False)):
        assert found(Around(), configure).splits == splits


class Unread(Stream):
    """Notes that it was read, wherever that is."""

    def __init__(self) -> None:
        self.read = multiprocessing.get_context("fork").Value("i", 0)

    def __iter__(self) -> Iterator[Any]:
        self.read.value = 1
        return iter(())


@pytest.mark.parametrize(
    "options", [{"probe": False}, {"num_workers": 2}, {"num_workers": 0}, {"split": True}]
)
def test_it_is_not_read_where_nothing_rests_on_it_or_the_user_says_so(options) -> None:
    stream = Unread()
    assert found(stream, **options).splits == (options == {"split": True})
    assert not stream.read.value


def test_there_are_as_many_workers_as_cpus_four_at_least_and_no_more_than_shards() -> None:
    of_six = ((None, 6), (9, 6), (4, 4), (1, 1), (0, 1))
    of_two = ((None, 4), (9, 4), (3, 3), (2, 2), (0, 1))

    def planned(cpus: int, split: StreamSplit) -> tuple[int, str, list[str]]:
        spec = LoaderSpec(dataset=Asks(), name="s", options=LoaderOptions(), batch_size=1)
        return Planner(spec, DatasetFacts(stream=split), machine()).workers_of_stream(cpus, "CPUs")

    for cpus, shards, wanted in (
        *((6, *each) for each in of_six),
        *((2, *each) for each in of_two),
    ):
        split = StreamSplit(splits=True, why="it has shards", most_workers=shards)
        count, why, told = planned(cpus, split)
        assert (count, told) == (wanted, [])
        assert "it has shards" in why
    count, _, told = planned(6, StreamSplit(splits=False, why="of its code"))
    assert count == 1
    assert "set num_workers=6, or split=True" in told[0]
    assert "of its code" in told[0]

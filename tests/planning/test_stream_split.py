"""Whether a stream shares itself out is seen from its library or a trial, and doubt means no."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import ChainDataset, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.datapipes.iter import IterableWrapper

from lightning_fastdata import LoaderOptions
from lightning_fastdata.host import clock
from lightning_fastdata.planning.facts.inspection import Questions, inspect_dataset
from lightning_fastdata.planning.plan_for import LoaderSpec, workers_of_stream
from lightning_fastdata.planning.stream_split import (
    Reading,
    StreamSplit,
    read_as_worker,
    splits_itself,
)

COUNT = 9


class Stream(IterableDataset):
    inner: Any = None

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner


class Plain(Stream):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(COUNT))


class Asks(Stream):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return iter(range(info.id, COUNT, info.num_workers))


class Endless(Stream):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return itertools.count(info.id, info.num_workers)


class Around(Stream):
    def __iter__(self) -> Iterator[Any]:
        yield from self.inner


class Cuts(Stream):
    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.inner, 3)


class Pairs(Stream):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(*self.inner, strict=True)


class Refuses(Stream):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is not None and info.num_workers > 1:
            raise RuntimeError(f"one worker only, and this is number {info.id}")
        yield 1


class OneLeavesOut(Stream):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return iter(range(info.id, COUNT - 1, info.num_workers) if info.num_workers > 1 else "ab")


class AsksAround(Around):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return itertools.islice(self.inner, info.id, None, info.num_workers)


def itself() -> Around:
    stream = Around()
    stream.inner = stream
    return stream


def pipe() -> Any:
    return IterableWrapper(range(COUNT))


SPLIT = {
    "asks": Asks(),
    "without an end": Endless(),
    "around": Around(Around(Asks())),
    "around rows": AsksAround([1, 2, 3]),
    "around one that does not": AsksAround(Plain()),
    "pairs of what splits alike": Pairs([Asks(), Asks()]),
    "chain": ChainDataset([Asks(), Endless()]),
    "pipe": pipe().shuffle().sharding_filter().batch(2),
}
WHOLE = {
    "plain": (Plain(), "Plain, tried, did not ask"),
    "around a plain one": (Around(Plain()), "did not ask"),
    "refuses workers": (Refuses(), "raised RuntimeError: one worker only"),
    "cuts": (Cuts(Asks()), "two workers of Cuts, tried, give 6 samples, and one alone 3"),
    "twice": (AsksAround(Asks()), "give 5 samples, and one alone 9"),
    "leaves out": (OneLeavesOut(), "give 8 samples, and one alone 2"),
    "a chain of both": (ChainDataset([Asks(), Plain()]), "Plain, tried, did not ask"),
    "itself": (itself(), "raised RecursionError"),
    "pipe": (pipe().shuffle(), "no sharding_filter()"),
    "half a pipe": (pipe().sharding_filter().concat(pipe()), "no sharding_filter()"),
}


@pytest.fixture
def read(monkeypatch):
    """Read a stream as a worker would, in this process; notes which workers there were."""
    monkeypatch.setattr(torch_worker, "_worker_info", None)  # and back afterwards

    def reading(stream: Any, number: int, workers: int, configure: Any = None) -> Reading:
        told: dict[str, Any] = {}
        try:
            read_as_worker(stream, number, workers, configure, told.__setitem__)
        except Exception as error:
            return Reading(frozenset(told), failed=f"raised {type(error).__name__}: {error}")
        return Reading(frozenset(told) - {"samples"}, told.get("samples"))

    return reading


@pytest.mark.parametrize("kind", SPLIT)
def test_a_stream_that_shares_itself_out_is_known(kind: str, read) -> None:
    assert splits_itself(SPLIT[kind], read).splits


@pytest.mark.parametrize("kind", WHOLE)
def test_any_doubt_means_that_it_does_not(kind: str, read) -> None:
    stream, why = WHOLE[kind]
    found = splits_itself(stream, read)
    assert not found.splits
    assert why in found.why


def test_what_must_not_be_read_is_not_known() -> None:
    found = splits_itself(Asks(), None)
    assert (found.splits, found.why) == (False, "Asks is of no known library, and was not tried")


@pytest.mark.parametrize(
    "held", [socket.socket, multiprocessing.Queue, multiprocessing.SimpleQueue]
)
def test_what_a_trial_would_take_from_is_not_tried(held) -> None:
    found = splits_itself(Asks([held()]), lambda *_: pytest.fail("it was read"))
    assert not found.splits
    assert "from which a trial would take samples" in found.why


def test_a_sharded_pipe_that_is_wrapped_is_read_whole_by_each_worker() -> None:
    assert not splits_itself(pipe().sharding_filter(), None, wrapped=True).splits


def configures(worker: int) -> None:
    info = get_worker_info()
    info.dataset.inner = range(worker, COUNT, info.num_workers)


def seeds(worker: int) -> None:
    get_worker_info().dataset.inner = range(COUNT - worker)


def test_a_worker_init_fn_that_configures_the_copy_of_its_worker_shares_out(read) -> None:
    for configure, splits in ((configures, True), (seeds, False)):

        def reading(stream: Any, number: int, workers: int, how: Any = configure) -> Reading:
            return read(stream, number, workers, how)

        assert splits_itself(Around(), reading, configured=True).splits == splits


def test_a_trial_ends_when_it_has_taken_a_second(read) -> None:
    class Slow(Endless):
        def __iter__(self) -> Iterator[Any]:
            for number in super().__iter__():
                now[0] += 300_000_000
                taken.append(number)
                yield number

    class Planned(clock.Clock):
        def monotonic_ns(self) -> int:
            return now[0]

    now, taken = [0], []
    with clock.installed(Planned()):
        assert splits_itself(Slow(), read).splits
    assert len(taken) == 4


# -- in a process of its own -----------------------------------------------------------------------


class Elsewhere(Asks):
    """May not be read in this process."""

    def __init__(self) -> None:
        self.process = os.getpid()

    def __iter__(self) -> Iterator[Any]:
        assert os.getpid() != self.process
        return super().__iter__()


def found(stream: Any, **options: Any) -> StreamSplit | None:
    spec = LoaderSpec(dataset=stream, name="Stream", options=LoaderOptions(**options), batch_size=2)
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
    for cpus, shards, wanted in (
        *((6, *each) for each in of_six),
        *((2, *each) for each in of_two),
    ):
        split = StreamSplit(splits=True, why="it has shards", most_workers=shards)
        count, why, told = workers_of_stream(cpus, "CPUs", split)
        assert (count, told) == (wanted, [])
        assert "it has shards" in why
    count, _, told = workers_of_stream(6, "CPUs", StreamSplit(splits=False, why="of its code"))
    assert count == 1
    assert "set num_workers=6, or split=True" in told[0]
    assert "of its code" in told[0]

"""Whether a stream shares itself out is seen from its type and code, and doubt means no."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch.utils.data as torch_data
from torch.utils.data import ChainDataset, IterableDataset, get_worker_info
from torch.utils.data import get_worker_info as which_worker
from torch.utils.data.datapipes.iter import IterableWrapper

from lightning_fastdata.planning.stream_split import StreamSplit, splits_itself
from lightning_fastdata.planning.worker_count import workers_of_stream


class Stream(IterableDataset):
    """Nobody reads it: a look at it must not."""

    inner: Any = None

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner


class Plain(Stream):
    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("read")


class Asks(Stream):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return iter(range(info.id, 9, info.num_workers))


class Inherits(Asks):
    pass


class CallsSuper(Asks):
    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


class Replaces(Asks):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(9))


class ByModule(Stream):
    def __iter__(self) -> Iterator[Any]:
        return self.read()

    def read(self) -> Iterator[Any]:
        info = torch_data.get_worker_info()
        yield from range(info.id, 9, info.num_workers)


class ByProperty(Stream):
    @property
    def place(self) -> tuple[int, int]:
        info = which_worker()
        return info.id, info.num_workers

    def __iter__(self) -> Iterator[Any]:
        yield self.place


class Rows:
    def __init__(self) -> None:
        info = which_worker()
        self.at, self.step = info.id, info.num_workers

    def __next__(self) -> int:
        raise StopIteration


class ByIterator(Stream):
    def __iter__(self) -> Any:
        return Rows()


def numbers() -> Iterator[int]:
    info = get_worker_info()
    yield from range(info.id, 9, info.num_workers)


class ByFunction(Stream):
    def __iter__(self) -> Iterator[Any]:
        return self.inner()


class Around(Stream):
    def __iter__(self) -> Iterator[Any]:
        yield from self.inner


class Cuts(Stream):
    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self.inner, 3)


class Several(Stream):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(*self.inner, strict=True)


class Refuses(Stream):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is not None and info.num_workers > 1:
            raise RuntimeError("one worker only")
        yield 1


class SeedsOnly(Stream):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        yield info.seed + info.id


class AsksAround(Around):
    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return itertools.islice(self.inner, info.id, None, info.num_workers)


def itself() -> Around:
    stream = Around()
    stream.inner = stream
    return stream


def pipe() -> Any:
    return IterableWrapper(range(9))


SPLIT = {
    "asks": Asks(),
    "inherits": Inherits(),
    "calls super": CallsSuper(),
    "by module": ByModule(),
    "by property": ByProperty(),
    "by iterator": ByIterator(),
    "by function": ByFunction(numbers),
    "around": Around(Around(Asks())),
    "around rows": AsksAround([1, 2]),
    "around one that does not": AsksAround(Plain()),
    "chain": ChainDataset([Asks(), ByModule()]),
    "sum": Asks() + Asks(),
    "pipe": pipe().shuffle().sharding_filter().batch(2),
}
WHOLE = {
    "plain": Plain(),
    "replaces": Replaces(),
    "around a plain one": Around(Plain()),
    "around a list": Around([1, 2]),
    "refuses workers": Refuses(),
    "seeds only": SeedsOnly(),
    "cuts": Cuts(Asks()),
    "several": Several([Asks(), Asks()]),
    "twice": AsksAround(Asks()),
    "a chain of both": ChainDataset([Asks(), Plain()]),
    "itself": itself(),
    "pipe": pipe().shuffle(),
    "pipe with a branch that is not sharded": pipe().sharding_filter().concat(pipe()),
}


@pytest.mark.parametrize("kind", SPLIT)
def test_a_stream_that_shares_itself_out_is_known(kind: str) -> None:
    assert splits_itself(SPLIT[kind]).splits


@pytest.mark.parametrize("kind", WHOLE)
def test_any_doubt_means_that_it_does_not(kind: str) -> None:
    found = splits_itself(WHOLE[kind])
    assert not found.splits
    assert found.why


def test_a_sharded_pipe_that_is_wrapped_is_read_whole_by_each_worker() -> None:
    assert not splits_itself(pipe().sharding_filter(), wrapped=True).splits


def configures(worker: int) -> None:
    info = get_worker_info()
    info.dataset.inner = range(worker, 9, info.num_workers)


def seeds(worker: int) -> None:
    get_worker_info().dataset.inner = worker


def test_a_worker_init_fn_that_configures_the_copy_of_its_worker_shares_out() -> None:
    assert splits_itself(Plain(), worker_init_fn=configures).splits
    assert not splits_itself(Plain(), worker_init_fn=seeds).splits


def test_there_are_as_many_workers_as_cpus_four_at_least_and_no_more_than_shards() -> None:
    of_six = ((None, 6), (9, 6), (4, 4), (1, 1), (0, 1))
    of_two = ((None, 4), (9, 4), (3, 3), (2, 2), (0, 1))
    for cpus, shards, wanted in (
        *((6, *each) for each in of_six),
        *((2, *each) for each in of_two),
    ):
        found = StreamSplit(splits=True, why="it has shards", most_workers=shards)
        count, why, told = workers_of_stream(cpus, "CPUs", found)
        assert (count, told) == (wanted, [])
        assert "it has shards" in why
    count, _, told = workers_of_stream(6, "CPUs", StreamSplit(splits=False, why="of its code"))
    assert count == 1
    assert "set num_workers=6" in told[0]
    assert "of its code" in told[0]

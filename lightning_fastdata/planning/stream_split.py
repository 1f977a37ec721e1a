"""Whether a stream shares itself out among workers: seen from type and code, without reading it.

Each worker iterates a copy of the whole stream. Some streams ask which worker they are in and give
a part of their own; from the others, several workers would give each sample several times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch.utils.data import (
    ChainDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    IterDataPipe,
    get_worker_info,
)

from lightning_fastdata.batches.keyed import KeyedIterableDataset

_ASKS: Final = "get_worker_info"
_SHARES: Final = frozenset({_ASKS, "num_workers", "id"})
"""What code names that gives each worker its part. Code that names fewer of them seeds a generator,
refuses workers, or has a file for each of a given number of workers."""
_CUTS: Final = "islice"
_MOST_FUNCTIONS: Final = 200
_DEEPEST: Final = 8
_MOST_PARTS: Final = 64
_NOT_FOLLOWED: Final = frozenset({"torch", "numpy", "lightning_fastdata"})
_OWN_SPLIT: Final = (
    ("litdata", "StreamingDataset"),
    ("litdata", "CombinedStreamingDataset"),
    ("litdata", "ParallelStreamingDataset"),
    ("streaming", "StreamingDataset"),
)
"""Package and class of streams that share out their chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSplit:
    """Whether several workers together give each sample of a stream once."""

    splits: bool
    """False also where it cannot be seen."""
    why: str
    """What it is read from, to go on with after "because"."""
    most_workers: int | None = None
    """Its shards: more workers would find nothing to read. None: it has no such bound."""


def splits_itself(
    dataset: object,
    *,
    worker_init_fn: Callable[[int], None] | None = None,
    wrapped: bool = False,
) -> StreamSplit:
    """Return whether a stream shares itself out among workers, without reading it.

    Known are Hugging Face's streams, WebDataset, LitData, MosaicML's streaming and torch's
    DataPipes. Of others the code counts that runs in ``__iter__``: whether it asks
    ``get_worker_info()`` for the number of the worker and of all workers.

    Args:
        dataset: A stream.
        worker_init_fn: Of its loader, which may give each worker's copy its part.
        wrapped: The loader reads it through a wrapper of this package, for pipelines that it calls
            or a transform; torch then cannot shard a DataPipe.
    """
    found = _look_at(dataset, wrapped=wrapped, seen=frozenset())
    if found.splits or worker_init_fn is None:
        return found
    names, _ = _names_reached(list(_functions_of(worker_init_fn)), None)
    if {_ASKS, "num_workers", "dataset"} <= names:
        return StreamSplit(splits=True, why="worker_init_fn gives each worker its part")
    return found


def _no(why: str) -> StreamSplit:
    return StreamSplit(splits=False, why=why)


def _look_at(stream: Any, *, wrapped: bool, seen: frozenset[int]) -> StreamSplit:
    name = type(stream).__name__
    if id(stream) in seen or len(seen) > _DEEPEST:
        return _no(f"{name} holds itself")
    seen |= {id(stream)}
    if isinstance(stream, KeyedIterableDataset):
        return _look_at(vars(stream)["_keying"].dataset, wrapped=True, seen=seen)
    if _is_a(stream, "datasets", "IterableDataset"):
        return _hugging_face(stream)
    for package, kind in _OWN_SPLIT:
        if _is_a(stream, package, kind):
            return StreamSplit(splits=True, why=f"{package}'s {kind} shares out its chunks")
    if _is_a(stream, "webdataset", "DataPipeline"):
        return _web_dataset(stream, seen)
    if _is_a(stream, "torch", "_ShardingIterDataPipe"):
        if wrapped:
            return _no("torch shards a DataPipe only where nothing is wrapped around it")
        return StreamSplit(splits=True, why="torch shards it at its sharding_filter()")
    return _by_code(stream, wrapped=wrapped, seen=seen)


def _by_code(stream: Any, *, wrapped: bool, seen: frozenset[int]) -> StreamSplit:
    """Judge a stream by the code that runs when it is iterated, and by the streams it reads."""
    name = type(stream).__name__
    names, held = _names_reached(list(_iterating(type(stream))), stream)
    if isinstance(stream, IterDataPipe):  # whose __iter__ is torch's, around that of its class
        held = [part for value in vars(stream).values() for part in _parts(value)]
    parts = [part for part in held if isinstance(part, IterableDataset)]
    found = [_look_at(part, wrapped=wrapped, seen=seen) for part in parts]
    if any(isinstance(part, DataLoader) for part in held):
        return _no(f"{name} reads a DataLoader")
    if names >= _SHARES:
        if any(one.splits for one in found):
            return _no(f"both {name} and the stream that it reads share themselves out")
        return StreamSplit(splits=True, why=f"{name}.__iter__ asks get_worker_info() for its part")
    if not parts:
        for part in held:
            if _names_reached(list(_iterating(type(part))), part)[0] >= _SHARES:
                why = f"{type(part).__name__}.__iter__ asks get_worker_info() for its part"
                return StreamSplit(splits=True, why=why)
        return _no(f"{name}.__iter__ does not ask get_worker_info() for its part")
    unsplit = next((one for one in found if not one.splits), None)
    if unsplit is not None:
        return unsplit
    if len(parts) > 1 and not (_is_a(stream, "webdataset", name) or _joins(stream)):
        return _no(f"{name} reads several streams, whose parts need not belong together")
    if _CUTS in names and not isinstance(stream, IterDataPipe):
        return _no(f"{name} cuts the stream that it reads with islice, in each worker anew")
    # WebDataset raises in a worker that one of several streams has no shard for.
    bounds = [one.most_workers for one in found if one.most_workers is not None]
    return StreamSplit(splits=True, why=found[0].why, most_workers=min(bounds, default=None))


def _joins(stream: object) -> bool:
    return isinstance(stream, ChainDataset | IterDataPipe)


def _is_a(item: object, package: str, name: str) -> bool:
    return any(
        base.__name__ == name and base.__module__.split(".")[0] == package
        for base in type(item).__mro__
    )


def _hugging_face(stream: Any) -> StreamSplit:
    try:
        shards = getattr(stream, "num_shards", None) or stream.n_shards
    except Exception:  # whatever a version raises that has neither
        return _no("its number of shards could not be told")
    shared = "its 1 shard is" if shards == 1 else f"its {shards} shards are"
    return StreamSplit(splits=True, why=f"{shared} shared out", most_workers=int(shards))


def _web_dataset(stream: Any, seen: frozenset[int]) -> StreamSplit:
    stages = list(vars(stream).get("pipeline") or ())
    if vars(stream).get("nsamples", -1) > 0:
        return _no("with_epoch(n) gives n samples in each worker")
    shards, ranks = None, 1
    for stage in stages:
        if _is_a(stage, "webdataset", "ResampledShards"):
            return StreamSplit(splits=True, why="each worker draws shards of its own")
        urls = vars(stage).get("urls") if hasattr(stage, "__dict__") else None
        shards = len(urls) if shards is None and isinstance(urls, list) else shards
        if getattr(stage, "__name__", "") == "split_by_node":
            ranks = _ranks()
    found = []
    for stage in stages:
        if isinstance(stage, IterableDataset):
            found.append(_look_at(stage, wrapped=False, seen=seen))
            continue
        own = getattr(stage, "__module__", "").split(".")[0] != "webdataset"
        shares = own and _names_reached(list(_functions_of(stage)), None)[0] >= _SHARES
        if shares or getattr(stage, "__name__", "") == "split_by_worker":
            most = None if shards is None else max(1, shards // ranks)
            why = f"its {shards} shards are split by worker"
            found.append(StreamSplit(splits=True, why=why, most_workers=most))
    splitting = [one for one in found if one.splits]
    if len(splitting) != 1:
        return _no(f"{len(splitting)} stages of its pipeline split by worker, and one should")
    if splitting[0].most_workers is None and shards is None:
        return _no("its number of shards could not be told")  # a worker without any would raise
    return splitting[0]


def _ranks() -> int:
    distributed = torch.distributed
    started = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if started else 1


# -- code ------------------------------------------------------------------------------------------


def _iterating(cls: type) -> Iterator[FunctionType]:
    """Return the functions of a class that run when it is iterated."""
    for method in ("__iter__", "__next__"):
        for base in cls.__mro__:
            for function in _functions_of(vars(base).get(method)):
                yield function
                if "super" not in function.__code__.co_names:
                    break
            else:
                continue
            break


def _functions_of(item: object) -> Iterator[FunctionType]:
    """Return the Python functions that a callable or a descriptor runs."""
    if isinstance(item, FunctionType):
        yield item
    elif isinstance(item, MethodType | staticmethod | classmethod):
        yield from _functions_of(item.__func__)
    elif isinstance(item, property):
        yield from _functions_of(item.fget)
    elif isinstance(item, cached_property | partial):
        yield from _functions_of(item.func)


def _names_reached(functions: list[FunctionType], owner: object) -> tuple[set[str], list[Any]]:
    """Return the names in functions and in those they call, and what they read of their owner.

    Args:
        functions: Where to begin.
        owner: Whose methods and attributes the functions may use; None: they have no owner.
    """
    names: set[str] = set()
    held: dict[int, Any] = {}
    seen: set[int] = set()
    cls = type(owner)
    attributes = getattr(owner, "__dict__", {}) if owner is not None else {}
    while functions and len(seen) < _MOST_FUNCTIONS:
        function = functions.pop()
        if id(function.__code__) in seen:
            continue
        seen.add(id(function.__code__))
        for name in _names(function.__code__):
            names.add(name)
            if owner is not None:
                value = next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), None)
                functions += filter(_is_followed, _functions_of(value))
                if name in attributes:
                    functions += _functions_of(attributes[name])
                    held |= {id(part): part for part in _parts(attributes[name])}
        for value in _values_named(function):
            if value is get_worker_info:
                names.add(_ASKS)
            elif isinstance(value, type):
                if _is_followed(value):
                    functions += _functions_of(vars(value).get("__init__"))
                    functions += _iterating(value)
            else:
                functions += filter(_is_followed, _functions_of(value))
    return names, list(held.values())


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _values_named(function: FunctionType) -> Iterator[object]:
    """Return the globals, closed-over values and members of modules that a function names."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that is not bound yet
            continue
    names = list(_names(function.__code__))
    for name in names:
        value = function.__globals__.get(name)
        yield value
        if isinstance(value, ModuleType) and _is_followed(value):
            yield from (vars(value)[other] for other in names if other in vars(value))


def _is_followed(item: Any) -> bool:
    module = item.__name__ if isinstance(item, ModuleType) else getattr(item, "__module__", None)
    package = (module or "").split(".")[0]
    return package not in _NOT_FOLLOWED and package not in (sys.stdlib_module_names - {"__main__"})


def _parts(value: Any) -> Iterator[Any]:
    """Return what may be iterated of an attribute: itself, or the elements of a container."""
    if isinstance(value, dict):
        value = list(value.values())
    if type(value) in (list, tuple):
        for element in value[:_MOST_PARTS]:
            if _can_be_iterated(element):
                yield element
    elif _can_be_iterated(value):
        yield value


def _can_be_iterated(value: Any) -> bool:
    if isinstance(value, Dataset | DataLoader):
        return isinstance(value, IterableDataset | DataLoader)
    return any(isinstance(vars(c).get("__iter__"), FunctionType) for c in type(value).__mro__)

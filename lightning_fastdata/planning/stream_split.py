"""Whether a stream shares itself out among workers: seen from type and code, without reading it.

Each worker iterates a copy of the whole stream. Some streams ask which worker they are in and give
a part of their own; from the others, several workers would give each sample several times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from torch.utils.data import (
    ChainDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    IterDataPipe,
    get_worker_info,
)

from lightning_fastdata.batches.keyed import KeyedIterableDataset
from lightning_fastdata.batches.libraries import rank_now
from lightning_fastdata.tree import held, held_by, is_a

_ASKS: Final = "get_worker_info"
# What code names that gives each worker its part. Code that names fewer of them seeds a generator,
# refuses workers, or has a file for each of a given number of workers.
_SHARES: Final = frozenset({_ASKS, "num_workers", "id"})
_CUTS: Final = "islice"
_MOST_FUNCTIONS: Final = 200
_DEEPEST: Final = 8
_MOST_PARTS: Final = 64
_NOT_FOLLOWED: Final = frozenset(
    {"torch", "numpy", "lightning_fastdata", *sys.stdlib_module_names} - {"__main__"}
)
# Package and class of streams that share out their chunks.
_OWN_SPLIT: Final = (
    ("litdata", "StreamingDataset"),
    ("litdata", "CombinedStreamingDataset"),
    ("litdata", "ParallelStreamingDataset"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSplit:
    """Whether several workers together give each sample of a stream once."""

    splits: bool
    """False also where it cannot be seen."""
    why: str
    """What it is read from, to go on with after "because"."""
    most_workers: int | None = None
    """Its shards: more workers would find nothing to read. None: it has no such bound."""
    here: bool = False
    """Its library reads in processes of its own, and workers could not reach those."""


def splits_itself(
    dataset: object,
    *,
    worker_init_fn: Callable[[int], None] | None = None,
    wrapped: bool = False,
) -> StreamSplit:
    """Return whether a stream shares itself out among workers, without reading it.

    Known are Hugging Face's streams, WebDataset, LitData and torch's DataPipes. Of others the code
    counts that runs in ``__iter__``: whether it asks ``get_worker_info()`` for the number of the
    worker and of all workers. A ``worker_init_fn`` may give each worker's copy its part.
    ``wrapped``: the loader reads it through a wrapper of this package, for pipelines that it calls
    or a transform; torch then cannot shard a DataPipe.
    """
    found = _look_at(dataset, wrapped=wrapped, seen=frozenset())
    if found.splits or worker_init_fn is None:
        return found
    if {_ASKS, "num_workers", "dataset"} <= _names_reached(_functions_of(worker_init_fn))[0]:
        return StreamSplit(splits=True, why="worker_init_fn gives each worker its part")
    return found


def _no(why: str) -> StreamSplit:
    return StreamSplit(splits=False, why=why)


def _look_at(stream: object, *, wrapped: bool, seen: frozenset[int]) -> StreamSplit:
    name = type(stream).__name__
    if id(stream) in seen or len(seen) > _DEEPEST:
        return _no(f"{name} holds itself")
    seen |= {id(stream)}
    if isinstance(stream, KeyedIterableDataset):
        return _look_at(vars(stream)["_keying"].dataset, wrapped=True, seen=seen)
    if is_a(stream, "datasets", "IterableDataset"):
        return _hugging_face(stream)
    if any(is_a(part, "ray") for part in held_by(stream).values()):
        why = "Ray Data reads in processes of its own, which workers cannot reach"
        return StreamSplit(splits=False, why=why, here=True)
    for package, kind in _OWN_SPLIT:
        if is_a(stream, package, kind):
            return StreamSplit(splits=True, why=f"{package}'s {kind} shares out its chunks")
    if is_a(stream, "webdataset", "DataPipeline"):
        return _web_dataset(stream, seen)
    if is_a(stream, "torch", "_ShardingIterDataPipe"):
        if wrapped:
            return _no("torch shards a DataPipe only where nothing is wrapped around it")
        return StreamSplit(splits=True, why="torch shards it at its sharding_filter()")
    return _by_code(stream, wrapped=wrapped, seen=seen)


def _by_code(stream: object, *, wrapped: bool, seen: frozenset[int]) -> StreamSplit:
    """Judge a stream by the code that runs when it is iterated, and by the streams it reads."""
    name = type(stream).__name__
    names, read = _names_reached(_iterating(type(stream)), stream)
    piped = isinstance(stream, IterDataPipe)
    if piped:  # whose __iter__ is torch's, around that of its class
        read = [part for value in vars(stream).values() for part in _parts(value)]
    if any(isinstance(part, DataLoader) for part in read):
        return _no(f"{name} reads a DataLoader")
    parts = [part for part in read if isinstance(part, IterableDataset)]
    found = [_look_at(part, wrapped=wrapped, seen=seen) for part in parts]
    asks = "{}.__iter__ asks get_worker_info() for its part"
    if names >= _SHARES:
        if any(one.splits for one in found):
            return _no(f"both {name} and the stream that it reads share themselves out")
        return StreamSplit(splits=True, why=asks.format(name))
    if not parts:
        for part in read:
            if _names_reached(_iterating(type(part)), part)[0] >= _SHARES:
                return StreamSplit(splits=True, why=asks.format(type(part).__name__))
        return _no(f"{name}.__iter__ does not ask get_worker_info() for its part")
    unsplit = next((one for one in found if not one.splits), None)
    if unsplit is not None:
        return unsplit
    joins = isinstance(stream, ChainDataset | IterDataPipe) or is_a(stream, "webdataset", name)
    if len(parts) > 1 and not joins:
        return _no(f"{name} reads several streams, whose parts need not belong together")
    if _CUTS in names and not piped:
        return _no(f"{name} cuts the stream that it reads with islice, in each worker anew")
    # WebDataset raises in a worker that one of several streams has no shard for.
    bounds = [one.most_workers for one in found if one.most_workers is not None]
    return StreamSplit(splits=True, why=found[0].why, most_workers=min(bounds, default=None))


def _hugging_face(stream: Any) -> StreamSplit:
    try:
        shards = int(getattr(stream, "num_shards", None) or stream.n_shards)
    except Exception:  # whatever a version raises that has neither
        return _no("its number of shards is not known")
    shared = "its 1 shard is" if shards == 1 else f"its {shards} shards are"
    return StreamSplit(splits=True, why=f"{shared} shared out", most_workers=shards)


def _web_dataset(stream: object, seen: frozenset[int]) -> StreamSplit:
    stages = list(held(stream, "pipeline") or ())
    if vars(stream).get("nsamples", -1) > 0:
        return _no("with_epoch(n) gives n samples in each worker")
    if any(is_a(stage, "webdataset", "ResampledShards") for stage in stages):
        return StreamSplit(splits=True, why="each worker draws shards of its own")
    urls = (held(stage, "urls") for stage in stages)
    shards = next((len(each) for each in urls if isinstance(each, list)), None)
    names = [stage.__name__ if isinstance(stage, FunctionType) else "" for stage in stages]
    most = (
        None
        if shards is None
        else max(1, shards // (rank_now().ranks if "split_by_node" in names else 1))
    )
    found = []
    for name, stage in zip(names, stages, strict=True):
        if isinstance(stage, IterableDataset):
            found.append(_look_at(stage, wrapped=False, seen=seen))
            continue
        own = _package_of(stage) != "webdataset"
        shares = own and _names_reached(_functions_of(stage))[0] >= _SHARES
        if shares or name == "split_by_worker":
            why = f"its {shards} shards are split by worker"
            found.append(StreamSplit(splits=True, why=why, most_workers=most))
    splitting = [one for one in found if one.splits]
    if len(splitting) != 1:
        return _no(f"{len(splitting)} stages of its pipeline split by worker, and one should")
    if splitting[0].most_workers is None and shards is None:
        return _no("its number of shards is not known")  # a worker without any would raise
    return splitting[0]


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


def _names_reached(
    start: Iterable[FunctionType], owner: object = None
) -> tuple[set[str], list[object]]:
    """Return the names in functions and in those they call, and what they read of their owner.

    The functions may use the methods and attributes of their owner; None: they have none.
    """
    functions, names = list(start), set[str]()
    parts: dict[int, object] = {}
    seen: set[int] = set()
    members: dict[str, object] = {}
    for cls in reversed(type(owner).__mro__ if owner is not None else ()):
        members |= vars(cls)
    while functions and len(seen) < _MOST_FUNCTIONS:
        function = functions.pop()
        if id(function.__code__) in seen:
            continue
        seen.add(id(function.__code__))
        for name in _names(function.__code__):
            names.add(name)
            functions += filter(_is_followed, _functions_of(members.get(name)))
            attribute = held(owner, name)
            functions += _functions_of(attribute)
            parts |= {id(part): part for part in _parts(attribute)}
        for value in _values_named(function):
            if value is get_worker_info:
                names.add(_ASKS)
            elif not isinstance(value, type):
                functions += filter(_is_followed, _functions_of(value))
            elif _is_followed(value):
                functions += [*_functions_of(vars(value).get("__init__")), *_iterating(value)]
    return names, list(parts.values())


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


def _package_of(item: object) -> str:
    module = item.__name__ if isinstance(item, ModuleType) else getattr(item, "__module__", None)
    return (module or "").split(".")[0]


def _is_followed(item: object) -> bool:
    return _package_of(item) not in _NOT_FOLLOWED


def _parts(value: object) -> Iterator[object]:
    """Return what may be iterated of an attribute: itself, or the elements of a container."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        yield from filter(_can_be_iterated, value[:_MOST_PARTS])
    elif _can_be_iterated(value):
        yield value


def _can_be_iterated(value: object) -> bool:
    if isinstance(value, Dataset | DataLoader):
        return isinstance(value, IterableDataset | DataLoader)
    return any(isinstance(vars(c).get("__iter__"), FunctionType) for c in type(value).__mro__)

"""The randomness of one sample: found again from its key, whoever draws it.

Albumentations 2.0.8 gives every DataLoader worker the same random streams, and gives every
transform of a seeded ``Compose`` the same stream as its neighbours. Reseeding each top-level
pipeline with one shared pair of generators before every sample removes both, and makes a sample
depend on nothing but ``(seed, epoch, index)``.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import random
import struct
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lightning_fastdata.randomness.code_parts import code_parts

if TYPE_CHECKING:
    from lightning_fastdata.types import SampleKey

_MAX_DEPTH: Final = 8
_MAX_ITEMS: Final = 256
_LEAF_TYPES: Final = (
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    bool,
    type(None),
    np.ndarray,
)
_NOTHING_DRAWN: Final = (0, 0, 0, 0)


def reseed(composes: Sequence[Any], key: SampleKey) -> None:
    """Give each top-level pipeline the random state that belongs to one sample.

    All transforms of one pipeline share one pair of generators, so they draw one after the other
    from the same stream; different pipelines of one dataset get different streams. NumPy's
    generator is Philox (a counter-based generator), so that setting it costs no mixing.

    Args:
        composes: pipelines (``A.Compose`` or single transforms), in a fixed order.
        key: seed, epoch and index of the sample. Any integers, negative ones too.
    """
    for position, compose in enumerate(composes):
        if not hasattr(compose, "set_random_state"):
            # Another version: its transforms draw in lockstep, but by sample all the same.
            compose.set_random_seed(int.from_bytes(_digest(key, position)[:4], "little"))
            continue
        generator = getattr(compose, "random_generator", None)
        if generator is None or type(generator.bit_generator) is not np.random.Philox:
            generator = np.random.Generator(np.random.Philox(key=0))
        python = random.Random(_seed(generator, key, position))
        compose.set_random_state(generator, python)


def reseeder(compose: Any) -> Callable[[SampleKey], None]:
    """Return what does to one pipeline as :func:`reseed` does, at less cost.

    Args:
        compose: a pipeline that nobody else reseeds, and whose transforms stay as they are: it is
            given its generators once, now.
    """
    if not hasattr(compose, "set_random_state"):
        return functools.partial(reseed, (compose,))
    generator, python = np.random.Generator(np.random.Philox(key=0)), random.Random(0)
    compose.set_random_state(generator, python)
    return lambda key: python.seed(_seed(generator, key))


def _digest(key: SampleKey, position: int) -> bytes:
    text = b"%d,%d,%d,%d" % (*key, position)
    return hashlib.blake2b(text, digest_size=32).digest()


def _seed(generator: np.random.Generator, key: SampleKey, position: int = 0) -> int:
    """Seed NumPy's generator, and return what to seed Python's with."""
    first, second, rest = struct.unpack("<QQ16s", _digest(key, position))
    # Tuples, not arrays, whose numbers would be taken out one by one.
    generator.bit_generator.state = {
        "bit_generator": "Philox",
        "state": {"counter": _NOTHING_DRAWN, "key": (first, second)},
        "buffer": _NOTHING_DRAWN,
        "buffer_pos": 4,
        "has_uint32": 0,
        "uinteger": 0,
    }
    return int.from_bytes(rest, "little")


def find_composes(obj: object) -> tuple[Any, ...]:
    """Return the top-level Albumentations pipelines that a dataset holds, in a fixed order.

    Never imports Albumentations: where nobody has, there is no pipeline to find.
    """
    return find_instances(obj, loaded_classes("albumentations", "BaseCompose", "BasicTransform"))


def loaded_classes(module: str, *names: str) -> tuple[type, ...]:
    """Return the classes of these names that a module has, if somebody has imported it."""
    owner = sys.modules.get(module)
    return tuple(kind for name in names if isinstance(kind := getattr(owner, name, None), type))


def find_instances(obj: object, kinds: tuple[type, ...]) -> tuple[Any, ...]:
    """Return what a dataset holds of some classes, in a fixed order, without what that holds.

    Looks through attributes, lists, tuples, dicts (first 256 items, 8 levels deep), wrapped
    datasets (``Subset``, ``ConcatDataset``), bound methods, ``functools.partial``, the closures
    and defaults of functions, and what the user's own code of these refers to: globals of its
    modules and attributes of its classes.
    """
    if not kinds:
        return ()
    found: list[Any] = []
    seen: set[int] = set()
    waiting: list[tuple[object, int]] = [(obj, 0)]
    while waiting:
        item, depth = waiting.pop(0)
        if isinstance(item, _LEAF_TYPES) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, kinds):
            found.append(item)
        elif depth < _MAX_DEPTH:
            waiting.extend((part, depth + 1) for part in _parts(item, kinds))
    return tuple(found)


def _parts(item: object, kinds: tuple[type, ...]) -> Iterator[object]:
    if isinstance(item, dict | collections.UserDict | types.MappingProxyType):
        # Not any mapping: reading the values of one that stands for a file would open it.
        yield from list(item.values())[:_MAX_ITEMS]
    elif isinstance(item, list | tuple):
        yield from item[:_MAX_ITEMS]
    elif isinstance(item, functools.partial):
        yield item.func
        yield from item.args
        yield from item.keywords.values()
    elif isinstance(item, types.MethodType | types.BuiltinMethodType):
        yield item.__self__
    elif not _is_module_or_tensor(item):
        if hasattr(item, "__dict__") and not isinstance(item, type):
            yield from list(vars(item).values())[:_MAX_ITEMS]
        yield from code_parts(item, kinds)


def _is_module_or_tensor(item: object) -> bool:
    torch = sys.modules.get("torch")
    return isinstance(item, type(sys)) or (torch is not None and isinstance(item, torch.Tensor))

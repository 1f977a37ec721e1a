"""The randomness of one sample: found again from its key (seed, epoch, index), whoever draws it.

Albumentations 2.0.8 gives every DataLoader worker the same random streams, and gives every
transform of a seeded ``Compose`` the same stream as its neighbours. Reseeding each top-level
pipeline with one shared pair of generators before every sample removes both, and makes a sample
depend on nothing but its key.
"""

from __future__ import annotations

import hashlib
import os
import random
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lightning_fastdata.randomness.global_generators import GENERATORS, kept_random_state
from lightning_fastdata.tree import held, held_by

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lightning_fastdata.types import SampleKey

_NOTHING_DRAWN: Final = (0, 0, 0, 0)
_OF_A_SAMPLE: Final = {
    *("random_generator", "py_random", "params", "_images_was_list", "_masks_was_list"),
    *("is_sequence_input", "label_manager"),  # of the processors of boxes and keypoints
}
"""Attributes that an Albumentations pipeline sets for each sample anew."""
_KEYED: Final = threading.RLock()
_epochs_are_own = False


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
        generator = compose.random_generator
        if generator is None or type(generator.bit_generator) is not np.random.Philox:
            generator = np.random.Generator(np.random.Philox(key=0))
        python = random.Random(_seed(generator, key, position))
        compose.set_random_state(generator, python)


def lasting(composes: Sequence[Any]) -> dict[int, object]:
    """Return what pipelines that are reseeded for each sample are, by the ``id`` of each part.

    Without what the sample that was drawn last has left in them: generators, parameters, and what
    their processors know of its labels.
    """
    found: dict[int, object] = {}
    waiting = list(composes)
    while waiting:
        part = waiting.pop()
        if id(part) not in found:
            found[id(part)] = (
                type(part),
                {name: value for name, value in held_by(part).items() if name not in _OF_A_SAMPLE},
            )
            waiting += held(part, "transforms") or ()
            waiting += (held(part, "processors") or {}).values()
    return found


def reseeder(compose: Any) -> Callable[[SampleKey], None]:
    """Return what does to one pipeline as :func:`reseed` does, at less cost.

    Args:
        compose: a pipeline that nothing else reseeds, and whose transforms stay as they are: it is
            given its generators once, now.
    """
    generator, python = np.random.Generator(np.random.Philox(key=0)), random.Random(0)
    compose.set_random_state(generator, python)
    return lambda key: python.seed(_seed(generator, key))


def _seed(generator: np.random.Generator, key: SampleKey, position: int = 0) -> int:
    """Seed NumPy's generator, and return what to seed Python's with."""
    text = b"%d,%d,%d,%d" % (*key, position)
    first, second, rest = struct.unpack("<QQ16s", hashlib.blake2b(text, digest_size=32).digest())
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


def global_seed() -> int:
    """Return the seed that Lightning's ``seed_everything`` has set for this process, else 0."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


class EpochCell:
    """The current epoch, which worker processes that outlive it read from shared memory."""

    def __init__(self) -> None:
        value = torch.zeros(1, dtype=torch.int64)
        self._shared: torch.Tensor = value.share_memory_()  # type: ignore[no-untyped-call]
        self._number: NDArray[np.int64] | None = None
        self._is_own = False

    def set(self, epoch: int) -> None:
        """Write the epoch; call it before the first index of that epoch is handed out."""
        self._here()[0] = epoch

    def get(self) -> int:
        """Return the epoch last written."""
        return int(self._here()[0])

    def __getstate__(self) -> dict[str, object]:
        # torch hands over the memory itself, NumPy what is in it.
        return {"_shared": self._shared, "_number": None, "_is_own": False}

    def _here(self) -> NDArray[np.int64]:
        # Asked for with each sample: a view of NumPy answers in a tenth of a tensor's time.
        if self._number is None or self._is_own is not _epochs_are_own:
            number: NDArray[np.int64] = self._shared.numpy()
            self._number = number.copy() if _epochs_are_own else number
            self._is_own = _epochs_are_own
        return self._number


def keep_own_epochs() -> None:
    """Share no epoch with other processes from now on.

    A side process is given the epoch with each task, and may be one ahead of the training process.
    """
    global _epochs_are_own  # noqa: PLW0603 - a fact of the whole process
    _epochs_are_own = True


def seed_global_generators(
    seed: int, epoch: int, index: object, names: Collection[str] = GENERATORS
) -> None:
    """Seed ``random``, ``numpy.random`` and torch's CPU generator, or some of them, for a sample.

    What one of them draws does not depend on which others are seeded.
    """
    digest = _digest(seed, epoch, index)
    if "random" in names:
        random.seed(int.from_bytes(digest[:8], "little"))
    if "numpy" in names:
        np.random.seed(int.from_bytes(digest[8:12], "little"))
    if "torch" in names:
        # torch.manual_seed would also seed, and here queue up, all accelerators.
        torch.default_generator.manual_seed(_torch_seed(digest))


def torch_seed(key: SampleKey) -> int:
    """Return what torch's generator of the CPU is seeded with for a sample."""
    return _torch_seed(_digest(*key))


@contextmanager
def keyed_draws(key: SampleKey, names: Collection[str] = GENERATORS) -> Iterator[None]:
    """Draw for one sample in the block: seed global generators, and put them back behind it.

    One thread at a time: the generators belong to the process.
    """
    with _KEYED, kept_random_state(names):
        seed_global_generators(*key, names)
        yield


def _digest(seed: int, epoch: int, index: object) -> bytes:
    return hashlib.blake2b(f"{seed},{epoch},{index}".encode(), digest_size=20).digest()


def _torch_seed(digest: bytes) -> int:
    return int.from_bytes(digest[12:], "little", signed=True)

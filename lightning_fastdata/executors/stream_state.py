"""The states of a stream and of the global generators, in the process that reads the stream."""

from __future__ import annotations

import copy
import inspect
import pickle
import random
import warnings
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeGuard

import numpy as np
import torch
from torch.utils.data import IterableDataset

from lightning_fastdata.batches.keyed import KeyedIterableDataset
from lightning_fastdata.batches.libraries import tell_epoch
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.host import clock
from lightning_fastdata.order.indices import Stateful
from lightning_fastdata.randomness.global_generators import DrawWatch
from lightning_fastdata.tree import has_method, held_by, is_a, leaves

if TYPE_CHECKING:
    from lightning_fastdata.executors.stream_position import LanePosition

_SHARE: Final = 0.01
"""Of the time that taking states may cost."""
_LARGE_BYTES: Final = 64 * 1024
_LARGE_EACH_S: Final = 10.0
"""A larger state is taken once in so many seconds."""
_SCALARS: Final = frozenset({int, float, str, bool, type(None)})
_PLAIN: Final = "numbers, strings, lists, dicts and None"
_SHUFFLE_BUFFER: Final = "BufferShuffledExamplesIterable"
"""Of Hugging Face's ``datasets``."""
_LOOKED_AT: Final = 64
"""Samples at the beginning of a lane that :class:`ReadSamples` looks at, and each so many later;
batches of which it is seen whether they draw."""
_COUNTED: Final = ("num_samples_yielded", "num_workers", "batch_size")


class CountedState(Protocol):
    """A stream that makes its state from how much was read, as LitData's ``StreamingDataset``.

    It is asked in the training process, and each worker loads what it said.
    """

    def state_dict(
        self, num_samples_yielded: int, num_workers: int, batch_size: int
    ) -> dict[str, Any]:
        """Return the state after so many samples, read in batches of the workers in turn."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Go on from a state."""


def own_stream(dataset: Any) -> Any:
    """Return the user's stream, also where this package reads it through a wrapper."""
    return vars(dataset)["_keying"].dataset if _is_keyed(dataset) else dataset


def _is_keyed(dataset: object) -> TypeGuard[KeyedIterableDataset]:
    return isinstance(dataset, KeyedIterableDataset)


def tells_state(stream: object) -> TypeGuard[Stateful]:
    """Return whether a stream has ``state_dict()``, called so, and ``load_state_dict(state)``."""
    if not isinstance(stream, Stateful):
        return False
    try:
        inspect.signature(stream.state_dict).bind()
        inspect.signature(stream.load_state_dict).bind({})
    except (TypeError, ValueError):
        return False
    return True


def counts_samples(stream: object) -> TypeGuard[CountedState]:
    """Return whether a stream has the ``state_dict`` of :class:`CountedState`."""
    if not isinstance(stream, Stateful):
        return False
    try:
        return tuple(inspect.signature(stream.state_dict).parameters) == _COUNTED
    except (TypeError, ValueError):
        return False


def _has_shuffle_buffer(stream: object) -> bool:
    """Return whether a stream is, or reads, one of Hugging Face's that shuffles in a buffer."""
    waiting, seen = [stream], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if type(one).__name__ == _SHUFFLE_BUFFER:
            return True
        if isinstance(one, list | tuple):
            waiting.extend(one)
        elif isinstance(one, IterableDataset) or type(one).__module__.startswith("datasets."):
            waiting.extend(held_by(one).values())
    return False


def not_plain(value: object, path: str = "state") -> str:
    """Return what in a value is other than plain data, and where; "" if nothing is."""
    kind = type(value)
    if kind in _SCALARS:
        return ""
    parts: list[tuple[object, object]] = []
    if isinstance(value, dict) and kind is dict:
        keys = (key for key in value if type(key) not in _SCALARS)
        for key in keys:
            return f"a {type(key).__name__} as a key of {path}"
        parts = list(value.items())
    elif isinstance(value, list | tuple) and kind in (list, tuple):
        parts = list(enumerate(value))
    else:
        return f"a {kind.__name__} at {path}"
    found = (not_plain(part, f"{path}[{key!r}]") for key, part in parts)
    return next(filter(None, found), "")


def generator_states() -> dict[str, Any]:
    """Return the states of the global generators as plain data, 20 kB of it."""
    version, words, kept_back = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    inner = numpy_state["state"]
    return {
        "random": [version, list(words), kept_back],
        "numpy": {**numpy_state, "state": {**inner, "key": inner["key"].tolist()}},
        "torch": torch.default_generator.get_state().numpy().tobytes().hex(),
    }


def set_generator_states(states: dict[str, Any]) -> None:
    """Put the states of the global generators back."""
    version, words, kept_back = states["random"]
    random.setstate((version, tuple(words), kept_back))
    inner = states["numpy"]["state"]
    key = np.array(inner["key"], np.uint32)
    np.random.set_state({**states["numpy"], "state": {**inner, "key": key}})
    memory = bytearray.fromhex(states["torch"])
    torch.default_generator.set_state(torch.frombuffer(memory, dtype=torch.uint8))


class ReadSamples:
    """A digest of the samples that a lane has read since its beginning.

    Two lanes that read the same samples have the same one; that they are others is seen unless they
    differ in few values or places, as not all are looked at.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.digest = 0

    def add(self, sample: object) -> None:
        """Note the next sample."""
        at, self.samples = self.samples, self.samples + 1
        if at < _LOOKED_AT or at % _LOOKED_AT == 0:
            text = "".join(map(_some_of, leaves(sample)))
            self.digest = zlib.crc32(text.encode(errors="replace"), self.digest)


def _some_of(leaf: object) -> str:
    """Return some values of a leaf of a sample, as text."""
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        leaf = leaf.detach().flatten()
        leaf = leaf[:: max(1, len(leaf) // 16)].tolist()
    elif isinstance(leaf, np.ndarray):
        leaf = leaf.reshape(-1)
        leaf = leaf[:: max(1, len(leaf) // 16)].tolist()
    elif isinstance(leaf, bytes):
        leaf = len(leaf), leaf[:: max(1, len(leaf) // 16)]
    elif not isinstance(leaf, str | int | float | bool | np.generic | None):
        return type(leaf).__name__
    return repr(leaf)


class StateTaker:
    """Takes the states of one stream between its batches, where that costs next to nothing.

    Args:
        dataset: The stream, as it is read.
        worker: It is read in a side process, whose global generators are its own.
    """

    def __init__(self, dataset: Any, *, worker: bool) -> None:
        self._dataset = dataset
        self._stream = own_stream(dataset)
        self._takes = tells_state(self._stream)
        self._iterator: object = self._stream if isinstance(self._stream, Iterator) else None
        """What the stream has given last: it may be the stream itself."""
        self._read_before = not worker
        self._behind: tuple[Any, Any] | None = None
        """The states behind a pass that has ended."""
        self._watch = DrawWatch() if worker else None
        self._draws_seen, self._watched = DrawWatch(), 0
        self.drew = False
        """The stream was seen to draw from a global generator."""
        self._next_s = 0.0
        self._loaded = False
        self._loaded_state: dict[str, Any] | None = None
        self.refused = ""
        """Why its state cannot be saved, to go on with after ``state_dict()``."""
        self._told = False
        if self._takes and _has_shuffle_buffer(self._stream):
            self.refused = "leaves out the samples in its shuffle buffer, which would be lost"

    def before_pass(self) -> bytes | None:
        """Return what :meth:`take` does, before a pass; None: all is as a worker finds it.

        What is read in the training process may have been read there before.
        """
        states = self._behind
        if states is None and self._read_before:
            if self._iterator is not self._stream:
                self._iterator = None  # of a pass that was left
            states = self._plain_states()
        self._behind, self._read_before = None, True
        return self._pickled(states)

    def behind_pass(self) -> bytes | None:
        """Return the same as the stream has ended."""
        self._behind = self._plain_states()
        return self._pickled(self._behind)

    def _pickled(self, states: tuple[Any, Any] | None) -> bytes | None:
        whole = (*(states or (None, None)), self.generators())
        return None if whole == (None, None, None) else pickle.dumps(whole, 5)

    def _plain_states(self) -> tuple[Any, Any]:
        """Return the states of the stream and of its iterator, between two passes."""
        try:
            found = copy.deepcopy(self._states())
        except Exception:  # it may be set up by its first pass, and have no state before
            return None, None
        return (None, None) if self.refused else found

    def _states(self) -> tuple[Any, Any]:
        """Return the states of the stream and of its iterator, which may be live; None: none.

        Raises:
            _RefusedError: One cannot be saved.
        """
        own = self._iterator is self._stream
        return (
            _state_of(self._stream) if self._takes and not own else None,
            _state_of(self._iterator) if tells_state(self._iterator) else None,
        )

    def samples(self, begin: LanePosition) -> Iterator[Any]:
        """Begin the pass, where :meth:`begin` was told the same state."""
        stream: Any = self._stream
        kept = True
        iterator: Any = iter(stream)
        self._iterator = iterator
        if begin.state is not None and self._takes and iterator is not stream:
            with suppress(Exception):  # it may have no state before its first sample
                kept = _state_of(stream) == begin.state
            if not kept and not begin.from_start:  # it has set itself up in __iter__
                stream.load_state_dict(copy.deepcopy(begin.state))
        # A pass that has ended is followed by one that __iter__ has begun, or is to begin now.
        loads = kept or not begin.from_start
        if begin.iterator is not None and loads and tells_state(iterator):
            iterator.load_state_dict(copy.deepcopy(begin.iterator))
            if iterator is stream and begin.from_start:
                iterator = iter(self._stream)
        return self._dataset.over(iterator) if _is_keyed(self._dataset) else iterator

    def empty_pass(self) -> str:
        """Return what a pass without samples has made of the state that was loaded; "": nothing."""
        with suppress(Exception):
            loaded, now = self._loaded_state, _state_of(self._stream)
            if loaded is not None and now != loaded:
                return f"{loaded!r:.100} became {now!r:.100}"
        return ""

    def begin(self, state: dict[str, Any] | None, samples: int, epoch: int) -> None:
        """Have the next pass over the stream go on from a state; None: from the beginning.

        ``samples`` were read before in this epoch.
        """
        self._next_s, self._told = 0.0, False
        if self._loaded and has_method(self._stream, "reset_state_dict"):
            # It would go on from what it was given for another pass, in the epoch of that.
            self._stream.reset_state_dict()
            tell_epoch(self._dataset, epoch)
        self._loaded, self._loaded_state = state is not None, state
        if state is not None:
            self._stream.load_state_dict(copy.deepcopy(state))  # it may go on in that very object
        if _is_keyed(self._dataset):
            self._dataset.number_from(samples)

    def about_to_read(self) -> None:
        """Watch for what is drawn until :meth:`has_read`."""
        self._watched += 1
        if not self.drew and self._watched <= _LOOKED_AT:
            self._draws_seen.begin()

    def has_read(self) -> None:
        """Note whether anything was drawn."""
        self.drew = self.drew or (self._watched <= _LOOKED_AT and self._draws_seen.drew())

    def tell_refused(self) -> str:
        """Return why its state cannot be saved, once in each pass; "" otherwise."""
        why = "" if self._told else self.refused
        self._told = self._told or bool(why)
        return why

    def generators(self) -> dict[str, Any] | None:
        """Return the generators' states; None: they are those that the worker started with."""
        return generator_states() if self._watch is not None and self._watch.drew() else None

    def take(self) -> bytes | None:
        """Return the states of stream, iterator and generators, pickled; None: not now.

        It is the one that belongs to the samples that were read until now.
        """
        began_s = clock.monotonic()
        takes = self._takes or tells_state(self._iterator)
        if not takes or self.refused or began_s < self._next_s:
            return None
        try:
            states = self._states()
            # States may be live objects, which go on changing.
            pickled = pickle.dumps((*states, self.generators()), 5)
        except _RefusedError as why:
            self.refused = str(why)
            return None
        except Exception as error:  # whatever the user's code raises, or one that holds itself
            self.refused = f"raised {type(error).__name__} ({error!s:.200})"
            return None
        ended_s = clock.monotonic()
        self._next_s = ended_s + (ended_s - began_s) / _SHARE
        if len(pickled) > _LARGE_BYTES:
            self._next_s = max(self._next_s, ended_s + _LARGE_EACH_S)
        return pickled


class _RefusedError(Exception):
    """Why a state cannot be saved."""


def _state_of(stateful: Stateful) -> dict[str, Any]:
    state: object = stateful.state_dict()
    wrong = not_plain(state)
    if wrong:
        raise _RefusedError(f"holds {wrong}, and a checkpoint takes {_PLAIN} only")
    if not isinstance(state, dict):
        raise _RefusedError(f"returned {state!r:.40}, which is no dict")
    return state


def tell_read_again(stream: object, what: str, seconds: float, why: str) -> None:
    """Say that a resumed stream was read again, and how long that took."""
    warnings.warn(
        f"To go on where the training was saved, {what} of {type(stream).__name__} that were "
        f"delivered before were read again and dropped, in {seconds:.1f} s, as {why}.",
        FastDataWarning,
        stacklevel=4,
    )


def tell_empty_pass(stream: object, became: str) -> None:
    """Say that a state from behind a pass counted an empty one when it was loaded."""
    name = type(stream).__name__
    warnings.warn(
        f"{name}.state_dict() from the end of a pass was loaded, and {name} gave nothing and "
        f"counted that as a pass: {became}. The pass that follows may be another one than without "
        "a break. At its end, have __iter__ set its place back to the beginning.",
        FastDataWarning,
        stacklevel=4,
    )


def tell_others(stream: object) -> None:
    """Say that a stream that was read again gave other samples than before."""
    name = type(stream).__name__
    remedy = (
        "Have it shuffle by a seed and by the epoch, which on_train_epoch_start can tell it, or "
        "give it state_dict() and load_state_dict()."
    )
    if is_a(stream, "webdataset"):
        remedy = (
            "shuffle() of WebDataset is seeded by the clock, and shards by chance. Use "
            "WebDataset(..., detshuffle=True, seed=1) and .compose(webdataset.detshuffle(1000, "
            "seed=1)) in their place."
        )
    warnings.warn(
        f"{name} gave other samples than before the training was saved, when they were read again "
        "to go on behind them. So the training goes on, but in this epoch some samples come twice "
        f"and others not at all. {remedy}",
        FastDataWarning,
        stacklevel=4,
    )

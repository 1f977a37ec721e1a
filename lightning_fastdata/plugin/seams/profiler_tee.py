"""Listens to Lightning's own profiler calls, the only public place that sees every fetch.

Callbacks have no hook around the fetch of a batch or its transfer, but the loops announce both to
``trainer.profiler``, which is a public attribute. The tee stands in that place, forwards every
call to the user's profiler and tells listeners about the actions that matter.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning_fastdata.plugin.seams.internals import attributes_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

Listener = tuple[Callable[[], None], Callable[[], None]]
"""Called at the start and at the end of an action."""

_NOTHING: AbstractContextManager[Any] = nullcontext()
_OWN = frozenset(("profiler", "_idle", "_find", "_by_action"))


class ProfilerTee:
    """A profiler that forwards to another one and calls listeners on the way.

    Args:
        profiler: The profiler that was there.
        find: Returns the listener of an action, by the name with which it is announced, such as
            ``"[_TrainingEpochLoop].train_dataloader_next"``, or None; asked once for each name.
    """

    def __init__(self, profiler: Any, find: Callable[[str], Listener | None]) -> None:
        self.profiler = profiler
        # Lightning's default does nothing at the price of a generator per block. A subclass of it
        # has another name and is asked.
        self._idle = type(profiler).__name__ == "PassThroughProfiler"
        self._find = find
        self._by_action: dict[str, Listener | None] = {}

    def start(self, action_name: str) -> None:
        """Forward, then tell the listener: the user's profiler is not part of the interval."""
        self.profiler.start(action_name)
        listener = self._listener(action_name)
        if listener is not None:
            listener[0]()

    def stop(self, action_name: str) -> None:
        """Tell the listener, then forward."""
        listener = self._listener(action_name)
        if listener is not None:
            listener[1]()
        self.profiler.stop(action_name)

    def profile(self, action_name: str) -> AbstractContextManager[Any]:
        """Time the block, as ``Profiler.profile`` does.

        A step has some twenty such blocks, so those that nobody listens to cost next to nothing.
        """
        try:
            listener = self._by_action[action_name]
        except KeyError:
            listener = self._listener(action_name)
        block = _NOTHING if self._idle else self.profiler.profile(action_name)
        return block if listener is None else _Listened(block, listener)

    def _listener(self, action_name: str) -> Listener | None:
        try:
            return self._by_action[action_name]
        except KeyError:
            found = self._by_action[action_name] = self._find(action_name)
            return found

    def __reduce__(self) -> tuple[Any, ...]:
        # The listeners belong to one run of one trainer; a copy of the trainer is not measured.
        return _itself, (self.profiler,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.profiler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            # Lightning writes to its profiler (`_lightning_module`, `_local_rank`, ...).
            setattr(self.profiler, name, value)


def _itself(profiler: Any) -> Any:
    return profiler


class _Listened:
    """A block within another one, with a listener told at both of its ends."""

    __slots__ = ("_block", "_listener")

    def __init__(self, block: AbstractContextManager[Any], listener: Listener) -> None:
        self._block = block
        self._listener = listener

    def __enter__(self) -> Any:
        value = self._block.__enter__()
        self._listener[0]()
        return value

    def __exit__(self, *error: Any) -> bool | None:
        self._listener[1]()
        return self._block.__exit__(*error)


def attach(trainer: Trainer, find: Callable[[str], Listener | None]) -> Callable[[], None]:
    """Put a tee in front of the trainer's profiler and return what takes it away again."""
    measured = attributes_of(trainer)
    tee = measured.profiler = ProfilerTee(measured.profiler, find)

    def detach() -> None:
        outer, current = None, measured.profiler
        while current is not tee and isinstance(current, ProfilerTee):
            outer, current = current, current.profiler
        if current is not tee:
            return
        if outer is None:
            measured.profiler = tee.profiler
        else:
            outer.profiler = tee.profiler

    return detach

"""Listens to Lightning's own profiler calls, the only public place that sees every fetch.

Callbacks have no hook around the fetch of a batch or its transfer, but the loops announce both to
``trainer.profiler``, a public attribute. The tee takes its place and forwards every call to it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning_fastdata.plugin.seams.internals import attributes_of, itself

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_fastdata.plugin.seams.internals import TrainerAttributes

Listener = tuple[Callable[[], None], Callable[[], None]]
"""Called at the start and at the end of an action."""

_NOTHING: AbstractContextManager[object] = nullcontext()
_OWN = frozenset(("profiler", "_idle", "_find", "_by_action"))


class ProfilerTee:
    """A profiler that forwards to another one and calls listeners on the way.

    ``find`` returns the listener of an action, by the name with which it is announced, such as
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
        """Forward, then call the listener: the user's profiler is not part of the interval."""
        self.profiler.start(action_name)
        listener = self._listener(action_name)
        if listener is not None:
            listener[0]()

    def stop(self, action_name: str) -> None:
        """Call the listener, then forward."""
        listener = self._listener(action_name)
        if listener is not None:
            listener[1]()
        self.profiler.stop(action_name)

    def profile(self, action_name: str) -> AbstractContextManager[object]:
        """Time the block, as ``Profiler.profile`` does.

        A step has some twenty such blocks: those without a listener cost next to nothing.
        """
        try:
            listener = self._by_action[action_name]
        except KeyError:
            listener = self._listener(action_name)
        block = _NOTHING if self._idle else self.profiler.profile(action_name)
        return block if listener is None else _Listened(block, listener)

    def _listener(self, action_name: str) -> Listener | None:
        if action_name not in self._by_action:
            self._by_action[action_name] = self._find(action_name)
        return self._by_action[action_name]

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object]]:
        # The listeners belong to one run of one trainer; a copy of the trainer is not measured.
        return itself, (self.profiler,)

    def __getattr__(self, name: str) -> object:
        return getattr(self.profiler, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:  # Lightning writes to its profiler (`_lightning_module`, `_local_rank`, ...)
            setattr(self.profiler, name, value)


class _Listened:
    """A block within another one, whose listener is called at both of its ends."""

    __slots__ = ("_block", "_listener")

    def __init__(self, block: AbstractContextManager[object], listener: Listener) -> None:
        self._block = block
        self._listener = listener

    def __enter__(self) -> object:
        value = self._block.__enter__()
        self._listener[0]()
        return value

    def __exit__(self, *error: object) -> bool | None:
        self._listener[1]()
        return self._block.__exit__(*error)  # type: ignore[arg-type]


def attach(trainer: Trainer, find: Callable[[str], Listener | None]) -> Callable[[], None]:
    """Put a tee in front of the trainer's profiler and return what takes it away again."""
    measured = attributes_of(trainer)
    tee = measured.profiler = ProfilerTee(measured.profiler, find)

    def detach() -> None:
        holder: TrainerAttributes | ProfilerTee = measured
        while holder.profiler is not tee and isinstance(holder.profiler, ProfilerTee):
            holder = holder.profiler
        if holder.profiler is tee:
            holder.profiler = tee.profiler

    return detach

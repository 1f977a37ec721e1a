"""Listens to Lightning's own profiler calls, the only public place that sees every fetch.

Callbacks have no hook around the fetch of a batch or its transfer, but the loops announce both to
``trainer.profiler``, a public attribute. The tee takes its place and forwards every call to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from lightning_fastdata.plugin.seams.internals import TrainerAttributes, attributes_of, itself

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


Listener: TypeAlias = tuple[tuple[Callable[[], None], ...], tuple[Callable[[], None], ...]]
"""What is called at the start of an action and at its end, in this order."""

_NOTHING: Final[AbstractContextManager[object]] = nullcontext()
_OWN: Final = frozenset(("profiler", "profile", "_listeners"))


class ProfilerTee:
    """A profiler that forwards to another one and calls listeners on the way.

    Args:
        profiler: The user's, or Lightning's own.
        find: Returns the listener of an action, by the name with which it is announced, such as
            ``"[_TrainingEpochLoop].train_dataloader_next"``, or None; asked once for each name.
        tell: Takes what a listener raises, which the training must not see.

    Attributes:
        profile: Takes the name of an action and returns the block that times it, as
            ``Profiler.profile`` does.
    """

    def __init__(
        self,
        profiler: Any,
        find: Callable[[str], Listener | None],
        tell: Callable[[Exception], None],
    ) -> None:
        self.profiler = profiler
        self._listeners = _Listeners(find, tell)
        # Lightning's default does nothing at the price of a generator per block. A subclass of it
        # has another name and is asked. A step has some twenty blocks: looked up, they cost next to
        # nothing.
        idle = type(profiler).__name__ == "PassThroughProfiler"
        self.profile: Callable[[str], AbstractContextManager[object]] = (
            self._listeners.__getitem__ if idle else self._profile
        )

    def start(self, action_name: str) -> None:
        """Forward, then call the listener: the user's profiler is not part of the interval."""
        self.profiler.start(action_name)
        self._listeners[action_name].__enter__()

    def stop(self, action_name: str) -> None:
        """Call the listener, then forward."""
        self._listeners[action_name].__exit__(None, None, None)
        self.profiler.stop(action_name)

    @contextmanager
    def _profile(self, action_name: str) -> Iterator[object]:
        with self.profiler.profile(action_name) as value, self._listeners[action_name]:
            yield value

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


class _Listeners(dict[str, AbstractContextManager[object]]):
    """The name of an action -> a block at both of whose ends its listener is called."""

    def __init__(
        self, find: Callable[[str], Listener | None], tell: Callable[[Exception], None]
    ) -> None:
        super().__init__()
        self._find, self._tell = find, tell

    def __missing__(self, action_name: str) -> AbstractContextManager[object]:
        listener = self._find(action_name)
        block = _NOTHING if listener is None else _Listened(*listener, self._tell)
        self[action_name] = block
        return block


class _Listened(AbstractContextManager[None]):
    """A block that may be entered again and again, also within itself."""

    __slots__ = ("_begin", "_end", "_tell")

    def __init__(
        self,
        begin: tuple[Callable[[], None], ...],
        end: tuple[Callable[[], None], ...],
        tell: Callable[[Exception], None],
    ) -> None:
        self._begin, self._end, self._tell = begin, end, tell

    def __enter__(self) -> None:
        try:
            for call in self._begin:
                call()
        except Exception as error:
            self._tell(error)

    def __exit__(self, *_: object) -> None:
        try:
            for call in self._end:
                call()
        except Exception as error:
            self._tell(error)


def attach(
    trainer: Trainer,
    find: Callable[[str], Listener | None],
    tell: Callable[[Exception], None],
) -> Callable[[], None]:
    """Put a tee in front of the trainer's profiler and return what takes it away again."""
    measured = attributes_of(trainer)
    tee = measured.profiler = ProfilerTee(measured.profiler, find, tell)

    def detach() -> None:
        holder: TrainerAttributes | ProfilerTee = measured
        while holder.profiler is not tee and isinstance(holder.profiler, ProfilerTee):
            holder = holder.profiler
        if holder.profiler is tee:
            holder.profiler = tee.profiler

    return detach

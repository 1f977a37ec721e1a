"""What each operation inside a dataset's compositions takes, timed for a sample of the tasks.

While a task is timed, the compositions that the dataset holds (``Compose`` of torchvision, v1 and
v2, and Albumentations' ``Compose``, ``OneOf`` and the like) have a list of stand-ins for their
operations; afterwards they have their own list again. A stand-in calls its operation and does
nothing else, so that samples and random draws are the same, timed or not. Neither library is
imported: where no code has, there is nothing to time.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Final, NamedTuple

from lightning_fastdata.host import clock
from lightning_fastdata.randomness.search import find_instances, loaded_classes
from lightning_fastdata.tree import name_of

EVERY: Final = 32
"""One of so many tasks is timed."""
_TIMED_TASK: Final = 1
"""The first task pays for what is done once, so that the second of each round is timed."""


class OperationTime(NamedTuple):
    """What one operation took in one task."""

    name: str
    """Name of its class or function; operations of one name count as one."""
    calls: int
    """How often it was called."""
    total_ns: int
    """Time in it, and in what it holds: of nested compositions only the outermost is timed."""


class OperationWatch:
    """Times the operations of a dataset, as a process reads it, in one of so many tasks."""

    def __init__(self, dataset: object, every: int = EVERY) -> None:
        self._dataset = dataset
        self._every = every
        self._compositions: tuple[object, ...] | None = None
        self._tasks = 0
        self._alone = threading.Lock()
        self._thread: int | None = None
        self._inside = False
        self._replaced: list[tuple[object, object, object]] = []
        self._spent: dict[str, tuple[int, int]] = {}

    def begin(self) -> None:
        """Start a task of the calling thread, which may be one that is timed."""
        self.end()
        number, self._tasks = self._tasks, self._tasks + 1
        if number % self._every != _TIMED_TASK % self._every:
            return
        # Threads share the dataset; while one of them is timed, the others pass through.
        if not self._alone.acquire(blocking=False):
            return
        self._thread, self._inside, self._spent = threading.get_ident(), False, {}
        if self._compositions is None:
            self._compositions = _compositions_of(self._dataset)
        for owner in self._compositions:
            listed = vars(owner).get("transforms")
            if isinstance(listed, list | tuple) and type(listed) in (list, tuple):
                stand_ins = [_StandIn(operation, self) for operation in listed]
                self._replaced.append((owner, listed, stand_ins))
                vars(owner)["transforms"] = stand_ins

    def end(self) -> tuple[OperationTime, ...] | None:
        """End the task; return what its operations took: None if it was not timed, or has none."""
        if self._thread is None or self._thread != threading.get_ident():
            return None
        held = bool(self._replaced)
        for owner, listed, stand_ins in self._replaced:
            if vars(owner).get("transforms") is stand_ins:
                vars(owner)["transforms"] = listed
        self._replaced.clear()
        self._thread = None
        self._alone.release()
        if not held:
            return None
        return tuple(OperationTime(name, *spent) for name, spent in self._spent.items())

    def call(self, operation: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Call an operation and note its time, if it is the outermost one of the timed thread."""
        if self._inside or self._thread != threading.get_ident():
            return operation(*args, **kwargs)
        self._inside = True
        began_ns = clock.monotonic_ns()
        try:
            return operation(*args, **kwargs)
        finally:
            spent_ns = clock.monotonic_ns() - began_ns
            self._inside = False
            name = _name_of(operation)
            calls, total_ns = self._spent.get(name, (0, 0))
            self._spent[name] = calls + 1, total_ns + spent_ns


class _StandIn:
    """Stands for an operation in its composition: looks like it, and calls it."""

    __slots__ = ("_fastdata_call", "_fastdata_operation")
    _fastdata_call: Callable[..., object]
    _fastdata_operation: Callable[..., object]

    def __init__(self, operation: Callable[..., object], watch: OperationWatch) -> None:
        object.__setattr__(self, "_fastdata_operation", operation)
        object.__setattr__(self, "_fastdata_call", functools.partial(watch.call, operation))

    # isinstance(), with which compositions look for the operations that draw, asks for it.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._fastdata_operation)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._fastdata_call(*args, **kwargs)

    def __getattr__(self, name: str) -> object:
        return getattr(self._fastdata_operation, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._fastdata_operation, name, value)

    def __repr__(self) -> str:
        return repr(self._fastdata_operation)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        # A copy of a composition that is made meanwhile holds the operation itself.
        return _itself, (self._fastdata_operation,)


def _itself(operation: object) -> object:
    return operation


def _name_of(operation: object) -> str:
    while isinstance(operation, functools.partial):
        operation = operation.func
    return name_of(operation)


def _compositions_of(dataset: object) -> tuple[object, ...]:
    kinds = (
        *loaded_classes("albumentations", "BaseCompose"),
        *loaded_classes("torchvision.transforms.transforms", "Compose"),
        *loaded_classes("torchvision.transforms.v2", "Compose"),
    )
    return find_instances(dataset, kinds)

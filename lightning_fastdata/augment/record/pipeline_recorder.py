"""Records a dataset's own pipeline where the dataset calls it; other calls are left alone."""

from __future__ import annotations

import copy
import functools
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_fastdata.augment.ops.operation import Track
from lightning_fastdata.augment.pipeline.fields import is_too_wide
from lightning_fastdata.augment.pipeline.tree import list_leaves, list_nodes
from lightning_fastdata.augment.record.deferred import DeferredTensor, Waiting
from lightning_fastdata.augment.record.tape import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightning_fastdata.augment.ops.operation import DeviceOp
    from lightning_fastdata.augment.pipeline.plan import Plan


class Watch:
    """What is seen of a dataset's calls of its pipelines while it is tried out.

    Args:
        records: Whether the calls are recorded, too; else they run as always.
    """

    def __init__(self, *, records: bool = True) -> None:
        self.records = records
        self.calls = 0
        """Calls so far."""
        self.made: list[Waiting] = []
        """Everything that waits, to see what becomes of it."""
        self.given: dict[int, dict[str, Any]] = {}
        """What each pipeline was first called with, by its ``id``: a copy."""

    def call(self, compose: Any, data: Mapping[str, Any]) -> None:
        """Note a call."""
        self.calls += 1
        if self.records and id(compose) not in self.given:
            self.given[id(compose)] = copy.deepcopy(dict(data))


class Turn:
    """Which of a dataset's pipelines is being recorded: one at a time, in the thread that reads.

    A transform may belong to several pipelines, or be called by itself, and a dataset may call its
    pipelines in threads of its own. Whatever is not the call that is recorded runs as always.
    """

    def __init__(self, watch: Watch | None = None) -> None:
        self.thread = 0
        """Of the calls that are recorded."""
        self.watch = watch
        """Sees the calls; None: nobody asks."""
        self._calls: list[PipelineRecorder] = []
        """Whose call is being recorded, last, and within which other calls."""

    def begin(self) -> None:
        """Have the calls of this thread recorded."""
        self.thread = threading.get_ident()
        self._calls.clear()

    def take(self, recorder: PipelineRecorder, data: Mapping[str, Any]) -> bool:
        """Return whether the call that begins is to be recorded by this recorder."""
        if self.watch is not None:
            self.watch.call(recorder.compose, data)
            if not self.watch.records:
                return False
        if threading.get_ident() != self.thread:
            return False
        if self._calls and self._calls[-1].contains(recorder.compose):
            return False
        self._calls.append(recorder)
        return True

    def is_of(self, recorder: PipelineRecorder) -> bool:
        """Return whether this call is a part of the one that is recorded by this recorder."""
        last = self._calls[-1] if self._calls else None
        return last is recorder and threading.get_ident() == self.thread

    def end(self, recorder: PipelineRecorder) -> None:
        """Note that the call of a recorder is over, if it is its turn.

        After an error, too, as the dataset may catch it and go on.
        """
        if self.is_of(recorder):
            self._calls.pop()


class PipelineRecorder(Recorder):
    """Records one pipeline where the dataset calls it; hooked in from the beginning."""

    def __init__(self, compose: Any, plan: Plan, ops: Mapping[str, DeviceOp], turn: Turn) -> None:
        leaves = [leaf.transform for leaf in list_leaves(compose)]
        before = [dict(vars(leaf)) for leaf in leaves]
        super().__init__(compose, plan, ops, copied=False)
        hooks: list[tuple[Any, str, Any, Any]] = []
        for leaf, old in zip(leaves, before, strict=True):
            for name, hook in list(vars(leaf).items()):
                if hook is not old.get(name):
                    plain = old.get(name) or getattr(type(leaf), name).__get__(leaf)
                    chosen = functools.partial(self._in_turn, hook, plain)
                    hooks.append((leaf, name, chosen, old.get(name)))
        for name, hook in (("preprocess", self._begin), ("postprocess", self._end)):
            old_one = vars(compose).get(name)
            hooks.append((compose, name, functools.partial(hook, getattr(compose, name)), old_one))
        self._hooks = hooks
        self._turn = turn
        self._nodes = {id(node) for node in list_nodes(compose)}
        self._classes = tuple(map(type, leaves))
        self._given: dict[str, Any] = {}
        self.hook()

    def contains(self, compose: Any) -> bool:
        """Return whether a pipeline is a part of this one, and not all of it."""
        return compose is not self.compose and id(compose) in self._nodes

    def hook(self) -> None:
        """Have the calls of the pipeline recorded from now on, when it is its turn."""
        # Instance attributes shadow the methods, here as in the recorder of a copy.
        for owner, name, hook, _ in self._hooks:
            setattr(owner, name, hook)

    def unhook(self) -> None:
        """Leave the pipeline as it was before :meth:`hook`."""
        for owner, name, _, old in self._hooks:
            if old is None:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, old)

    def _in_turn(
        self, hook: Callable[..., Any], plain: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        if not self._turn.is_of(self):
            return plain(*args, **kwargs)
        try:
            return hook(*args, **kwargs)
        except BaseException:
            self._turn.end(self)
            raise

    def _refuse_late_pixels(self, name: str, data: Mapping[str, Any]) -> None:
        """Refuse nothing: the dataset gets the tensor computed, and so is the batch it comes in."""

    def _begin(self, original: Callable[[Any], Any], data: dict[str, Any]) -> Any:
        if self._turn.take(self, data):
            self._targets = {}
            self._given = dict(data)
        try:
            return original(data)
        except BaseException:
            self._turn.end(self)
            raise

    def _end(self, original: Callable[[Any], Any], data: dict[str, Any]) -> Any:
        try:
            result = original(data)
        except BaseException:
            self._turn.end(self)
            raise
        if not self._turn.is_of(self):
            return result
        for key, role in self._roles.items():
            target = self._targets.get(key)
            if target is None or result.get(key) is not target.shown:
                continue
            # Of such masks Albumentations' own dtype depends on what was drawn.
            waits = target.pending and not is_too_wide(self._given.get(key))
            if waits and isinstance(target.shown, torch.Tensor):
                if np.may_share_memory(target.real, self._given[key]):
                    target.real = target.real.copy()  # a dataset may read into one buffer
                track = Track(role, tuple(pending.op for pending in target.pending))
                waiting = Waiting(track, target.flush, target.real, self._classes)
                if self._turn.watch is not None:
                    self._turn.watch.made.append(waiting)
                result[key] = DeferredTensor.of(target.shown, (waiting,))
            else:
                result[key] = target.flush()
        self._targets, self._given = {}, {}
        self._turn.end(self)
        return result

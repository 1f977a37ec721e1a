"""Records a dataset's own pipeline where the dataset calls it; other calls are left alone."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import torch
import torch.overrides

from lightning_fastdata.augment.ops.operation import DeviceOp, Track
from lightning_fastdata.augment.pipeline.fields import is_too_wide
from lightning_fastdata.augment.pipeline.tree import list_leaves, list_nodes
from lightning_fastdata.augment.record.deferred import DeferredTensor, Waiting
from lightning_fastdata.augment.record.tape import Recorder
from lightning_fastdata.tree import name_of

if TYPE_CHECKING:
    from albumentations import BaseCompose

    from lightning_fastdata.augment.pipeline.plan import Plan

_Result = TypeVar("_Result")
_Data: TypeAlias = "dict[str, Any]"
"""What a pipeline is called with, and what it returns."""


@dataclass(slots=True, kw_only=True)
class Watch:
    """What is seen of a dataset's calls of its pipelines while it is tried out."""

    records: bool = True
    """Whether the calls are recorded, too; else they run as always."""
    calls: int = 0
    made: list[Waiting] = field(default_factory=list)
    """Everything that waits, to see what becomes of it."""
    given: dict[int, _Data] = field(default_factory=dict)
    """A copy of what each pipeline was first called with, by its ``id``."""

    def call(self, compose: BaseCompose, data: Mapping[str, Any]) -> None:
        """Note a call."""
        self.calls += 1
        if self.records and id(compose) not in self.given:
            self.given[id(compose)] = copy.deepcopy(dict(data))

    def fate(self) -> str:
        """Return why no batch waits for the device, by what became of each tensor, in words."""
        if not self.made:
            return (
                "no sample that was tried leaves it an image for the device: it is given stacks "
                "(images=, volume=), called in another thread or one transform at a time, or not "
                "called (a dataset may keep what they returned before)"
            )
        use = next((one.use for one in self.made if one.use is not None), None)
        if use is None:
            return (
                "the batch has no tensor of what it returns in dicts, lists, tuples or dataclasses"
            )
        if use is torch.stack:
            return (
                "the batch stacks what it returns with other tensors, with those of another "
                "pipeline, or not along the first dimension"
            )
        name = torch.overrides.resolve_name(use) or name_of(use)
        return f"the dataset, or the collation, works on what it returns ({name})"


class Turn:
    """Which of a dataset's pipelines is being recorded: one at a time, in the thread that reads.

    A transform may belong to several pipelines, or be called by itself, and a dataset may call its
    pipelines in threads of its own. Whatever is not the call that is recorded runs as always.
    """

    def __init__(self, watch: Watch | None = None) -> None:
        self.watch = watch
        self._thread = 0
        self._calls: list[PipelineRecorder] = []
        """The recorder whose call is being recorded, last, and those of the calls around it."""

    def begin(self) -> None:
        """Have the calls of this thread recorded."""
        self._thread = threading.get_ident()
        self._calls.clear()

    def take(self, recorder: PipelineRecorder, data: Mapping[str, Any]) -> bool:
        """Return whether the call that begins is to be recorded by this recorder."""
        if self.watch is not None:
            self.watch.call(recorder.compose, data)
            if not self.watch.records:
                return False
        if threading.get_ident() != self._thread:
            return False
        within = self._calls[-1] if self._calls else recorder
        if within.compose is not recorder.compose and id(recorder.compose) in within.nodes:
            return False
        self._calls.append(recorder)
        return True

    def is_of(self, recorder: PipelineRecorder) -> bool:
        """Return whether this call is a part of the one that is recorded by this recorder."""
        last = self._calls[-1] if self._calls else None
        return last is recorder and threading.get_ident() == self._thread

    def end(self, recorder: PipelineRecorder) -> None:
        """Note that the call of a recorder is over, if it is its turn."""
        if self.is_of(recorder):
            self._calls.pop()


class PipelineRecorder(Recorder):
    """Records one pipeline where the dataset calls it; hooked in from the beginning."""

    def __init__(
        self, compose: BaseCompose, plan: Plan, ops: Mapping[str, DeviceOp], turn: Turn
    ) -> None:
        self._hooks: list[tuple[object, str, Callable[..., object], object]] = []
        """Owner, name, what is there while hooked, and before (None: the method of the class)."""
        self._turn = turn
        self.nodes = {id(node) for node in list_nodes(compose)}
        self._classes = tuple(type(leaf.transform) for leaf in list_leaves(compose))
        self._given: _Data = {}
        super().__init__(compose, plan, ops, copied=False)
        for name, hook in (("preprocess", self._begin), ("postprocess", self._end)):
            chosen = functools.partial(hook, getattr(compose, name))
            self._hooks.append((compose, name, chosen, vars(compose).get(name)))
        self.hook()

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

    def _replace(self, owner: object, name: str, hook: Callable[..., object]) -> None:
        # No closure: a dataset may copy its pipeline, and the copy has its own methods.
        chosen = functools.partial(self._in_turn, hook, getattr(owner, name))
        self._hooks.append((owner, name, chosen, vars(owner).get(name)))

    def _in_turn(
        self,
        hook: Callable[..., object],
        plain: Callable[..., object],
        /,
        *args: object,
        **kwargs: object,
    ) -> object:
        if not self._turn.is_of(self):
            return plain(*args, **kwargs)
        return self._ending_on_error(hook, *args, **kwargs)

    def _ending_on_error(
        self, function: Callable[..., _Result], *args: object, **kwargs: object
    ) -> _Result:
        """Call a function; after an error the turn ends, as the dataset may catch it and go on."""
        try:
            return function(*args, **kwargs)
        except BaseException:
            self._turn.end(self)
            raise

    def _refuse_late_pixels(self, name: str, data: Mapping[str, Any]) -> None:
        """Refuse nothing: the dataset gets the tensor computed, and so is the batch it comes in."""

    def _begin(self, original: Callable[[_Data], object], data: _Data) -> object:
        if self._turn.take(self, data):
            self._targets = {}
            self._given = dict(data)
        return self._ending_on_error(original, data)

    def _end(self, original: Callable[[_Data], _Data], data: _Data) -> _Data:
        result = self._ending_on_error(original, data)
        if not self._turn.is_of(self):
            return result
        for key, role in self._roles.items():
            target = self._targets.get(key)
            if target is None or result.get(key) is not target.shown:
                continue
            # Of such masks Albumentations' own dtype depends on what was drawn.
            waits = target.pending and not is_too_wide(self._given.get(key))
            if not waits or not isinstance(target.shown, torch.Tensor):
                result[key] = target.flush()
                continue
            if np.may_share_memory(target.real, self._given[key]):
                target.real = target.real.copy()  # a dataset may read into one buffer
            track = Track(role, tuple(pending.op for pending in target.pending))
            waiting = Waiting(track, target.flush, target.real, self._classes)
            if self._turn.watch is not None:
                self._turn.watch.made.append(waiting)
            result[key] = DeferredTensor.of(target.shown, (waiting,))
        self._targets, self._given = {}, {}
        self._turn.end(self)
        return result

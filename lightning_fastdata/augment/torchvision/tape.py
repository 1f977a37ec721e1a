"""Run a v2 pipeline without the pixel work of its end; write down what it would have done.

The pipeline runs as always, a copy of it, up to the boundary of its plan. Behind that, where a
transform would touch the pixels of an image or mask, the call and its parameters are noted, and a
*phantom* (a tensor of the right shape, dtype and type on the meta device) goes on in its place.
Probabilities, choices, orders, boxes, keypoints and labels are therefore torchvision's own. Reading
the pixels of a phantom is an error of torch.

Replaced on the transforms of the copy is ``transform``, which is public, and of policies
(``RandAugment``, ...) the method that carries out an operation; where a version has no such method,
policies run in the worker.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from lightning_fastdata.augment.ops.operation import Tape, TapeOp, Track
from lightning_fastdata.augment.torchvision.forms import Call, encode, general, general_name
from lightning_fastdata.augment.torchvision.kernels import TYPES, as_type, plain
from lightning_fastdata.augment.torchvision.plan import (
    DTYPES,
    LEAVE_MASKS,
    METHODS,
    Leaf,
    children_of,
    kind_of,
    rounds,
    with_children,
)
from lightning_fastdata.tree import replace_leaves

if TYPE_CHECKING:
    from lightning_fastdata.augment.ops.operation import Role
    from lightning_fastdata.augment.torchvision.plan import Plan
    from lightning_fastdata.tree import Path
    from lightning_fastdata.types import Batch

_TYPE_NAMES: Final = {kind: name for name, kind in TYPES.items()}
_DIMENSIONS: Final = {"image": {3}, "mask": {2, 3}}


class Form(NamedTuple):
    """What the pixels of an image or mask of a sample look like."""

    type_name: str
    """One of :data:`TYPES`."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    def phantom(self) -> torch.Tensor:
        """Return a tensor of this form whose pixels cannot be read."""
        return as_type(torch.empty(self.shape, dtype=self.dtype, device="meta"), self.type_name)

    @property
    def role(self) -> Role:
        """What its pixels are to a batch."""
        return "mask" if self.type_name == "Mask" else "image"


def form_of(value: Any) -> Form | None:
    """Return the form of a tensor whose pixels may be left to a device; None of anything else."""
    name = _TYPE_NAMES.get(type(value))
    if name is None:
        return None
    form = Form(name, tuple(value.shape), value.dtype)
    known = value.ndim in _DIMENSIONS[form.role] and value.dtype in DTYPES[form.role]
    return form if known and value.numel() else None


@dataclass(slots=True, eq=False)
class Target:
    """An image or mask on its way through a pipeline."""

    real: torch.Tensor
    """What it was before anything was noted."""
    form: Form
    """What it looks like by now."""
    shown: torch.Tensor
    """What the pipeline handles in its place."""
    noted: list[TapeOp] = field(default_factory=list)


class Recorder:
    """A copy of one pipeline, prepared to be recorded. Not for two threads at once."""

    def __init__(self, pipeline: Any, plan: Plan) -> None:
        self._targets: dict[int, Target] = {}
        self._forms: dict[tuple[object, ...], Form] = {}
        """The form behind an operation, by its number, its name in a policy, the form before."""
        # Else masks are real, for a transform that reads them.
        self._masks_too = all(kind_of(leaf.transform) != "masks" for leaf in plan.leaves)
        rounding = (leaf.number for leaf in plan.leaves if rounds(leaf.transform))
        self._rounding = max(rounding, default=-1)
        self.done_here: set[int] = set()
        """Numbers of transforms that met what nothing can be noted of; for ``costs.py`` alone."""
        self._pipeline = self._hooked(pipeline, iter(plan.leaves), plan.boundary)

    def __call__(self, sample: Batch) -> tuple[Batch, Tape]:
        """Run the pipeline once and return what it returns, and what is still to be done.

        Images and masks of the result are as they were before that, of their last type.
        """
        self._targets = {}
        result = self._pipeline(sample)
        tape: dict[Any, Track] = {}

        def real(path: Path, value: Any) -> Any:
            target = self._known(value)
            if target is None:
                return value
            if target.noted:
                tape[path] = Track(target.form.role, tuple(target.noted))
            return as_type(target.real, target.form.type_name)

        result = replace_leaves(result, real, depth=-1)
        self._targets = {}
        return result, tape

    def _hooked(self, node: Any, leaves: Iterator[Leaf], boundary: int) -> Any:
        """Return a copy of a pipeline in which what comes behind the boundary is noted."""
        inside = children_of(node)
        if inside is None:
            leaf = next(leaves)
            return node if leaf.number <= boundary else self._hook(leaf)
        return with_children(node, [self._hooked(child, leaves, boundary) for child in inside])

    def _hook(self, leaf: Leaf) -> Any:
        """Return a copy of a transform that asks here before it touches pixels."""
        # One transform may stand in several places. An attribute of the copy shadows the class's.
        node, kind = copy.copy(leaf.transform), kind_of(leaf.transform)
        if kind in METHODS:
            name = METHODS[kind]
            setattr(node, name, partial(self._note, leaf, getattr(node, name)))
        elif kind == "types":
            node.transform = partial(self._retype, node.transform)
        return node

    def _known(self, value: Any) -> Target | None:
        """Return the target that a value is shown for; None: it is shown for none."""
        target = self._targets.get(id(value))
        return target if target is not None and target.shown is value else None

    def _taken(self, value: Any) -> Target | None:
        """Return a new target for pixels that may be left to a device; None of anything else."""
        form = form_of(value)
        if form is None or value.requires_grad or (form.role == "mask" and not self._masks_too):
            return None
        target = Target(plain(value), form, value)
        self._show(target, form)
        return target

    def _note(self, leaf: Leaf, call: Call, value: Any, /, *given: Any, **named: Any) -> Any:
        target = self._known(value) or self._taken(value)
        if target is None:
            self.done_here.add(leaf.number)
            return call(value, *given, **named)
        form = target.form
        leaves_it = form.type_name == "Mask" and type(leaf.transform).__name__ in LEAVE_MASKS
        if leaves_it or (given and given[0] == "Identity"):
            return target.shown
        after = self._form_after(leaf, form, call, given, named)
        exact = leaf.number < self._rounding
        steps = encode(leaf.transform, (*given, *named.values()), form, exact=exact)
        if steps is None:
            steps = [(general_name(leaf), general(form.type_name, given, named))]
        target.noted += [TapeOp(leaf.number, step, encoded) for step, encoded in steps]
        return target.shown if after == form else self._show(target, after)

    def _form_after(
        self, leaf: Leaf, form: Form, call: Call, given: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Form:
        """Return the form behind an operation, which is tried on an image of zeros, once.

        What torchvision refuses it refuses here, too.
        """
        key = leaf.number, given[0] if isinstance(given[0], str) else None, form
        if key not in self._forms:
            zeros = torch.zeros(form.shape, dtype=form.dtype)
            made = call(as_type(zeros, form.type_name), *given, **named)
            self._forms[key] = form._replace(shape=tuple(made.shape), dtype=made.dtype)
        return self._forms[key]

    def _show(self, target: Target, form: Form) -> torch.Tensor:
        target.form, target.shown = form, form.phantom()
        self._targets[id(target.shown)] = target
        return target.shown

    def _retype(self, transform: Call, value: Any, params: Mapping[str, Any]) -> Any:
        target, made = self._known(value), transform(value, params)
        if target is None:
            return made
        return self._show(target, target.form._replace(type_name=_TYPE_NAMES[type(made)]))

"""Run a v2 pipeline without the pixel work of its end; write down what it would have done.

The pipeline runs as always, a copy of it, up to the boundary of its plan. Behind that, where a
transform would touch the pixels of an image or mask, the call and its parameters are noted, and a
*phantom* (a tensor of the right shape, dtype and type on the meta device) goes on in its place.
Probabilities, choices, orders, boxes, keypoints and labels are therefore torchvision's own. Reading
the pixels of a phantom is an error of torch.

On the transforms of the copy the public method ``transform`` is replaced; on policies
(``RandAugment``, ...), the method that carries out an operation. If a version of torchvision has no
such method, policies run in the worker.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch

from lightning_fastdata.augment.ops.operation import Role, Tape, TapeOp, Track
from lightning_fastdata.augment.torchvision.forms import (
    TYPES,
    Call,
    Form,
    as_type,
    encode,
    general,
    general_name,
    plain,
)
from lightning_fastdata.augment.torchvision.plan import (
    DTYPES,
    LEAVE_MASKS,
    METHODS,
    Leaf,
    Plan,
    children_of,
    kind_of,
    rounds,
    with_children,
)
from lightning_fastdata.tree import Path, replace_leaves
from lightning_fastdata.types import Batch

_TYPE_NAMES: Final = {kind: name for name, kind in TYPES.items()}
_DIMENSIONS: Final = {"image": {3}, "mask": {2, 3}}


def form_of(value: Any) -> Form | None:
    """Return the form of a tensor whose pixels may be left to a device; None for anything else."""
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
    """The tensor as it was before anything was noted."""
    role: Role
    """What the tensor was then: a mask stays one, also as a plain tensor."""
    form: Form
    """Type, shape and dtype that the noted operations lead to."""
    shown: torch.Tensor
    """The phantom that the pipeline handles in its place."""
    noted: list[TapeOp] = field(default_factory=list)


class Recorder:
    """A copy of one pipeline, prepared for recording. Only one thread at a time may use it."""

    def __init__(self, pipeline: Any, plan: Plan) -> None:
        self._targets: dict[int, Target] = {}
        self._forms: dict[tuple[object, ...], Form] = {}
        """Form after an operation, by (transform number, choice of a policy or None, old form)."""
        # If a transform reads masks, they stay real.
        self._masks_too = all(kind_of(leaf.transform) != "masks" for leaf in plan.leaves)
        rounding = (leaf.number for leaf in plan.leaves if rounds(leaf.transform))
        self._rounding = max(rounding, default=-1)
        self._pipeline = self._hooked(pipeline, iter(plan.leaves), plan.boundary)

    def __call__(self, sample: Batch) -> tuple[Batch, Tape]:
        """Run the pipeline once; return its result, and the tape of operations still to be run.

        Images and masks in the result have the pixels from before those operations, and their
        final type.
        """
        self._targets = {}
        result = self._pipeline(sample)
        tape: dict[Any, Track] = {}

        def real(path: Path, value: Any) -> Any:
            target = self._known(value)
            if target is None:
                return value
            if target.noted:
                tape[path] = Track(target.role, tuple(target.noted))
            return as_type(target.real, target.form.type_name)

        result = replace_leaves(result, real, depth=-1)
        self._targets = {}
        return result, tape

    def _hooked(self, node: Any, leaves: Iterator[Leaf], boundary: int) -> Any:
        """Return a copy of a pipeline in which the transforms behind the boundary are noted."""
        inside = children_of(node)
        if inside is None:
            leaf = next(leaves)
            return node if leaf.number <= boundary else self._hook(leaf)
        return with_children(node, [self._hooked(child, leaves, boundary) for child in inside])

    def _hook(self, leaf: Leaf) -> Any:
        """Return a copy of a transform that calls this recorder before it touches pixels."""
        # Copied, as it may stand in several places. The copy's attribute shadows the class's.
        node, kind = copy.copy(leaf.transform), kind_of(leaf.transform)
        if kind in METHODS:
            name = METHODS[kind]
            setattr(node, name, partial(self._note, leaf, getattr(node, name)))
        elif kind == "types":
            node.transform = partial(self._retype, node.transform)
        return node

    def _known(self, value: Any) -> Target | None:
        """Return the target in whose place a value is shown; None: there is no such target."""
        target = self._targets.get(id(value))
        return target if target is not None and target.shown is value else None

    def _taken(self, value: Any) -> Target | None:
        """Return a new target for pixels that may be left to a device; None for anything else."""
        form = form_of(value)
        if form is None or value.requires_grad or (form.role == "mask" and not self._masks_too):
            return None
        target = Target(plain(value), form.role, form, value)
        self._show(target, form)
        return target

    def _note(self, leaf: Leaf, call: Call, value: Any, /, *given: Any, **named: Any) -> Any:
        target = self._known(value) or self._taken(value)
        if target is None:
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
        """Return the form after an operation, which is tried once on an image of zeros.

        If torchvision refuses the operation, its error is raised here.
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

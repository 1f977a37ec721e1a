"""Run a v2 pipeline without its pixel work; write down what it would have done.

The pipeline runs as always, a copy of it; only where a transform would touch the pixels of an image
or mask, the call and its parameters are noted, and a *phantom* (a tensor of the right shape, dtype
and type on the meta device) goes on in its place. Probabilities, choices, orders, boxes, keypoints
and labels are therefore torchvision's own. What needs pixels gets them: torchvision runs what was
noted so far, for that sample only. Reading the pixels of a phantom is an error of torch.

Replaced on the transforms of the copy are ``transform`` and ``forward``, which are public, and of
policies (``RandAugment``, ...) the method that carries out an operation; where a version has no
such method, policies run in the worker.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.utils._pytree import tree_map

from lightning_fastdata.augment.ops.operation import Tape, TapeOp, Track
from lightning_fastdata.augment.torchvision.forms import encode
from lightning_fastdata.augment.torchvision.operations import (
    TYPES,
    Call,
    as_type,
    general,
    general_name,
    plain,
)
from lightning_fastdata.augment.torchvision.pipeline import (
    Leaf,
    children_of,
    with_children,
)
from lightning_fastdata.augment.torchvision.plan import (
    LEAVE_MASKS,
    POLICY_METHOD,
    SIZE_BY_SIZE,
    Kind,
    keeps_size,
    kind_of,
    rounds,
)
from lightning_fastdata.tree import replace_leaves

if TYPE_CHECKING:
    from lightning_fastdata.augment.torchvision.plan import Plan
    from lightning_fastdata.tree import Path
    from lightning_fastdata.types import Batch

_TYPE_NAMES: Final = {kind: name for name, kind in TYPES.items()}
_DTYPES: Final = {
    "Image": frozenset({torch.uint8, torch.float32}),
    "Mask": frozenset({torch.uint8, torch.bool, torch.int32, torch.int64, torch.float32}),
}
_DIMENSIONS: Final = {"Image": {3}, "Mask": {2, 3}}


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
    def role(self) -> str:
        """Return what its pixels are to a batch."""
        return "mask" if self.type_name == "Mask" else "image"


@dataclass(slots=True, eq=False)
class Target:
    """An image or mask on its way through a pipeline."""

    real: Any
    """Its pixels, or what fetches them."""
    form: Form
    """What it looks like by now."""
    shown: torch.Tensor
    """What the pipeline handles in its place."""
    noted: list[TapeOp] = field(default_factory=list)
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=list)
    """How torchvision would do what was noted."""

    def flush(self) -> torch.Tensor:
        """Return the pixels after what was noted, which torchvision does now."""
        if callable(self.real):
            self.real = self.real()
        for call in self.calls:
            self.real = call(self.real)
        self.noted.clear()
        self.calls.clear()
        self.real = as_type(plain(self.real), self.form.type_name)
        real: torch.Tensor = self.real
        return real


class Recorder:
    """A copy of one pipeline, prepared to be recorded. Not for two threads at once."""

    def __init__(self, pipeline: Any, plan: Plan) -> None:
        self._targets: dict[int, Target] = {}
        self._forms: dict[tuple[object, ...], Form] = {}
        """The form behind an operation, by its number and what it depends on of the form before."""
        rounding = (leaf.number for leaf in plan.leaves if rounds(leaf.transform))
        self._rounding = max(rounding, default=-1)
        self.pipeline = self._hooked(pipeline, iter(plan.leaves), plan.boundary)

    def __call__(
        self, sample: Batch, sources: Mapping[int, Callable[[], torch.Tensor]] | None = None
    ) -> tuple[Batch, Tape]:
        """Run the pipeline once and return what it returns, and what is still to be done.

        Images and masks of the result are as the real operations left them, of their last type. Of
        tensors whose ``id`` is in ``sources`` the sample has only phantoms: the source fetches the
        pixels, at most once, when an operation needs them, and is the result where none does.
        """
        self._targets = {}
        if sources:
            self._begin(sample, sources)
        result = self.pipeline(sample)
        tape: dict[Any, Track] = {}

        def real(path: Path, value: Any) -> Any:
            target = self._targets.get(id(value))
            if target is None or target.shown is not value:
                return value
            if target.noted or callable(target.real):
                tape[path] = Track(target.form.role, tuple(target.noted))  # type: ignore[arg-type]
            pixels = target.real
            return pixels if callable(pixels) else as_type(plain(pixels), target.form.type_name)

        result = replace_leaves(result, real, depth=-1)
        self._targets = {}
        return result, tape

    def _begin(self, sample: Batch, sources: Mapping[int, Callable[[], torch.Tensor]]) -> None:
        def take(_: Path, value: Any) -> Any:
            if id(value) in sources:
                form = _form_of(value)
                assert form is not None
                self._add(Target(sources[id(value)], form, value))
            return value

        replace_leaves(sample, take, depth=-1)

    def _hooked(self, node: Any, leaves: Iterator[Leaf], boundary: int) -> Any:
        """Return a copy of a pipeline in which what comes behind the boundary is noted."""
        inside = children_of(node)
        if inside is None:
            leaf = next(leaves)
            return node if leaf.number <= boundary else self._hook(leaf)
        return with_children(node, [self._hooked(child, leaves, boundary) for child in inside])

    def _hook(self, leaf: Leaf) -> Any:
        node, kind = leaf.transform, kind_of(leaf.transform)
        if not isinstance(node, torch.nn.Module):
            return partial(self._whole, leaf, node)
        # One transform may stand in several places. An attribute of the copy shadows the class's.
        node = copy.copy(node)
        name, hook = _HOOKS[kind]
        if name is not None:
            own = getattr(node, name)
            setattr(node, name, partial(getattr(self, hook), leaf, own))
        return node

    def _add(self, target: Target) -> Target:
        self._targets[id(target.shown)] = target
        return target

    def _target(self, value: Any) -> Target | None:
        """Return the target that a value is shown for, a new one of pixels; None of others."""
        target = self._targets.get(id(value))
        if target is not None and target.shown is value:
            return target
        form = _form_of(value)
        if form is None or value.is_meta or value.requires_grad:
            return None
        return self._add(Target(plain(value), form, form.phantom()))

    def _note(self, leaf: Leaf, call: Call, value: Any, /, *given: Any, **named: Any) -> Any:
        target = self._target(value)
        if target is None:
            return call(value, *given, **named)
        form = target.form
        name = type(leaf.transform).__name__
        if (given and given[0] == "Identity") or (form.type_name == "Mask" and name in LEAVE_MASKS):
            return target.shown
        before = partial(_called, call, form.type_name, given, named)
        after = self._form_after(leaf, form, given, before)
        if leaf.conditional and after != form:
            return call(target.flush(), *given, **named)
        exact = leaf.number < self._rounding
        steps = encode(leaf.transform, (*given, *named.values()), form, exact=exact)
        if steps is None:
            steps = [(general_name(leaf), general(form.type_name, given, named))]
        target.noted += [TapeOp(leaf.number, step, encoded) for step, encoded in steps]
        target.calls.append(before)
        return self._show(target, after)

    def _form_after(
        self, leaf: Leaf, form: Form, given: tuple[Any, ...], call: Callable[[Any], Any]
    ) -> Form:
        """Return the form behind an operation, which is tried on an image of zeros, once.

        What torchvision refuses it refuses here, too.
        """
        chosen = given[0] if kind_of(leaf.transform) == "policy" else None
        scales = type(leaf.transform).__name__ in SIZE_BY_SIZE
        key = leaf.number, chosen, form if scales else (form.shape[:-2], form.dtype, form.type_name)
        if key not in self._forms:
            made = call(torch.zeros(form.shape, dtype=form.dtype))
            self._forms[key] = Form(form.type_name, tuple(made.shape), made.dtype)
        after = self._forms[key]
        size = form.shape[-2:] if keeps_size(leaf.transform) else after.shape[-2:]
        return after._replace(shape=(*after.shape[:-2], *size))

    def _show(self, target: Target, form: Form) -> torch.Tensor:
        if form != target.form:
            target.form, target.shown = form, form.phantom()
            self._add(target)
        return target.shown

    def _retype(self, _: Leaf, transform: Call, value: Any, params: Mapping[str, Any]) -> Any:
        target = self._targets.get(id(value))
        if target is None or target.shown is not value:
            return transform(value, params)
        name = _TYPE_NAMES.get(type(transform(value, params)))
        if name is None:
            return transform(target.flush(), params)
        return self._show(target, target.form._replace(type_name=name))

    def _real(self, value: Any, kinds: tuple[str, ...] = tuple(TYPES)) -> Any:
        target = self._targets.get(id(value))
        if target is None or target.shown is not value or target.form.type_name not in kinds:
            return value
        return target.flush()

    def _whole(self, _: Leaf, function: Callable[..., Any], /, *inputs: Any) -> Any:
        return function(*tree_map(self._real, inputs))

    def _masks_only(self, _: Leaf, function: Callable[..., Any], /, *inputs: Any) -> Any:
        return function(*tree_map(partial(self._real, kinds=("Mask",)), inputs))


_HOOKS: Final[Mapping[Kind, tuple[str | None, str]]] = {
    "noted": ("transform", "_note"),
    "policy": (POLICY_METHOD, "_note"),
    "types": ("transform", "_retype"),
    "targets": (None, ""),
    "masks": ("forward", "_masks_only"),
    "pixels": ("forward", "_whole"),
}
"""What is replaced of a transform, and by what."""


def _called(
    call: Call, type_name: str, given: tuple[Any, ...], named: Mapping[str, Any], pixels: Any
) -> torch.Tensor:
    return plain(call(as_type(plain(pixels), type_name), *given, **named))


def _form_of(value: Any) -> Form | None:
    """Return the form of a tensor whose pixels may be left to a device; None of anything else."""
    name = _TYPE_NAMES.get(type(value))
    if name is None:
        return None
    kind = "Mask" if name == "Mask" else "Image"
    fits = value.ndim in _DIMENSIONS[kind] and value.dtype in _DTYPES[kind] and value.numel()
    return Form(name, tuple(value.shape), value.dtype) if fits else None

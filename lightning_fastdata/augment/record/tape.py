"""Run a real Albumentations pipeline without its pixel work; write down what it would have done.

The pipeline runs as always; only where a transform would touch the pixels of an image or mask, the
operation and its drawn parameters are noted, and a *phantom* (an empty array of the right shape and
dtype) goes on in its place. Probabilities, choices, boxes, keypoints, labels and filters are
therefore Albumentations' own. An operation that needs real pixels gets them: the notes so far are
carried out first, by Albumentations, for that sample only.

What is asked of Albumentations beyond its documentation:

- ``_key2func`` of a transform: by the key of a target, the function that it calls with it. Where a
  version has no such name, the self-check fails and every pipeline runs whole on the CPU.
- ``apply_with_params``, ``update_transform_params`` and ``get_params_dependent_on_data`` of a
  transform, ``preprocess`` and ``postprocess`` of a Compose: replaced on single objects, never on a
  class. Those of a copy stay; those of a pipeline that a dataset calls itself are put back by
  ``PipelineRecorder.unhook``.
- ``transforms`` of any composition that a dataset holds: replaced while one task of a worker is
  timed, and put back when it ends (:mod:`lightning_fastdata.stamps.operations`).

``tests/augment/test_albumentations_internals.py`` pins each against the installed Albumentations.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_fastdata.augment.ops.operation import (
    DeviceOp,
    Encoded,
    Tape,
    TapeOp,
    Track,
    draw_params,
    peek_params,
)
from lightning_fastdata.augment.pipeline.plan import Plan, device_form
from lightning_fastdata.augment.pipeline.tree import is_albumentations, keeps_params, list_leaves
from lightning_fastdata.augment.pipeline.values import (
    Values,
    in_unit_range,
    takes_any_range,
    takes_dtype,
    unit_after,
)
from lightning_fastdata.augment.record.targets import target_roles
from lightning_fastdata.augment.replay.torch import replay_one
from lightning_fastdata.errors import TransformError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from lightning_fastdata.augment.ops.operation import Shape


@dataclass(slots=True)
class Pending:
    """An operation that was noted, and how Albumentations would carry it out."""

    op: TapeOp
    apply: Callable[..., Any]
    params: Mapping[str, Any]
    bars_pixels: bool
    """Whether it changes the form of the image, so that no later operation may have its pixels."""


class Target:
    """An image or mask on its way: real pixels, and what is still to be done to them."""

    __slots__ = ("_unit", "pending", "real", "shown")

    def __init__(self, real: Any, shown: Any) -> None:
        self.real = real
        self.shown = shown
        self.pending: list[Pending] = []
        self._unit: bool | None = None

    def in_unit_range(self) -> bool:
        """Return whether the values here are integers, or sure to lie in [0, 1].

        Pixels that have to be fetched first are: somebody has looked, as that takes long.
        """
        if self._unit is None:
            self._unit = callable(self.real) or in_unit_range(self.real)
        return self._unit

    def note(self, pending: Pending, transform: Any, dtype: np.dtype[Any]) -> None:
        """Note an operation, which makes values of a dtype."""
        self.pending.append(pending)
        if dtype.kind == "f":
            before = Values(self.shown.dtype, True)
            if self.shown.dtype != dtype or not unit_after(transform, before, dtype):
                self._unit = unit_after(transform, before._replace(unit=False), dtype)

    def flush(self) -> Any:
        """Return the pixels after what was noted, which Albumentations carries out now."""
        if self.pending or callable(self.real):
            self._unit = None
        if callable(self.real):
            self.real = self.real()
        for pending in self.pending:
            self.real = contiguous(pending.apply(contiguous(self.real), **pending.params))
        self.pending.clear()
        return self.real


def contiguous(value: Any) -> Any:
    """Return an array that lies in memory as NumPy's do; anything else as it is."""
    return np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value


def function_by_key(transform: Any) -> Mapping[str, Callable[..., Any]]:
    """Return what a transform calls with the value of each key of a sample that it knows."""
    return transform._key2func  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Hooked:
    """A transform whose operations are noted, and what is known of it before any sample."""

    leaf: int
    """Its number in its pipeline."""
    transform: Any
    original: Callable[..., Any]
    """Its own ``apply_with_params``."""
    op: DeviceOp
    targets: tuple[tuple[str, bool], ...]
    """The images and masks that it takes, images first, and whether each one is an image."""
    conditional: bool
    """Whether some samples may go without it, so that it must not change the form of the others."""
    any_range: bool
    """Whether it takes floats outside of [0, 1]."""


class Recorder:
    """One pipeline, copied and prepared to be recorded. Not for two threads at once.

    Args:
        compose: the pipeline.
        plan: where each of its operations runs.
        ops: device forms by class name.
        copied: prepare a copy, so that the pipeline itself stays as it is.
    """

    def __init__(
        self, compose: Any, plan: Plan, ops: Mapping[str, DeviceOp], *, copied: bool = True
    ) -> None:
        self.compose = copy.deepcopy(compose) if copied else compose
        self._plan = plan
        self._roles = target_roles(compose)
        # A mask takes the parameters of the image beside it.
        self._images_first = sorted(self._roles, key=lambda key: self._roles[key] != "image")
        self._targets: dict[str, Target] = {}
        self._small: dict[int, dict[str, Any]] = {}
        self._keeps_params = keeps_params(compose)
        self.reading = ""
        """Class name of the transform that asked for real pixels last."""
        for index, leaf in enumerate(list_leaves(self.compose)):
            if index > plan.opaque_until:
                self._hook(index, leaf.transform, ops)

    def __call__(
        self, data: Mapping[str, Any], sources: Mapping[str, Callable[[], Any]] | None = None
    ) -> tuple[dict[str, Any], Tape]:
        """Run the pipeline once and return what it returns, and what is still to be done.

        Args:
            data: the arguments of the pipeline.
            sources: for images and masks whose entry in ``data`` only has the right shape and
                dtype, the function that fetches the pixels. It is called at most once, and only
                when an operation needs them.

        Returns:
            The pipeline's result, in which images and masks are as the real operations left them
            (the source function itself where nothing needed the pixels), and the tape.
        """
        self._targets = {key: Target(source, data[key]) for key, source in (sources or {}).items()}
        self._small = {}
        result = self.compose(**data)
        tape = {}
        for key, role in self._roles.items():
            target = self._targets.get(key)
            if target is not None and result.get(key) is target.shown:
                result[key] = target.real
                pixels = data[key] if callable(target.real) else target.real
                noted = tuple(pending.op for pending in target.pending)
                tape[key] = Track(role, noted, pixels.shape[:2], pixels.dtype)
        self._targets = {}
        return result, tape

    def _hook(self, index: int, transform: Any, ops: Mapping[str, DeviceOp]) -> None:
        # Instance attributes shadow the methods: the classes of Albumentations stay as they are.
        original = transform.apply_with_params
        op = None if self._plan.placements[index].where == "worker" else device_form(transform, ops)
        if op is None:
            transform.apply_with_params = functools.partial(self._run, original)
        else:
            keys = [key for key in self._images_first if key in function_by_key(transform)]
            targets = tuple((key, self._roles[key] == "image") for key in keys)
            conditional = self._plan.conditional[index]
            hooked = _Hooked(
                index, transform, original, op, targets, conditional, takes_any_range(op)
            )
            transform.apply_with_params = functools.partial(self._record, hooked)
        if self._plan.sees_pixels[index] and not is_albumentations(transform):
            transform.update_transform_params = functools.partial(
                self._draw_on_pixels, transform.update_transform_params
            )
        if self._plan.sees_pixels[index]:
            transform.get_params_dependent_on_data = functools.partial(
                self._draw_on_pixels, transform.get_params_dependent_on_data
            )
        elif op is not None and op.draw is not None:
            transform.get_params_dependent_on_data = functools.partial(
                self._draw_small, transform.get_params_dependent_on_data, transform, index, op
            )

    def _target(self, key: str, value: Any) -> Target:
        target = self._targets.get(key)
        if target is None or target.shown is not value:
            value = contiguous(value)
            target = self._targets[key] = Target(value, value)
        return target

    def _is_pixels(self, key: str, value: Any) -> bool:
        return key in self._roles and value is not None

    def _real(self, data: Mapping[str, Any], reader: Callable[..., Any]) -> dict[str, Any]:
        self.reading = type(getattr(reader, "__self__", reader)).__name__
        return {
            key: self._target(key, value).flush() if self._is_pixels(key, value) else value
            for key, value in data.items()
        }

    def _draw_on_pixels(self, original: Callable[..., Any], params: Any, data: Any) -> Any:
        # `data` itself keeps the phantoms: the call that follows recognises its targets by them.
        return original(params=params, data=self._real(data, original))

    def _draw_small(
        self,
        original: Callable[..., Any],
        transform: Any,
        index: int,
        op: DeviceOp,
        params: dict[str, Any],
        data: dict[str, Any],
    ) -> Any:
        # What is computed here (boxes, lists of masks) or returned needs the whole field.
        given = {key for key in function_by_key(transform) if data.get(key) is not None}
        deferred = {"image", *(key for key, role in self._roles.items() if role == "mask")}
        whole = not {"image"} <= given <= deferred or self._keeps_params
        if whole or not _one_size([data[key] for key in given]):
            self._small[index] = peek_params(op, transform, params, data)
            return original(params=params, data=data)
        return draw_params(op, transform, original, params, data, whole=False)

    def _run(self, original: Callable[..., Any], params: dict[str, Any], /, **data: Any) -> Any:
        result = original(params, **self._real(data, original))
        for key, before in data.items():
            if self._is_pixels(key, before) and key in result:
                value = contiguous(result[key])
                result[key] = value
                self._targets[key] = Target(value, value)
        return result

    def _record(self, hooked: _Hooked, params: dict[str, Any], /, **data: Any) -> Any:
        leaf, op = hooked.leaf, hooked.op
        # Apart from the parameters, which a pipeline may return.
        drawn = params | self._small.pop(leaf) if leaf in self._small else params
        noted = self._encode(hooked, drawn, data)
        if noted is None:
            self._refuse_late_pixels(op.name, data)
            return self._run(hooked.original, params, **data)
        if len(noted) < len(data):
            others = {key: value for key, value in data.items() if key not in self._roles}
            data |= hooked.original(params, **others) if others else {}
        for key, encoded, shape, dtype in noted:
            target = self._target(key, data[key])
            changes = shape != target.shown.shape or dtype != target.shown.dtype
            bars = changes and leaf != self._plan.crop
            apply, given = function_by_key(hooked.transform)[key], params
            if op.draw is not None:
                # The few numbers that were drawn are not enough for Albumentations.
                is_image = self._roles[key] == "image"
                apply, given = functools.partial(replay_one, op, encoded, is_image), {}
            pending = Pending(TapeOp(leaf, op.name, encoded), apply, given, bars)
            target.note(pending, hooked.transform, dtype)
            if op.name == "ToTensorV2":
                target.shown = _phantom_tensor(shape, dtype)
            elif changes:
                target.shown = _phantom(shape, dtype)
            data[key] = target.shown
        return data

    def _encode(
        self, hooked: _Hooked, params: Mapping[str, Any], data: Mapping[str, Any]
    ) -> list[tuple[str, Encoded, Shape, np.dtype[Any]]] | None:
        """Return what to note for each image and mask, or None if this draw needs real pixels."""
        transform, op = hooked.transform, hooked.op
        noted: list[tuple[str, Encoded, Shape, np.dtype[Any]]] = []
        size = None
        for key, is_image in hooked.targets:
            value = data.get(key)
            if value is None:
                continue
            if not isinstance(value, np.ndarray):
                return None
            shape, dtype = value.shape, value.dtype
            if size not in (None, shape[:2]):
                return None
            size = shape[:2]
            if is_image:
                fits = takes_dtype(op, dtype)
                if not hooked.any_range:
                    fits = fits and self._target(key, value).in_unit_range()
                encoded = op.encode(transform, params, shape, dtype) if fits else None
                if encoded is None:
                    return None
                new_shape = op.out_shape(transform, params, shape)
                new_dtype = op.out_dtype(transform, dtype)
                if hooked.conditional and (new_shape != shape or new_dtype != dtype):
                    return None
                noted.append((key, encoded, new_shape, new_dtype))
            elif op.mask is not None:
                if not noted:
                    return None
                encoded = noted[0][1]
                noted.append((key, encoded, _mask_shape(op, transform, params, shape), dtype))
        return noted

    def _refuse_late_pixels(self, name: str, data: Mapping[str, Any]) -> None:
        for key, value in data.items():
            if self._is_pixels(key, value):
                for pending in self._target(key, value).pending:
                    if pending.bars_pixels:
                        raise TransformError(
                            f"{name} drew parameters without a form for the device after "
                            f"{pending.op.name} had changed the shape or dtype of the images. "
                            f"Put {name} before {pending.op.name} in the pipeline, or use "
                            "on_device=False (augment='cpu')."
                        )


def _one_size(values: list[Any]) -> bool:
    """Whether images and masks are of one size, as they are unless a pipeline skips that check."""
    return len(values) < 2 or len({np.shape(value)[:2] for value in values}) == 1


@functools.lru_cache(maxsize=64)
def _phantom(shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    # Zeroed pages that nobody writes to cost no memory. A zero-stride array would not do:
    # Albumentations copies whatever is not contiguous. Read-only, so that a mistake is an error.
    phantom = np.zeros(shape, dtype)
    phantom.flags.writeable = False
    return phantom


@functools.lru_cache(maxsize=64)
def _phantom_tensor(shape: Shape, dtype: np.dtype[Any]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.from_numpy(np.empty(0, dtype)).dtype, device="meta")


def _mask_shape(op: DeviceOp, transform: Any, params: Mapping[str, Any], shape: Shape) -> Shape:
    turned = op.name != "ToTensorV2" or (transform.transpose_mask and len(shape) == 3)
    return op.out_shape(transform, params, shape) if turned else shape


def phantom(shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    """Return a read-only array of this shape and dtype whose pixels mean nothing."""
    return _phantom(tuple(shape), np.dtype(dtype))

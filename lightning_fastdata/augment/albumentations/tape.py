"""Run a real Albumentations pipeline without its pixel work; write down what it would have done.

The pipeline runs as always. Only where a transform would touch the pixels of an image or mask, the
operation and its drawn parameters are noted, and a *phantom* (an empty array of the right shape and
dtype) goes on in its place. Probabilities, choices, boxes, keypoints, labels and filters are
therefore Albumentations' own. An operation that needs real pixels gets them: Albumentations runs
the operations that were noted so far, for that sample only.

Internals of Albumentations that are used here:

- ``_key2func`` of a transform: the function that it calls for a target, by the target's key.
- ``apply_with_params``, ``update_transform_params`` and ``get_params_dependent_on_data`` of a
  transform: replaced on the transforms of a copy of the pipeline, never on a class.

``tests/augment/test_albumentations_internals.py`` pins each against the installed Albumentations.
Pipelines are recorded only with the version that the tests use, which is the last one released.
With any other version every operation stays on the CPU, where the installed library computes it,
and a warning says so.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch

from lightning_fastdata.augment.albumentations.plan import (
    MASKS,
    Node,
    Plan,
    device_form,
    is_albumentations,
    list_leaves,
    takes_dtype,
    target_roles,
)
from lightning_fastdata.augment.ops.operation import (
    DeviceOp,
    DType,
    Encoded,
    Shape,
    Tape,
    TapeOp,
    Track,
    Transform,
)
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.host.machine import version_of
from lightning_fastdata.tree import copy_of_compose

_Values: TypeAlias = "dict[str, Any]"
"""Parameters or data of a transform, by name."""
KNOWN_VERSION: Final = "2.0.8"
"""The version of Albumentations with which device forms and the recorder are tested."""


@functools.cache
def refusal() -> str | None:
    """Return why no pipeline may be recorded in this environment, or None.

    If there is a reason, the first call in a process warns.
    """
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    version, of_x = version_of("albumentations"), version_of("albumentationsx")
    if of_x is not None:  # it installs a package of the same name
        reason = f"`import albumentations` is AlbumentationsX {of_x}, which cannot be recorded"
    elif version == KNOWN_VERSION:
        return None
    else:
        reason = f"Albumentations {version or 'of an unknown version'} has not been tried"
    warnings.warn(what_it_means(reason), FastDataWarning, stacklevel=2)
    return reason


def what_it_means(reason: str) -> str:
    """Return a message: what a reason not to record leads to, and what to do about it."""
    return (
        f"Albumentations pipelines run whole in the workers, on the CPU, because {reason}. They "
        "give what the installed library gives. To have a GPU run what it can: pip uninstall "
        f"albumentations albumentationsx; pip install albumentations=={KNOWN_VERSION}."
    )


@dataclass(slots=True, eq=False)
class Target:
    """An image or mask on its way through a pipeline."""

    real: Any
    """The pixels before the pending operations, or a function that fetches them."""
    shown: Any
    """The array or tensor that the pipeline handles in its place: a phantom, or the pixels."""
    pending: list[tuple[TapeOp, Callable[[Any], Any]]] = field(default_factory=list)
    """The operations noted since ``real``, each with Albumentations' function that runs it."""

    def flush(self) -> Any:
        """Have Albumentations run the pending operations now, and return the pixels."""
        if callable(self.real):
            self.real = self.real()
        for _, run in self.pending:
            self.real = contiguous(run(contiguous(self.real)))
        self.pending.clear()
        return self.real


def contiguous(value: Any) -> Any:
    """Return an array as a C-contiguous one; anything else as it is."""
    return np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value


class _Hooked(NamedTuple):
    """A transform whose operations are noted, with facts that are known before any sample."""

    leaf: int
    transform: Transform
    original: Callable[..., _Values]
    """The transform's own ``apply_with_params``, which a hook replaces."""
    op: DeviceOp
    targets: tuple[tuple[str, bool], ...]
    """Keys of the images and masks that it takes, images first; each with whether it is one."""
    conditional: bool
    """Whether some samples may skip it, so that it must not change the form of the others."""


class Recorder:
    """A copy of one pipeline, prepared for recording. Only one thread at a time may use it."""

    def __init__(self, compose: Node, plan: Plan, ops: Mapping[str, DeviceOp]) -> None:
        self.compose = copy_of_compose(compose)
        self._plan = plan
        self._roles = target_roles(compose)
        # A mask takes the parameters of the image beside it.
        self._images_first = sorted(self._roles, key=lambda key: self._roles[key] != "image")
        self._targets: dict[str, Target] = {}
        self._strange: set[str] = set()
        """Keys of masks that came with a dtype without device forms; OpenCV may change it later."""
        for index, leaf in enumerate(list_leaves(self.compose)):
            if index > plan.opaque_until:
                self._hook(index, leaf.transform, ops)

    def __call__(
        self, data: Mapping[str, Any], sources: Mapping[str, Callable[[], Any]] | None = None
    ) -> tuple[_Values, Tape]:
        """Run the pipeline once; return its result, and the tape of operations still to be run.

        Images and masks in the result are as the real operations left them. For a key in
        ``sources``, ``data`` holds a phantom, and the source fetches the pixels, at most once, when
        an operation needs them. If none does, the source itself stands in the result.
        """
        self._targets = {key: Target(source, data[key]) for key, source in (sources or {}).items()}
        self._strange = {
            key
            for key, role in self._roles.items()
            if role == "mask" and key in data and getattr(data[key], "dtype", None) not in MASKS
        }
        result: _Values = self.compose(**data)
        tape = {}
        for key, role in self._roles.items():
            target = self._targets.get(key)
            if target is not None and result.get(key) is target.shown:
                result[key] = target.real
                tape[key] = Track(role, tuple(op for op, _ in target.pending))
        self._targets = {}
        return result, tape

    def _hook(self, index: int, transform: Transform, ops: Mapping[str, DeviceOp]) -> None:
        original = transform.apply_with_params
        op = None if self._plan.placements[index].where == "worker" else device_form(transform, ops)
        run = functools.partial(self._run, original)
        if op is not None:
            keys = [key for key in self._images_first if key in function_by_key(transform)]
            targets = tuple((key, self._roles[key] == "image") for key in keys)
            conditional = self._plan.conditional[index]
            hooked = _Hooked(index, transform, original, op, targets, conditional)
            run = functools.partial(self._record, hooked)
        # A hook is called in place of a method: an instance attribute shadows that of the class.
        transform.apply_with_params = run
        if self._plan.sees_pixels[index]:
            own = () if is_albumentations(transform) else ("update_transform_params",)
            for name in (*own, "get_params_dependent_on_data"):
                drawn_by = getattr(transform, name)
                draw = functools.partial(self._draw_on_pixels, drawn_by)
                setattr(transform, name, draw)

    def _target(self, key: str, value: Any) -> Target:
        target = self._targets.get(key)
        if target is None or target.shown is not value:
            value = contiguous(value)
            target = self._targets[key] = Target(value, value)
        return target

    def _is_pixels(self, key: str, value: object) -> bool:
        return key in self._roles and value is not None

    def _real(self, data: Mapping[str, Any]) -> _Values:
        return {
            key: self._target(key, value).flush() if self._is_pixels(key, value) else value
            for key, value in data.items()
        }

    def _draw_on_pixels(
        self,
        original: Callable[..., _Values],
        params: _Values,
        data: _Values,
    ) -> _Values:
        # `data` itself keeps the phantoms: the call that follows recognises its targets by them.
        return original(params=params, data=self._real(data))

    def _run(
        self,
        original: Callable[..., _Values],
        params: _Values,
        /,
        **data: Any,
    ) -> _Values:
        result = original(params, **self._real(data))
        for key, before in data.items():
            if self._is_pixels(key, before) and key in result:
                value = contiguous(result[key])
                result[key] = value
                self._targets[key] = Target(value, value)
        return result

    def _record(self, hooked: _Hooked, params: _Values, /, **data: Any) -> _Values:
        leaf, op = hooked.leaf, hooked.op
        noted = self._encode(hooked, params, data)
        if noted is None:
            return self._run(hooked.original, params, **data)
        if len(noted) < len(data):
            others = {key: value for key, value in data.items() if key not in self._roles}
            data |= hooked.original(params, **others) if others else {}
        for key, encoded, shape, dtype in noted:
            target = self._target(key, data[key])
            changes = shape != target.shown.shape or dtype != target.shown.dtype
            run = functools.partial(function_by_key(hooked.transform)[key], **params)
            target.pending.append((TapeOp(leaf, op.name, encoded), run))
            if op.name == "ToTensorV2":
                target.shown = _phantom_tensor(shape, dtype)
            elif changes:
                target.shown = phantom(shape, dtype)
            data[key] = target.shown
        return data

    def _encode(
        self, hooked: _Hooked, params: _Values, data: _Values
    ) -> list[tuple[str, Encoded, Shape, DType]] | None:
        """Return what to note of each image and mask, or None if this draw needs real pixels."""
        transform, op = hooked.transform, hooked.op
        noted: list[tuple[str, Encoded, Shape, DType]] = []
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
                encoded = op.encode(transform, params, shape, dtype) if fits else None
                if encoded is None:
                    return None
                new_shape = op.out_shape(transform, params, shape)
                new_dtype = op.out_dtype(transform, dtype)
                if hooked.conditional and (new_shape != shape or new_dtype != dtype):
                    return None
                noted.append((key, encoded, new_shape, new_dtype))
            elif op.mask is not None:
                if not noted or key in self._strange or dtype not in MASKS:
                    return None
                turned = op.name != "ToTensorV2" or (transform.transpose_mask and len(shape) == 3)
                new_shape = op.out_shape(transform, params, shape) if turned else shape
                noted.append((key, noted[0][1], new_shape, dtype))
        return noted


def function_by_key(transform: Transform) -> Mapping[str, Callable[..., Any]]:
    """Return the function that a transform calls on the value of each key of a sample, by key."""
    return transform._key2func  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=64)
def phantom(shape: Shape, dtype: DType) -> np.ndarray:
    """Return a read-only array of this shape and dtype whose pixels mean nothing."""
    # Zeroed pages that are never written to cost no memory. A zero-stride array would not do, as
    # Albumentations copies arrays that are not contiguous. Writing to a phantom is an error.
    array = np.zeros(shape, dtype)
    array.flags.writeable = False
    return array


@functools.lru_cache(maxsize=64)
def _phantom_tensor(shape: Shape, dtype: DType) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.from_numpy(np.empty(0, dtype)).dtype, device="meta")

"""Device forms for operations that people wrote themselves.

A form belongs to one class: not to its name, which others may use too, and not to its subclasses.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from lightning_fastdata.augment.albumentations.plan import Node, drawn_parameters, list_leaves
from lightning_fastdata.augment.ops.operation import DeviceOp, Encode, Run
from lightning_fastdata.augment.ops.values import encode_table, ramp_table, run_table
from lightning_fastdata.errors import TransformError, require
from lightning_fastdata.tree import copy_of_compose

_REGISTERED: Final[dict[type, DeviceOp]] = {}
_SHAPE: Final = (24, 40, 3)
"""Shape of the image on which a table is tried; no side is 16, as those of the ramp are."""
_TRIES: Final = 4
"""Number of draws with which a table is tried, as a transform may draw what it does."""


def register(
    kind: type,
    *,
    table: bool = False,
    encode: Encode | None = None,
    image: Run | None = None,
    mask: Run | None = None,
    reads_pixels: bool | None = None,
) -> Callable[[], None]:
    """Give a transform of your own a form that runs on batches on the device.

    Pipelines that are built afterwards use it, in worker processes too, however these start. With
    worker processes that are spawned, functions must be importable, as the class itself must be.
    Images and masks keep their shape and dtype.

    Args:
        kind: a subclass of ``A.ImageOnlyTransform`` or ``A.DualTransform``; classes derived from it
            are not meant.
        table: for an image-only transform whose ``apply`` makes each uint8 value from that value
            and its channel alone, alike for every pixel: its own ``apply`` makes a table of 256
            entries for each sample. When a pipeline is built, random pixels show whether it is
            such a transform. Images of float32 go through the transform itself.
        encode: ``(transform, params, shape, dtype) -> Encoded | None``, called for each sample
            with what the transform drew; None leaves that sample to the transform itself.
        image: ``(images, static, arrays) -> images``, uint8 or float32 ``[n, H, W, C]``; it must
            not write to what it is given.
        mask: like ``image``, for masks ``[n, H, W]`` or ``[n, H, W, C]``; a DualTransform needs it.
        reads_pixels: whether ``get_params_dependent_on_data`` looks at the values of pixels. None:
            it does if the class, or a parent outside Albumentations' core, has this method or
            ``update_transform_params``. False for a sampler that looks only at shapes spares the
            CPU the pixels.

    Returns:
        A function that undoes the registration, for pipelines that are built after that.

    Raises:
        TransformError: ``kind`` is no transform class; neither a table nor both ``encode`` and
            ``image`` were given, or all; or a transform that changes masks has no form for them.
    """
    _check_class(kind)
    whole = encode is not None and image is not None
    if table == whole or (table and any((encode, image, mask))):
        raise TransformError(
            f"{kind.__name__} needs either table=True, or both encode= and image= (and mask=, if "
            "it moves masks)."
        )
    import albumentations

    if not issubclass(kind, albumentations.ImageOnlyTransform) and mask is None:
        raise TransformError(
            f"{kind.__name__} is a DualTransform, which changes masks too: register it with "
            "encode=, image= and mask=."
        )
    op = DeviceOp(
        name=f"{kind.__module__}.{kind.__qualname__}",
        encode=encode or encode_table,
        image=image or run_table,
        mask=mask,
        owner=kind,
        reads_pixels=_has_sampler(kind) if reads_pixels is None else reads_pixels,
    )
    _REGISTERED[kind] = op

    def unregister() -> None:
        if _REGISTERED.get(kind) is op:
            del _REGISTERED[kind]

    return unregister


def registered_forms(compose: Node, known: Mapping[str, DeviceOp]) -> dict[str, DeviceOp]:
    """Return the registered forms of the transforms of a pipeline, each under a name of its own.

    Forms ``known`` since it was built keep their names, as batches with them may be on their way.

    Raises:
        TransformError: a transform that was registered with ``table=True`` is not pointwise.
    """
    forms = {op.owner: op for op in known.values()}
    for leaf in list_leaves(compose):
        kind = type(leaf.transform)
        if kind not in forms and (op := _REGISTERED.get(kind)) is not None:
            # Classes made by a function may share one name: the number tells their forms apart.
            forms[kind] = replace(op, name=f"{op.name}#{len(forms)}")
        if kind in forms and forms[kind].encode is encode_table:
            check_pointwise(leaf.transform)
    return {op.name: op for op in forms.values()}


def check_pointwise(transform: Node) -> None:
    """Try out whether a transform makes each value of an image from itself and its channel alone.

    Raises:
        TransformError: it does not, or its result is not uint8 of the same shape.
    """
    name = type(transform).__name__
    transform = copy_of_compose(transform)
    transform.set_random_state(np.random.default_rng(0), random.Random(0))
    pixels = np.random.default_rng(1).integers(0, 256, _SHAPE, np.uint8)
    for _ in range(_TRIES):
        try:
            params = drawn_parameters(transform, {"image": pixels})
            real = np.asarray(transform.apply(pixels.copy(), **params))
            table = ramp_table(transform, params, _SHAPE[2])
        except Exception as error:
            raise TransformError(
                f"{name} is registered with table=True, but raised {type(error).__name__} on a "
                f"uint8 image [{', '.join(map(str, _SHAPE))}]: {error}. A table can stand for it "
                "only if its apply takes any uint8 image. Register encode= and image= instead."
            ) from error
        looked_up = table[pixels, np.arange(_SHAPE[2])]
        if real.dtype != np.uint8 or not np.array_equal(real, looked_up):
            raise TransformError(
                f"{name} is registered with table=True, but on a random uint8 image its apply "
                "does not make each value from that value and its channel alone. Register encode= "
                "and image= instead, or leave it to the CPU."
            )


def _check_class(kind: object) -> None:
    require("albumentations", extra="augment", what="register()")
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    import albumentations

    if not (isinstance(kind, type) and issubclass(kind, albumentations.BasicTransform)):
        raise TransformError(
            f"{kind!r} is no class of a transform. Register a subclass of "
            "albumentations.ImageOnlyTransform or DualTransform, the class itself."
        )


def _has_sampler(kind: type) -> bool:
    names = ("get_params_dependent_on_data", "update_transform_params")
    owners = (next(cls for cls in kind.__mro__ if name in vars(cls)) for name in names)
    return not all(owner.__module__.startswith("albumentations.core.") for owner in owners)

"""Which operations on batches a transform of v2 comes down to, with what it drew.

A transform, or a set of parameters, that is not known here has the general form of
:mod:`~lightning_fastdata.augment.torchvision.operations`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
from torchvision.transforms.v2 import functional

from lightning_fastdata.augment.ops.operation import DeviceOp, Encoded
from lightning_fastdata.augment.torchvision import kernels
from lightning_fastdata.augment.torchvision.operations import TYPES, device_op
from lightning_fastdata.augment.torchvision.windows import resized_crop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_fastdata.augment.torchvision.tape import Form

Noted: TypeAlias = "Iterator[tuple[str, Encoded]]"
"""Operations by name, in the order in which they run."""
_How: TypeAlias = "tuple[Any, Any, Form]"
"""How pixels are read: the interpolation, the fill, and the form of the image or mask."""
_MOST_CHANNELS: Final = 4
"""Of images that torch resizes as bytes."""
_COLOURS: Final = ("brightness", "contrast", "saturation", "hue")


class UnknownFormError(Exception):
    """The parameters have no form for batches; never seen by users."""


def encode(transform: Any, given: tuple[Any, ...], form: Form) -> list[tuple[str, Encoded]] | None:
    """Return the operations that a transform comes down to; None: it has its general form.

    Args:
        transform: of torchvision's v2 itself.
        given: what it was called with besides the tensor: parameters, or those of a policy.
        form: of the image or mask.
    """
    known = _OF_TRANSFORMS.get(type(transform).__name__)
    try:
        if known is not None:
            return list(known(transform, given[0], form))
        return list(_policy(given, form)) if isinstance(given[0], str) else None
    except UnknownFormError:
        return None


def has_form(transform: Any) -> bool:
    """Return whether samples that take a transform share a call, whatever each of them drew."""
    return type(transform).__name__ in _OF_TRANSFORMS


def _number(name: str, **values: Any) -> tuple[str, Encoded]:
    return name, Encoded((), {key: np.asarray(value) for key, value in values.items()})


def _need_colours(form: Form) -> None:
    """Leave to torchvision what it refuses."""
    if form.shape[0] not in {1, 3}:
        raise UnknownFormError


def _of_colours(factors: Mapping[str, Any], order: Sequence[str], form: Form) -> Noted:
    _need_colours(form)
    for name in order:
        factor = factors[f"{name}_factor"]
        if factor is not None:
            yield _number(name, factor=np.float64(factor))


def _jitter(transform: Any, params: Mapping[str, Any], form: Form) -> Noted:  # noqa: ARG001
    return _of_colours(params, [_COLOURS[at] for at in params["fn_idx"].tolist()], form)


def _distort(transform: Any, params: Mapping[str, Any], form: Form) -> Noted:  # noqa: ARG001
    order = ["brightness", "saturation", "hue"]
    order.insert(1 if params["contrast_before"] else 3, "contrast")
    yield from _of_colours(params, order, form)
    if params["channel_permutation"] is not None:
        yield _number("permute", order=params["channel_permutation"].numpy())


def _permuted(transform: Any, params: Mapping[str, Any], form: Form) -> Noted:  # noqa: ARG001
    yield _number("permute", order=params["permutation"].numpy())


def _blurred(transform: Any, params: Mapping[str, Any], form: Form) -> Noted:  # noqa: ARG001
    static = (("size", tuple(transform.kernel_size)),)
    yield "blur", Encoded(static, {"sigma": np.array(params["sigma"], np.float64)})


def _erased(transform: Any, params: Mapping[str, Any], form: Form) -> Noted:  # noqa: ARG001
    value = params["v"]
    if value is None:
        return
    if value.shape[1:] != (1, 1):
        raise UnknownFormError
    colour = value.flatten().expand(form.shape[0]).to(form.dtype).numpy()
    box = [params[name] for name in ("i", "j", "h", "w")]
    yield _number("erase", box=np.array(box, np.int64), value=colour)


def _cropped(transform: Any, params: Mapping[str, Any], form: Form) -> Noted:
    padding = tuple(params["padding"]) if params["needs_pad"] else None
    static = (
        ("size", (params["height"], params["width"])),
        ("padding", padding),
        ("fill", _fill_for(transform.fill, form)),
        ("mode", transform.padding_mode),
        ("type", form.type_name),
    )
    yield "crop", Encoded(static, {"corner": np.array([params["top"], params["left"]], np.int64)})


def _resized(transform: Any, params: Mapping[str, Any], form: Form) -> Noted:
    """Resize a window, or all, as bytes are resized on CPUs, on any device."""
    if transform.size is None or len(transform.size) != 2:
        raise UnknownFormError
    how = getattr(transform.interpolation, "value", transform.interpolation)
    smooth = "antialias" if transform.antialias else "bilinear"
    mode = {"nearest": "nearest", "bilinear": smooth}.get(how)
    if form.type_name == "Mask":
        mode = None if how == "nearest-exact" else "nearest"
    elif form.shape[0] > _MOST_CHANNELS:
        mode = None
    if mode is None:
        raise UnknownFormError
    whole = dict(zip(("top", "left", "height", "width"), (0, 0, *form.shape[-2:]), strict=True))
    box = [params.get(name, place) for name, place in whole.items()]
    static = ("size", tuple(transform.size)), ("mode", mode)
    yield "resized_crop", Encoded(static, {"box": np.array(box, np.int64)})


def _rotated(transform: Any, params: Mapping[str, Any], form: Form) -> Noted:
    how = transform.interpolation, transform.fill, form
    return _rotation(params["angle"], transform.center, how)


def _moved(transform: Any, params: Mapping[str, Any], form: Form) -> Noted:
    how = transform.interpolation, transform.fill, form
    return _affine(how, **params, center=transform.center)


def _projected(transform: Any, params: Mapping[str, Any], form: Form) -> Noted:
    static = _reading(transform.interpolation, transform.fill, form)
    numbers = np.array(params["coefficients"], np.float32)
    yield "perspective", Encoded(static, {"coefficients": numbers})


def _fill_for(fill: Any, form: Form) -> Any:
    """Return what torchvision fills an image or mask with: None, a number, or a tuple of some."""
    if isinstance(fill, Mapping):
        kind = TYPES[form.type_name]
        fill = fill[kind] if kind in fill else fill.get("others")
    return fill if fill is None or isinstance(fill, int | float) else tuple(map(float, fill))


def _reading(interpolation: Any, fill: Any, form: Form) -> tuple[tuple[str, Any], ...]:
    mode = getattr(interpolation, "value", interpolation)
    mode = "nearest" if form.type_name == "Mask" else mode
    fill = _fill_for(fill, form)
    channels = form.shape[0] if len(form.shape) == 3 else 1
    fits = not isinstance(fill, tuple) or len(fill) in {1, channels}
    if mode not in {"nearest", "bilinear"} or not fits:
        raise UnknownFormError
    return ("mode", mode), ("fill", fill)


def _rotation(angle: float, center: Any, how: _How) -> Noted:
    angle %= 360
    if center is None and angle % 90 == 0:  # torchvision turns the pixels themselves
        raise UnknownFormError
    return _affine(how, -angle, center=center)


def _affine(
    how: _How,
    angle: float = 0.0,
    translate: Sequence[float] = (0, 0),
    scale: float = 1.0,
    shear: Sequence[float] = (0.0, 0.0),
    center: Sequence[float] | None = None,
) -> Noted:
    """Turn, shear, scale and move about a place in pixels, or about the middle."""
    module = getattr(functional, "_geometry", None)
    inverse = getattr(module, "_get_inverse_affine_matrix", None)
    if inverse is None:  # it has no public name
        raise UnknownFormError
    height, width = how[2].shape[-2:]
    middle = [0.0, 0.0]
    if center is not None:
        middle = [place - size * 0.5 for place, size in zip(center, (width, height), strict=True)]
    matrix = inverse(middle, angle, [float(by) for by in translate], scale, shear)
    array = torch.tensor(matrix, dtype=torch.float32).view(2, 3).numpy()
    yield "affine", Encoded(_reading(*how), {"matrix": array})


_OF_TRANSFORMS: Final[Mapping[str, Callable[..., Noted]]] = {
    "ColorJitter": _jitter,
    "GaussianBlur": _blurred,
    "RandomAffine": _moved,
    "RandomChannelPermutation": _permuted,
    "RandomCrop": _cropped,
    "RandomErasing": _erased,
    "RandomPerspective": _projected,
    "RandomPhotometricDistort": _distort,
    "RandomResizedCrop": _resized,
    "RandomRotation": _rotated,
    "Resize": _resized,
}


def _policy(given: tuple[Any, ...], form: Form) -> Noted:
    name, magnitude, *reading = given
    _need_colours(form)
    if name in _POLICY_FACTORS:
        yield _number(_POLICY_FACTORS[name], factor=np.float64(1.0 + magnitude))
    elif name == "Posterize":
        yield _number("posterize", bits=np.int64(int(magnitude)))
    elif name == "Solarize":
        bound = 1.0 if form.dtype.is_floating_point else 255
        yield _number("solarize", threshold=np.float64(bound * magnitude))
    elif name in _POLICY_WARPS:
        yield from _POLICY_WARPS[name](magnitude, (*reading, form))
    else:
        raise UnknownFormError


def _sheared(how: _How, *slopes: float) -> Noted:
    """Shear about the upper left corner."""
    degrees = [math.degrees(math.atan(slope)) for slope in slopes]
    return _affine(how, shear=degrees, center=(0, 0))


_POLICY_FACTORS: Final = {
    "Brightness": "brightness",
    "Color": "saturation",
    "Contrast": "contrast",
    "Sharpness": "sharpness",
}
_POLICY_WARPS: Final[Mapping[str, Callable[[float, _How], Noted]]] = {
    "Rotate": lambda by, how: _rotation(by, None, how),
    "ShearX": lambda by, how: _sheared(how, by, 0.0),
    "ShearY": lambda by, how: _sheared(how, 0.0, by),
    "TranslateX": lambda by, how: _affine(how, translate=(int(by), 0)),
    "TranslateY": lambda by, how: _affine(how, translate=(0, int(by))),
}


FORMS: Final[Mapping[str, DeviceOp]] = {
    run.__name__: device_op(run.__name__, run)
    for run in (
        *(kernels.affine, kernels.blur, kernels.brightness, kernels.contrast, kernels.crop),
        *(kernels.erase, kernels.hue, kernels.permute, kernels.perspective, kernels.posterize),
        *(kernels.saturation, kernels.sharpness, kernels.solarize, resized_crop),
    )
}
"""Operations with parameters of each sample's own, by name."""

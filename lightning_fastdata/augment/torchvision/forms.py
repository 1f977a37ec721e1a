"""What a transform of v2 does to a batch, with what it drew.

Every transform has a general form: torchvision's own code, on the samples that share parameters. It
is right by construction. Those that are known here come down to operations with parameters of each
sample's own, which are one call for all samples.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
from torchvision.transforms.v2 import functional

from lightning_fastdata.augment.ops.operation import DeviceOp, Encoded
from lightning_fastdata.augment.replay.compiled import Compiled
from lightning_fastdata.augment.torchvision import kernels
from lightning_fastdata.augment.torchvision.kernels import TYPES, as_type, plain
from lightning_fastdata.augment.torchvision.plan import (
    DTYPES,
    METHODS,
    NEARLY,
    Leaf,
    kind_of,
    leaves_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from lightning_fastdata.augment.ops.operation import Arrays, Run, Values
    from lightning_fastdata.augment.torchvision.tape import Form

Call: TypeAlias = Callable[..., torch.Tensor]
"""What carries out an operation on a tensor: ``call(tensor, *given, **named)``."""
Noted: TypeAlias = "Iterator[tuple[str, Encoded]]"
"""Operations by name, in the order in which they run."""
_How: TypeAlias = "tuple[Any, Any, Form]"
"""How pixels are read: the interpolation, the fill, and the form of the image or mask."""
_MODES: Final = frozenset({"nearest", "bilinear"})
_MOST_CHANNELS: Final = 4
"""Of images that torch resizes as bytes."""
_BOX: Final = ("top", "left", "height", "width")
_HALVES: Final = np.array([[0.5], [0.5], [1.0]], np.float32)
"""By which a matrix takes column and row in halves of pixels, with nothing rounded."""
_SMOOTHING: Final = (np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13).astype(np.float32)
_COLOURS: Final = ("brightness", "contrast", "saturation", "hue")


class UnknownFormError(Exception):
    """The parameters have no form for batches; never seen by users."""


def encode(
    transform: Any, given: tuple[Any, ...], form: Form, *, exact: bool = False
) -> list[tuple[str, Encoded]] | None:
    """Return the operations that a transform comes down to; None: it has its general form.

    ``given``: what it was called with besides the tensor: parameters, or those of a policy.
    ``exact``: whether floats have to be torchvision's to the last bit.
    """
    name = type(transform).__name__
    if form.dtype not in DTYPES[form.role]:
        return None
    if exact and form.dtype.is_floating_point and name in NEARLY:
        return None
    known = _OF_TRANSFORMS.get(name)
    try:
        if known is not None:
            return list(known(transform, given[0], form))
        return list(_policy(given, form)) if isinstance(given[0], str) else None
    except UnknownFormError:
        return None


def general_name(leaf: Leaf) -> str:
    """Return the name of the operation that is a transform itself."""
    return f"{leaf.number} {type(leaf.transform).__name__}"


def general(type_name: str, given: tuple[Any, ...], named: Mapping[str, Any]) -> Encoded:
    """Return a call of a transform, as it is packed for a batch."""
    # Equal parameters are equal bytes, by which samples are put together.
    return Encoded((("type", type_name), ("call", pickle.dumps((given, dict(named))))), {})


def chosen(static: Values) -> str | None:
    """Return which operation a policy has chosen, of a packed call; None: it is no policy's."""
    given, _ = pickle.loads(static["call"])
    return given[0] if isinstance(given[0], str) else None


def _run(transform: Any, batch: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    given, named = pickle.loads(static["call"])
    batch = batch.clone() if getattr(transform, "inplace", False) else batch
    call: Call = getattr(transform, METHODS[kind_of(transform)])
    made = plain(call(as_type(batch, static["type"]), *given, **named))
    return made.contiguous()  # of gray images all channels are one memory


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
            yield _factor(name, factor)


def _factor(name: str, factor: float, **more: Any) -> tuple[str, Encoded]:
    """Return an operation with a factor and what it lacks of one, rounded as torch does it."""
    return _number(name, factor=np.float32(factor), share=np.float32(1.0 - factor), **more)


def _distort(transform: Any, params: Mapping[str, Any], form: Form) -> Noted:  # noqa: ARG001
    order = ["brightness", "saturation", "hue"]
    order.insert(1 if params["contrast_before"] else 3, "contrast")
    yield from _of_colours(params, order, form)
    if params["channel_permutation"] is not None:
        yield _number("permute", order=params["channel_permutation"].numpy())


def _blurred(transform: Any, params: Mapping[str, Any], form: Form) -> Noted:
    across, down = map(_gaussian, transform.kernel_size, params["sigma"])
    kernel = (down[:, None] * across).expand(form.shape[0], -1, -1)
    yield _number("blur", kernel=kernel, across=across[None, None], down=down[None, :, None])


def _gaussian(size: int, sigma: float) -> torch.Tensor:
    limit = (size - 1) / (2.0 * math.sqrt(2.0))
    return torch.softmax(torch.linspace(-limit, limit, size).div(sigma).pow(2).neg(), 0)


def _erased(transform: Any, params: Mapping[str, Any], form: Form) -> Noted:  # noqa: ARG001
    value = params["v"]
    if value is None:
        return
    if value.shape[1:] != (1, 1):
        raise UnknownFormError
    colour = value.flatten().expand(form.shape[0]).to(form.dtype).numpy()
    rows, columns = (np.zeros(length, bool) for length in form.shape[-2:])
    rows[params["i"] : params["i"] + params["h"]] = True
    columns[params["j"] : params["j"] + params["w"]] = True
    yield _number("erase", rows=rows, columns=columns, value=colour)


def _cropped(transform: Any, params: Mapping[str, Any], form: Form) -> Noted:
    padding = tuple(params["padding"]) if params["needs_pad"] else None
    static = (
        ("padding", padding),
        ("fill", _fill_for(transform.fill, form)),
        ("mode", transform.padding_mode),
        ("type", form.type_name),
    )
    top, left, height, width = (params[name] for name in _BOX)
    picked = {"rows": top + np.arange(height), "columns": left + np.arange(width)}
    yield "crop", Encoded(static, picked)


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
    whole = dict(zip(_BOX, (0, 0, *form.shape[-2:]), strict=True))
    box = [params.get(name, place) for name, place in whole.items()]
    floats = form.dtype.is_floating_point
    numbers = kernels.window_numbers(box, form.shape[-2:], transform.size, mode, floats=floats)
    if mode == "nearest":
        yield "crop", Encoded((("padding", None),), numbers)
    else:
        yield "resized_crop", Encoded((), numbers)


def _how(transform: Any, form: Form) -> _How:
    return transform.interpolation, transform.fill, form


def _projected(transform: Any, params: Mapping[str, Any], form: Form) -> Noted:
    *above, right, below = params["coefficients"]
    divisors = np.array([[right, below, 1.0]] * 2, np.float32).T
    numbers = {"above": _to_middle(above, form), "below": divisors * _HALVES}
    yield _warp("perspective", numbers, _how(transform, form))


def _fill_for(fill: Any, form: Form) -> Any:
    """Return what torchvision fills an image or mask with: None, a number, or a tuple of some."""
    if isinstance(fill, Mapping):
        kind = TYPES[form.type_name]
        fill = fill[kind] if kind in fill else fill.get("others")
    return fill if fill is None or isinstance(fill, int | float) else tuple(map(float, fill))


def _warp(name: str, numbers: Mapping[str, np.ndarray], how: _How) -> tuple[str, Encoded]:
    interpolation, fill, form = how
    mode = getattr(interpolation, "value", interpolation)
    mode = "nearest" if form.type_name == "Mask" else mode
    fill, channels = _fill_for(fill, form), form.shape[0] if len(form.shape) == 3 else 1
    around = np.array([] if fill is None else fill, np.float32).reshape(-1)
    if mode not in _MODES or around.size not in {0, 1, channels}:
        raise UnknownFormError
    if mode == "nearest" and not form.dtype.is_floating_point:
        around = around.round()
    black = not around.any()
    if around.size and not (black and mode == "nearest"):  # outside, zeros are read
        numbers = {**numbers, "fill": around}
    return name, Encoded((("mode", mode), ("black", black)), numbers)


def _to_middle(matrix: Sequence[float], form: Form) -> np.ndarray:
    """Return a matrix of six numbers as float32 ``[3, 2]``, of halves of pixels."""
    height, width = form.shape[-2:]
    half = np.array([0.5 * width, 0.5 * height], np.float32)
    return np.array(matrix, np.float32).reshape(2, 3).T / half * _HALVES


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
    yield _warp("affine", {"matrix": _to_middle(matrix, how[2])}, how)


_OF_TRANSFORMS: Final[Mapping[str, Callable[..., Noted]]] = {
    "ColorJitter": lambda _, params, form: _of_colours(
        params, [_COLOURS[at] for at in params["fn_idx"].tolist()], form
    ),
    "GaussianBlur": _blurred,
    "RandomAffine": lambda own, params, form: _affine(_how(own, form), **params, center=own.center),
    "RandomChannelPermutation": lambda _, params, __: iter(
        [_number("permute", order=params["permutation"].numpy())]
    ),
    "RandomCrop": _cropped,
    "RandomErasing": _erased,
    "RandomPerspective": _projected,
    "RandomPhotometricDistort": _distort,
    "RandomResizedCrop": _resized,
    "RandomRotation": lambda own, params, form: _rotation(
        params["angle"], own.center, _how(own, form)
    ),
    "Resize": _resized,
}


def _policy(given: tuple[Any, ...], form: Form) -> Noted:
    name, magnitude, *reading = given
    _need_colours(form)
    if name in _POLICY_FACTORS:
        kernel = np.broadcast_to(_SMOOTHING, (form.shape[0], 3, 3))
        more = {"kernel": kernel} if name == "Sharpness" else {}
        yield _factor(_POLICY_FACTORS[name], 1.0 + magnitude, **more)
    elif name == "Posterize":
        bits = int(magnitude)
        step, mask = 0.5**bits, 255 << (8 - bits) & 255
        levels = np.array([step, 0.0, 1.0 - step], np.float32)
        floats = form.dtype.is_floating_point
        yield _number("posterize", **({"levels": levels} if floats else {"mask": np.uint8(mask)}))
    elif name == "Solarize":
        bound = 1.0 if form.dtype.is_floating_point else 255
        yield _number("solarize", threshold=np.float32(bound * magnitude))
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


def device_op(name: str, run: Run, *, compiled: bool = False) -> DeviceOp:
    """Return an operation that is the same for images and masks, and is encoded elsewhere."""
    image, mask = (Compiled(run), Compiled(run, exact=True)) if compiled else (run, run)
    return DeviceOp(name=name, encode=lambda *_: None, image=image, mask=mask)


_SHORT: Final = frozenset({"brightness", "crop", "erase", "permute", "posterize", "solarize"})
"""What is three operators of torch at most, so that nothing is compiled."""
FORMS: Final[Mapping[str, DeviceOp]] = {
    run.__name__: device_op(run.__name__, run, compiled=run.__name__ not in _SHORT)
    for run in (
        *(kernels.affine, kernels.blur, kernels.brightness, kernels.contrast, kernels.crop),
        *(kernels.erase, kernels.hue, kernels.permute, kernels.perspective, kernels.posterize),
        *(kernels.saturation, kernels.sharpness, kernels.solarize, kernels.resized_crop),
    )
}
"""Operations with parameters of each sample's own, by name."""


def device_ops(pipeline: Any) -> Mapping[str, DeviceOp]:
    """Return the operations that a pipeline may note, by name."""
    ops = dict(FORMS)
    for leaf in leaves_of(pipeline):
        if kind_of(leaf.transform) in METHODS:
            ops[general_name(leaf)] = device_op(general_name(leaf), partial(_run, leaf.transform))
    return ops

"""What a v2 transform does to a batch with its draws.

Every transform has a general form: torchvision's own code, run on the samples that share
parameters. It is right by construction. Transforms that are known here are also written as
operations whose parameters differ between samples, which take one call for all samples.

Each of these computes what the kernel of ``torchvision.transforms.v2.functional`` computes for one
image: in the same order, with the same roundings. Batches of images are ``[n, C, H, W]``; those of
masks may be ``[n, H, W]``. Numbers that follow from a sample's parameters alone are computed with
the draws, so that a device is given as few operators as the roundings need. No operator waits for
the host.

``torch.compile`` joins products with sums, and has a ``grid_sample`` of its own, which would at
times take the neighbouring pixel. The steps for compiled code are written so that it cannot.

For windows that are resized, source positions and weights of each row and column are computed with
the draws, in the arithmetic of torch's CPU kernels. Sums are taken in the order of those kernels:
first along rows, then along columns. For bytes, weights have 16 bits and each pass is rounded to
bytes, so that a device makes the same pixels. For floats the last bit may differ, as compilers
round a product and a sum together, or apart.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import product
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import conv2d, grid_sample, pad
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional

from lightning_fastdata.augment.ops.operation import Arrays, DeviceOp, Encoded, Role, Run, Values
from lightning_fastdata.augment.replay.compiled import Compiled
from lightning_fastdata.augment.torchvision.plan import (
    DTYPES,
    METHODS,
    NEARLY,
    Leaf,
    kind_of,
    leaves_of,
)

TYPES: Final[Mapping[str, type[torch.Tensor]]] = {
    "Tensor": torch.Tensor,
    "Image": tv_tensors.Image,
    "Mask": tv_tensors.Mask,
}
"""Types of tensors whose pixels may be left to a device, by name."""
Call: TypeAlias = Callable[..., torch.Tensor]
"""A function that carries out an operation on a tensor: ``call(tensor, *given, **named)``."""
Noted: TypeAlias = Iterator[tuple[str, Encoded]]
"""Names of operations, each with its parameters, in the order in which they run."""
_How: TypeAlias = "tuple[Any, Any, Form]"
"""How pixels are read: the interpolation, the fill, and the form of the image or mask."""
_MODES: Final = frozenset({"nearest", "bilinear"})
_MOST_CHANNELS: Final = 4
"""Most channels of images that torch resizes as bytes; a resize of more has the general form."""
_BOX: Final = ("top", "left", "height", "width")
_HALVES: Final = np.array([[0.5], [0.5], [1.0]], np.float32)
"""Factors of a matrix, so that it takes column and row in halves of pixels; nothing is rounded."""
_SMOOTHING: Final = (np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13).astype(np.float32)
_COLOURS: Final = ("brightness", "contrast", "saturation", "hue")
_RGB: Final = 3
_MOST_BITS: Final = 22
_WEIGHT_LIMIT: Final = 1 << 15


def as_type(tensor: torch.Tensor, type_name: str) -> torch.Tensor:
    """Return a tensor as one of the types by name."""
    return tensor.as_subclass(TYPES[type_name])


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as torch's own."""
    return tensor.as_subclass(torch.Tensor)


class Form(NamedTuple):
    """What the pixels of an image or mask of a sample look like."""

    type_name: str
    """Name of the tensor's type, a key of :data:`TYPES`."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    def phantom(self) -> torch.Tensor:
        """Return a tensor of this form whose pixels cannot be read."""
        return as_type(torch.empty(self.shape, dtype=self.dtype, device="meta"), self.type_name)

    @property
    def role(self) -> Role:
        """Whether the pixels are an image or a mask."""
        return "mask" if self.type_name == "Mask" else "image"


class UnknownFormError(Exception):
    """The parameters have no form for batches; never seen by users."""


def encode(
    transform: Any, given: tuple[Any, ...], form: Form, *, exact: bool = False
) -> list[tuple[str, Encoded]] | None:
    """Return the operations that make up a transform; None: only its general form can be used.

    ``given``: the arguments of the call besides the tensor: parameters, or those of a policy.
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
    """Return a packed call of a transform, which samples of a batch may share."""
    # Equal parameters make equal bytes, and samples with equal bytes share a call.
    return Encoded((("type", type_name), ("call", pickle.dumps((given, dict(named))))), {})


def _run(transform: Any, batch: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    given, named = pickle.loads(static["call"])
    batch = batch.clone() if getattr(transform, "inplace", False) else batch
    call: Call = getattr(transform, METHODS[kind_of(transform)])
    made = plain(call(as_type(batch, static["type"]), *given, **named))
    return made.contiguous()  # the channels of gray images may share memory


def _number(name: str, **values: Any) -> tuple[str, Encoded]:
    return name, Encoded((), {key: np.asarray(value) for key, value in values.items()})


def _need_colours(form: Form) -> None:
    """Raise UnknownFormError for numbers of channels that torchvision refuses by itself."""
    if form.shape[0] not in {1, 3}:
        raise UnknownFormError


def _of_colours(factors: Mapping[str, Any], order: Sequence[str], form: Form) -> Noted:
    _need_colours(form)
    for name in order:
        factor = factors[f"{name}_factor"]
        if factor is not None:
            yield _factor(name, factor)


def _factor(name: str, factor: float, **more: Any) -> tuple[str, Encoded]:
    """Return an operation with a factor, and with 1 minus the factor, rounded as in torch."""
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
    """Yield the resize of a window, or of the whole image, as torch computes it on CPUs."""
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
    numbers = window_numbers(box, form.shape[-2:], transform.size, mode, floats=floats)
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
    """Return torchvision's fill of an image or mask: None, a number, or a tuple of numbers."""
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
    if around.size and not (black and mode == "nearest"):  # zeros are read outside
        numbers = {**numbers, "fill": around}
    return name, Encoded((("mode", mode), ("black", black)), numbers)


def _to_middle(matrix: Sequence[float], form: Form) -> np.ndarray:
    """Return a matrix of six numbers as float32 ``[3, 2]``, for positions in halves of pixels."""
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
    """Yield a turn, shear, scale and move about ``center`` in pixels; None: about the middle."""
    module = getattr(functional, "_geometry", None)
    inverse = getattr(module, "_get_inverse_affine_matrix", None)
    if inverse is None:  # the function has no public name
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
    """Yield a shear about the upper left corner."""
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


def brightness(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Multiply by a factor."""
    return _limited(images * _each(arrays["factor"]), images)


def contrast(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Blend with the mean of the gray image."""
    mean = _gray(images).mean((-3, -2, -1), keepdim=True, dtype=torch.float32)
    return _blend(images, mean, arrays)


def saturation(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Blend with the gray image."""
    return _blend(images, _gray(images), arrays) if images.shape[-3] == _RGB else images


def hue(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Turn the colours, in hue, saturation and value."""
    if images.shape[-3] != _RGB:
        return images
    colours = functional.to_dtype(images, torch.float32, scale=True)
    red, green, _ = colours.split(1, -3)
    value, least = colours.amax(-3, keepdim=True), colours.amin(-3, keepdim=True)
    span, gray = value - least, value == least
    saturated = span / value.masked_fill(gray, 1.0)
    by_red, by_green, by_blue = ((value - colours) / span.masked_fill(gray, 1.0)).split(1, -3)
    tint = torch.where(value == green, by_red + 2.0 - by_blue, by_green + 4.0 - by_red)
    tint = torch.where(value == red, by_blue - by_green, tint)
    tint = tint.mul_(1.0 / 6.0).add_(1.0).fmod_(1.0)
    tint = tint.add_(_each(arrays["factor"])).remainder_(1.0).mul_(6.0)
    sixth = tint.floor()
    share, pale = saturated * tint.sub_(sixth), 1.0 - saturated
    falling = (1.0 - share).mul_(value).clamp_(0.0, 1.0)
    rising = (share + pale).mul_(value).clamp_(0.0, 1.0)
    lowest = pale.mul_(value).clamp_(0.0, 1.0)
    # Each colour goes the way of red, a third of the circle later.
    third = torch.arange(0, 6, 2, device=images.device).view(-1, 1, 1)
    way = (sixth - third).remainder_(6.0)
    made = torch.where((way == 2) | (way == 3), lowest, value)
    made = torch.where(way == 1, falling, torch.where(way == 4, rising, made))
    turned: Tensor = functional.to_dtype(made, images.dtype, scale=True)
    return turned


def sharpness(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Blend with the image that a kernel smooths, except for the outermost pixels."""
    if min(images.shape[-2:]) <= 2:
        return images
    sharp = images.to(arrays["kernel"].dtype)
    smooth = _correlated(sharp, arrays["kernel"])
    smooth = smooth if images.is_floating_point() else smooth.round_()
    further = pad(smooth - sharp[..., 1:-1, 1:-1], [1, 1, 1, 1])
    return _limited(_multiply_add(sharp, _each(arrays["share"]), further), images)


def posterize(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Keep some bits of each value."""
    if not images.is_floating_point():
        return images & _each(arrays["mask"])
    # The step is a power of two, so that everything here is exact.
    step, lowest, highest = map(_each, arrays["levels"].unbind(1))
    return images.clamp(lowest, highest).floor_divide_(step).mul_(step)


def solarize(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Invert values at a threshold or above."""
    above = images >= _each(arrays["threshold"])
    return torch.where(above, functional.invert(images), images)


def permute(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Put the channels into another order."""
    rows = torch.arange(len(images), device=images.device)[:, None]
    return images[rows, arrays["order"]]


def blur(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Correlate each channel with a kernel ``[C, rows, columns]``, the borders mirrored."""
    # Compiled code blurs along rows and then along columns, which takes fewer sums.
    kernel, names = arrays["kernel"], ("across", "down") if is_compiling() else ("kernel",)
    down, across = (size // 2 for size in kernel.shape[-2:])
    out = pad(images.to(kernel.dtype), [across, across, down, down], mode="reflect")
    for name in names:
        out = _correlated(out, arrays[name])
    return out if images.is_floating_point() else out.round_().to(images.dtype)


def erase(images: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Write a colour to a rectangle, given which rows and which columns it covers."""
    inside = arrays["rows"][:, None, :, None] & arrays["columns"][:, None, None, :]
    return torch.where(inside, arrays["value"][:, :, None, None], images)


def crop(batch: Tensor, static: Values, arrays: Arrays) -> Tensor:
    """Pad all samples alike, then pick rows and columns."""
    if static["padding"] is not None:
        fill = static["fill"]
        fill = list(fill) if isinstance(fill, tuple) else fill
        typed, padding = as_type(batch, static["type"]), list(static["padding"])
        batch = plain(functional.pad(typed, padding, fill, static["mode"]))
    planes = batch.reshape(-1, *batch.shape[-2:])
    each = torch.arange(len(planes), device=batch.device).view(len(batch), -1, 1, 1)
    made = planes[each, arrays["rows"][:, None, :, None], arrays["columns"][:, None, None, :]]
    return made.view(*batch.shape[:-2], *made.shape[-2:])


def affine(batch: Tensor, static: Values, arrays: Arrays) -> Tensor:
    """Read each pixel at the place that a matrix ``[3, 2]`` says, counted from the middle."""
    height, width = batch.shape[-2:]
    return _read(batch, _places_of(batch, arrays["matrix"], 1 - height, 1 - width), static, arrays)


def perspective(batch: Tensor, static: Values, arrays: Arrays) -> Tensor:
    """Read each pixel at the place that two matrices ``[3, 2]`` say: a point, and its divisors."""
    above, below = (_places_of(batch, arrays[name], 1, 1) for name in ("above", "below"))
    if is_compiling():  # compiled code divides floats in its own way
        above, below = above.double(), below.double()
    return _read(batch, above.div_(below).float().sub_(1.0), static, arrays)


def _each(numbers: Tensor) -> Tensor:
    """Return one number for each sample, shaped to broadcast over images."""
    return numbers.view(-1, 1, 1, 1)


def _limited(values: Tensor, like: Tensor) -> Tensor:
    """Return values limited to the range of the images ``like``, in their dtype."""
    bound = 1.0 if like.is_floating_point() else 255.0
    return values.clamp_(0, bound).to(like.dtype)


def _gray(images: Tensor) -> Tensor:
    """Return RGB images in gray, as floats; bytes in whole levels. Gray images stay as they are."""
    if images.shape[-3] != _RGB:
        return images
    red, green, blue = images.unsqueeze(-4).unbind(-3)
    gray: Tensor = red.mul(0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114)
    return gray if images.is_floating_point() else gray.floor_()


def _blend(images: Tensor, other: Tensor, arrays: Arrays) -> Tensor:
    own = images * _each(arrays["factor"])
    return _limited(_multiply_add(own, _each(arrays["share"]), other), images)


def _read(batch: Tensor, places: Tensor, static: Values, arrays: Arrays) -> Tensor:
    """Return the pixels of a batch at places ``[n, H, W, 2]``, from -1 to 1 across the image."""
    planes, mode = batch if batch.ndim == 4 else batch.unsqueeze(1), static["mode"]
    values, around = _sampled(planes.to(places.dtype), places, mode), arrays.get("fill")
    if around is not None:
        # Compiled code computes all channels alike, in one kernel.
        count = planes.shape[1] if is_compiling() else 1
        ones = places.new_ones(1).expand(len(planes), count, *planes.shape[-2:])
        inside, around = _sampled(ones, places, mode), around[:, :, None, None]
        if mode == "nearest":
            values = torch.where(inside < 0.5, around, values)
        elif static["black"]:
            values = values * inside
        else:
            values = (values - around).mul_(inside).add_(around)
    if not batch.is_floating_point() and mode != "nearest":
        values = values.round_()
    return values.to(batch.dtype).view(batch.shape)


def _multiply_add(values: Tensor, shares: Tensor, others: Tensor) -> Tensor:
    """Return ``values + shares * others``, rounded once, as ``Tensor.add(alpha=)`` does it."""
    if values.device.type != "cpu" or not shares.is_floating_point():
        return torch.addcmul(values, others, shares)
    return (values.double() + shares.double() * others.double()).float()


def _places_of(batch: Tensor, matrix: Tensor, top: int, left: int) -> Tensor:
    """Return places ``[n, H, W, 2]``: column, row and the number 1 of each pixel, times a matrix.

    Rows begin at ``top``, columns at ``left``, and both count halves of pixels.
    """
    height, width = batch.shape[-2:]
    # Products of doubles are exact, and rounded where they become floats.
    kind = torch.float64 if is_compiling() else torch.float32
    down = torch.arange(top, top + 2 * height - 1, 2, dtype=kind, device=batch.device)
    across = torch.arange(left, left + 2 * width - 1, 2, dtype=kind, device=batch.device)
    if batch.is_cpu and not is_compiling():  # as torchvision, to the last bit
        rows, columns = torch.meshgrid(down, across, indexing="ij")
        base = torch.stack([columns, rows, torch.ones_like(rows)], -1).view(1, -1, 3)
        return base.expand(len(batch), -1, -1).bmm(matrix).view(-1, height, width, 2)
    # On a device, a setting of the user's would decide the precision of a product of matrices.
    by_column, by_row, moved = (one[:, None, None] for one in matrix.unbind(1))
    columns, rows = across[:, None] * by_column, down[:, None, None] * by_row
    return (columns.float() + rows.float()).add_(moved)


def _sampled(planes: Tensor, places: Tensor, mode: str) -> Tensor:
    """Return planes of floats, read at places ``[n, H, W, 2]`` from -1 to 1; outside are zeros.

    ``mode``: ``"nearest"`` or ``"bilinear"``, as of ``grid_sample``.
    """
    if not is_compiling():
        return grid_sample(planes, places, mode=mode, padding_mode="zeros", align_corners=False)
    (count, height, width), less = planes.shape[1:], planes.new_full((), -1.0)
    each = places[:, None].expand(-1, count, -1, -1, -1)  # all channels alike: in one kernel
    column, row = (
        _multiply_add(less, less.new_full((), size), at + 1.0) * 0.5
        for size, at in zip((width, height), each.unbind(-1), strict=True)
    )

    def at(y: Tensor, x: Tensor) -> Tensor:
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        y, x = (torch.where(inside, one, 0.0).long() for one in (y, x))  # NaN becomes 0, too
        found = planes.flatten(2).gather(-1, (y * width + x).flatten(2))
        return torch.where(inside, found.view(inside.shape), 0.0)

    if mode == "nearest":
        return at(row.round(), column.round())
    top, left = row.floor(), column.floor()
    below, right = row - top, column - left
    upper = (1.0 - right) * at(top, left) + right * at(top, left + 1)
    lower = (1.0 - right) * at(top + 1, left) + right * at(top + 1, left + 1)
    return (1.0 - below) * upper + below * lower


def _correlated(planes: Tensor, kernels: Tensor) -> Tensor:
    """Return planes of floats, each correlated with its kernel, without their borders."""
    if is_compiling():  # a convolution would be compiled for each number of samples
        (rows, columns), (height, width) = kernels.shape[-2:], planes.shape[-2:]
        height, width = height - rows + 1, width - columns + 1
        total = torch.zeros_like(planes[..., :height, :width])
        for i, j in product(range(rows), range(columns)):
            values = planes[..., i : i + height, j : j + width]
            total = total + values * kernels[..., i : i + 1, j : j + 1]
        return total
    weights = kernels.flatten(0, 1).unsqueeze(1)
    flat = planes.reshape(1, -1, *planes.shape[-2:])
    made = conv2d(flat, weights, groups=len(weights))
    return made.view(*planes.shape[:2], *made.shape[-2:])


def window_numbers(
    box: Sequence[int], whole: Sequence[int], size: Sequence[int], mode: str, *, floats: bool
) -> Mapping[str, np.ndarray]:
    """Return source positions and weights of a window of an image that is resized to a size.

    ``box``: top, left, height and width of the window; ``whole``: height and width of the image.
    ``mode``: ``"nearest"``, whose numbers are those of a crop; ``"bilinear"``, or ``"antialias"``.
    ``floats``: whether pixels are floats, and not bytes.
    """
    numbers: dict[str, np.ndarray] = {}
    for axis, name in enumerate(("rows", "columns")):
        first, length = box[axis], box[axis + 2]
        if mode == "nearest":
            numbers[name] = first + _nearest(length, size[axis])
        else:
            made = _averages(first, length, whole[axis], size[axis], mode == "antialias", floats)
            numbers[name], weights = made
            numbers |= {f"{name} weights": weights} if floats else _rounded(name, weights)
    return numbers


def resized_crop(batch: Tensor, static: Values, arrays: Arrays) -> Tensor:  # noqa: ARG001
    """Return resized windows of images ``[n, C, H, W]``, by stacked :func:`window_numbers`."""
    return _blended(_blended(batch, 3, "columns", arrays), 2, "rows", arrays)


def _nearest(length: int, size: int) -> np.ndarray:
    """Return the places along an axis that are read, int64 ``[size]``."""
    scale = np.float32(length) / np.float32(size)
    places = (np.arange(size, dtype=np.float32) * scale).astype(np.int64)
    return np.minimum(places, length - 1)


@lru_cache(maxsize=64)
def _averages(
    first: int, length: int, whole: int, size: int, smooth: bool, floats: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first places that are read, int64 ``[size]``, and weights ``[taps, size]``.

    All windows of a batch have the same number of taps. ``smooth``: whether pixels are averaged
    (antialiased) where the window is made smaller. The weights of floats are NaN where torch does
    not read, as a pixel of NaN times 0 is NaN.
    """
    kind: Any = np.float32 if floats else np.float64
    scale = kind(length) / kind(size)
    wide = np.maximum(scale, kind(1.0)) if smooth else kind(1.0)
    taps = min(whole, math.ceil(max(1.0, whole / size) if smooth else 1.0) * 2 + 1)
    half = np.array([0.5])  # a double, as in torch, whatever the dtype of the rest
    center = ((np.arange(size) + half) * scale).astype(kind)
    begin = np.maximum((center - wide + half).astype(np.int64), 0)
    end = np.minimum((center + wide + half).astype(np.int64), length)
    # Taps before the window or behind it weigh nothing.
    start = np.minimum(first + begin, whole - taps)
    at = (start - first + np.arange(taps)[:, None]).astype(kind)
    away = np.abs(((at - center + half) * kind(1.0 / np.float64(wide))).astype(kind))
    read = (at >= begin) & (at < end)
    weights = np.where(read & (away < 1.0), kind(1.0) - away, kind(0.0))
    weights /= np.add.accumulate(weights)[-1]
    read &= (length != size) | (weights > 0)  # an axis that keeps its length is copied
    return start, np.where(read, weights, kind(np.nan)) if floats else weights


def _rounded(name: str, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Return weights as integers, and how to round their sums: the number to add, bits to shift."""
    scaled = weights.max() * 2.0 ** np.arange(1, _MOST_BITS + 1) + 0.5
    bits = int((scaled.astype(np.int64) < _WEIGHT_LIMIT).sum())
    return {
        f"{name} weights": (weights * 2.0**bits + 0.5).astype(np.int32),
        f"{name} rounding": np.array([1 << (bits - 1), bits], np.int32),
    }


def _blended(planes: Tensor, axis: int, name: str, arrays: Arrays) -> Tensor:
    """Return weighted sums along an axis of ``[n, C, H, W]``, rounded as the dtype needs."""
    places, weights = arrays[name], arrays[f"{name} weights"]
    rounding = arrays.get(f"{name} rounding")
    one, made = [len(planes), 1, 1, 1], [*planes.shape]
    one[axis] = made[axis] = places.shape[-1]
    first = places.view(one).expand(made)
    total = planes.new_zeros(()) if rounding is None else rounding[:, 0].view(-1, 1, 1, 1)
    unread = weights.isnan() if rounding is None else None
    weights = weights if unread is None else weights.nan_to_num()
    for tap in range(weights.shape[1]):
        # A later tap reads at the place of the first one, in a batch that begins that much later.
        later = planes.narrow(axis, tap, planes.shape[axis] - tap).gather(axis, first)
        later = later if unread is None else later.masked_fill_(unread[:, tap].view(one), 0.0)
        total = _multiply_add(total, weights[:, tap].view(one), later)
    if rounding is None:
        return total
    # The weights for bytes add up to nearly one, so that no sum is above 255.
    return total.bitwise_right_shift_(rounding[:, 1].view(-1, 1, 1, 1)).to(planes.dtype)


def device_op(name: str, run: Run, *, compiled: bool = False) -> DeviceOp:
    """Return an operation that is the same for images and masks; `encode` encodes it."""
    image, mask = (Compiled(run), Compiled(run, exact=True)) if compiled else (run, run)
    return DeviceOp(name=name, encode=lambda *_: None, image=image, mask=mask)


_SHORT: Final = frozenset({"brightness", "crop", "erase", "permute", "posterize", "solarize"})
"""Names of operations of at most three torch operators, which are not compiled."""
FORMS: Final[Mapping[str, DeviceOp]] = {
    run.__name__: device_op(run.__name__, run, compiled=run.__name__ not in _SHORT)
    for run in (
        *(affine, blur, brightness, contrast, crop),
        *(erase, hue, permute, perspective, posterize),
        *(saturation, sharpness, solarize, resized_crop),
    )
}
"""Operations whose parameters differ between samples, by name."""


def device_ops(pipeline: Any) -> Mapping[str, DeviceOp]:
    """Return the operations that a pipeline may note, by name."""
    ops = dict(FORMS)
    for leaf in leaves_of(pipeline):
        if kind_of(leaf.transform) in METHODS:
            ops[general_name(leaf)] = device_op(general_name(leaf), partial(_run, leaf.transform))
    return ops

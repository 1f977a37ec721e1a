"""The fields of a sample or a batch: where image and mask are, their form, what lies beside them.

If an image is moved, and a mask, another image or boxes beside it are not, they no longer fit the
image. That is an error, or a warning.
"""

from __future__ import annotations

import numbers
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import islice, pairwise
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from lightning_fastdata.errors import BatchError, FastDataWarning, check
from lightning_fastdata.tree import (
    Path,
    PilImage,
    children,
    leaves,
    rebuilt,
    spelled,
    with_items,
)
from lightning_fastdata.types import Batch

Location: TypeAlias = int | str | None
"""Index or key of a field; None when the sample or batch is itself the image."""

_Entry = TypeVar("_Entry", bound="int | str | None")

_USUAL: Final = frozenset({"uint8", "float32"})
_HALF_DTYPES: Final = frozenset({torch.float16, torch.bfloat16})
_NUMBERS: Final = "biuf"
"""Kinds of NumPy dtypes that images may have: bool, signed and unsigned integer, float."""
_TOO_WIDE: Final = frozenset({"int64", "uint64"})
CHANNELS: Final = frozenset({1, 3, 4})
"""Numbers of channels that images usually have."""
_WIDE: Final = 16
"""Height and width from which a shape ``[1, 3 or 4, height, width]`` is read as channels first."""
_PIL_MODES: Final = {"L": "L", "RGB": "RGB", "RGBA": "RGBA", "1": "L"}
_PIL_NUMBERS: Final = frozenset({"F", "I", "I;16", "I;16B", "I;16L", "I;16N"})
"""PIL modes whose pixels are single numbers of more than one byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """Which fields of a sample or batch hold the image and the mask, by key or index."""

    image: int | str | None = None
    """Key or index of the image; None: ``"image"``, or the first element that looks like one and
    has no other role."""
    mask: int | str | None = None
    """Key or index of the mask; None: ``"mask"``, where there is such a key."""
    stays: tuple[int | str, ...] = ()
    """Keys or indices of fields that are left as they are, though the image beside them moves."""

    def __post_init__(self) -> None:
        for name, place in (("image", self.image), ("mask", self.mask)):
            fine = isinstance(place, str | int | None)
            check(name, place, fine, "None, a key of the samples and a position in them")
        for place in self.stays:
            fine = isinstance(place, str | int)
            check("stays", place, fine, "keys of the samples and positions in them")


def listed(value: _Entry | Sequence[_Entry] | None) -> tuple[_Entry, ...]:
    """Return a tuple of the keys or numbers given: one, a sequence of several, or None."""
    if value is None:
        return ()
    several = isinstance(value, Iterable) and not isinstance(value, str)
    return tuple(value) if several else (value,)  # type: ignore[return-value,arg-type]


class UnsureError(BatchError):
    """Either of two fields may be the image."""


class Found(NamedTuple):
    """Where the fields of one sample or batch are."""

    image: Location
    mask: Location
    """Key or index of the mask; None: there is no mask."""


def find_fields(item: Batch, fields: Fields, *, batched: bool, names: Iterable[str] = ()) -> Found:
    """Return where image and mask are in a sample, or in a batch with a leading dimension.

    What has another role is not taken for the image: the mask, what stays, and the positions that
    are among the ``names`` in a pipeline, as ``"2"`` is.

    Raises:
        BatchError: there is no image, or the field that was named does not exist.
        UnsureError: what has two dimensions looks more like an image than what has three, or
            stands before it.
    """
    check_named(item, fields)
    mapping = isinstance(item, Mapping)
    mask = fields.mask
    other = "mask" in (fields.image, *fields.stays)
    if mask is None and mapping and item.get("mask") is not None and not other:
        mask = "mask"
    if fields.image is not None:
        return Found(fields.image, mask)
    if mapping and "image" in item:
        return Found("image", mask)
    if isinstance(item, list | tuple):
        others = from_start(
            item, (mask, *fields.stays, *(int(name) for name in names if name.isdecimal()))
        )
        rest = [at for at in range(len(item)) if at not in others]
        looked = ((at, _rank(item[at], batched=batched)) for at in rest)
        ranks = {at: rank for at, rank in looked if rank is not None}
        fits = sorted(ranks, key=lambda at: ranks[at])
        deep = [at for at in fits if getattr(item[at], "ndim", 3) - batched == 3]
        if deep and fits[0] not in deep:  # a table, a mask or boxes before an image, say
            raise UnsureError(
                f"Which field of {describe(item)} is the image? Say image={fits[0]} or "
                f"image={deep[0]} (to FastDataModule, as_batch_transform)."
            )
        if fits:
            return Found(fits[0], mask)
    elif _rank(item, batched=batched) is not None:
        return Found(None, None)
    raise BatchError(
        f"No image was found in {describe(item)}. {_where_fields_are(item)}"
        "Expected the key 'image', or a tuple with an "
        "image in it (PIL, or an array or tensor of numbers with 2 or 3 dimensions per sample), or "
        "frames or a volume under Albumentations' names for them ('images', 'volume'). "
        "Say where it is with image=<key or index>."
    )


def from_start(item: Batch, places: Iterable[Location]) -> set[Location]:
    """Return places in a sample or batch; positions from the end are counted from the start."""
    length = len(item) if isinstance(item, list | tuple) else 0
    return {at + length if isinstance(at, int) and at < 0 else at for at in places}


def check_named(item: Batch, fields: Fields) -> None:
    """Raise BatchError if a field that was named does not exist in a sample or batch."""
    for name, location in (("image", fields.image), ("mask", fields.mask)):
        if location is not None and not has_field(item, location):
            raise BatchError(
                f"There is no field {location!r} (given as {name}=) in {describe(item)}. "
                f"{_where_fields_are(item)}"
                f"Name a key or an index that exists{in_namedtuple(item, location)}. If samples of "
                "another stage have it, give this stage a transform of its own: "
                f"as_batch_transform(pipeline), without {name}={location!r}, in "
                "augment={<stage>: ...}."
            )


def _where_fields_are(item: Batch) -> str:
    """Return for messages what has fields, if a sample or batch is no such thing; "" if it is."""
    has_them = isinstance(item, Mapping | list | tuple | np.ndarray | torch.Tensor)
    kind = type(item).__name__
    return "" if has_them else f"Return a dict or a tuple: {kind} has no fields that are known. "


def in_namedtuple(item: Batch, location: int | str) -> str:
    """Return for messages where a namedtuple has the field of a name; "" for anything else."""
    names: tuple[int | str, ...] = getattr(item, "_fields", ())
    return f": of a namedtuple its position, {names.index(location)}" if location in names else ""


def target_places(
    item: Batch,
    fields: Fields,
    names: Collection[str],
    *,
    batched: bool,
    fits: Callable[[str, Batch], bool] = lambda _name, _value: True,
) -> dict[str, Location]:
    """Return where the image and the mask are, and what else a pipeline knows by these names.

    In a mapping the names are keys; in a tuple, the name ``"2"`` means the field at position 2.
    What stays is left out. ``fits`` returns whether the value of another field than image and mask
    is what its name says.

    Raises:
        BatchError: as :func:`find_fields`.
    """
    found = find_fields(item, fields, batched=batched, names=names)
    places: dict[str, Location] = {"image": found.image}
    if found.mask is not None:
        places["mask"] = found.mask
    named: dict[Any, int | str] = {}
    stays = from_start(item, fields.stays)
    if isinstance(item, Mapping):
        named = {name: name for name in item}
    elif isinstance(item, list | tuple):
        named = {str(place): place for place in range(len(item))}
    for name, place in named.items():
        known = name in names and name not in places and place not in {*places.values(), *stays}
        if known and item[place] is not None and fits(name, item[place]):
            places[name] = place
    return places


def has_field(item: Batch, location: int | str) -> bool:
    """Whether a sample or batch has a field at this key or index."""
    if isinstance(item, Mapping):
        return location in item
    if isinstance(item, list | tuple) and isinstance(location, int):
        return -len(item) <= location < len(item)
    return False


def get_field(item: Batch, location: Location) -> Batch:
    """Return one field of a sample or batch."""
    return item if location is None else item[location]


def put_fields(item: Batch, values: Mapping[Location, Batch]) -> Batch:
    """Return a sample or batch of the same type in which some fields are replaced."""
    if None in values:
        return values[None]
    if isinstance(item, Mapping):
        return with_items(item, values)
    elements = list(item)
    for location, value in values.items():
        if isinstance(location, int):
            elements[location] = value
    return rebuilt(item, elements)


def _rank(value: object, *, batched: bool) -> int | None:
    """Return how little a value looks like an image; None: it cannot be one.

    0: a PIL image, or uint8 or float32 with 2 or 3 dimensions, or half precision with 3. 1 and 2:
    numbers of another NumPy dtype with 3 or 2 dimensions, as masks and tables have them, too.
    """
    if not isinstance(value, np.ndarray | torch.Tensor):
        return 0 if not batched and isinstance(value, PilImage) else None
    ndim = value.ndim - batched
    if ndim not in {2, 3}:
        return None
    if _dtype_name(value) in _USUAL or (ndim == 3 and value.dtype in _HALF_DTYPES):
        return 0
    return 4 - ndim if has_numpy_dtype(value) else None


def has_numpy_dtype(value: object) -> bool:
    """Whether a value is an array or tensor of numbers whose dtype NumPy has, too."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in _NUMBERS
    try:
        return isinstance(value, torch.Tensor) and numpy_dtype(value.dtype).kind in _NUMBERS
    except TypeError:
        return False


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Return NumPy's dtype for one of torch; TypeError if there is none, e.g. for bfloat16."""
    return np.dtype(str(dtype).removeprefix("torch."))


def to_hwc(value: object) -> np.ndarray:
    """Return the image of one sample as Albumentations wants it.

    Args:
        value: PIL image; array ``[H, W]`` or ``[H, W, C]``; tensor ``[H, W]``, ``[C, H, W]`` or
            ``[H, W, C]``, as :func:`channels_first` tells.

    Returns:
        An array ``[H, W]`` or ``[H, W, C]``; arrays and tensors keep their dtype.

    Raises:
        BatchError: the value is no image, holds no numbers, or has other than 2 or 3 dimensions.
    """
    if not isinstance(value, np.ndarray | torch.Tensor):
        if isinstance(value, PilImage):
            mode = _PIL_MODES.get(value.mode, "RGB")
            # Copied: what PIL lends cannot be written to, and a transform may do so.
            return np.array(value if value.mode in _PIL_NUMBERS else value.convert(mode))
        raise BatchError(
            f"The image is {describe(value)}. Expected a PIL image, an array or a tensor."
        )
    if not has_numpy_dtype(value) or value.ndim not in {2, 3}:
        raise BatchError(
            f"The image is {describe(value)}. Expected numbers, such as uint8 or float32 in "
            "[0, 1], with 2 or 3 dimensions per sample; convert it in the dataset."
        )
    if isinstance(value, np.ndarray):
        if value.ndim == 3 and value.shape[0] in CHANNELS and min(value.shape[1:]) >= _WIDE:
            raise BatchError(
                f"The image is {describe(value)}, with its channels first. Albumentations takes "
                "arrays with the channels last: return it as image.transpose(1, 2, 0), or as a "
                "torch tensor, which may have them first."
            )
        return value
    array: np.ndarray = value.detach().cpu().numpy()
    if array.ndim == 3 and channels_first(tuple(array.shape)):
        return np.ascontiguousarray(array.transpose(1, 2, 0))
    return array


def mask_to_numpy(value: object, size: tuple[int, ...] | None = None) -> np.ndarray:
    """Return the mask of one sample as an array ``[H, W]`` or ``[H, W, C]``.

    ``size`` is the height and width of the image beside it; None: there is no image.

    Raises:
        BatchError: the value is no mask, or has its channels first.
    """
    given = describe(value)
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, PilImage):
        value = np.array(value)
    array = value if isinstance(value, np.ndarray) else None
    if array is None or array.ndim not in {2, 3}:
        raise BatchError(
            f"The mask is {given}. Expected a PIL image, or an array or tensor with 2 or "
            "3 dimensions per sample. If it is no mask of the image, of tokens say, it is to stay: "
            "augment=as_batch_transform(compose, stays=['mask'])."
        )
    if array.shape[1:] == size and array.shape[:2] != size:
        raise BatchError(
            f"The mask is {given}, with its channels first. Albumentations takes masks [H, W] or "
            "[H, W, C], and gives them back so: return mask[0], or mask.permute(1, 2, 0)."
        )
    return array


def mask_as_given(mask: Batch, given: Batch) -> Batch:
    """Return a mask, or a list of masks, with its 64-bit dtype again if OpenCV made it int32.

    Only operations that move pixels with OpenCV change the dtype, so that the samples of a batch
    would differ by what they drew.
    """
    if isinstance(mask, list | tuple):
        return type(mask)(mask_as_given(one, given) for one in mask)
    while isinstance(given, list | tuple) and given:
        given = given[0]
    if _dtype_name(given) not in _TOO_WIDE or _dtype_name(mask) != "int32":
        return mask
    dtype = _dtype_name(given)
    return mask.to(getattr(torch, dtype)) if isinstance(mask, torch.Tensor) else mask.astype(dtype)


def _dtype_name(value: object) -> str:
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return str(value.dtype).removeprefix("torch.")
    return ""


def channels_first(shape: tuple[int, ...]) -> bool:
    """Whether a shape ``[a, b, c]`` is read as ``[C, H, W]``, not as ``[H, W, C]``.

    Two last dimensions that are equal are height and width, unless images usually have so many
    channels: pictures with more bands than rows are squares. Else the smaller of its first and last
    dimension is taken for the channels; if equal, the first.
    """
    square = shape[1] == shape[2] and shape[2] not in CHANNELS
    return square or shape[0] <= shape[2]


def describe(item: Batch, depth: int = 0) -> str:
    """Return the structure of a sample or batch in a few words, for messages."""
    if isinstance(item, np.ndarray | torch.Tensor):
        kind = "array" if isinstance(item, np.ndarray) else "tensor"
        shape = ", ".join(map(str, item.shape))
        return f"{kind}[{str(item.dtype).removeprefix('torch.')}: {shape}]"
    if isinstance(item, Mapping) and depth < 3:
        parts = [f"{key!r}: {describe(value, depth + 1)}" for key, value in item.items()]
        return "{" + ", ".join(parts[:12]) + (", ...}" if len(parts) > 12 else "}")
    if isinstance(item, list | tuple) and depth < 3:
        parts = [describe(value, depth + 1) for value in item[:6]]
        inner = ", ".join(parts) + (", ..." if len(item) > 6 else "")
        return f"({inner})" if isinstance(item, tuple) else f"[{inner}]"
    return f"PIL image ({item.mode})" if isinstance(item, PilImage) else type(item).__name__


def first_device(item: Batch) -> torch.device | None:
    """Return the device of the first tensor in a sample or batch, or None if there is none."""
    tensors = (leaf for leaf in leaves(item) if isinstance(leaf, torch.Tensor))
    return next((tensor.device for tensor in tensors), None)


def size_of(images: torch.Tensor) -> tuple[int, int]:
    """Return height and width of images ``[n, C, H, W]``, ``[n, H, W, C]`` or ``[n, H, W]``."""
    first = images.ndim == 4 and channels_first(tuple(images.shape[1:]))
    height, width = images.shape[2:] if first else images.shape[1:3]
    return int(height), int(width)


_MOST_PARTS: Final = 16
"""Most elements of a list that are looked at, as a list may hold thousands of tokens."""
_PLAIN: Final = (numbers.Number, str, bytes, type(None))
_warned: set[str] = set()


class Mover(NamedTuple):
    """A transform that moves the pixels of an image."""

    name: str
    """Name of the transform in messages."""
    takes_boxes: bool
    """Whether the transform moves boxes, too; if so, fields that look like boxes get no warning."""
    library: Literal["albumentations", "torchvision", "mixing"] = "albumentations"
    """Library for which messages explain how a field is given a role."""


def check_beside(
    item: Batch,
    known: Collection[Location],
    size: tuple[int, int],
    mover: Mover,
    *,
    samples: int | None = None,
    moves: Callable[[Any], bool] = lambda _: False,
) -> None:
    """Raise BatchError if a field with the height and width of the image would not move with it.

    A field that looks like boxes, or is named like keypoints, raises a FastDataWarning, once.

    Args:
        item: a sample, or a batch.
        known: places of the fields that move, too, or that the user said stay as they are.
        size: height and width of the image in pixels.
        mover: the transform that moves its pixels.
        samples: number of samples if ``item`` is a batch; None: it is a sample.
        moves: returns whether a value within a field moves, too.
    """
    if isinstance(item, list | tuple):
        known = {place % len(item) for place in known if isinstance(place, int)}
    for place, field in children(item) or ():
        if place in known or isinstance(field, _PLAIN):
            continue
        for path, value, shape in _arrays(field, (place,), samples):
            if moves(value):
                continue
            if size in pairwise(shape):
                raise BatchError(_left_behind(path, value, mover))
            rows = shape[1] if len(shape) == 2 else 0
            if rows in {2, 3} and any(word in str(path[-1]).lower() for word in _POINTS):
                _warn_of(_KEYPOINTS, path, value, mover)
            elif not mover.takes_boxes and rows in {4, 5}:
                _warn_of(_BOXES, path, value, mover)


def _arrays(
    value: Batch, path: Path, samples: int | None
) -> Iterator[tuple[Path, Batch, tuple[int, ...]]]:
    """Yield the path of each array in a field, the array, and its shape in one sample."""
    if isinstance(value, np.ndarray | torch.Tensor):
        shape = tuple(value.shape)
        yield path, value, shape[1:] if samples is not None and shape[:1] == (samples,) else shape
    elif isinstance(value, Mapping) or is_dataclass(value):
        for key, part in children(value) or ():
            yield from _arrays(part, (*path, key), samples)
    elif isinstance(value, list | tuple):
        width = _width_of_rows(value)
        if width:
            yield path, value, (len(value), width)
            return
        # In a batch, a list with as many parts as samples has one part for each sample.
        of_each = None if samples == len(value) else samples
        for place, part in enumerate(islice(value, _MOST_PARTS)):
            yield from _arrays(part, (*path, place), of_each)
    elif not isinstance(value, _PLAIN) and isinstance(value, PilImage):
        yield path, value, value.size[::-1]


def _width_of_rows(value: list[Batch] | tuple[Batch, ...]) -> int:
    """Return how many numbers the first row of a list has; 0: it is no list of rows."""
    first: Any = value[0] if value else None
    rows = isinstance(first, list | tuple)
    return len(first) if rows and all(isinstance(one, numbers.Number) for one in first) else 0


def _name(path: Path) -> str:
    return repr(path[0]) if len(path) == 1 else spelled(path)


def _left_behind(path: Path, value: Batch, mover: Mover) -> str:
    place = path[0]
    return (
        f"The field {_name(path)} is {describe(value)}, as high and as wide as the image. "
        f"{mover.name} moves the pixels of the image, and this field has no role, so that it would "
        f"stay behind. {_role_of(path, mover)} If it is to stay as it is, say stays=[{place!r}], "
        f"as in augment=as_batch_transform({_GIVEN[mover.library]}, stays=[{place!r}])."
    )


_GIVEN: Final = {"albumentations": "compose", "torchvision": "pipeline", "mixing": "pipeline"}


def _role_of(path: Path, mover: Mover) -> str:
    """Return the part of a message that tells how to give a field a role."""
    place = path[0]
    if mover.library == "mixing":
        return "Only images and labels are mixed."
    if mover.library == "torchvision":
        named = f", or say mask={place!r} (to FastDataModule or as_batch_transform)"
        return (
            "If it is a mask, let the dataset return it as tv_tensors.Mask"
            f"{named if len(path) == 1 else ''}. If it is another image, return both as "
            "tv_tensors.Image. v2 finds them in dicts, lists and tuples alone."
        )
    if len(path) > 1:
        return (
            "If it is a mask or an image, return it beside the image: {'image': ..., 'mask': ...}."
        )
    return (
        f"If it is the mask, say mask={place!r} (to FastDataModule, DataThroughputCallback, "
        "as_batch_transform). If it is another image or mask, say A.Compose(..., "
        f"additional_targets={{'{place}': 'image'}}), or 'mask'."
    )


_BOXES: Final = ("boxes", "bbox_params=A.BboxParams(...)", "bboxes", "BoundingBoxes")
_KEYPOINTS: Final = (
    "keypoints", "keypoint_params=A.KeypointParams(...)", "keypoints", "KeyPoints",
)  # fmt: skip
"""What such targets are called by: a word, the argument that tells a Compose of them, their usual
field, and the class of tv_tensors."""
_POINTS: Final = ("keypoint", "landmark")


def _warn_of(targets: tuple[str, ...], path: Path, value: Batch, mover: Mover) -> None:
    word, params, field, tv_tensor = targets
    how = {
        "albumentations": f"Say how they are written, A.Compose(..., {params}), and have the "
        f"dataset return a dict with 'image' and {field!r}.",
        "torchvision": f"Let the dataset return them as tv_tensors.{tv_tensor}, and a "
        "FastDataModule load it.",
        "mixing": "Only images and labels are mixed.",
    }[mover.library]
    text = (
        f"The field {_name(path)} is {describe(value)}, as {word} are, and {mover.name} moves the "
        f"pixels of the image without them. {how} If they are no {word}, or are to stay as they "
        f"are, say augment=as_batch_transform({_GIVEN[mover.library]}, stays=[{path[0]!r}])."
    )
    # Once for each name, not each text: the numbers of boxes differ between samples.
    told = f"{mover.name} {_name(path)}"
    if told not in _warned:
        _warned.add(told)
        warnings.warn(text, FastDataWarning, stacklevel=4)

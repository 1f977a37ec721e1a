"""The images of a batch, found and put side by side in one picture for a logger or a file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from lightning_fastdata.augment.pipeline.fields import (
    Fields,
    channels_first,
    describe,
    find_fields,
    get_field,
    to_hwc,
)
from lightning_fastdata.augment.pipeline.tree import list_leaves
from lightning_fastdata.errors import BatchError
from lightning_fastdata.randomness.search import find_composes, find_instances, loaded_classes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Self

    from lightning_fastdata.types import Batch

_GAP_PX: Final = 2


class Normalized(NamedTuple):
    """How images were normalised: ``(image - mean) / std`` of images in [0, 1]."""

    mean: tuple[float, ...]
    """One number per channel, or one for all."""
    std: tuple[float, ...]
    """One number per channel, or one for all."""

    def undone(self, images: np.ndarray) -> np.ndarray:
        """Return images ``[..., C]`` as they were before, in [0, 1] if they were so."""
        undone: np.ndarray = images * np.asarray(self.std) + np.asarray(self.mean)
        return undone


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchImages:
    """What is known of the images of a batch."""

    image: int | str | None = None
    """Their key or index; None: to be found."""
    normalized: Normalized | None = None
    """How they were normalised; None: not known."""

    @classmethod
    def behind(cls, transforms: Iterable[object], image: int | str | None) -> Self:
        """Return what is known of images that transforms run on, in their order."""
        return cls(image=image, normalized=find_normalized(list(transforms)))

    def normalized_by(self, owners: Sequence[object]) -> Self:
        """Return the same of images that datasets or transforms normalise."""
        return replace(self, normalized=find_normalized(owners))

    def find(self, batch: Batch) -> torch.Tensor:
        """Return the images of a batch, on any device, as ``[n, H, W, C]``.

        Raises:
            BatchError: There are no images in it.
        """
        place = self.image
        if place is None:
            place = find_fields(batch, Fields(), batched=True).image
        found = get_field(batch, place)
        if (
            not isinstance(found, torch.Tensor)
            or found.ndim not in {3, 4}
            or not (found.dtype == torch.uint8 or found.is_floating_point())
        ):
            raise BatchError(
                f"The field {place!r} is {describe(found)}. Expected images [n, C, H, W], "
                "[n, H, W, C] or [n, H, W], uint8 or floating point."
            )
        if found.ndim == 3:
            return found.unsqueeze(-1)
        return found.permute(0, 2, 3, 1) if channels_first(tuple(found.shape[1:])) else found

    def grid(self, images: torch.Tensor, most: int) -> np.ndarray:
        """Return images side by side, as the model gets them.

        uint8 is shown as it is, and floats as they were before they were normalised. Where that is
        not known, floats in [0, 1] are shown as they are, and of others each channel is stretched,
        in the whole batch alike, so that all but its outermost hundredths are visible. It waits for
        the device and copies the images that are shown, nothing else.

        Args:
            images: ``[n, H, W, C]``, as :meth:`find` returns them.
            most: Images to show at most, the first ones.

        Returns:
            uint8 ``[height, width, 3]``; gray images are shown gray, and of more than three
            channels the first three.

        Raises:
            BatchError: There is no image.
        """
        images = images[:most].detach().cpu()
        if not len(images):
            raise BatchError("The batch is empty, so there is nothing to show.")
        pixels = _as_bytes(images, self.normalized)
        count, height, width, _ = pixels.shape
        across = math.ceil(math.sqrt(count * height / width))
        across = min(count, max(1, across))
        down = math.ceil(count / across)
        size = (down * (height + _GAP_PX) - _GAP_PX, across * (width + _GAP_PX) - _GAP_PX, 3)
        page = np.full(size, 255, np.uint8)
        for number, one in enumerate(pixels):
            top = number // across * (height + _GAP_PX)
            left = number % across * (width + _GAP_PX)
            page[top : top + height, left : left + width] = one
        return page


def find_normalized(owner: object) -> Normalized | None:
    """Return how the pipelines that a dataset or a transform holds normalise; None: not known.

    It is known if there is one way, by fixed numbers in every sample: Albumentations' ``Normalize``
    or torchvision's.
    """
    composes = find_composes(owner)
    leaves = [leaf for compose in composes for leaf in list_leaves(compose)]
    found: set[Normalized | None] = {
        _way(leaf.transform.mean, leaf.transform.std)
        if not leaf.conditional and leaf.transform.normalization == "standard"
        else None
        for leaf in leaves
        if type(leaf.transform).__name__ == "Normalize"
    }
    for module in ("torchvision.transforms", "torchvision.transforms.v2"):
        kinds = loaded_classes(module, "Normalize")
        found |= {_way(own.mean, own.std) for own in find_instances(owner, kinds)}
    return found.pop() if len(found) == 1 else None


def left_undone(
    training: Iterable[object], other: Iterable[object], sample: Batch, image: int | str | None
) -> str | None:
    """Return what training does to all images and another stage does not; None: nothing is seen.

    That is how they are made floating point and normalised.

    Args:
        training: transforms of the training.
        other: transforms of the other stage.
        sample: of its dataset, which may have done all of it already.
        image: key or index of the image in it; None finds it.
    """
    trained, others = _names(training), _names(other)
    try:
        place = find_fields(sample, Fields(image=image), batched=False).image
        pixels, _ = to_hwc(get_field(sample, place))
    except BatchError:
        return None
    normalised = "Normalize" not in trained - others or not _in_unit_range(pixels)
    if normalised and (others or not trained or pixels.dtype.kind == "f"):
        return None
    return f"{' and '.join(sorted(trained))}, and images here are {describe(pixels)}"


def _in_unit_range(pixels: np.ndarray) -> bool:
    """Return whether the values of an image are integers, or lie in [0, 1]."""
    floats = pixels.dtype.kind == "f" and pixels.size
    return not floats or bool(pixels.min() >= 0 and pixels.max() <= 1)


def _names(transforms: Iterable[object]) -> set[str]:
    """Return which operations of pipelines make floats of all images."""
    transforms = list(transforms)
    leaves = [leaf for compose in find_composes(transforms) for leaf in list_leaves(compose)]
    names = {type(leaf.transform).__name__ for leaf in leaves} & {"Normalize", "ToFloat"}
    kinds = loaded_classes("torchvision.transforms.v2", "Normalize", "ToDtype", "ConvertImageDtype")
    own = find_instances(transforms, kinds)
    return names | {type(one).__name__ for one in own if _makes_floats(one)}


def _makes_floats(transform: Any) -> bool:
    """Return whether a transform of torchvision makes images floating point, or normalises them."""
    dtypes = getattr(transform, "dtype", torch.float32)
    given = dtypes.values() if isinstance(dtypes, Mapping) else [dtypes]
    return any(isinstance(one, torch.dtype) and one.is_floating_point for one in given)


def _way(mean: object, std: object) -> Normalized:
    both = (np.atleast_1d(np.asarray(one, np.float64)) for one in (mean, std))
    return Normalized(*(tuple(one.tolist()) for one in both))


def _as_bytes(images: torch.Tensor, normalized: Normalized | None) -> np.ndarray:
    if images.dtype == torch.uint8:
        return _three_channels(images.numpy())
    values = np.nan_to_num(images.float().numpy())
    if normalized is not None and len(normalized.mean) in (1, values.shape[-1]):
        return _to_levels(_three_channels(normalized.undone(values)))
    values = _three_channels(values)
    low, high = values.min(), values.max()
    if low < 0 or high > 1:
        bounds = np.percentile(values.reshape(-1, 3), (1, 99), axis=0)
        values = (values - bounds[0]) / np.maximum(bounds[1] - bounds[0], 1e-6)
    return _to_levels(values)


def _three_channels(values: np.ndarray) -> np.ndarray:
    """Return the first three channels of images ``[..., C]``, or the first one three times."""
    return values[..., :3] if values.shape[-1] >= 3 else np.repeat(values[..., :1], 3, -1)


def _to_levels(values: np.ndarray) -> np.ndarray:
    """Return values in [0, 1] as uint8, rounded; what is beyond is cut off."""
    out: np.ndarray = (values * 255).round().clip(0, 255).astype(np.uint8)
    return out

"""The front end for Kornia: the workers draw, Kornia itself computes.

A module draws its parameters by ``forward_parameters(batch_shape)`` and takes them as ``params=``.
They are first drawn once for the whole batch, which settles what belongs to the batch: which
modules run, in which order, which samples are mixed, and what all samples share. Then each module,
in their order, draws again for each sample as for a batch of one. Parameters with a row for each
sample are put together from these draws.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Size, Tensor
from torch.utils._pytree import tree_map_only

from lightning_fastdata.augment.fields import (
    Fields,
    Location,
    Mover,
    channels_first,
    check_beside,
    describe,
    find_fields,
    get_field,
    has_field,
    put_fields,
    to_hwc,
)
from lightning_fastdata.augment.replay.program import BatchDraws, Draws, key_of_batch
from lightning_fastdata.augment.stage_transform import (
    CallableTransform,
    PipelineTransform,
    StageTransform,
    WorkerTransform,
    follow,
    plain_tensors,
    table,
)
from lightning_fastdata.device.backend import device_draws
from lightning_fastdata.errors import BatchError, TransformError
from lightning_fastdata.randomness.seeds import keyed_draws
from lightning_fastdata.tree import loaded_classes
from lightning_fastdata.types import Batch, SampleKey

Params: TypeAlias = Any
"""A dict of tensors, or a list of named items that hold such dicts, lists or None."""

_OF_BATCH: Final = frozenset({"MixAugmentationBaseV2", "OperationBase"})
"""Names of base classes of modules that draw for a batch: mixing, and policies (AutoAugment)."""
_IMAGES: Final = frozenset({"INPUT", "IMAGE"})
_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "MASK": ("mask", "masks"),
    "BBOX_XYXY": ("bbox_xyxy", "boxes", "bboxes", "bbox"),
    "BBOX_XYWH": ("bbox_xywh", "boxes", "bboxes", "bbox"),
    "BBOX": ("bbox", "bboxes", "boxes"),
    "KEYPOINTS": ("keypoints",),
    "CLASS": ("class", "label", "labels"),
    "LABEL": ("label", "labels", "class"),
}
"""Names of the fields that each of Kornia's data keys may stand for, the likeliest first."""
_HOME: Final = "kornia.augmentation"
_KINDS: Final = ("AugmentationBase2D", "MixAugmentationBaseV2", "ImageSequential")
"""Base classes of single modules and of sequences, such as ``AugmentationSequential``."""
_UNKEYED: Final = (
    *("PatchSequential", "VideoSequential"),
    *("ManyToManyAugmentationDispather", "ManyToOneAugmentationDispather"),
)


def stage_transform(transform: object, fields: Fields) -> KorniaTransform | None:
    """Return the batch transform of a module of Kornia; None: ``transform`` is no such module.

    An ``nn.Sequential`` that begins with a module of Kornia is taken for a sequence of Kornia.

    Raises:
        TransformError: the module is or holds a container that cannot draw for each sample.
    """
    unkeyed = loaded_classes(_HOME, *_UNKEYED)
    kinds = loaded_classes(_HOME, *_KINDS) + loaded_classes(f"{_HOME}.auto", "PolicyAugmentBase")
    module: Any = transform
    if type(module) is torch.nn.Sequential and len(module) and isinstance(module[0], kinds):
        [sequence] = loaded_classes(_HOME, "ImageSequential")
        module = sequence(*module)
    if not (isinstance(module, torch.nn.Module) and isinstance(module, kinds + unkeyed)):
        return None
    for part in module.modules():
        if isinstance(part, unkeyed):
            raise TransformError(
                f"{type(part).__name__} of Kornia draws for the patches or frames of a whole "
                "batch, which cannot be drawn for each sample by its key. Give augment= a function "
                "that calls it, lambda batch: ...: it then draws for the batch, as the batch's "
                "number says."
            )
    return KorniaTransform(module, fields)


class _Drawn(NamedTuple):
    """What a batch has to know of a sample to draw its parameters."""

    key: SampleKey
    shape: tuple[int, ...] | None
    """Shape ``[C, H, W]`` of the image; None: it is not known before the batch is collated."""


class KorniaTransform(PipelineTransform):
    """A module of Kornia, or a sequence of them; see :func:`as_batch_transform`.

    Kornia computes the whole batch, with parameters that were drawn for each sample. Bytes become
    float32 in [0, 1] first, as Kornia takes no bytes. Images with the channels last are permuted,
    so that all come out as ``[n, C, H, W]``.
    """

    library = "Kornia"

    def take_in(self) -> None:
        """Take the module as it is now."""
        super().take_in()
        # A copy computes: a module keeps what it drew last, so the original would seem to change.
        self._copy = copy.deepcopy(self.pipeline)

    def behind(self) -> StageTransform:
        """Return the module as a callable, which draws for a whole batch by the batch's number."""
        return CallableTransform(self.pipeline, self._fields)

    def check_sample(self, sample: Batch) -> None:
        """Raise BatchError if a sample has no image, or a field that would not move with it."""
        place = find_fields(sample, self._fields, batched=False).image
        size = to_hwc(get_field(sample, place)).shape[:2]
        moving = loaded_classes(_HOME, "GeometricAugmentationBase2D")
        if place is None or not any(isinstance(one, moving) for one in self.pipeline.modules()):
            return
        moved = [where for _, where in _targets(self.pipeline, self._fields, sample, place)]
        mover = Mover(self.name, takes_boxes=len(moved) > 1, library="kornia")
        check_beside(sample, {*moved, *self._fields.stays}, size, mover)

    def in_worker(self, *, on_device: bool) -> KorniaWorker:
        """Return the part in the workers: it draws for a sample, and computes if no device does."""
        return KorniaWorker(self.pipeline, self._fields, on_device=on_device)

    def apply(self, batch: Batch, draws: Draws | None) -> Batch:
        """Return the batch as Kornia computes it with the parameters that were drawn."""
        if not isinstance(draws, BatchDraws):
            return batch
        return _computed(self._copy, self._fields, batch, *draws.values)

    def apply_unprepared(self, batch: Batch, key: SampleKey) -> Batch:
        """Draw for a batch of another loader as a whole, as Kornia does, and compute it.

        The key of the first sample decides: drawing for each sample would take as long as the step.
        """
        return _computed(self._copy, self._fields, batch, None, [key])

    def explain(self) -> str:
        """Return a line for each module that draws."""
        who = {True: "the batch", False: "each sample"}
        drawing = (module for module in self.pipeline.modules() if hasattr(module, "p_batch"))
        rows = [(type(one).__name__, who[is_of_batch(one)]) for one in drawing]
        return table([(name, "device", f"by Kornia itself; {one} draws") for name, one in rows])


class KorniaWorker(WorkerTransform):
    """The part of a Kornia module in a side process: it draws, and computes if no device does."""

    needs_batches = True

    def __init__(self, module: Any, fields: Fields, *, on_device: bool) -> None:
        self._module = copy.deepcopy(module).cpu()
        for part in self._module.modules():
            if hasattr(part, "set_rng_device_and_dtype"):  # a container does not pass this on
                part.set_rng_device_and_dtype(torch.device("cpu"), torch.get_default_dtype())
        self._fields = fields
        self._on_device = on_device

    def __call__(self, sample: Batch, key: SampleKey) -> tuple[Batch, _Drawn]:
        """Return the sample with its image as ``[C, H, W]``, and what its batch needs to draw."""
        place = find_fields(sample, self._fields, batched=False).image
        value = get_field(sample, place)
        if not isinstance(value, Tensor) or value.ndim != 3 or not channels_first(value.shape):
            pixels = to_hwc(value)
            pixels = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
            value = torch.from_numpy(np.ascontiguousarray(pixels))
            sample = put_fields(sample, {place: value})
        return sample, _Drawn(key, tuple(value.shape))

    def collate(self, drawn: Sequence[_Drawn]) -> BatchDraws | None:
        """Return the batch's parameters, or only the keys to draw them later; None: no device."""
        if not self._on_device:
            return None
        keys, shapes = zip(*drawn, strict=True)
        params = None
        if shapes[0] is not None and len(set(shapes)) == 1:
            # Arrays go to another process as plain bytes.
            params = draw(self._module, keys, (len(keys), *shapes[0]))
            params = tree_map_only(Tensor, Tensor.numpy, params)
        return BatchDraws(len(keys), (params, keys))

    def stacks(self, samples: Sequence[Batch], drawn: Sequence[_Drawn]) -> bool:  # noqa: ARG002
        """Return whether the images have one shape."""
        return len({one.shape for one in drawn}) == 1

    def holds(self, batch: Batch, drawn: Sequence[_Drawn], _: Mapping[Any, Tensor]) -> bool:
        """Return whether the images have the shape for which parameters are drawn."""
        images = get_field(batch, find_fields(batch, self._fields, batched=True).image)
        shape = (len(drawn), *(drawn[0].shape or ()))
        return isinstance(images, Tensor) and tuple(images.shape) == shape

    def finish_each(
        self, samples: Sequence[Batch], drawn: Sequence[_Drawn]
    ) -> tuple[list[Batch], list[_Drawn]]:
        """Return the samples, to be drawn for once the batch is collated, whatever its shape."""
        return list(samples), [one._replace(shape=None) for one in drawn]

    def finish(self, batch: Batch, drawn: Sequence[_Drawn]) -> Batch:
        """Compute a batch that was collated here; used where no device takes part."""
        keys = [one.key for one in drawn]
        return _computed(self._module, self._fields, batch, None, keys)


def _computed(
    module: Any, fields: Fields, batch: Batch, params: Any, keys: Sequence[SampleKey]
) -> Batch:
    """Return a batch as Kornia computes it.

    ``params`` are the drawn parameters; None: they are drawn here, as :func:`draw` says.
    """
    with plain_tensors():
        place = find_fields(batch, fields, batched=True).image
        images = _as_kornia_takes(get_field(batch, place))
        params = draw(module, keys, images.shape) if params is None else params
        params = tree_map_only(np.ndarray, torch.from_numpy, params)
        targets = _targets(module, fields, batch, place)
        given = [images if where == place else get_field(batch, where) for _, where in targets]
        told = {"data_keys": [key for key, _ in targets]} if hasattr(module, "data_keys") else {}
        follow(module, images.device)
        # Numbers that a module draws while it computes belong to the batch.
        with keyed_draws(key_of_batch(keys[0])), device_draws(images.device):
            # Not its __call__, which may copy the images back to the CPU.
            made = module.forward(*given, params=params, **told)
        made = [made] if isinstance(made, Tensor) else list(made)
        changed = {where: one for (_, where), one in zip(targets, made, strict=True)}
        return put_fields(batch, changed)


def _as_kornia_takes(images: Batch) -> Tensor:
    """Return images as floats ``[n, C, H, W]``; bytes become float32 in [0, 1]."""
    if not isinstance(images, Tensor) or images.ndim not in {3, 4}:
        raise BatchError(
            f"The image field is {describe(images)}. Kornia takes a batch of images of one size: "
            "[n, C, H, W], [n, H, W, C] or [n, H, W]."
        )
    if images.ndim == 3:
        images = images[:, None]
    elif not channels_first(tuple(images.shape[1:])):
        images = images.permute(0, 3, 1, 2).contiguous()
    floats: Tensor = images.float() / 255 if images.dtype == torch.uint8 else images
    return floats


def _targets(
    module: Any, fields: Fields, item: Batch, image: Location
) -> list[tuple[str, Location]]:
    """Return the fields of a sample or batch that a module transforms: Kornia's key, and the place.

    Raises:
        BatchError: a field that the module transforms is missing.
    """
    keys = getattr(module, "data_keys", ["INPUT"])
    if keys is None and isinstance(item, Mapping):  # Kornia goes by the names of fields
        names = [name for name in item if isinstance(name, str) and name != image]
        known = ((name, [key for key in _NAMES if name.upper().startswith(key)]) for name in names)
        return [("INPUT", image), *((keys[0], name) for name, keys in known if keys)]
    targets: list[tuple[str, Location]] = []
    for key in (getattr(key, "name", key).upper() for key in keys or ["INPUT"]):
        before = [image, *(where for _, where in targets)]
        place = image if key in _IMAGES else _place_of(key, fields, item, before)
        if place is None and key not in _IMAGES:
            raise BatchError(
                f"{type(module).__name__} of Kornia transforms {key.lower()}, and there is none in "
                f"{describe(item)}. In a dict it is called {' or '.join(map(repr, _NAMES[key]))}; "
                "in a tuple it follows what comes before it in data_keys."
            )
        targets.append((key, place))
    return targets


def _place_of(key: str, fields: Fields, item: Batch, before: Sequence[Location]) -> Location:
    if key == "MASK" and fields.mask is not None and fields.mask not in before:
        return fields.mask
    if isinstance(item, Mapping):
        return next((name for name in _NAMES[key] if name in item and name not in before), None)
    after = before[-1] + 1 if isinstance(before[-1], int) else None
    return after if after is not None and has_field(item, after) else None


def draw(module: Any, keys: Sequence[SampleKey], shape: Sequence[int]) -> Params:
    """Return the parameters of a module for a batch of images ``[n, C, H, W]``.

    ``keys`` has the key of each sample, by which it draws for itself; or only that of the first
    sample, by which the batch draws as a whole.

    Raises:
        TransformError: a parameter cannot be drawn for each sample.
    """
    with keyed_draws(key_of_batch(keys[0]), ("torch",)):
        drawn = module.forward_parameters(Size(shape))
    if len(keys) != shape[0]:
        return drawn
    alone = [(own, of_batch) for own, of_batch in _drawing(module, drawn) if not is_of_batch(own)]
    rows: list[list[dict[str, Tensor]]] = [[] for _ in alone]
    for key in keys if alone else ():
        with keyed_draws(key, ("torch",)):
            for (own, of_batch), drawn_alone in zip(alone, rows, strict=True):
                drawn_alone.append(own.forward_parameters(_as_one(own, of_batch)))
    for (own, of_batch), drawn_alone in zip(alone, rows, strict=True):
        # Releases before 0.9 have rows only for the samples to which a module is applied.
        counts = len(keys), int((of_batch["batch_prob"] > 0.5).sum())
        for name, value in of_batch.items():
            if isinstance(value, Tensor):
                what = f"{type(own).__name__}: {name}"
                ones = [one[name] for one in drawn_alone]
                of_batch[name] = _put_together(value, ones, counts, what)
    return drawn


def is_of_batch(module: Any) -> bool:
    """Return whether what a module draws belongs to the batch and not to its samples."""
    if getattr(module, "same_on_batch", False) or getattr(module, "p_batch", 1.0) < 1:
        return True
    return not _OF_BATCH.isdisjoint(one.__name__ for one in type(module).__mro__)


def _drawing(module: Any, drawn: Params) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the modules that have drawn, in the order in which they run, with what they drew."""
    if isinstance(drawn, dict):
        yield module, drawn
    elif drawn is not None:
        for item in drawn:
            yield from _drawing(module.get_submodule(item.name), item.data)


def _as_one(module: Any, drawn: dict[str, Any]) -> Size:
    shape = drawn.get("forward_input_shape")
    if shape is None:
        raise TransformError(
            f"Kornia's {type(module).__name__} does not say for which shape it draws "
            "(forward_input_shape), so that it cannot be drawn for each sample by its key."
        )
    return Size((1, *shape.tolist()[1:]))


def _put_together(
    together: Tensor, ones: Sequence[Tensor], counts: Sequence[int], what: str
) -> Tensor:
    """Return a parameter put together from those of the samples; the batch's if it has no rows.

    ``counts``: the numbers of rows that a parameter of the batch may have.
    """
    form = together.shape[1:]
    rows = together.ndim > 0 and all(len(one) <= 1 and one.shape[1:] == form for one in ones)
    if rows and len(together) in counts:
        return torch.cat(list(ones))
    if all(one.shape == together.shape for one in ones):
        return together
    raise TransformError(
        f"Kornia's {what} is {tuple(together.shape)} for a batch of {len(ones)}, and no row for "
        "each sample, so that it cannot be drawn by the sample's key. Give the module "
        "same_on_batch=True, or call it in a function: augment=lambda batch: ..."
    )

"""MixUp and CutMix on whole batches, keyed by sample."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from lightning_fastdata.augment.batch_draws import BatchDraws
from lightning_fastdata.augment.ops.operation import Tape
from lightning_fastdata.augment.pipeline.fields import (
    Fields,
    Location,
    channels_first,
    describe,
    find_fields,
    get_field,
    has_field,
    listed,
    put_fields,
)
from lightning_fastdata.augment.pipeline.roles import Mover, check_beside
from lightning_fastdata.augment.record.worker import ComposeWorker
from lightning_fastdata.augment.replay.program import Draws, compile_tapes
from lightning_fastdata.augment.stage_transform import (
    PipelineTransform,
    StageTransform,
    WorkerTransform,
    plain_tensors,
    table,
)
from lightning_fastdata.augment.transform import BatchTransform, as_batch_transform
from lightning_fastdata.errors import BatchError, OptionsError, TransformError
from lightning_fastdata.types import Batch, SampleKey

if TYPE_CHECKING:
    from typing import Self

__all__ = ["CutMix", "MixUp", "MixedTransform", "mixed"]
_BOX_KEYS: Final = ("boxes", "bboxes")
_LABEL_KEYS: Final = ("label", "labels", "target", "targets")
_NUMBERS, _ORDER = "mixing numbers", "mixing order"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The fields of a batch of ``n`` samples that mixing changes."""

    image: Tensor
    """Images ``[n, C, H, W]``, uint8 or floating point."""
    labels: Tensor | None = None
    """Shares of the classes ``[n, classes]``, float32; None if there are no labels."""
    mask: Tensor | None = None
    """Classes of pixels ``[n, H, W]`` of any integer dtype, or ``[n, C, H, W]``; or None."""


def _check_share(name: str, value: float) -> None:
    """Raise OptionsError unless a probability is one."""
    if not 0 <= value <= 1:
        raise OptionsError(f"{name} is {value}; give a probability from 0 to 1.")


def _check_positive(name: str, value: float) -> None:
    """Raise OptionsError unless a number is positive and finite."""
    if not 0 < value < float("inf"):
        raise OptionsError(f"{name} is {value}; give a positive number.")


def partners(order: Tensor) -> Tensor:
    """Return for each sample the position of the sample it is mixed with, int64 ``[n]``.

    The samples stand in a ring, sorted by their random numbers ``order``, int64 ``[n]``; a sample's
    partner is the one before. In a batch of several no sample is its own partner, each is a partner
    once, and who meets whom depends on which samples the batch holds, not on their order in it.
    """
    ring = order.argsort(stable=True)
    return torch.empty_like(ring).scatter_(0, ring, ring.roll(1))


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    """Return values ``[n]`` in a shape that broadcasts with ``like`` ``[n, ...]``."""
    return values.view(-1, *[1] * (like.ndim - 1))


def _mixed_labels(parts: Parts, kept: Tensor, other: Tensor) -> Tensor | None:
    """Return the shares of the classes, of which ``kept``, float64 ``[n]``, is the sample's own."""
    if parts.labels is None:
        return None
    own, rest = (_per_sample(one.to(parts.labels.dtype), parts.labels) for one in (kept, 1 - kept))
    return parts.labels * own + parts.labels[other] * rest


@dataclass(frozen=True)
class MixUp:
    """Blend each sample with a partner: ``share * own + (1 - share) * partner``.

    After Zhang, Cisse, Dauphin and Lopez-Paz, "mixup: beyond empirical risk minimization" (ICLR
    2018). uint8 images are rounded; float images behind ``Normalize`` are not.

    Args:
        alpha: the share is drawn from Beta(alpha, alpha) for each sample.
        p: probability that a sample is blended.

    Raises:
        OptionsError: ``alpha`` is not positive, or ``p`` is no probability.
    """

    count: ClassVar[int] = 2
    """Numbers that are drawn for each sample."""
    alpha: float = 0.2
    p: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("alpha", self.alpha)
        _check_share("p", self.p)

    def draw(self, generator: np.random.Generator) -> list[float]:
        """Return whether (a uniform number) and the share."""
        return [generator.random(), generator.beta(self.alpha, self.alpha)]

    def mix(self, parts: Parts, numbers: Tensor, order: Tensor) -> Parts:
        """Return the blended batch; BatchError if it has masks, which cannot be blended."""
        if parts.mask is not None:
            raise BatchError(
                "MixUp blends images, and this batch has masks of pixels, which cannot be blended. "
                "Use CutMix for masks."
            )
        other = partners(order)
        share = torch.where(numbers[:, 0] < self.p, numbers[:, 1], 1.0)
        given = parts.image.dtype
        # Half precision would round the shares, so that they no longer add up to 1.
        wide = torch.float64 if given == torch.float64 else torch.float32
        image = parts.image.to(wide)
        own, rest = (_per_sample(one, image).to(wide) for one in (share, 1 - share))
        image = image[other] * rest + image * own
        image = (image if given.is_floating_point else image.round()).to(given)
        return replace(parts, image=image, labels=_mixed_labels(parts, share, other))


@dataclass(frozen=True)
class CutMix:
    """Replace a rectangle of each sample by that of a partner; labels by the shares of the area.

    After Yun et al., "CutMix: regularization strategy to train strong classifiers with localizable
    features" (ICCV 2019), with torchvision's rectangle: its middle is anywhere in the image, and
    what would be outside is cut off.

    Args:
        alpha: the share of the area that is kept is drawn from Beta(alpha, alpha) for each sample.
        p: probability that a sample gets a rectangle.

    Raises:
        OptionsError: ``alpha`` is not positive, or ``p`` is no probability.
    """

    count: ClassVar[int] = 4
    """Numbers that are drawn for each sample."""
    alpha: float = 1.0
    p: float = 1.0

    def __post_init__(self) -> None:
        _check_positive("alpha", self.alpha)
        _check_share("p", self.p)

    def draw(self, generator: np.random.Generator) -> list[float]:
        """Return whether, the share, and where the middle is in parts of the sides."""
        share = generator.beta(self.alpha, self.alpha)
        return [generator.random(), share, *generator.random(2)]

    def mix(self, parts: Parts, numbers: Tensor, order: Tensor) -> Parts:
        """Return the batch with rectangles, in images and masks."""
        height, width = parts.image.shape[2:]
        left, top, right, bottom = cut_boxes(numbers, height, width, p=self.p)
        y = torch.arange(height, device=numbers.device)
        x = torch.arange(width, device=numbers.device)
        rows = (y >= top[:, None]) & (y < bottom[:, None])
        columns = (x >= left[:, None]) & (x < right[:, None])
        other = partners(order)
        kept = 1 - ((right - left) * (bottom - top)).double() / (height * width)
        choose = rows[:, :, None] & columns[:, None, :]
        image = torch.where(choose[:, None], parts.image[other], parts.image)
        mask = parts.mask
        if mask is not None:
            mask = torch.where(choose if mask.ndim == 3 else choose[:, None], mask[other], mask)
        return replace(parts, image=image, mask=mask, labels=_mixed_labels(parts, kept, other))


def cut_boxes(
    numbers: Tensor, height: int, width: int, *, p: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return left, top, right and bottom of the rectangles to cut, int64 ``[n]`` each.

    ``numbers`` is what `CutMix` drew, float64 ``[n, 4]``; without a rectangle all four are equal.
    """
    whether, share, across, down = numbers.unbind(1)
    half = torch.where(whether < p, 0.5 * (1 - share).clamp(min=0).sqrt(), 0.0)
    x, y = (across * width).long(), (down * height).long()
    half_width, half_height = (half * width).long(), (half * height).long()
    left, right = (x - half_width).clamp(min=0), (x + half_width).clamp(max=width)
    top, bottom = (y - half_height).clamp(min=0), (y + half_height).clamp(max=height)
    return left, top, right, bottom


MixStep: TypeAlias = MixUp | CutMix
"""One way to change a batch whose samples see each other: how many numbers it draws for each, the
numbers, and what it makes of a batch by them. ``order``, int64 ``[n]``, decides who meets whom."""


class Mixer:
    """Runs steps on whole batches, wherever their fields are.

    ``label`` is where the labels of whole images are; None: to be found.
    """

    library = "torch"

    def __init__(
        self,
        steps: tuple[MixStep, ...],
        fields: Fields,
        label: int | str | None,
        num_classes: int | None,
    ) -> None:
        self.steps = steps
        self.fields = fields
        self._label = label
        self._num_classes = num_classes

    def check_classes(self, sample: Batch) -> None:
        """Raise BatchError if a class of a sample is none of ``num_classes``.

        It would train as if it had no label: so would -100, which a loss leaves out, as a share of
        a mixture it cannot. On the device a look at it would have to wait.
        """
        if self._num_classes is None:
            return
        place = self._label_place(sample, find_fields(sample, self.fields, batched=False).image)
        value = get_field(sample, place) if place is not None and has_field(sample, place) else None
        if isinstance(value, Tensor | np.ndarray) and value.ndim == 0:
            value = value.item()
        if isinstance(value, int | np.integer):
            _check_class(int(value), self._num_classes, f"The label {place!r} of a sample")

    def draw(self, key: SampleKey) -> Any:
        """Return what a sample draws."""
        return draw_numbers(self.steps, key)

    def pack(
        self, drawn: Sequence[Any], inner: WorkerTransform | None, tapes: Sequence[Any]
    ) -> Draws:
        """Return what the samples of a batch have drawn, beside the tapes of a pipeline."""
        if inner is None:
            return compile_tapes([{}] * len(drawn), beside=stack_drawn(drawn))
        return cast("ComposeWorker", inner).collate(tapes, stack_drawn(drawn))

    def carry_out(self, batch: Batch, draws: Draws) -> Batch:
        """Return a collated batch with its samples mixed as was drawn."""
        numbers, order = (draws.beside[name].view(draws.blob) for name in (_NUMBERS, _ORDER))
        return self.mix(batch, numbers, order)

    def mix(self, batch: Batch, numbers: Tensor, order: Tensor) -> Batch:
        """Return a collated batch with its samples mixed.

        By the numbers drawn for it, float64 ``[n, count]``, and a random number of each sample for
        each step, int64 ``[n, steps]``. BatchError: a field has not the form that mixing needs.
        """
        with plain_tensors():
            found = self._find(batch)
            label = self._label_place(batch, found["image"])
            image = get_field(batch, found["image"])
            if not isinstance(image, Tensor) or image.ndim not in {3, 4}:
                raise BatchError(
                    f"Mixing needs a batch of images of one size, but the image field is "
                    f"{describe(image)}."
                )
            if len(image) != len(numbers):
                raise BatchError(
                    f"The image field is {describe(image)}, but was drawn for {len(numbers)} "
                    "samples. A collate_fn must keep the samples of a batch, in order."
                )
            form = _Form(image)
            shares = None if label is None else self._shares(batch, label, image.device)
            known = {*found.values(), *(() if label is None else (label,))}
            self._check_beside(batch, known, form.image)
            given = get_field(batch, found["mask"]) if "mask" in found else None
            parts = Parts(
                image=form.image,
                labels=shares,
                mask=None if given is None else _mask_parts(given, form.image),
            )
            ends = list(accumulate(step.count for step in self.steps))
            own = numbers.tensor_split(ends[:-1], dim=1)
            for step, drawn, by in zip(self.steps, own, order.unbind(1), strict=True):
                parts = step.mix(parts, drawn, by)
            changed: dict[Location, object] = {found["image"]: form.restored(parts.image)}
            if given is not None and parts.mask is not None:
                changed[found["mask"]] = _mask_restored(parts.mask, given)
            if label is not None:
                changed[label] = parts.labels
            return put_fields(batch, changed)

    def _find(self, batch: Batch) -> dict[str, Location]:
        image, mask = find_fields(batch, self.fields, batched=True)
        for name in _BOX_KEYS:
            if isinstance(batch, Mapping) and name in batch and name not in self.fields.stays:
                raise BatchError(
                    f"The batch holds {name!r}, which mixing would leave where they are while the "
                    f"images change. Boxes are not mixed. If these are none: stays=[{name!r}]."
                )
        return {
            "image": image,
            **({} if mask is None else {"mask": _existing(batch, mask, "mask")}),
        }

    def _check_beside(self, batch: Batch, known: Collection[Location], image: Tensor) -> None:
        """Raise BatchError if something of the images' size would not be mixed."""
        mover = Mover(_name(self.steps[0]), takes_boxes=False)
        size = image.shape[2], image.shape[3]
        check_beside(batch, {*known, *self.fields.stays}, size, mover, samples=len(image))

    def _label_place(self, item: Batch, image: Location) -> int | str | None:
        if self._label is not None:
            return self._label
        if isinstance(item, Mapping):
            return next((key for key in _LABEL_KEYS if key in item), None)
        if isinstance(item, Sequence) and isinstance(image, int) and len(item) > image + 1:
            return image + 1
        return None

    def _shares(self, batch: Batch, place: int | str, device: torch.device) -> Tensor:
        labels, num_classes = get_field(batch, _existing(batch, place, "label")), self._num_classes
        if not isinstance(labels, Tensor) or labels.ndim not in {1, 2}:
            raise BatchError(
                f"The labels are {describe(labels)}. Mixing needs classes [n] or one-hot rows "
                "[n, classes]; say where they are with label=<key or index>."
            )
        if labels.ndim == 2:
            return labels.float()
        if labels.is_floating_point():
            dtype = str(labels.dtype).removeprefix("torch.")
            raise BatchError(
                f"The labels are {describe(labels)}, numbers of {dtype}. Classes are integers: "
                "have the dataset return int(label). One number for each sample to regress on is "
                "mixed as rows of one, [n, 1]: torch.tensor([value])."
            )
        if num_classes is None:
            raise BatchError(
                f"The labels are {describe(labels)}. To mix classes their number is needed: "
                "mixed(..., num_classes=10)."
            )
        if labels.device.type == "cpu" and len(labels):
            for value in labels.long().aminmax():
                _check_class(int(value), num_classes, "A label of the batch")
        # By comparison: one_hot would ask the device for the largest class.
        return (labels[:, None] == torch.arange(num_classes, device=device)).float()


def _check_class(value: int, classes: int, what: str) -> None:
    if not 0 <= value < classes:
        raise BatchError(
            f"{what} is class {value}, but num_classes={classes} means classes 0 to {classes - 1}. "
            "What has no class cannot be mixed: leave such samples out of the dataset."
        )


def _existing(batch: Batch, place: int | str, name: str) -> int | str:
    if not has_field(batch, place):
        raise BatchError(f"There is no field {place!r} (given as {name}=) in {describe(batch)}.")
    return place


class _Form:
    """The images of a batch as ``[n, C, H, W]``, and the way back to how they came."""

    def __init__(self, image: Tensor) -> None:
        self._gray = image.ndim == 3
        self._last = image.ndim == 4 and not channels_first(tuple(image.shape[1:]))
        image = image[:, None] if self._gray else image
        last = image.is_contiguous(memory_format=torch.channels_last)
        keeps = last and not image.is_contiguous()
        self._format = torch.channels_last if keeps else torch.contiguous_format
        self.image = image.permute(0, 3, 1, 2) if self._last else image

    def restored(self, image: Tensor) -> Tensor:
        if self._gray:
            return image[:, 0]
        if self._last:
            return image.permute(0, 2, 3, 1).contiguous()
        # Nothing is copied where a step has kept it.
        return image.contiguous(memory_format=self._format)


def _mask_parts(mask: object, image: Tensor) -> Tensor:
    size = tuple(image.shape[2:])
    if isinstance(mask, Tensor) and mask.ndim in {3, 4}:
        if tuple(mask.shape[1:3]) == size:
            return mask if mask.ndim == 3 else mask.permute(0, 3, 1, 2)
        if tuple(mask.shape[2:]) == size:
            return mask
    raise BatchError(
        f"The masks are {describe(mask)} beside images of {size[0]} x {size[1]} pixels. Mixing "
        "needs masks of the size of the images."
    )


def _mask_restored(mask: Tensor, given: Tensor) -> Tensor:
    same = tuple(mask.shape) == tuple(given.shape)
    return mask if same else mask.permute(0, 2, 3, 1).contiguous()


def mixed(
    *steps: object,
    image: int | str | None = None,
    mask: int | str | None = None,
    stays: int | str | Sequence[int | str] = (),
    label: int | str | None = None,
    num_classes: int | None = None,
    same_pixels: bool = False,
) -> MixedTransform:
    """Return a transform that mixes the samples of a batch, behind a pipeline or alone.

    For example ``FastDataModule(augment=mixed(compose, CutMix(), num_classes=10))``. What is drawn
    for a sample depends on ``(seed, epoch, dataset index)`` alone; who it is mixed with, also on
    which samples are in its batch, not on their order.

    Args:
        steps: a pipeline of Albumentations or torchvision v2 first, if there is one; then
            ``MixUp`` or ``CutMix``, in the order in which they run.
        image: key or index of the image in a sample and in a batch; None finds it.
        mask: key or index of the mask; None takes the key ``"mask"`` where there is one.
        stays: what is left as it is, as :func:`as_batch_transform` takes it.
        label: key or index of the labels: classes ``[n]`` or one-hot ``[n, classes]``; they become
            shares ``[n, classes]``, float32, in every batch. None takes the key ``"label"``,
            ``"labels"``, ``"target"`` or ``"targets"``, or the field behind the image in a tuple.
        num_classes: number of classes; needed where labels are not one-hot.
        same_pixels: as :func:`as_batch_transform` takes it.

    Raises:
        TransformError: nothing to mix with was given, or a pipeline that is not the first, or one
            that transforms what the mixing would leave as it is: boxes, keypoints or additional
            targets.
    """
    rest = list(steps)
    pipeline = None
    if rest and not isinstance(rest[0], MixStep):
        first = as_batch_transform(
            rest.pop(0), image=image, mask=mask, stays=stays, same_pixels=same_pixels
        )
        worker = first.in_worker(on_device=False)
        if worker is None or worker.needs_batches:
            raise TransformError(
                f"{first.name} comes before what mixes, and only a pipeline of Albumentations or "
                "torchvision v2 can. Register a callable by itself, behind the mixing."
            )
        pipeline = first
    mixes = tuple(step for step in rest if isinstance(step, MixStep))
    wrong = [step for step in rest if not isinstance(step, MixStep)]
    if wrong or not rest:
        what = f"{wrong[0]!r} does not mix" if wrong else "There is nothing that mixes"
        raise TransformError(
            f"{what}. Give mixed() a pipeline first, if you have one, and then MixUp or CutMix."
        )
    if isinstance(pipeline, BatchTransform):
        _check_all_is_mixed(pipeline)
    fields = Fields(image=image, mask=mask, stays=listed(stays))
    return MixedTransform(pipeline, Mixer(mixes, fields, label, num_classes))


def _check_all_is_mixed(pipeline: BatchTransform) -> None:
    """Refuse to mix images whose keypoints, boxes or further images would stay behind."""
    names = {"bboxes": "boxes", "keypoints": "keypoints"}
    moved = [what for name, what in names.items() if name in pipeline.compose.processors]
    others = sorted(pipeline.compose.additional_targets)
    moved += [f"the additional targets {', '.join(others)}"] if others else []
    if moved:
        raise TransformError(
            f"The pipeline transforms {' and '.join(moved)}, which cannot be mixed, so that they "
            "would no longer belong to their images."
        )


class MixedTransform(StageTransform):
    """A pipeline or none, and what mixes the batch behind it; see :func:`mixed`.

    Attributes:
        pipeline: what runs on each sample before the mixing, or None.
    """

    def __init__(self, pipeline: StageTransform | None, mixer: Mixer) -> None:
        self.name = ", ".join([*([pipeline.name] if pipeline else []), *map(_name, mixer.steps)])
        self.library = mixer.library if pipeline is None else pipeline.library
        self.pipeline = pipeline
        self._mixer = mixer

    def redrawn(self) -> tuple[str, ...]:
        """Return the operations of which a device makes other pixels of the same distribution."""
        return () if self.pipeline is None else self.pipeline.redrawn()

    def without_form(self) -> Sequence[tuple[str, torch.nn.Module]]:
        """Return the parts of the pipeline that run on one sample after the other, by name."""
        return () if self.pipeline is None else self.pipeline.without_form()

    def check_sample(self, sample: Batch) -> None:
        """Raise BatchError if a sample of the dataset holds no image that can be read."""
        if self.pipeline is not None:
            self.pipeline.check_sample(sample)
        else:
            find_fields(sample, self._mixer.fields, batched=False)

    def for_samples(self, samples: Iterable[Any]) -> Self:
        """Return the transform for a dataset, of which these are samples from all over it."""
        return self if self.pipeline is None else self._behind(self.pipeline.for_samples(samples))

    def made_of(self) -> tuple[object, ...]:
        """Return the pipeline, and what mixes."""
        before = () if self.pipeline is None else self.pipeline.made_of()
        return (*before, *self._mixer.steps)

    def renewed(self) -> Self:
        """Return the transform as the pipeline is now: itself, if nothing of that has changed."""
        return self if self.pipeline is None else self._behind(self.pipeline.renewed())

    def _behind(self, pipeline: StageTransform) -> Self:
        if pipeline is self.pipeline:
            return self
        twin = copy.copy(self)
        twin.pipeline = pipeline
        return twin

    def in_worker(self, *, on_device: bool) -> MixedWorker:
        """Return the part that runs on each sample in the side process."""
        inner = None if self.pipeline is None else self.pipeline.in_worker(on_device=on_device)
        return MixedWorker(inner, self._mixer)

    def apply(self, batch: Batch, draws: Draws | None) -> Batch:
        """Run the pipeline, then the mixing; BatchError if a field has not the form it needs."""
        if draws is None:
            return batch
        if self.pipeline is not None:
            before = draws.before if isinstance(draws, BatchDraws) else draws
            batch = self.pipeline.apply(batch, before)
        return self._mixer.carry_out(batch, draws)

    def apply_unprepared(self, batch: Batch, key: SampleKey) -> Batch:
        """Draw and apply in one go, for a batch of another loader."""
        if self.pipeline is not None:
            batch = self.pipeline.apply_unprepared(batch, key)
        found = find_fields(batch, self._mixer.fields, batched=True)
        images: Tensor = get_field(batch, found.image)
        keys = [key._replace(index=key.index + row) for row in range(len(images))]
        draws = self._mixer.pack([self._mixer.draw(own) for own in keys], None, ())
        return self._mixer.carry_out(batch, draws.to(images.device, True))

    def explain(self) -> str:
        """Return where each operation runs and why, as text."""
        rows = self.pipeline.rows() if isinstance(self.pipeline, PipelineTransform) else []
        steps = [(_name(step), "batch", "mixes its samples") for step in self._mixer.steps]
        return table(rows + steps)


class MixedWorker(WorkerTransform):
    """The part of a mixed transform that runs on each sample; picklable."""

    needs_batches = True

    def __init__(self, inner: WorkerTransform | None, mixer: Mixer) -> None:
        self._inner = inner
        self._mixer = mixer

    def __call__(self, sample: Batch, key: SampleKey) -> tuple[Batch, object]:
        """Return the sample as the worker leaves it, and what was drawn for it."""
        self._mixer.check_classes(sample)
        tape: Tape | None = None
        if self._inner is not None:
            sample, tape = self._inner(sample, key)
        return sample, (tape, self._mixer.draw(key))

    def collate(self, drawn: Sequence[Any]) -> Draws:
        """Return what was drawn for a batch, packed in the order of its samples."""
        tapes, own = zip(*drawn, strict=True)
        return self._mixer.pack(own, self._inner, tapes)

    def stacks(self, samples: Sequence[Batch], drawn: Sequence[Any], batch: Batch = None) -> bool:
        """Return whether what waits for the device can be one tensor, or is one in a batch."""
        tapes = [tape for tape, _ in drawn]
        return self._inner is None or self._inner.stacks(samples, tapes, batch)

    def finish_each(
        self, samples: Sequence[Batch], drawn: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return samples of which only the mixing waits for the device, and what it drew."""
        if self._inner is None:
            return list(samples), list(drawn)
        tapes, numbers = zip(*drawn, strict=True)
        done, left = self._inner.finish_each(samples, tapes)
        return done, list(zip(left, numbers, strict=True))

    def finish(self, batch: Batch, drawn: Sequence[Any]) -> Batch:
        """Return a batch that was collated here, mixed; for where nothing runs on the device."""
        draws = self._mixer.pack([own for _, own in drawn], None, ())
        return self._mixer.carry_out(batch, draws)


def draw_numbers(steps: Sequence[MixStep], key: SampleKey) -> tuple[list[float], list[int]]:
    """Return all numbers of one sample: those of the steps, and one to find partners by per step.

    They belong to the key, and to no other key; the pipeline's own draws are independent of them.
    """
    text = b"mixing %d,%d,%d" % key
    digest = hashlib.blake2b(text, digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=np.frombuffer(digest, np.uint64)))
    numbers: list[float] = []
    order = []
    for step in steps:
        order.append(int(generator.integers(0, 2**63, dtype=np.uint64)))
        numbers += step.draw(generator)
    return numbers, order


def stack_drawn(drawn: Sequence[tuple[list[float], list[int]]]) -> dict[str, np.ndarray]:
    """Return the numbers of a batch: float64 ``[n, count]`` and int64 ``[n, steps]``."""
    return {
        _NUMBERS: np.array([numbers for numbers, _ in drawn], np.float64).reshape(len(drawn), -1),
        _ORDER: np.array([order for _, order in drawn], np.int64).reshape(len(drawn), -1),
    }


def _name(step: object) -> str:
    return type(step).__name__

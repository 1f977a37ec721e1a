"""MixUp and CutMix on whole batches, keyed by sample."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Final, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_fastdata.augment.fields import (
    Fields,
    Location,
    Mover,
    channels_first,
    check_beside,
    describe,
    find_fields,
    from_start,
    get_field,
    has_field,
    in_namedtuple,
    listed,
    put_fields,
    size_of,
)
from lightning_fastdata.augment.replay.program import Draws
from lightning_fastdata.augment.stage_transform import (
    PipelineTransform,
    StageTransform,
    WorkerTransform,
    plain_tensors,
    table,
)
from lightning_fastdata.augment.transform import BatchTransform, as_batch_transform
from lightning_fastdata.errors import (
    BatchError,
    OptionsError,
    TransformError,
    check,
    is_number,
    is_whole,
)
from lightning_fastdata.tree import children
from lightning_fastdata.types import Batch, SampleKey

__all__ = ["CutMix", "MixUp", "MixedTransform", "mixed"]
_NOT_MIXED: Final = ("boxes", "bboxes", "mask", "masks")
_LABEL_KEYS: Final = ("label", "labels", "target", "targets")
_NUMBERS, _ORDER = "mixing numbers", "mixing order"


def partners(order: Tensor) -> Tensor:
    """Return for each sample the position of the sample it is mixed with, int64 ``[n]``.

    The samples stand in a ring, sorted by their random numbers ``order``, int64 ``[n]``; a sample's
    partner is the one before. In a batch of several no sample is its own partner, each is a partner
    once, and who meets whom depends on which samples the batch holds, not on their order in it.
    """
    ring = order.argsort(stable=True)
    return torch.empty_like(ring).scatter_(0, ring, ring.roll(1))


def _blended(values: Tensor, kept: Tensor, other: Tensor) -> Tensor:
    """Return each sample blended with its partner; ``kept``, float64 ``[n]``, is its own share."""
    own, rest = (
        share.to(values.dtype).view(-1, *[1] * (values.ndim - 1)) for share in (kept, 1 - kept)
    )
    return values[other] * rest + values * own


@dataclass(frozen=True)
class _Mix:
    alpha: float
    p: float = 1.0

    def __post_init__(self) -> None:
        if not is_number(self.alpha, above=0) or self.alpha == float("inf"):
            raise OptionsError(f"alpha is {self.alpha!r}; give a positive number.")
        if not is_number(self.p) or not 0 <= self.p <= 1:
            raise OptionsError(f"p is {self.p!r}; give a probability from 0 to 1.")


@dataclass(frozen=True)
class MixUp(_Mix):
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
    """Number of random numbers that are drawn for each sample."""
    alpha: float = 0.2

    def draw(self, generator: np.random.Generator) -> list[float]:
        """Return a uniform number, which decides whether the sample is blended, and the share."""
        return [generator.random(), generator.beta(self.alpha, self.alpha)]

    def mix(self, image: Tensor, numbers: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """Return blended images, and each sample's own share in its image."""
        share = torch.where(numbers[:, 0] < self.p, numbers[:, 1], 1.0)
        # Half precision would round the shares, so that they no longer add up to 1.
        wide = image if image.dtype == torch.float64 else image.float()
        made = _blended(wide, share, other)
        return (made if image.is_floating_point() else made.round()).to(image.dtype), share


@dataclass(frozen=True)
class CutMix(_Mix):
    """Replace a rectangle of each sample by its partner's; mix labels by the shares of the area.

    After Yun et al., "CutMix: regularization strategy to train strong classifiers with localizable
    features" (ICCV 2019), with torchvision's rectangle: its middle is anywhere in the image, and
    its part outside the image is cut off.

    Args:
        alpha: the share of the area that is kept is drawn from Beta(alpha, alpha) for each sample.
        p: probability that a sample gets a rectangle.

    Raises:
        OptionsError: ``alpha`` is not positive, or ``p`` is no probability.
    """

    count: ClassVar[int] = 4
    """Number of random numbers that are drawn for each sample."""
    alpha: float = 1.0

    def draw(self, generator: np.random.Generator) -> list[float]:
        """Return a number that decides whether, the share, and the middle as parts of the sides."""
        share = generator.beta(self.alpha, self.alpha)
        return [generator.random(), share, *generator.random(2)]

    def mix(self, image: Tensor, numbers: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """Return images with rectangles, and each sample's own share in its image."""
        height, width = size_of(image)
        left, top, right, bottom = cut_boxes(numbers, height, width, p=self.p)
        y = torch.arange(height, device=numbers.device)
        x = torch.arange(width, device=numbers.device)
        rows = (y >= top[:, None]) & (y < bottom[:, None])
        columns = (x >= left[:, None]) & (x < right[:, None])
        inside = rows[:, :, None] & columns[:, None, :]
        if image.ndim == 4:
            first = channels_first(tuple(image.shape[1:]))
            inside = inside[:, None] if first else inside[..., None]
        kept = 1 - ((right - left) * (bottom - top)).double() / (height * width)
        return torch.where(inside, image[other], image), kept


def cut_boxes(
    numbers: Tensor, height: int, width: int, *, p: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return left, top, right and bottom of the rectangles to cut, int64 ``[n]`` each.

    ``numbers`` is what `CutMix` drew, float64 ``[n, 4]``. Without a rectangle, left equals right
    and top equals bottom.
    """
    whether, share, across, down = numbers.unbind(1)
    half = torch.where(whether < p, 0.5 * (1 - share).clamp(min=0).sqrt(), 0.0)
    x, y = (across * width).long(), (down * height).long()
    half_width, half_height = (half * width).long(), (half * height).long()
    left, right = (x - half_width).clamp(min=0), (x + half_width).clamp(max=width)
    top, bottom = (y - half_height).clamp(min=0), (y + half_height).clamp(max=height)
    return left, top, right, bottom


MixStep: TypeAlias = MixUp | CutMix
"""A way to mix the samples of a batch. ``draw`` returns the ``count`` numbers of a sample; ``mix``
takes images ``[n, C, H, W]``, ``[n, H, W, C]`` or ``[n, H, W]``, the numbers of all samples, and
the position of each sample's partner, ``other``, int64 ``[n]``."""


class Mixer:
    """Mixes whole batches by steps, and finds their images and labels.

    ``label`` is the key or index of the labels, one for each image; None: it is found.
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

        Such a sample would train as if it had no label. Class -100 is refused, too: a loss ignores
        it, but cannot ignore a share of a mixture. Samples are checked, as the host would have to
        wait for the labels of a batch on a device.
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
        """Return what a sample draws by its key."""
        return draw_numbers(self.steps, key)

    def pack(self, drawn: Sequence[Any], inner: WorkerTransform, tapes: Sequence[Any]) -> Draws:
        """Pack what the samples of a batch have drawn, beside the tapes of a pipeline before."""
        return inner.collate(tapes, stack_drawn(drawn))

    def alone(self, batch: Batch, drawn: Sequence[Any], device: torch.device) -> Batch:
        """Return a collated batch, of which nothing waits, with its samples mixed as was drawn."""
        draws = self.pack(drawn, WorkerTransform(), [None] * len(drawn))
        return self.carry_out(batch, draws.to(device, non_blocking=True))

    def carry_out(self, batch: Batch, draws: Draws) -> Batch:
        """Return a collated batch with its samples mixed as was drawn.

        Raises:
            BatchError: a field has not the form that mixing needs.
        """
        numbers, order = (draws.beside[name].view(draws.blob) for name in (_NUMBERS, _ORDER))
        with plain_tensors():
            place = find_fields(batch, self.fields, batched=True).image
            image = self._images(batch, place, len(numbers))
            self._refuse_others(batch)
            label = self._label_place(batch, place)
            self._check_beside(batch, {place, label}, image)
            labels = None if label is None else self._shares(batch, label, image.device)
            ends = list(accumulate(step.count for step in self.steps))
            own = numbers.tensor_split(ends[:-1], dim=1)
            for step, drawn, by in zip(self.steps, own, order.unbind(1), strict=True):
                other = partners(by)
                image, kept = step.mix(image, drawn, other)
                labels = None if labels is None else _blended(labels, kept, other)
            return put_fields(
                batch, {place: image} if label is None else {place: image, label: labels}
            )

    def _images(self, batch: Batch, place: Location, samples: int) -> Tensor:
        image = get_field(batch, place)
        if isinstance(image, Tensor) and image.ndim in {3, 4} and len(image) == samples:
            return image
        raise BatchError(
            f"The image field is {describe(image)}, but was drawn for {samples} samples. Mixing "
            "needs a batch of images of one size: a collate_fn must keep the samples of a batch, "
            "in order."
        )

    def _refuse_others(self, batch: Batch) -> None:
        """Raise BatchError if a batch holds boxes or masks, which cannot be mixed."""
        for name in _NOT_MIXED:
            if isinstance(batch, Mapping) and name in batch and name not in self.fields.stays:
                raise BatchError(
                    f"The batch holds {name!r}, which mixing would leave as they are while the "
                    "images change: only images and labels are mixed. If they belong to no image: "
                    f"stays=[{name!r}]."
                )

    def _check_beside(self, batch: Batch, known: Collection[Location], image: Tensor) -> None:
        """Raise BatchError if a field of the images' size would not be mixed."""
        mover = Mover(_name(self.steps[0]), takes_boxes=False, library="mixing")
        known = {*known, *self.fields.stays}
        check_beside(batch, known, size_of(image), mover, samples=len(image))

    def _label_place(self, item: Batch, image: Location) -> int | str | None:
        if self._label is not None:
            return self._label
        if isinstance(item, Mapping):
            found = next((key for key in _LABEL_KEYS if key in item), None)
            if found is not None:
                return found
        elif isinstance(item, Sequence) and isinstance(image, int) and len(item) > image + 1:
            return image + 1
        self._refuse_without(item, image)
        return None

    def _refuse_without(self, item: Batch, image: Location) -> None:
        """Raise BatchError if there are labels that were not found, or should be some."""
        known = from_start(item, (image, *self.fields.stays))
        others = (
            place
            for place, value in children(item) or ()
            if place not in known and isinstance(value, Tensor) and value.ndim in {1, 2}
        )
        other, classes = next(others, None), self._num_classes
        if other is None and classes is None:
            return
        rest = "" if other is None else f" If {other!r} holds no labels, say stays=[{other!r}]."
        rest += "" if classes is None else f" If there are none, leave num_classes={classes} out."
        raise BatchError(
            f"No labels were found in {describe(item)}, so that images would be mixed without "
            "them. Say where they are with label=<key or index>: only the keys 'label', 'labels', "
            f"'target' and 'targets' are found, and what is behind the image in a tuple.{rest}"
        )

    def _shares(self, batch: Batch, place: int | str, device: torch.device) -> Tensor:
        if not has_field(batch, place):
            raise BatchError(
                f"There is no field {place!r} (given as label=) in {describe(batch)}"
                f"{in_namedtuple(batch, place)}."
            )
        labels = get_field(batch, place)
        if not isinstance(labels, Tensor) or labels.ndim not in {1, 2}:
            raise BatchError(
                f"The labels are {describe(labels)}. Mixing needs classes [n] or one-hot rows "
                "[n, classes]; say where they are with label=<key or index>."
            )
        if labels.ndim == 2:
            if self._num_classes not in {None, labels.shape[1]}:
                raise BatchError(
                    f"The labels are {describe(labels)}, rows of {labels.shape[1]}, but "
                    f"num_classes={self._num_classes} was given. Of a class in a row of one have "
                    "the dataset return int(label); rows are mixed as they are without num_classes."
                )
            return labels.float()
        if labels.is_floating_point() or labels.is_complex():
            raise BatchError(
                f"The labels are {describe(labels)}. Classes are integers: have the dataset return "
                "int(label). One number for each sample to regress on is mixed as rows of one, "
                "[n, 1]: torch.tensor([value])."
            )
        if self._num_classes is None:
            raise BatchError(
                f"The labels are {describe(labels)}. To mix classes their number is needed: "
                "mixed(..., num_classes=10)."
            )
        if labels.device.type == "cpu" and len(labels):
            for value in labels.long().aminmax():
                _check_class(int(value), self._num_classes, "A label of the batch")
        # Not by one_hot, for which the host would wait for the largest class on the device.
        return (labels[:, None] == torch.arange(self._num_classes, device=device)).float()


def _check_class(value: int, classes: int, what: str) -> None:
    if not 0 <= value < classes:
        raise BatchError(
            f"{what} is class {value}, but num_classes={classes} means classes 0 to {classes - 1}. "
            "What has no class cannot be mixed: leave such samples out of the dataset."
        )


def mixed(
    *steps: object,
    image: int | str | None = None,
    stays: int | str | Sequence[int | str] = (),
    label: int | str | None = None,
    num_classes: int | None = None,
    same_pixels: bool = True,  # noqa: ARG001 - of calls written before
) -> MixedTransform:
    """Return a transform that mixes the samples of a batch, behind a pipeline or alone.

    For example ``FastDataModule(augment=mixed(compose, CutMix(), num_classes=10))``. What is drawn
    for a sample depends on ``(seed, epoch, dataset index)`` alone; who it is mixed with, also on
    which samples are in its batch, not on their order. Images and labels are mixed; masks or boxes
    beside them are an error, unless ``stays`` names them.

    Args:
        steps: a pipeline of Albumentations or torchvision v2 first, if there is one; then
            ``MixUp`` or ``CutMix``, in the order in which they run.
        image: key or index of the image in a sample and in a batch; None finds it.
        stays: fields that are left as they are, as :func:`as_batch_transform` takes it.
        label: key or index of the labels: classes ``[n]`` or one-hot ``[n, classes]``; they become
            shares ``[n, classes]``, float32, in every batch. None takes the key ``"label"``,
            ``"labels"``, ``"target"`` or ``"targets"``, or the field behind the image in a tuple;
            a batch that may have its labels elsewhere is an error.
        num_classes: number of classes; needed where labels are not one-hot.
        same_pixels: without effect, as in :func:`as_batch_transform`.

    Raises:
        TransformError: nothing to mix with was given, or a pipeline that is not the first, or one
            that transforms what the mixing would leave as it is: boxes, keypoints or additional
            targets.
    """
    rest = list(steps)
    pipeline = None
    if rest and not isinstance(rest[0], MixStep):
        pipeline = as_batch_transform(rest.pop(0), image=image, stays=stays)
        if isinstance(pipeline, MixedTransform):
            raise TransformError(
                f"{pipeline.name} mixes already. Give all of it at once: mixed(compose, MixUp(), "
                "CutMix())."
            )
        worker = pipeline.in_worker(on_device=False)
        if worker is None or worker.needs_batches:
            raise TransformError(
                f"{pipeline.name} comes before what mixes, and only a pipeline of Albumentations "
                "or torchvision v2 can. Register a callable by itself, behind the mixing."
            )
    fine = num_classes is None or is_whole(num_classes, 1)
    check("num_classes", num_classes, fine, "None and whole numbers from 1")
    mixes = tuple(step for step in rest if isinstance(step, MixStep))
    wrong = [step for step in rest if not isinstance(step, MixStep)]
    if wrong or not rest:
        what = f"{wrong[0]!r} does not mix" if wrong else "There is nothing that mixes"
        raise TransformError(
            f"{what}. Give mixed() a pipeline first, if you have one, and then MixUp or CutMix."
        )
    if isinstance(pipeline, BatchTransform):
        _check_all_is_mixed(pipeline)
    fields = Fields(image=image, stays=listed(stays))
    return MixedTransform(pipeline, Mixer(mixes, fields, label, num_classes))


def _check_all_is_mixed(pipeline: BatchTransform) -> None:
    """Refuse to mix images whose keypoints, boxes or further images would not be mixed."""
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
    """A pipeline, if there is one, and the steps that mix its batches; see :func:`mixed`.

    Attributes:
        pipeline: the pipeline that runs on each sample before the mixing, or None.
    """

    def __init__(self, pipeline: StageTransform | None, mixer: Mixer) -> None:
        self.name = ", ".join([*([pipeline.name] if pipeline else []), *map(_name, mixer.steps)])
        self.library = mixer.library if pipeline is None else pipeline.library
        self.pipeline = pipeline
        self._mixer = mixer

    def check_sample(self, sample: Batch) -> None:
        """Raise BatchError if a sample of the dataset holds no image that can be read."""
        if self.pipeline is not None:
            self.pipeline.check_sample(sample)
        else:
            find_fields(sample, self._mixer.fields, batched=False)

    def for_samples(self, samples: Iterable[Any]) -> Self:
        """Return the transform for a dataset, given samples from all over it."""
        return self if self.pipeline is None else self._behind(self.pipeline.for_samples(samples))

    def made_of(self) -> tuple[object, ...]:
        """Return the pipeline, if there is one, and the steps that mix."""
        before = () if self.pipeline is None else self.pipeline.made_of()
        return (*before, *self._mixer.steps)

    def renewed(self) -> Self:
        """Return the transform for the pipeline as it is now; itself if that has not changed."""
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
            batch = self.pipeline.apply(batch, draws)
        return self._mixer.carry_out(batch, draws)

    def apply_unprepared(self, batch: Batch, key: SampleKey) -> Batch:
        """Draw and apply in one go, for a batch of another loader."""
        if self.pipeline is not None:
            batch = self.pipeline.apply_unprepared(batch, key)
        found = find_fields(batch, self._mixer.fields, batched=True)
        images: Tensor = get_field(batch, found.image)
        keys = [key._replace(index=key.index + row) for row in range(len(images))]
        return self._mixer.alone(batch, [self._mixer.draw(own) for own in keys], images.device)

    def explain(self) -> str:
        """Return where each operation runs and why, as text."""
        rows = self.pipeline.plan.placements if isinstance(self.pipeline, PipelineTransform) else ()
        steps = [(_name(step), "batch", "mixes its samples") for step in self._mixer.steps]
        return table([*rows, *steps])


class MixedWorker(WorkerTransform):
    """The part of a mixed transform that runs on each sample; picklable.

    What is drawn for a sample is a pair: the tape of the pipeline, and the numbers of the mixing.
    """

    needs_batches = True

    def __init__(self, inner: WorkerTransform | None, mixer: Mixer) -> None:
        super().__init__()
        self._inner = inner or WorkerTransform()
        self._mixer = mixer

    def __call__(self, sample: Batch, key: SampleKey) -> tuple[Batch, object]:
        """Return the sample as the worker leaves it, and what was drawn for it."""
        self._mixer.check_classes(sample)
        sample, tape = self._inner(sample, key)
        return sample, (tape, self._mixer.draw(key))

    def pipelines(self) -> tuple[object, ...]:
        """Return the pipeline that comes before the mixing, if there is one."""
        return self._inner.pipelines()

    def collate(
        self,
        drawn: Sequence[Any],
        beside: Mapping[str, np.ndarray] | None = None,  # noqa: ARG002
    ) -> Draws:
        """Return what was drawn for a batch, packed in the order of its samples."""
        tapes, own = zip(*drawn, strict=True)
        return self._mixer.pack(own, self._inner, tapes)

    def stacks(
        self, samples: Sequence[Batch], drawn: Sequence[Any], listed: Collection[Any] = ()
    ) -> bool:
        """Return whether what waits for the device can be stacked, and is not ``listed``."""
        return self._inner.stacks(samples, [tape for tape, _ in drawn], listed)

    def finish_each(
        self, samples: Sequence[Batch], drawn: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Finish the pipeline on each sample; return the samples, and the draws for the mixing."""
        tapes, numbers = zip(*drawn, strict=True)
        done, left = self._inner.finish_each(samples, tapes)
        return done, list(zip(left, numbers, strict=True))

    def finish(self, batch: Batch, drawn: Sequence[Any]) -> Batch:
        """Mix a batch that was collated here; used where nothing runs on the device."""
        return self._mixer.alone(batch, [own for _, own in drawn], torch.device("cpu"))


def draw_numbers(steps: Sequence[MixStep], key: SampleKey) -> tuple[list[float], list[int]]:
    """Return all numbers of one sample: those of the steps, and one per step that decides partners.

    They follow from the key alone, and are independent of the pipeline's own draws.
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

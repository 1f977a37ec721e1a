"""A torchvision v2 pipeline as a transform of batches, and its part in the workers.

torchvision's own ``v2.CutMix`` and ``v2.MixUp`` may stand at its end, or alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import filterfalse, takewhile
from typing import Any, Final, NamedTuple, cast

import numpy as np
import PIL.Image
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.data import default_collate
from torchvision import tv_tensors
from torchvision.transforms import v2

from lightning_fastdata.augment.fields import (
    CHANNELS,
    Fields,
    Location,
    Mover,
    UnsureError,
    channels_first,
    check_beside,
    check_named,
    describe,
    find_fields,
    first_device,
    get_field,
    has_field,
    put_fields,
)
from lightning_fastdata.augment.mixing import MixedTransform, Mixer
from lightning_fastdata.augment.ops.operation import Tape
from lightning_fastdata.augment.replay.program import Draws, compile_tapes, key_of_batch
from lightning_fastdata.augment.replay.torch import checked_rows, replay
from lightning_fastdata.augment.stage_transform import (
    CallableTransform,
    PipelineTransform,
    StageTransform,
    WorkerTransform,
    plain_tensors,
)
from lightning_fastdata.augment.torchvision.forms import device_ops, plain
from lightning_fastdata.augment.torchvision.plan import (
    ANY_LAYOUT,
    MIXES,
    MOVES,
    NEED_BOXES,
    Leaf,
    Plan,
    as_it_is,
    children_of,
    is_own,
    is_v1,
    is_v2,
    leaves_of,
    make_plan,
    may_draw,
    with_children,
)
from lightning_fastdata.augment.torchvision.tape import Recorder, form_of
from lightning_fastdata.errors import BatchError, FastDataWarning, TransformError
from lightning_fastdata.randomness.global_generators import GENERATORS
from lightning_fastdata.randomness.seeds import keyed_draws
from lightning_fastdata.tree import Path, at_path, put_leaves, with_paths
from lightning_fastdata.types import Batch, SampleKey

_FROM_ARRAYS: Final = frozenset({"ToImage", "ToTensor"})
_KINDS: Final = {"image": tv_tensors.Image, "mask": tv_tensors.Mask}


def stage_transform(transform: object, fields: Fields) -> StageTransform | None:
    """Return the batch transform of a v2 pipeline, which may end in mixing; None: it is none.

    Raises:
        TransformError: a transform that draws for each sample stands behind or beside one that
            mixes, or the pipeline is of torchvision's first interface.
    """
    steps = _flat(transform)
    before = list(takewhile(lambda step: not any(map(_mixes, leaves_of(step))), steps))
    mixing = steps[len(before) :]
    if is_v1(transform):
        raise TransformError(
            f"{type(transform).__name__} is of torchvision's first interface "
            "(torchvision.transforms), which draws once for a whole batch. augment= runs v2 with "
            "draws for each sample: take the same names from torchvision.transforms.v2, begin with "
            "v2.ToImage(), and write v2.ToDtype(torch.float32, scale=True) for ToTensor. Its "
            "pixels are those of tensors, which differ a little from those of PIL images. To keep "
            "the latter, leave the pipeline in the dataset."
        )
    if not mixing:
        return TorchvisionTransform(transform, fields) if is_v2(transform) else None
    for leaf in (leaf for step in mixing for leaf in leaves_of(step)):
        if not _mixes(leaf) and may_draw(leaf):
            raise TransformError(
                f"{leaf.name} stands behind or beside what mixes the samples of a batch "
                f"({mixing[0]!r}), where it would draw once for all of them. Put it before."
            )
    pipeline = TorchvisionTransform(v2.Compose(before), fields) if before else None
    return _OwnMixes(pipeline, _OwnMixer(mixing, fields))


def _mixes(leaf: Leaf) -> bool:
    return isinstance(leaf.transform, MIXES)


def _flat(transform: Any) -> list[Any]:
    if type(transform) not in {v2.Compose, nn.Sequential}:
        return [transform]
    return [step for child in children_of(transform) or () for step in _flat(child)]


class TorchvisionTransform(PipelineTransform):
    """A torchvision v2 pipeline for batches, for ``FastDataModule(augment=...)``.

    Each sample draws what v2 draws with torch's generator seeded by its key
    (:func:`~lightning_fastdata.randomness.seeds.torch_seed`).
    """

    library = "torchvision"
    plan: Plan
    _one_size = _pil = False
    """Whether all images that were seen have one size, and whether they are PIL images."""

    def take_in(self) -> None:
        """Plan for the pipeline as it is now, which is what runs until the next time."""
        super().take_in()
        self._taken = as_it_is(self.pipeline)
        self.plan = make_plan(self._taken, one_size=self._one_size, pil=self._pil)
        self._collated: dict[bool, PipelineWorker] = {}
        """Workers for batches of other loaders, by whether a device takes what it can."""

    def _look_at(self, sample: Batch) -> Any:
        return image_of(typed(sample, self._fields))

    def _fit(self, seen: Sequence[Any]) -> None:
        # Images of one size need nothing done to them before they make a batch.
        sizes = set(map(size_of, seen))
        self._one_size = len(seen) > 1 and len(sizes) == 1 and None not in sizes
        self._pil = any(isinstance(image, PIL.Image.Image) for image in seen)

    def behind(self) -> StageTransform:
        """Return a callable that runs on batches behind another transform; itself if it draws."""
        draws = any(map(may_draw, self.plan.leaves))
        return self if draws else CallableTransform(self.pipeline, self._fields)

    def check_sample(self, sample: Batch) -> None:
        """Raise BatchError if v2 would leave a sample, or a part of it, as it is."""
        traits = Traits.of(self.plan.leaves)
        known = typed(sample, self._fields)
        check_convertible(sample, known, traits)
        check_roles(known, self._fields, traits)

    def in_worker(self, *, on_device: bool) -> PipelineWorker:
        """Return the part that runs on each sample: all of it, or what a device cannot do."""
        plan = self.plan if on_device and self.defers else None
        return PipelineWorker(self._taken, self._fields, plan)

    def apply(self, batch: Batch, draws: Draws | None) -> Batch:
        """Compute what was drawn, on images ``[n, C, H, W]`` and masks from the workers.

        Raises:
            BatchError: a field is missing, or has another number of samples than was drawn.
        """
        if draws is None or not draws.programs:
            return batch
        ops, done = device_ops(self._taken), {}
        with plain_tensors():
            for path, program in draws.programs.items():
                value = plain(checked_rows(at_path(batch, path), draws, path))
                done[path] = replay(program, draws.blob, value, ops)
        return put_leaves(batch, done)

    def apply_unprepared(self, batch: Batch, key: SampleKey) -> Batch:
        """Draw and compute here, for a batch ``[n, C, H, W]`` of another loader.

        Its samples are treated like any others. On the CPU it is faster to run the whole pipeline
        on one sample after the other.

        Raises:
            BatchError: there is no image ``[n, C, H, W]``, or a field would not move with it.
            TransformError: the pipeline needs boxes or keypoints, which a collated batch has lost,
                or its results cannot be stacked.
        """
        with plain_tensors():
            return self.run_collated(
                batch, key, on_device=first_device(batch) != torch.device("cpu")
            )

    def run_collated(self, batch: Batch, key: SampleKey, *, on_device: bool) -> Batch:
        """Do as :meth:`apply_unprepared`; ``on_device``: compute on the whole batch what can be."""
        traits = Traits.of(self.plan.leaves)
        if traits.boxes is not None:
            raise TransformError(
                f"The pipeline transforms boxes or keypoints, too ({traits.boxes}), and those "
                "cannot be told apart in a batch that another loader has collated. Give the "
                "pipeline to FastDataModule(augment=...) and let FastDataModule load the data."
            )
        places = {"image": (found := find_fields(batch, self._fields, batched=True)).image}
        places |= {} if found.mask is None else {"mask": found.mask}
        given = {
            name: _checked_tensor(get_field(batch, where), where) for name, where in places.items()
        }
        image = given["image"]
        if image.ndim != 4 or _channels_are_last(image):
            raise BatchError(
                f"The images are {describe(image)}, and torchvision takes [n, C, H, W]. Let the "
                "dataset return images [C, H, W], or begin its own transforms with v2.ToImage()."
            )
        if traits.mover is not None and found.image is not None:
            known = {*places.values(), *self._fields.stays}
            size = (int(image.shape[-2]), int(image.shape[-1]))
            check_beside(batch, known, size, traits.mover, samples=len(image))
        made = self._made(given, key, on_device=on_device)
        return put_fields(batch, {places[name]: made[name] for name in places})

    def _made(
        self, given: Mapping[str, Tensor], key: SampleKey, *, on_device: bool
    ) -> Mapping[str, Batch]:
        """Return images and masks of a batch, transformed, where they lie."""
        if on_device not in self._collated:
            plan = make_plan(self._taken, one_size=True) if on_device else None
            self._collated[on_device] = PipelineWorker(self._taken, Fields(), plan)
        worker = self._collated[on_device]
        # A worker that only draws needs no pixels, and the host need not wait for them.
        known = all(form_of(typed_row) for typed_row in _sample(given, 0).values())
        blind = known and on_device and worker.needs_no_pixels
        rows = {name: one.to("meta" if blind else "cpu") for name, one in given.items()}
        keys = [key._replace(index=key.index + row) for row in range(len(rows["image"]))]
        samples = [_whole(_sample(rows, row)) for row in range(len(keys))]
        made, tapes = zip(*map(worker, samples, keys), strict=True)
        if on_device and not worker.stacks(made, tapes):
            return self._made(given, key, on_device=False)
        whole = _whole(given) if blind else _stacked(made, given["image"].device)
        draws = worker.collate(tapes).to(given["image"].device, non_blocking=True)
        whole = self.apply(whole, draws)
        return whole if "mask" in given else {"image": whole}


def _checked_tensor(value: Any, place: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise BatchError(f"The field {place!r} is {describe(value)}. Expected a tensor of samples.")
    return plain(value)


def _sample(rows: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
    # Copies: transforms may write to what they are given.
    return {name: batch[row].clone().as_subclass(_KINDS[name]) for name, batch in rows.items()}


def _whole(parts: Mapping[str, Batch]) -> Batch:
    """Return the input of the pipeline: an image, or an image and a mask by name."""
    return parts if "mask" in parts else parts["image"]


def _stacked(samples: Sequence[Batch], device: torch.device) -> Batch:
    try:
        whole = default_collate([tree_map_only(Tensor, plain, one) for one in samples])
    except (RuntimeError, TypeError) as error:
        raise TransformError(
            f"What the pipeline makes of the samples of a batch cannot be stacked: {error}. End it "
            "with transforms that make tensors of one size: Resize, RandomCrop, ToImage, ..."
        ) from error
    return tree_map_only(Tensor, lambda one: one.to(device), whole)


class _OwnMixes(MixedTransform):
    _mixer: _OwnMixer

    def behind(self) -> StageTransform:
        """Return a callable that mixes behind another transform, by the number of the batch."""
        if self.pipeline is not None:
            return self
        mixing = CallableTransform(self._mixer, Fields())
        mixing.name = self.name
        return mixing


class _OwnMixer(Mixer):
    """Has torchvision mix whole batches, and draw by the key of the batch."""

    library = "torchvision"

    def __init__(self, steps: Sequence[Any], fields: Fields) -> None:
        self.steps = tuple(steps)
        self.fields = fields

    def check_classes(self, sample: Batch) -> None:
        """Leave the check to torchvision."""

    def draw(self, key: SampleKey) -> SampleKey:
        """Return the key of the sample; the first sample's key decides what the batch draws."""
        return key

    def pack(
        self, drawn: Sequence[SampleKey], inner: WorkerTransform, tapes: Sequence[Any]
    ) -> Draws:
        """Return the key of the batch, and what was drawn for a pipeline before."""
        draws = inner.collate(tapes)
        draws.key = key_of_batch(drawn[0])
        return draws

    def carry_out(self, batch: Batch, draws: Draws) -> Batch:
        """Return a collated batch as torchvision mixes it by the key of the batch."""
        place = find_fields(batch, self.fields, batched=True).image
        self._check_beside(batch, {place}, get_field(batch, place))
        assert draws.key is not None  # as pack() makes it
        with plain_tensors(), keyed_draws(draws.key, ("torch",)):
            return self(batch)

    def __call__(self, batch: Batch) -> Batch:
        """Return a collated batch as torchvision mixes it, by torch's generator as it is."""
        place = find_fields(batch, self.fields, batched=True).image
        # By this type it is found beside other tensors, whatever their order.
        made = put_fields(batch, {place: tv_tensors.Image(get_field(batch, place))})
        for step in cast("tuple[Any, ...]", self.steps):
            made = step(made)
        return put_fields(made, {place: plain(get_field(made, place))})


class PipelineWorker(WorkerTransform):
    """The part of a pipeline that runs on each sample in the side process; picklable.

    ``plan`` says what is left to a device; None: the whole pipeline runs here, as v2 runs it.
    """

    def __init__(self, pipeline: Any, fields: Fields, plan: Plan | None) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._fields = fields
        self._plan = plan
        self._traits = Traits.of(leaves_of(pipeline))

    def __call__(self, sample: Batch, key: SampleKey) -> tuple[Batch, Tape | None]:
        """Return the sample as the worker leaves it, and a tape of what the device has still to do.

        The tape is None when everything was done here.

        Raises:
            BatchError: a named field is missing, or a field would not move with the image.
        """
        sample = typed(sample, self._fields)
        check_roles(sample, self._fields, self._traits)
        place = None if self._traits.function is None else place_of_image(sample)
        alone = place is not None and nothing_beside_image(sample)
        given = at_path(sample, place) if place is not None and alone else sample
        if self._traits.writes:  # the dataset may hold these tensors, and hand them out again
            given = tree_map_only(Tensor, lambda tensor: tensor.clone(), given)
        with plain_tensors(), keyed_draws(key, self._traits.generators):
            made, tape = self._run(given, None if alone else place)
        if place is None or not alone:
            return made, tape
        whole = put_leaves(sample, {place: made})
        return whole, tape and {(*place, *path): track for path, track in tape.items()}

    @property
    def needs_no_pixels(self) -> bool:
        """Whether it only draws, so that samples need no pixels."""
        return self._plan is not None and self._plan.boundary < 0

    def _run(self, given: Batch, place: Path | None) -> tuple[Batch, Tape | None]:
        """Run the pipeline; ``place``: where the functions in it find the image; None: as v2."""
        pipelines: dict[Path | None, Any] = vars(self._local).setdefault("pipelines", {})
        if place not in pipelines:
            own = self._pipeline if place is None else _on_images(self._pipeline, place)
            pipelines[place] = own if self._plan is None else Recorder(own, self._plan)
        made = pipelines[place](given)
        return (made, None) if self._plan is None else made

    def pipelines(self) -> tuple[object, ...]:
        """Return the pipeline."""
        return (self._pipeline,)

    def waiting(self, sample: Batch, names: Collection[Path]) -> Mapping[Path, Tensor]:
        """Return the tensors that lie in a sample at these paths."""
        found = {path: at_path(sample, path) for path in names}
        return {path: value for path, value in found.items() if isinstance(value, Tensor)}

    def finished(self, sample: Batch, tape: Tape) -> Batch:
        """Return a sample after the operations on its tape."""
        draws, ops = compile_tapes([tape]), device_ops(self._pipeline)
        done = {}
        for path, program in draws.programs.items():
            value = at_path(sample, path)
            [made] = replay(program, draws.blob, plain(value)[None], ops)
            done[path] = made.as_subclass(type(value))
        return put_leaves(sample, done)


class Traits(NamedTuple):
    """What a pipeline does to samples, as far as its transforms tell."""

    mover: Mover | None
    """The first transform that moves pixels; None: no transform of torchvision's does."""
    boxes: str | None
    """Name of a transform that makes no sense without boxes or keypoints; None: there is none."""
    function: str | None
    """Name of a callable in the pipeline that is no ``v2.Transform``; None: there is none. It is
    usually written for images, as torchvision's datasets call their ``transform`` on images."""
    own: bool
    """Whether all code that runs is torchvision's: no other classes, no ``Lambda``."""
    reader: str | None
    """Name of the first transform that takes channels to come first; None: there is none, or the
    user's own code runs before it, and may turn the image."""
    takes_arrays: bool
    """Whether NumPy arrays are made images before any pixels are moved."""
    writes: bool
    """Whether a transform writes to the tensors that it is given."""

    @classmethod
    def of(cls, leaves: Sequence[Leaf]) -> Traits:
        """Return what the transforms of a pipeline tell."""
        names = [type(leaf.transform).__name__ for leaf in leaves]
        moves = next((name for name in names if name in MOVES), None)
        before = names if moves is None else names[: names.index(moves)]
        boxes = next((name for name in names if name in NEED_BOXES), None)
        own = [is_own(leaf.transform) and leaf.name != "Lambda" for leaf in leaves]
        first = names if all(own) else names[: own.index(False)]
        functions = (leaf for leaf in leaves if not isinstance(leaf.transform, v2.Transform))
        return cls(
            mover=None if moves is None else Mover(moves, boxes is not None, "torchvision"),
            boxes=boxes,
            function=next((leaf.name for leaf in functions), None),
            own=all(own),
            reader=next((name for name in first if name not in ANY_LAYOUT), None),
            takes_arrays=not _FROM_ARRAYS.isdisjoint(before),
            writes=any(getattr(leaf.transform, "inplace", False) for leaf in leaves),
        )

    @property
    def generators(self) -> tuple[str, ...]:
        """The global generators that it may draw from."""
        return ("torch",) if self.own else GENERATORS


def typed(sample: Batch, fields: Fields) -> Batch:
    """Return a sample whose named fields say by their types what they are.

    A mask is one, whatever it was: to v2 a PIL image is an image, and an array is nothing.
    v2 takes the first plain tensor for the image. If that is no image, and another tensor is one,
    the latter gets the type of an image.

    Raises:
        BatchError: a named field does not exist, or either of two tensors may be the image.
    """
    check_named(sample, fields)
    kinds: dict[Location, Any] = {fields.mask: tv_tensors.Mask, fields.image: tv_tensors.Image}
    kinds.pop(None, None)
    first = image_of(sample if fields.mask is None else put_fields(sample, {fields.mask: None}))
    untold = first is not None and not _is_image(first)
    if untold and fields.image is None and first.ndim < 3:
        try:
            kinds[find_fields(sample, fields, batched=False).image] = tv_tensors.Image
        except UnsureError:  # v2 would take the first, and leave the other as it is
            raise
        except BatchError:
            pass
    given = {place: get_field(sample, place) for place in kinds}
    if fields.mask is not None:
        given[fields.mask] = _mask_pixels(given[fields.mask])
    bare = {place for place, value in given.items() if isinstance(value, Tensor)}
    # What v2 takes for the image anyway stays plain: an Image would make [1, H, W] of [H, W].
    bare -= {place for place in bare if given[place] is first}
    values = {place: kinds[place](given[place]) for place in bare if not _has_role(given[place])}
    return put_fields(sample, values) if values else sample


def _mask_pixels(mask: Batch) -> Batch:
    """Return a mask that is a PIL image or an array as a tensor ``[H, W]`` or ``[C, H, W]``."""
    if isinstance(mask, PIL.Image.Image):
        pixels = v2.functional.pil_to_tensor(mask)
        return pixels[0] if len(pixels) == 1 else pixels
    if isinstance(mask, np.ndarray):
        last = mask.ndim == 3 and not channels_first(mask.shape)
        return torch.from_numpy((mask.transpose(2, 0, 1) if last else mask).copy())
    return mask.as_subclass(Tensor) if isinstance(mask, tv_tensors.Image) else mask


def place_of_image(sample: Batch) -> Path | None:
    """Return where the only image of a sample is; None: there is none, or the sample itself is."""
    image = image_of(sample)
    several = sum(map(_is_image, tree_flatten(sample)[0])) > 1
    if image is None or image is sample or several or (_has_role(image) and not _is_image(image)):
        return None
    return next((path for path, leaf in with_paths(sample) if leaf is image), None)


def nothing_beside_image(sample: Batch) -> bool:
    """Return whether v2 would transform nothing but the image of a sample."""
    image = image_of(sample)
    return all(leaf is image or not _has_role(leaf) for leaf in tree_flatten(sample)[0])


class _OnImage(nn.Module):
    """A function of images, for samples that hold one at a certain place."""

    def __init__(self, function: Any, place: Path) -> None:
        super().__init__()
        self._function = function
        self._place = place

    def forward(self, sample: Batch) -> Batch:
        image = at_path(sample, self._place)
        made = self._function(image)
        if isinstance(image, tv_tensors.Image) and type(made) is Tensor:
            made = tv_tensors.wrap(made, like=image)  # by this type v2 finds it beside others
        return put_leaves(sample, {self._place: made})


def _on_images(node: Any, place: Path) -> Any:
    """Return a pipeline whose functions are given the image at a place, and v2 the whole sample."""
    inside = children_of(node)
    if inside is not None:
        return with_children(node, [_on_images(child, place) for child in inside])
    return node if isinstance(node, v2.Transform) else _OnImage(node, place)


def check_roles(sample: Batch, fields: Fields, traits: Traits) -> None:
    """Raise BatchError if a field as large as the image would not move with it.

    Or if channels come last in the image where torchvision takes them to come first, or v2 would
    transform what is to stay.
    """
    mover, image = traits.mover, image_of(sample)
    for place in filter(partial(has_field, sample), fields.stays):
        field = get_field(sample, place)
        if any(leaf is image or _has_role(leaf) for leaf in tree_flatten(field)[0]):
            raise BatchError(
                f"The field {place!r} is to stay as it is (stays=), but v2 transforms PIL images, "
                "tv_tensors and, without an image among these, the first tensor. Let the dataset "
                "return it as a plain tensor or an array, and the image as tv_tensors.Image."
            )
    if traits.reader is not None and isinstance(image, Tensor) and _channels_are_last(image):
        raise BatchError(
            f"The image of a sample is {describe(image)}, with its channels last, and "
            f"{traits.reader} takes [C, H, W]: it would take rows for channels. Let the dataset "
            "return image.permute(2, 0, 1), or begin the pipeline with a function that does so."
        )
    size = size_of(image)
    if mover is None or size is None:
        return

    found = tree_flatten(sample)[0]
    # v2 looks into no dataclasses, and into no mappings but dicts.
    seen = set(map(id, found))

    def moves(value: Any) -> bool:
        array = traits.takes_arrays and isinstance(value, np.ndarray)
        return id(value) in seen and (array or value is image or _has_role(value))

    boxes = any(isinstance(one, tv_tensors.BoundingBoxes) for one in found)
    mover = mover._replace(takes_boxes=mover.takes_boxes or boxes)
    check_beside(sample, fields.stays, (size[0], size[1]), mover, moves=moves)


def _channels_are_last(image: Tensor) -> bool:
    """Return whether an image ``[..., C, H, W]`` is none, but has its channels last.

    A patch of many bands that is as high as wide is none of these, however small it is.
    """
    if image.ndim < 3:
        return False
    first, height, width = image.shape[-3:]
    return width in CHANNELS and first not in CHANNELS and height != width


def image_of(sample: Batch) -> Any:
    """Return the image of a sample, as v2 finds it; else what it would move; None: nothing."""
    values = tree_flatten(sample)[0]
    tensors = [value for value in values if isinstance(value, Tensor)]
    images = [*filter(_is_image, values), *filterfalse(_has_role, tensors), *tensors]
    return next(iter(images), None)


def size_of(image: Any) -> tuple[int, ...] | None:
    """Return height and width of an image; None: it has none."""
    if isinstance(image, PIL.Image.Image):
        return image.size[::-1]
    return None if image is None or image.ndim < 2 else tuple(image.shape[-2:])


def check_convertible(sample: Batch, known: Batch, traits: Traits) -> None:
    """Raise BatchError if v2 would pass a sample through, as it does with arrays.

    Warn if a function is given the image alone, and there is more in the sample. ``known``: the
    sample with types that say what its named fields are.
    """
    values = tree_flatten(sample)[0]
    if traits.function is not None and len(values) > 1 and place_of_image(known) is not None:
        called = "the pipeline" if nothing_beside_image(known) else "it"
        warnings.warn(
            f"{traits.function} is no transform of v2, so that {called} is called with the image "
            "of a sample alone, and does nothing to what is beside it. If it is to see that, too, "
            "derive it from v2.Transform.",
            FastDataWarning,
            stacklevel=2,
        )
    if not traits.own or any(isinstance(one, Tensor | PIL.Image.Image) for one in values):
        return
    arrays = [value for value in values if isinstance(value, np.ndarray) and value.ndim in {2, 3}]
    if not arrays:
        raise BatchError(
            f"The first sample is {describe(sample)}, in which torchvision finds nothing to "
            "transform. It looks for tensors and PIL images in tuples, lists and dicts."
        )
    if not traits.takes_arrays:
        raise BatchError(
            f"The image of the first sample is {describe(arrays[0])}, and torchvision passes "
            "arrays through as they are. Begin the pipeline with v2.ToImage(), or return a tensor "
            "[C, H, W]."
        )


def _has_role(value: object) -> bool:
    return isinstance(value, tv_tensors.TVTensor | PIL.Image.Image)


def _is_image(value: object) -> bool:
    return isinstance(value, tv_tensors.Image | tv_tensors.Video | PIL.Image.Image)

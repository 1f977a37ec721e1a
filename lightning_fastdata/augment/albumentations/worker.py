"""The part of an Albumentations pipeline that runs on each sample in the side process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from lightning_fastdata.augment.albumentations.plan import (
    Node,
    Plan,
    argument_names,
    is_albumentations,
    list_leaves,
    mover_of,
    nodes_of,
    target_roles,
)
from lightning_fastdata.augment.albumentations.tape import Recorder
from lightning_fastdata.augment.fields import (
    CHANNELS,
    Fields,
    Location,
    check_beside,
    get_field,
    mask_as_given,
    mask_to_numpy,
    put_fields,
    target_places,
    to_hwc,
)
from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.ops.operation import DeviceOp, DType, Tape, Track
from lightning_fastdata.augment.replay.program import compile_tapes
from lightning_fastdata.augment.replay.torch import replay
from lightning_fastdata.augment.stage_transform import WorkerTransform
from lightning_fastdata.errors import BatchError
from lightning_fastdata.randomness.seeds import reseeder
from lightning_fastdata.tree import PilImage, copy_of_compose, is_users
from lightning_fastdata.types import Batch, SampleKey

_VOLUMES: Final = frozenset({"images", "volume", "volumes", "mask3d", "masks3d"})
_SEVERAL: Final = _VOLUMES | {"masks"}
_MASKS: Final = frozenset({"masks", "mask3d", "masks3d"})
_WRITES: Final = "min_max_per_channel"
"""How ``Normalize`` writes to the image that it is given, if that is one of floats."""
_NAMES_OF_CALLS: Final = frozenset({"force_apply", "params", "self"})
"""Arguments of Albumentations' own methods, which fields cannot be passed beside."""


class SampleForm(NamedTuple):
    """The properties of the images and masks of a sample on which a plan depends."""

    channels: int | None
    """Number of channels of the image; None if it is ``[H, W]``."""
    images: Mapping[str, DType]
    """Dtype of each image, by the pipeline's name for the image."""
    masks: Mapping[str, DType]
    """Dtype of each mask, by the pipeline's name for the mask."""


class ComposeWorker(WorkerTransform):
    """The part of a pipeline that runs on each sample in the side process; picklable.

    Several threads may call it: each has its own copy of the pipeline. It carries the device forms
    registered for classes of this pipeline, as a spawned process knows of no registration.
    """

    fuses_steps = True

    def __init__(
        self,
        compose: Node,
        fields: Fields,
        plan: Plan | None,
        registered: Mapping[str, DeviceOp] | None = None,
    ) -> None:
        super().__init__()
        self._compose = compose
        self._registered = registered or {}
        self._fields = fields
        self._plan = plan
        self._roles = target_roles(compose)
        self._masks = _MASKS | {name for name, role in self._roles.items() if role == "mask"}
        self._taken = argument_names(compose)
        strict = getattr(compose, "strict", False)
        own = not strict and not all(map(is_albumentations, nodes_of(compose)))
        self._unread = {*compose.available_keys, *_NAMES_OF_CALLS} if own else None
        """Names of fields that code of the user's is not given; None: there is no such code."""
        self._mover = mover_of(compose)
        leaves = list_leaves(compose)
        self._writes = any(vars(one.transform).get("normalization") == _WRITES for one in leaves)
        self.ends_in_tensors = any(type(one.transform).__name__ == "ToTensorV2" for one in leaves)

    def __call__(self, sample: Batch, key: SampleKey) -> tuple[Batch, Tape | None]:
        """Return the sample as the worker leaves it, and a tape of what the device has still to do.

        The tape is None when everything was done here. Images and masks of the sample are tensors
        ``[H, W, C]`` or ``[H, W]`` when there is a tape, else whatever the pipeline yields.

        Raises:
            BatchError: the sample has neither an image nor frames nor volumes, or a field beside
                the image would not move with it.
        """
        if sample is None:  # a sample that the collate_fn is to leave out
            return None, None
        data, places = self._arguments(sample)
        plan = self._plan if "image" in data else None
        run, seed = self._own(plan)
        seed(key)
        tape: Tape | None = None if self._plan is None else {}
        if plan is None:
            result = run(**data)
        else:
            result, tape = run(data)
            for target in self._roles:
                if target in places and isinstance(result[target], np.ndarray):
                    pixels = _with_channel(result[target], data[target], tape.get(target))
                    result[target] = _own_tensor(pixels)
        for name in data.keys() & self._masks:
            result[name] = mask_as_given(result[name], data[name])
        given = put_fields(sample, {places[name]: result[name] for name in places})
        # Only a mapping has a place for what a pipeline adds (`replay`, `applied_transforms`).
        added = result.keys() - places.keys() if isinstance(sample, Mapping) else ()
        return put_fields(given, {name: result[name] for name in added}) if added else given, tape

    def form_of(self, sample: Batch) -> SampleForm | None:
        """Return the form of the images and masks of a sample; None: it has only frames or volumes.

        Raises:
            BatchError: the sample has neither an image nor frames nor volumes.
        """
        data, _ = self._arguments(sample)
        if "image" not in data:
            return None
        shape = data["image"].shape
        images, masks = (
            {
                name: data[name].dtype
                for name, own in self._roles.items()
                if own == role and data.get(name) is not None
            }
            for role in ("image", "mask")
        )
        return SampleForm(shape[2] if len(shape) == 3 else None, images, masks)

    def waiting(self, sample: Batch, names: Collection[str]) -> Mapping[str, torch.Tensor]:
        """Return those images and masks of a sample that are tensors, among these names."""
        try:
            found = self._tensors(sample)
        except BatchError:  # it has no image
            return {}
        return {name: found[name][1] for name in names if name in found}

    def finished(self, sample: Batch, tape: Tape) -> Batch:
        """Return a sample after the operations on its tape."""
        if sample is None or self._has_volumes_alone(sample):
            return sample
        draws, values = compile_tapes([tape]), {}
        ops = DEVICE_OPS | self._registered
        for name, (place, pixels) in self._tensors(sample).items():
            made, program = pixels, draws.programs.get(name)
            if program is not None:
                made = replay(program, draws.blob, pixels[None], ops)[0]
            values[place] = made if self.ends_in_tensors else made.numpy()
        return put_fields(sample, values)

    def _tensors(self, sample: Batch) -> dict[str, tuple[Location, torch.Tensor]]:
        """Return the images and masks that are tensors, by name, each with its place.

        Raises:
            BatchError: the sample has no image.
        """
        places = target_places(sample, self._fields, self._roles, batched=False)
        found = {name: (place, get_field(sample, place)) for name, place in places.items()}
        return {name: one for name, one in found.items() if isinstance(one[1], torch.Tensor)}

    def _own(self, plan: Plan | None) -> tuple[Callable[..., Any], Callable[[SampleKey], None]]:
        """Return this thread's pipeline, or its recorder for a plan, and a function to seed it."""
        own = self._copies()
        if id(plan) not in own:
            if plan is None:
                compose = run = copy_of_compose(self._compose)
            else:
                run = Recorder(self._compose, plan, DEVICE_OPS | self._registered)
                compose = run.compose
            own[id(plan)] = compose, run, reseeder(compose)
        return own[id(plan)][1:]

    def pipelines(self) -> tuple[object, ...]:
        """Return the parts that hold code of the user's, of this thread's copies.

        Before its first sample these are the original ones. Transforms of the library keep nothing
        from sample to sample, and in a copy that records some are replaced.
        """
        copies = [each[0] for each in self._copies().values()] or [self._compose]
        parts = [part for compose in copies for part in nodes_of(compose)]
        return tuple(each for each in parts if is_users(type(each).__module__) or _calls(each))

    def _copies(self) -> dict[int, tuple[Node, Callable[..., Any], Callable[[SampleKey], None]]]:
        """Return this thread's copies, by the ``id`` of their plans, as they run and are seeded."""
        found: dict[int, tuple[Node, Callable[..., Any], Callable[[SampleKey], None]]]
        found = vars(self._local).setdefault("by_plan", {})
        return found

    def _arguments(self, sample: Batch) -> tuple[dict[str, Any], dict[str, Location]]:
        """Return the arguments of the pipeline, and the place of each in the sample."""
        if self._has_volumes_alone(sample):
            mask = {} if self._fields.mask is None else {"mask": self._fields.mask}
            taken = self._taken - set(self._fields.stays)
            there = [n for n in sample if n in taken and sample[n] is not None]
            places = {n: n for n in there if _fits(n, sample[n])} | mask
        else:
            places = target_places(sample, self._fields, self._taken, batched=False, fits=_fits)
        data: dict[str, Any] = {}
        for name, place in places.items():
            value, role = get_field(sample, place), self._roles.get(name)
            if role is not None and (value is not None or name == "image"):
                size = data["image"].shape[:2] if "image" in data else None
                is_image = role == "image"
                value = self._own_image(value) if is_image else mask_to_numpy(value, size)
            data[name] = _as_arrays(value, image=name == "images") if name in _SEVERAL else value
        if self._mover is not None and "image" in data:
            known = {*places.values(), *self._fields.stays}
            check_beside(sample, known, data["image"].shape[:2], self._mover)
        if self._unread is not None and isinstance(sample, Mapping):
            known = {*self._unread, *self._taken, *places.values(), *self._fields.stays}
            others = (name for name in sample if isinstance(name, str) and name not in known)
            data |= {name: sample[name] for name in others}
        return data, places

    def _own_image(self, value: object) -> np.ndarray:
        """Return an image as an array; a copy where Albumentations may write to it.

        It does so when it equalizes a gray image, or normalizes floats by the range of each
        channel, and the dataset may hand out the same array in each epoch.
        """
        image = to_hwc(value)
        is_gray = image.ndim == 2 or image.shape[2] == 1
        written = is_gray or (self._writes and image.dtype.kind == "f")
        return image.copy() if written and not isinstance(value, PilImage) else image

    def _has_volumes_alone(self, sample: Batch) -> bool:
        named = self._fields.image
        if not isinstance(sample, Mapping) or named not in {None, *_VOLUMES}:
            return False
        if named is None and "image" in sample:
            return False
        held = (_VOLUMES - _MASKS) & self._taken & sample.keys()
        if "images" in held and _is_one_image(sample["images"], named):
            held -= {"images"}
        return any(_fits(name, sample[name]) for name in held)


def _fits(name: str, value: object) -> bool:
    # Samples may use the names of volumes for other things: a loudness, file names.
    if name not in _VOLUMES:
        return True
    values = value if isinstance(value, list | tuple) and value else [value]
    return all(isinstance(one, np.ndarray | torch.Tensor | PilImage) for one in values)


def _is_one_image(value: object, named: Location | None) -> bool:
    """Return whether the field of frames holds a single image, with channels first or last.

    An array has its channels last. One that nobody has ``named`` the image is gray frames else.
    """
    if isinstance(value, list | tuple):
        return False
    shape: tuple[int, ...] = getattr(value, "shape", ())
    ends = shape[2:] if named is None and isinstance(value, np.ndarray) else shape[::2]
    return len(shape) < 3 or (len(shape) == 3 and not CHANNELS.isdisjoint(ends))


def _as_arrays(value: Batch, *, image: bool) -> Batch:
    """Return images, masks or a volume as Albumentations wants them."""
    if isinstance(value, list | tuple):
        return [to_hwc(one) if image else mask_to_numpy(one) for one in value]
    if not isinstance(value, torch.Tensor):
        return value
    return np.stack([to_hwc(one) for one in value]) if image else value.detach().cpu().numpy()


def _calls(transform: object) -> bool:
    """Return whether a transform of the library calls a function of the user's."""
    return type(transform).__name__ == "Lambda"


def _with_channel(pixels: np.ndarray, given: np.ndarray, left: Track | None) -> np.ndarray:
    """Return an image with its channel axis again, if an operation made ``[H, W]`` of it.

    OpenCV's inpainting drops the axis in some samples, and ``ToTensorV2`` on the device needs it.
    """
    lost = left is not None and left.role == "image" and pixels.ndim == 2 < given.ndim
    ends = lost and left is not None and any(op.name == "ToTensorV2" for op in left.ops)
    return pixels[..., None] if ends else pixels


def _own_tensor(array: np.ndarray) -> torch.Tensor:
    # The pipeline may hand back the dataset's own read-only array (a memory map).
    array = np.ascontiguousarray(array)
    # NumPy takes a reversed axis of one pixel for contiguous; torch does not.
    ready = array.flags.writeable and min(array.strides) >= 0
    return torch.from_numpy(array if ready else array.copy())

"""Transforms of a batch on the device, whatever they were written with: Albumentations' is here."""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias, get_args

import torch

from lightning_fastdata.augment.albumentations.collated_batches import (
    channels_as_given,
    channels_behind,
    check_images,
    check_samples,
    places_of,
    run_each,
)
from lightning_fastdata.augment.albumentations.plan import (
    BYTES,
    Node,
    Plan,
    analyse,
    list_leaves,
    target_roles,
    why_no_forms,
)
from lightning_fastdata.augment.albumentations.tape import Recorder, refusal, what_it_means
from lightning_fastdata.augment.albumentations.worker import ComposeWorker, SampleForm
from lightning_fastdata.augment.fields import (
    Fields,
    Location,
    describe,
    find_fields,
    get_field,
    listed,
    numpy_dtype,
    put_fields,
    target_places,
    to_hwc,
)
from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.ops.operation import DeviceOp, DType
from lightning_fastdata.augment.registry import registered_forms
from lightning_fastdata.augment.replay.program import Draws
from lightning_fastdata.augment.replay.torch import checked_rows, replay
from lightning_fastdata.augment.stage_transform import (
    CallableTransform,
    PipelineTransform,
    StageTransform,
    plain_tensors,
    table,
)
from lightning_fastdata.errors import (
    BatchError,
    FastDataWarning,
    OptionsError,
    TransformError,
    check,
    is_whole,
)
from lightning_fastdata.fingerprint import Fingerprint, fingerprint
from lightning_fastdata.randomness.seeds import derived_seed, lasting
from lightning_fastdata.tree import (
    children,
    copy_of_compose,
    find_composes,
    find_instances,
    is_a,
    loaded_classes,
)
from lightning_fastdata.types import Batch, SampleKey

if TYPE_CHECKING:
    import numpy as np

OnCpu: TypeAlias = Literal["albumentations", "torch"]
"""What computes pixels of a batch on the CPU: Albumentations, or torch, as it does on a device."""
_NUMBERS: Final = itertools.count()
"""Numbers of the objects that draw without a key, so that each draws for itself."""


def as_batch_transform(
    transform: object,
    *,
    image: int | str | None = None,
    mask: int | str | None = None,
    stays: int | str | Sequence[int | str] = (),
    same_pixels: bool = True,  # noqa: ARG001 - of calls written before
) -> StageTransform:
    """Return a transform of batches.

    Args:
        transform: an ``A.Compose`` or any single Albumentations transform; a torchvision
            ``v2.Compose`` or any single transform of v2; another ``nn.Module`` or callable, such as
            a module of Kornia; or a ``StageTransform``, which is returned as it is.
            A callable gets the whole batch and returns the whole batch; with ``image=`` it gets
            that field alone, and its result replaces the field.
        image: key or index of the image in a sample and in a batch; None finds it.
        mask: key or index of the mask; None takes the key ``"mask"``. For more of them, and for
            other images, Albumentations has ``additional_targets``, such as ``{"depth": "mask"}``;
            in tuples ``{"2": "image"}`` names the third element.
        stays: for a pipeline, keys or indices of fields that are to stay as they are beside an
            image that is moved. Any other field of the image's height and width is an error.
        same_pixels: without effect: pixels are those of the pipeline's own library in any case.

    Raises:
        TransformError: ``transform`` is none of these, or a pipeline that cannot be taken.
    """
    fields = Fields(image=image, mask=mask, stays=listed(stays))
    if isinstance(transform, StageTransform):
        return transform
    forward = getattr(transform, "forward", None)
    lists_modules = getattr(forward, "__func__", None) is torch.nn.Module.forward  # it has none
    if isinstance(transform, type) or lists_modules or not callable(transform):
        raise TransformError(
            f"{transform!r} cannot transform a batch. Pass an albumentations Compose or a "
            "torchvision v2.Compose (an instance), an nn.Module, or a callable that takes a batch "
            "and returns a batch."
        )
    if is_a(transform, "albumentations"):
        return BatchTransform(transform, fields)
    if "torchvision.transforms" in sys.modules:
        from lightning_fastdata.augment.torchvision.transform import stage_transform

        if (made := stage_transform(transform, fields)) is not None:
            return made
    return CallableTransform(transform, fields)


class BatchTransform(PipelineTransform):
    """An Albumentations pipeline for batches, for ``FastDataModule(augment=...)`` or to be called.

    :meth:`from_albumentations` makes one to call. Only one thread at a time may use it.
    """

    library = "Albumentations"
    plan: Plan
    _drawn = 0
    """Number of samples for which calls without a key have drawn."""
    _number: int | None = None
    """Number of the object among those called without a key; None: it was not called so yet."""

    def __init__(self, compose: Node, fields: Fields, *, on_cpu: OnCpu = "albumentations") -> None:
        import albumentations

        whole = isinstance(compose, albumentations.Compose)
        self._registered: dict[str, DeviceOp] = {}
        if on_cpu not in get_args(OnCpu):
            choices = ", ".join(get_args(OnCpu))
            raise OptionsError(f"on_cpu is {on_cpu!r}; choose one of {choices}.")
        self._on_cpu = on_cpu
        self._images: tuple[int | None, DType] = 3, BYTES
        """Number of channels (None: ``[H, W]``) and dtype of the images that the plan is for."""
        self._why_not: str | None = None
        """Reason why no operation runs on a device; None: some may."""
        super().__init__(compose if whole else albumentations.Compose([compose]), fields)
        self.name = type(compose).__name__

    @classmethod
    def from_albumentations(
        cls,
        compose: Node,
        *,
        image: int | str | None = None,
        mask: int | str | None = None,
        stays: int | str | Sequence[int | str] = (),
        same_pixels: bool = True,  # noqa: ARG003 - of calls written before
        on_cpu: OnCpu = "albumentations",
    ) -> Self:
        """Return a transform of batches to call yourself.

        Args:
            compose: an ``A.Compose`` or any single Albumentations transform.
            image: key or index of the image in batches that are no bare tensor; None finds it.
            mask: key or index of the mask; None takes the key ``"mask"``.
            stays: fields that are left as they are, as :func:`as_batch_transform` takes it.
            same_pixels: without effect: pixels are Albumentations' in any case.
            on_cpu: what makes the pixels of batches that lie on the CPU: ``"albumentations"``, or
                ``"torch"``, to see without a device what one would do; that takes many times as
                long.

        Raises:
            TransformError: ``compose`` is no pipeline.
            OptionsError: ``on_cpu`` is something else.
        """
        if isinstance(compose, type) or not is_a(compose, "albumentations"):
            raise TransformError(
                f"{compose!r} is no albumentations pipeline. Pass a Compose, an instance of it."
            )
        return cls(compose, Fields(image=image, mask=mask, stays=listed(stays)), on_cpu=on_cpu)

    def __call__(
        self, images: Any, masks: torch.Tensor | None = None, *, key: SampleKey | None = None
    ) -> Any:
        """Return a batch transformed by the pipeline, where it lies.

        On the CPU Albumentations itself runs on each sample, unless ``on_cpu`` says otherwise. For
        batches on a device, it runs on the samples that drew an operation without a device form,
        and on all images of a dtype without device forms.

        Args:
            images: uint8, float32 in [0, 1], or another of NumPy's dtypes that Albumentations
                takes, ``[n, H, W, C]``, ``[n, C, H, W]`` or ``[n, H, W]``, on any device; or a dict
                or tuple that holds them.
            masks: ``[n, H, W]``, ``[n, H, W, C]`` or ``[n, C, H, W]``, if ``images`` is a tensor.
            key: sample ``i`` draws with ``key.index + i``. None: with a seed that follows from
                torch's (``torch.initial_seed()``) and from how many such objects were called
                before without a key, epoch 0, and a number that counts all samples this object has
                drawn for, from 0. Ranks of one seed then draw alike: give each its own key.

        Returns:
            The images, or images and masks, or a batch like the one that was given. Images come
            out as ``[n, C, H, W]`` behind ``ToTensorV2``, else in the layout that they had.

        Raises:
            BatchError: there are no such images.
            TransformError: the pipeline transforms boxes or keypoints.
            OptionsError: ``key`` is no :class:`SampleKey` of whole numbers.
        """
        fine = key is None or (isinstance(key, SampleKey) and all(map(is_whole, key)))
        check("key", key, fine, "None and a SampleKey(seed, epoch, index) of whole numbers")
        if self._has_changed():
            self.take_in()
        bare = isinstance(images, torch.Tensor)
        if masks is not None and not bare:
            raise BatchError(
                f"masks= goes with a tensor of images, not with {describe(images)}: put the masks "
                "into that batch, and say where with mask=."
            )
        batch = {"image": images, "mask": masks} if bare else images
        fields = Fields() if bare else self._fields
        samples = len(get_field(batch, find_fields(batch, fields, batched=True).image))
        if key is None:
            self._number = next(_NUMBERS) if self._number is None else self._number
            seed = derived_seed(torch.initial_seed(), "BatchTransform", self._number)
            key = SampleKey(seed, 0, self._drawn)
            self._drawn += samples
        done = self._run_collated(batch, key, fields)
        if not bare:
            return done
        return done["image"] if masks is None else (done["image"], done["mask"])

    @property
    def compose(self) -> Any:
        """The pipeline, as a ``Compose``."""
        return self.pipeline

    def state(self) -> Fingerprint | None:
        """Return the fingerprint of the pipeline as it is now; None: it has none."""
        # What a device can do depends neither on globals nor on what the pipeline drew before.
        return fingerprint(self.compose, with_globals=False, instead=lasting([self.compose]))

    def take_in(self) -> None:
        """Plan for the pipeline as it is now."""
        super().take_in()
        self._registered = registered_forms(self.compose, self._registered)
        self.plan = self._plan_for(self.compose, *self._images, why_not=self._why_not)
        self._copy: Any = None
        """A copy of the pipeline, for batches that another loader has collated."""
        self._recorders: dict[object, Recorder | None] = {}
        """Recorders for such batches, by the form of the images; None: nothing may be deferred."""
        self._looked = False
        """Whether values of images on a device were checked, which is done once: the host waits."""

    def _plan_for(
        self,
        compose: Node,
        channels: int | None = 3,
        dtype: DType = BYTES,
        *,
        size: tuple[int, int] | None = None,
        why_not: str | None = None,
    ) -> Plan:
        return analyse(
            compose,
            self.ops,
            size=size,
            refusal=refusal() or why_not,
            channels=channels,
            dtype=dtype,
        )

    @property
    def ops(self) -> Mapping[str, DeviceOp]:
        """Device forms by name, with those that were registered for the pipeline's own classes."""
        return DEVICE_OPS | self._registered

    def check_sample(self, sample: Batch) -> None:
        """Raise BatchError if a sample holds no image, or a field that would not move with it."""
        self._look_at(sample)
        fields = {str(name) for name, _ in children(sample) or ()}
        for kind, processor in self.compose.processors.items():
            names = processor.data_fields
            if fields.isdisjoint(names):
                warnings.warn(
                    f"The pipeline transforms {kind}, and the first sample has none: it is "
                    f"{describe(sample)}. Images would move without their {kind}. Let the dataset "
                    f"return a dict with {' or '.join(map(repr, names))}, or leave the "
                    f"{kind} out of the Compose.",
                    FastDataWarning,
                    stacklevel=2,
                )

    def in_worker(self, *, on_device: bool) -> ComposeWorker:
        """Return the part that runs on each sample: all of it, or what a device cannot do."""
        plan = self.plan if on_device and self.plan.defers else None
        return ComposeWorker(self.compose, self._fields, plan, self._registered)

    def _look_at(self, sample: Batch) -> SampleForm | None:
        return self.in_worker(on_device=False).form_of(sample)

    def _fit(self, seen: Sequence[SampleForm | None]) -> None:
        if forms := [form for form in seen if form is not None]:
            first = forms[0]
            self._images = first.channels, first.images["image"]
            self._why_not = why_no_forms(first.images.values(), first.masks.values())
            if any(form.images.items() - first.images.items() for form in forms):
                self._why_not = "the samples hold images of several dtypes"
        else:
            self._why_not = "the samples hold no image, but frames or volumes"

    def apply(self, batch: Batch, draws: Draws | None) -> Batch:
        """Compute what was drawn, on images ``[n, H, W, C]`` or ``[n, H, W]`` from the workers.

        Images come out as ``[n, C, H, W]`` after ``ToTensorV2``, else in the layout of the workers.

        Raises:
            BatchError: the image field is missing, or has another number of samples than was drawn.
        """
        if draws is None or not draws.programs:
            return batch
        # What no operation is left for has a place, too, which is not the image's.
        names = {*draws.programs, *target_roles(self.compose)}
        places = target_places(batch, self._fields, names, batched=True)
        made: dict[Location, Batch] = {}
        with plain_tensors():
            for name, program in draws.programs.items():
                value = checked_rows(get_field(batch, places[name]), draws, places[name])
                made[places[name]] = replay(program, draws.blob, value, self.ops)
        return put_fields(batch, made)

    def apply_unprepared(self, batch: Batch, key: SampleKey) -> Batch:
        """Draw and compute here, for a batch ``[n, C, H, W]`` or ``[n, H, W, C]``.

        Raises:
            BatchError: there is no image batch, or one of floats outside of [0, 1].
            TransformError: the pipeline needs boxes or keypoints, which a collated batch has lost.
        """
        return self._run_collated(batch, key, self._fields)

    def _run_collated(self, batch: Batch, key: SampleKey, fields: Fields) -> Batch:
        """Return a batch of another loader, on any device, images and masks transformed."""
        if self._copy is None:
            self._copy = copy_of_compose(self.compose)
        compose = self._copy
        if compose.processors:
            names = " and ".join(sorted(compose.processors))
            raise TransformError(
                f"The pipeline transforms {names} too, and those cannot be told apart in a batch "
                "that another loader has collated. Give the pipeline to "
                "FastDataModule(augment=...) and let FastDataModule load the data."
            )
        with plain_tensors():
            places = places_of(batch, fields, compose)
            given = {name: get_field(batch, place) for name, place in places.items()}
            image = given["image"]
            check_images(image, values=not self._looked)
            # A device is asked once, as the host waits for it.
            self._looked = image.device.type != "cpu"
            check_samples(given, places)
            tensors, turned = channels_behind(given)
            recorder = None
            if image.device.type != "cpu" or self._on_cpu == "torch":
                recorder = self._recorder(compose, tensors)
            made, is_chw = run_each(tensors, key, compose, recorder, self.ops)
            made = channels_as_given(made, turned, compose, images_are_chw=is_chw)
            return put_fields(batch, {places[name]: made[name] for name in places})

    def _recorder(self, compose: Node, tensors: Mapping[str, torch.Tensor]) -> Recorder | None:
        """Return the recorder for images of such a form, or None if nothing may be deferred."""
        roles, image = target_roles(compose), tensors["image"]
        images, masks = (
            {numpy_dtype(one.dtype) for name, one in tensors.items() if roles[name] == role}
            for role in ("image", "mask")
        )
        if why_no_forms(images, masks) is not None:
            return None
        height, width, *channels = map(int, image.shape[1:])
        form = (height, width, *channels, image.dtype)
        if form not in self._recorders:
            count = channels[0] if channels else None
            plan = self._plan_for(compose, count, images.pop(), size=(height, width))
            possible = (plan.defers or not plan.placements) and plan.opaque_until < 0
            self._recorders[form] = Recorder(compose, plan, self.ops) if possible else None
        return self._recorders[form]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_copy": None, "_recorders": {}}

    def explain(self, size: tuple[int, int] | None = None) -> str:
        """Return a table: operation, where it runs, why.

        Args:
            size: height and width of images that are collated already; None: images of a dataset,
                which may differ in size until an operation makes them one size.

        Raises:
            OptionsError: ``size`` is something else.
        """
        pair = isinstance(size, tuple | list) and len(size) == 2
        fine = size is None or (pair and all(is_whole(side, 1) for side in size))
        check("size", size, fine, "None and (height, width), whole numbers from 1")
        plan = self.plan if size is None else self._plan_for(self.compose, size=size)
        rows = table(plan.placements)
        reason = refusal() if size is None else None
        return rows if reason is None else f"{rows}\n{what_it_means(reason)}"


def left_undone(
    training: Iterable[object], other: Iterable[object], sample: Batch, image: int | str | None
) -> str | None:
    """Return what training does to all images and another stage does not; None: nothing is found.

    Only operations that make images floating point, or normalise them, are looked for.

    Args:
        training: transforms of the training.
        other: transforms of the other stage.
        sample: a sample of the other stage's dataset, which may have done all of it already.
        image: key or index of the image in the sample; None finds it.
    """
    trained, others = _names(training), _names(other)
    try:
        place = find_fields(sample, Fields(image=image), batched=False).image
        pixels = to_hwc(get_field(sample, place))
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
    """Return the class names of the operations that make floats of images, or normalise them."""
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

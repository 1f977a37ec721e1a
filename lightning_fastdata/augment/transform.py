"""Transforms of a batch on the device, whatever they were written with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lightning_fastdata.augment.pipeline.fields import (
    Fields,
    describe,
    find_fields,
    get_field,
    listed,
)
from lightning_fastdata.augment.pipeline.tree import is_albumentations_pipeline
from lightning_fastdata.augment.pipeline_transform import PipelineTransform
from lightning_fastdata.augment.stage_transform import (
    CallableTransform,
    StageTransform,
    table,
)
from lightning_fastdata.errors import BatchError, TransformError
from lightning_fastdata.types import SampleKey

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from lightning_fastdata.augment.collated_batches import OnCpu
    from lightning_fastdata.augment.pipeline.tree import Node


def as_batch_transform(
    transform: object,
    *,
    image: int | str | None = None,
    mask: int | str | None = None,
    stays: int | str | Sequence[int | str] = (),
    same_pixels: bool = False,
) -> StageTransform:
    """Return a transform of batches.

    Args:
        transform: an ``A.Compose`` or any single Albumentations transform; an ``nn.Module`` or
            callable; or a ``StageTransform``, which is returned as it is. A callable gets the whole
            batch and returns the whole batch; with ``image=`` it gets that field alone, and its
            result replaces the field.
        image: key or index of the image in a sample and in a batch; None finds it.
        mask: key or index of the mask; None takes the key ``"mask"``. For more of them, and for
            other images, Albumentations has ``additional_targets``, such as ``{"depth": "mask"}``;
            in tuples ``{"2": "image"}`` names the third element.
        stays: for Albumentations, keys or indices of what is to stay as it is beside an image that
            is moved. Anything else of the image's height and width is an error.
        same_pixels: for Albumentations, leave noise, elastic fields and other operations that draw
            numbers for every pixel to the worker. On the device they keep the distribution of
            Albumentations' result, not its pixels.

    Raises:
        TransformError: it is none of these.
    """
    fields = Fields(image=image, mask=mask, stays=listed(stays))
    if isinstance(transform, StageTransform):
        return transform
    if callable(transform) and not isinstance(transform, type):
        if is_albumentations_pipeline(transform):
            return BatchTransform(transform, fields, same_pixels=same_pixels)
        return CallableTransform(transform, fields)
    raise TransformError(
        f"{transform!r} cannot transform a batch. Pass an albumentations Compose (an instance), an "
        "nn.Module, or a callable that takes a batch and returns a batch."
    )


class BatchTransform(PipelineTransform):
    """An Albumentations pipeline for batches, for ``FastDataModule(augment=...)`` or to be called.

    :meth:`from_albumentations` makes one to call. Not for several threads at once.
    """

    _drawn = 0
    """Samples that calls without a key have drawn for."""

    @classmethod
    def from_albumentations(
        cls,
        compose: Node,
        *,
        image: int | str | None = None,
        mask: int | str | None = None,
        stays: int | str | Sequence[int | str] = (),
        same_pixels: bool = False,
        on_cpu: OnCpu = "albumentations",
    ) -> Self:
        """Return a transform of batches to call yourself.

        Args:
            compose: an ``A.Compose`` or any single Albumentations transform.
            image: key or index of the image in batches that are no bare tensor; None finds it.
            mask: key or index of the mask; None takes the key ``"mask"``.
            stays: what is left as it is, as :func:`as_batch_transform` takes it.
            same_pixels: the same.
            on_cpu: what makes the pixels of batches that lie on the CPU: ``"albumentations"``, or
                ``"torch"``, as on a device, to see without one what it would do; that takes many
                times as long.

        Raises:
            TransformError: it is no pipeline.
            OptionsError: ``on_cpu`` is something else.
        """
        if isinstance(compose, type) or not is_albumentations_pipeline(compose):
            raise TransformError(
                f"{compose!r} is no albumentations pipeline. Pass a Compose, an instance of it."
            )
        return cls(
            compose,
            Fields(image=image, mask=mask, stays=listed(stays)),
            same_pixels=same_pixels,
            on_cpu=on_cpu,
        )

    def __call__(
        self, images: Any, masks: torch.Tensor | None = None, *, key: SampleKey | None = None
    ) -> Any:
        """Return a batch transformed by the pipeline, where it lies.

        On the CPU Albumentations itself runs on each sample, unless ``on_cpu`` says otherwise; so
        it does, on a device, on samples for which an operation without a device form was drawn,
        and where there is no form for images of their dtype.

        Args:
            images: uint8, float32 in [0, 1], or what else Albumentations takes of NumPy's dtypes,
                ``[n, H, W, C]``, ``[n, C, H, W]`` or ``[n, H, W]``, on any device; or a dict or
                tuple that holds them.
            masks: ``[n, H, W]``, ``[n, H, W, C]`` or ``[n, C, H, W]``, if ``images`` is a tensor.
            key: sample ``i`` draws with ``key.index + i``. None: with the seed of torch
                (``torch.initial_seed()``), epoch 0 and a number that counts all samples this object
                has drawn for, from 0. Ranks of one seed then draw alike: give each its own key.

        Returns:
            The images, or images and masks, or a batch like the one that was given. Images come
            out as ``[n, C, H, W]`` behind ``ToTensorV2``, else in the layout that they had.

        Raises:
            BatchError: there are no such images.
            TransformError: the pipeline transforms boxes or keypoints.
        """
        self._follow()
        bare = isinstance(images, torch.Tensor)
        if masks is not None and not bare:
            raise BatchError(
                f"masks= goes with a tensor of images, not with {describe(images)}: put the masks "
                "into that batch, and say where with mask=."
            )
        batch = {"image": images, "mask": masks} if bare else images
        fields = Fields() if bare else self._fields
        samples = len(get_field(batch, find_fields(batch, fields, batched=True).image))
        done = self._run_unprepared(batch, self._next_key(samples, key), fields)
        if not bare:
            return done
        return done["image"] if masks is None else (done["image"], done["mask"])

    def explain(self, size: tuple[int, int] | None = None) -> str:
        """Return a table: operation, where it runs, why.

        Args:
            size: height and width of images that are collated already; None: images of a dataset,
                which may differ in size until an operation makes them one size.
        """
        if size is None:
            return super().explain()
        places = self._on_batches().plan(size).placements
        return table([(place.name, place.where, place.why) for place in places])

    def _next_key(self, samples: int, key: SampleKey | None) -> SampleKey:
        if key is not None:
            return key
        first, self._drawn = self._drawn, self._drawn + samples
        return SampleKey(torch.initial_seed(), 0, first)

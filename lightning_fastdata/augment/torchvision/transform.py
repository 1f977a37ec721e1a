"""A torchvision v2 pipeline as a transform of batches."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import PIL.Image
import torch
from torchvision.transforms import v2

from lightning_fastdata.augment.pipeline.fields import first_device
from lightning_fastdata.augment.replay.torch import checked_rows, replay
from lightning_fastdata.augment.stage_transform import (
    CallableTransform,
    PipelineTransform,
    StageTransform,
    plain_tensors,
)
from lightning_fastdata.augment.torchvision.collated import run_collated
from lightning_fastdata.augment.torchvision.kinds import may_draw
from lightning_fastdata.augment.torchvision.operations import device_ops, plain
from lightning_fastdata.augment.torchvision.plan import Plan, make_plan
from lightning_fastdata.augment.torchvision.samples import (
    Traits,
    check_convertible,
    check_roles,
    image_of,
    size_of,
    typed,
)
from lightning_fastdata.augment.torchvision.tape import Recorder
from lightning_fastdata.augment.torchvision.worker import PipelineWorker
from lightning_fastdata.tree import at_path, put_leaves

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

    from lightning_fastdata.augment.replay.program import Draws
    from lightning_fastdata.types import Batch, SampleKey


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
        """Plan for the pipeline as it is now."""
        super().take_in()
        self.plan = make_plan(
            self.pipeline, one_size=self._one_size, pil=self._pil, refusal=_refusal()
        )
        self._recorder: Recorder | None = None
        """For batches of other loaders."""

    def for_samples(self, samples: Iterable[Batch]) -> Self:
        """Return the transform for a dataset, of which these are samples from all over it.

        Where they have one size, nothing has to be done to them before they make a batch.
        """
        seen = [image_of(sample) for sample in samples]
        sizes = set(map(size_of, seen))
        fitted = copy.copy(self)
        fitted._one_size = len(seen) > 1 and len(sizes) == 1 and None not in sizes
        fitted._pil = any(isinstance(image, PIL.Image.Image) for image in seen)
        fitted.take_in()
        return fitted

    def behind(self) -> StageTransform:
        """Return what runs behind another transform, on whole batches; itself, if it draws."""
        draws = any(map(may_draw, self.plan.leaves))
        return self if draws else CallableTransform(self.pipeline, self._fields)

    def check_sample(self, sample: Batch) -> None:
        """Raise BatchError if v2 would leave a sample, or a part of it, as it is."""
        traits = Traits.of(self.plan.leaves)
        check_convertible(sample, traits)
        check_roles(typed(sample, self._fields), self._fields, traits)

    def in_worker(self, *, on_device: bool) -> PipelineWorker:
        """Return the part that runs on each sample: all of it, or what a device cannot do."""
        plan = self.plan if on_device and self.defers else None
        return PipelineWorker(self.pipeline, self._fields, plan)

    def apply(self, batch: Batch, draws: Draws | None) -> Batch:
        """Compute what was drawn on images ``[n, C, H, W]`` and masks of the workers.

        Raises:
            BatchError: a field is missing, or has another number of samples than was drawn.
        """
        if draws is None or not draws.programs:
            return batch
        ops, done = device_ops(self.pipeline), {}
        with plain_tensors():
            for path, program in draws.programs.items():
                value = plain(checked_rows(at_path(batch, path), draws, path))
                done[path] = replay(program, draws.blob, value, ops)
        return put_leaves(batch, done)

    def apply_unprepared(self, batch: Batch, key: SampleKey) -> Batch:
        """Draw and compute here, for a batch ``[n, C, H, W]``.

        Raises:
            BatchError: there is no image batch.
            TransformError: the pipeline needs boxes or keypoints, which a collated batch has lost.
        """
        self.follow(key.epoch)
        # On the CPU it is faster to run the pipeline on one sample after the other.
        records = _refusal() is None and first_device(batch) != torch.device("cpu")
        if records and self._recorder is None:
            self._recorder = Recorder(self.pipeline, make_plan(self.pipeline, one_size=True))
        recorder = self._recorder if records else None
        with plain_tensors():
            return run_collated(self.pipeline, batch, self._fields, key, recorder)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_recorder": None}


def _refusal() -> str | None:
    """Return why no pipeline may be recorded with the installed torchvision, or None."""
    if hasattr(v2.Transform, "make_params") and hasattr(v2.Transform, "transform"):
        return None
    return "torchvision before 0.21 does not say what a transform draws"

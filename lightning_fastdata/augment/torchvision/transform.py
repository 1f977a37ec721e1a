"""A torchvision v2 pipeline as a transform of batches."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import PIL.Image
import torch
from torchvision.transforms import v2

from lightning_fastdata.augment.pipeline.fields import describe
from lightning_fastdata.augment.replay.torch import replay
from lightning_fastdata.augment.stage_transform import (
    CallableTransform,
    StageTransform,
    plain_tensors,
    table,
)
from lightning_fastdata.augment.torchvision.collated import run_collated
from lightning_fastdata.augment.torchvision.operations import device_ops
from lightning_fastdata.augment.torchvision.pipeline import is_own, is_v1, is_v2
from lightning_fastdata.augment.torchvision.plan import lacks_form, make_plan, may_draw
from lightning_fastdata.augment.torchvision.rewrite import rewritten
from lightning_fastdata.augment.torchvision.samples import (
    check_convertible,
    check_roles,
    image_of,
    mover_of,
    size_of,
    typed,
)
from lightning_fastdata.augment.torchvision.tape import Recorder
from lightning_fastdata.augment.torchvision.worker import PipelineWorker
from lightning_fastdata.errors import BatchError, TransformError
from lightning_fastdata.fingerprint import fingerprint
from lightning_fastdata.tree import replace_leaves

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Self

    from lightning_fastdata.augment.pipeline.fields import Fields
    from lightning_fastdata.augment.replay.program import Draws
    from lightning_fastdata.fingerprint import Fingerprint
    from lightning_fastdata.tree import Path
    from lightning_fastdata.types import Batch, SampleKey


def stage_transform(
    transform: object,
    fields: Fields,
    *,
    same_pixels: bool,  # noqa: ARG001 - no device makes other pixels here
) -> TorchvisionTransform | None:
    """Return the transform of batches of a v2 pipeline; None: it is none.

    Raises:
        TransformError: it is a pipeline of torchvision's first interface.
    """
    if is_v2(transform):
        return TorchvisionTransform(transform, fields)
    if is_v1(transform):
        raise TransformError(
            f"{type(transform).__name__} is of torchvision's first interface "
            "(torchvision.transforms), which draws once for a whole batch. Its form in v2, which "
            f"augment= runs with draws for each sample, is\n\n{rewritten(transform)}\n\nIts pixels "
            "are those of tensors, which differ a little from those of PIL images. To keep the "
            "latter, leave the pipeline in the dataset."
        )
    return None


class TorchvisionTransform(StageTransform):
    """A torchvision v2 pipeline for batches, for ``FastDataModule(augment=...)``.

    Each sample draws what v2 draws with torch's generator seeded by its key
    (:func:`~lightning_fastdata.randomness.seeds.torch_seed`).
    """

    library = "torchvision"

    def __init__(self, pipeline: Any, fields: Fields) -> None:
        self.name = type(pipeline).__name__
        self.pipeline = pipeline
        self._fields = fields
        self._one_size = self._pil = False
        """Whether all images that were seen have one size, and whether they are PIL images."""
        self._take_in(_state_of(pipeline))

    def _take_in(self, state: Fingerprint | None) -> None:
        """Plan for the pipeline as it is now."""
        self._state = state
        self._epoch: int | None = None
        self._recorder: Recorder | None = None
        """For batches of other loaders."""
        self.plan = make_plan(
            self.pipeline, one_size=self._one_size, pil=self._pil, refusal=refusal()
        )

    @property
    def defers(self) -> bool:
        """Whether a device can do any part of it."""
        return self.plan.defers

    def without_form(self) -> Sequence[tuple[str, torch.nn.Module]]:
        """Return what torchvision itself or the user's own code does; functions have no times."""
        listed = ((leaf.name, leaf.transform) for leaf in self.plan.leaves)
        return [one for one in listed if isinstance(one[1], torch.nn.Module) and lacks_form(one[1])]

    def made_of(self) -> tuple[object, ...]:
        """Return the pipeline."""
        return (self.pipeline,)

    def renewed(self) -> Self:
        """Return the transform as the pipeline is now: itself, if nothing of that has changed."""
        state = _state_of(self.pipeline)
        if state is not None and state == self._state:
            return self
        twin = copy.copy(self)
        twin._take_in(state)
        return twin

    def for_samples(self, samples: Iterable[Batch]) -> Self:
        """Return the transform for a dataset, of which these are samples from all over it.

        Where they have one size, nothing has to be done to them before they make a batch.
        """
        seen = [image_of(sample) for sample in samples]
        sizes = set(map(size_of, seen))
        fitted = copy.copy(self)
        fitted._one_size = len(seen) > 1 and len(sizes) == 1 and None not in sizes
        fitted._pil = any(isinstance(image, PIL.Image.Image) for image in seen)
        fitted._take_in(self._state)
        return fitted

    def behind(self) -> StageTransform:
        """Return what runs behind another transform, on whole batches; itself, if it draws."""
        whole = all(is_own(leaf.transform) and not may_draw(leaf) for leaf in self.plan.leaves)
        return CallableTransform(self.pipeline, self._fields) if whole else self

    def check_sample(self, sample: Batch) -> None:
        """Raise BatchError if v2 would leave a sample, or a part of it, as it is."""
        check_convertible(sample, self.plan.leaves)
        check_roles(typed(sample, self._fields), self._fields, mover_of(self.plan.leaves))

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
        ops, waiting = device_ops(self.pipeline), set(draws.programs)

        def carried_out(path: Path, value: Any) -> Any:
            program = draws.programs.get(path)
            if program is None:
                return value
            waiting.discard(path)
            if not isinstance(value, torch.Tensor) or len(value) != draws.samples:
                raise BatchError(
                    f"The field {path!r} should be a tensor of {draws.samples} samples, as many as "
                    f"were drawn for, but is {describe(value)}. A collate_fn must stack the images "
                    "of a batch in order, and keep them at their place."
                )
            return replay(program, draws.blob, value.as_subclass(torch.Tensor), ops)

        with plain_tensors():
            done = replace_leaves(batch, carried_out, depth=-1)
        if waiting:
            raise BatchError(f"There is no field {min(map(str, waiting))} in {describe(batch)}.")
        return done

    def apply_unprepared(self, batch: Batch, key: SampleKey) -> Batch:
        """Draw and compute here, for a batch ``[n, C, H, W]``.

        Raises:
            BatchError: there is no image batch.
            TransformError: the pipeline needs boxes or keypoints, which a collated batch has lost.
        """
        if self._epoch not in (None, key.epoch) and self.renewed() is not self:
            self._take_in(_state_of(self.pipeline))
        self._epoch = key.epoch
        if self._recorder is None and refusal() is None:
            self._recorder = Recorder(self.pipeline, make_plan(self.pipeline, one_size=True))
        with plain_tensors():
            return run_collated(self.pipeline, batch, self._fields, key, recorder=self._recorder)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_recorder": None}

    def explain(self) -> str:
        """Return a table: operation, where it runs, why."""
        return table([(placed.name, placed.where, placed.why) for placed in self.plan.placements])


def refusal() -> str | None:
    """Return why no pipeline may be recorded with the installed torchvision, or None."""
    if hasattr(v2.Transform, "make_params") and hasattr(v2.Transform, "transform"):
        return None
    return "torchvision before 0.21 does not say what a transform draws"


def _state_of(pipeline: Any) -> Fingerprint | None:
    return fingerprint(pipeline, with_globals=False)

"""The transforms of each stage, and the batches that wait for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.augment import StageTransform, as_batch_transform, left_undone
from lightning_fastdata.batches.staged import StagedBatch
from lightning_fastdata.device import reads_page_locked
from lightning_fastdata.errors import FastDataWarning, TransformError
from lightning_fastdata.plugin.placing.shared_draws import told_of_shared_draws
from lightning_fastdata.types import STAGES, Batch, PixelPlace, Stage

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import Trainer

    from lightning_fastdata.planning.plan_for import LoaderSpec


_ALSO_NORMALISED: Final[Mapping[str, str]] = {
    "Albumentations": "A.Compose([A.Normalize(), A.ToTensorV2()])",
    "torchvision": "v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])",
}
"""A pipeline that only makes floats of images and normalises them, by whose it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """A loader that is to be made for a stage, and what its pipeline rests on besides."""

    spec: LoaderSpec
    seed: int  # of the draws
    trainer: Trainer | None = None
    """Who runs the stage; None: not known yet, and everything is deferred to the workers."""


class StageTransforms:
    """What was registered for each stage; a pipeline is always the first.

    ``augment`` is a transform for training, or a dict with stages as keys, or None.

    Raises:
        TransformError: As :meth:`register`.
    """

    def __init__(self, augment: object, *, image: str | int | None, mask: str | int | None) -> None:
        self._image, self._mask = image, mask
        self._of: dict[Stage, list[StageTransform]] = {stage: [] for stage in STAGES}
        self._explained: dict[Stage, tuple[StageTransform, StageTransform]] = {}
        """Of each stage, what was registered, and what it was last made to suit a dataset."""
        self._told = False
        self.assign(augment)

    def assign(self, augment: object) -> None:
        """Have these transforms, and none else, as :class:`StageTransforms` takes them."""
        self.given = augment
        for registered in self._of.values():
            registered.clear()
        by_stage: Mapping[Any, object]
        by_stage = augment if isinstance(augment, Mapping) else {"train": augment}
        for stage, transform in by_stage.items():
            if transform is not None:
                self.register(transform, stage)

    def __getitem__(self, stage: Stage) -> list[StageTransform]:
        return self._of[stage]

    def worker_part(self, stage: Stage) -> StageTransform | None:
        """Return the transform of a stage that starts in the workers, if there is one."""
        registered = self._of[stage]
        return registered[0] if registered and registered[0].starts_in_worker else None

    def worker_part_for(self, stage: Stage, samples: Iterable[object]) -> StageTransform | None:
        """Return what starts in the workers, as it suits a dataset; it is explained so from now on.

        ``samples`` are of the dataset, read as far as is needed; none: as it suits any.
        """
        part = self.worker_part(stage)
        if part is None:
            return None
        suited = part.for_samples(samples)
        self._explained[stage] = part, suited
        return suited

    def run_on_device(self, stage: Stage, *, pipeline: bool) -> bool:
        """Return whether anything of a stage runs on the device; ``pipeline``: of a pipeline."""
        return any(pipeline or not made.starts_in_worker for made in self._of[stage])

    def register(self, transform: object, stage: Stage) -> Callable[[], None]:
        """Add a transform to a stage, and return what removes it again.

        Raises:
            TransformError: The stage does not exist, the transform is of no known kind, or it
                would be a second pipeline or one that comes too late.
        """
        if stage not in STAGES:
            raise TransformError(
                f"There is no stage {stage!r} to register a transform for; stages are "
                f"{', '.join(STAGES)}."
            )
        made = as_batch_transform(transform, image=self._image, mask=self._mask)
        registered = self._of[stage]
        if registered:
            made = made.behind()
        if made.starts_in_worker and registered:
            raise TransformError(
                f"The {made.library} pipeline {made.name} was registered for stage {stage!r} after "
                f"{registered[0].name}. It starts in the workers and has to be the first and only "
                "one: register it first, or join two pipelines in one Compose."
            )
        registered.append(made)

        def remove() -> None:
            if made in registered:
                registered.remove(made)

        return remove

    def warn_if_unlike_training(self, stage: Stage, name: str, sample: object) -> None:
        """Warn, once, if training normalises the images and a stage does not.

        ``sample`` is one of its dataset, ``name``. What callables do to it is not known.
        """
        callables = any(not one.starts_in_worker for one in self._of[stage])
        if self._told or stage == "train" or callables:
            return
        undone = left_undone(self._of["train"], self._of[stage], sample, self._image)
        if undone is not None:
            self._told = True
            part = self.worker_part("train")
            example = _ALSO_NORMALISED["Albumentations" if part is None else part.library]
            warnings.warn(
                f"{name}: training runs {undone}. Nothing in augment= does the same for stage "
                f"{stage!r}, so that the model gets other numbers there than it learns on. Give "
                f"each stage its pipeline: augment={{'train': compose, {stage!r}: {example}}}.",
                FastDataWarning,
                stacklevel=3,
            )

    def explain(self, where: Callable[[Stage], tuple[PixelPlace, str]]) -> list[str]:
        """Return, for each transform, where each of its operations runs and why.

        ``where`` returns for a stage where the pixels of its pipeline are computed, and why.
        """
        parts = []
        for stage, registered in self._of.items():
            place, why = where(stage)
            for made in registered:
                known, used = self._explained.get(stage, (None, made))
                text = (used if known is made else made).explain()
                if made.starts_in_worker and place == "workers":
                    text = f"all of it in the workers, by {made.library} itself: {why}"
                elif made.starts_in_worker:
                    text = f"on the device: {why}\n{text}"
                parts.append(f"augment, {stage}\n{text}")
        return parts


# -- batches that wait for their transform, alone or combined from several loaders -----------------


def inside(batch: Batch, function: Callable[[Batch], Batch]) -> Batch:
    """Apply a function to a batch as the user knows it, leaving its draws where they are."""
    if isinstance(batch, StagedBatch):
        return batch.with_batch(function(batch.batch))
    if not _is_combined(batch):
        return function(batch)
    plain = function(_each(batch, lambda b: b.batch if isinstance(b, StagedBatch) else b))
    if type(batch) is dict:
        return {key: _restaged(batch[key], value) for key, value in plain.items()}
    return type(batch)(map(_restaged, batch, plain))


def _restaged(staged: Batch, value: Batch) -> Batch:
    return staged.with_batch(value) if isinstance(staged, StagedBatch) else value


def transfer(batch: Batch, move: Callable[[Batch], Batch], device: torch.device) -> Batch:
    """Move a batch as the user knows it, and what was drawn for its transform, to the device."""
    if isinstance(batch, StagedBatch):
        if batch.crossing is not None:
            return batch.crossing.land()
        draws = batch.draws
        if draws is not None:
            draws = draws.to(device, non_blocking=reads_page_locked(device.type))
        return StagedBatch(move(batch.batch), draws, batch.stage)
    if _is_combined(batch):
        return _each(batch, lambda part: transfer(part, move, device))
    return move(batch)


def carry_out_draws(batch: Batch, transforms: StageTransforms) -> Batch:
    """Carry out what the workers drew for a batch, or for several combined, on the device.

    Only that: it reads the batch and nothing else. Callables may read what the training writes and
    draw from generators that it draws from, so they run where they would without prefetching.
    """
    if isinstance(batch, StagedBatch):
        first = next((t for t in transforms[batch.stage] if t.starts_in_worker), None)
        if batch.draws is None or first is None:
            return batch
        return StagedBatch(first.apply(batch.batch, batch.draws), None, batch.stage)
    if _is_combined(batch):
        return _each(batch, lambda part: carry_out_draws(part, transforms))
    return batch


def finish(
    batch: Batch,
    transforms: StageTransforms,
    drawing: Callable[[Stage], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> tuple[Batch, bool]:
    """Run what a batch on the device waits for; return it plain, with whether anything ran.

    ``drawing`` returns a block in which the callables of a stage draw.
    """
    if _is_combined(batch):
        return _each(batch, lambda part: finish(part, transforms, drawing)[0]), True
    if not isinstance(batch, StagedBatch):
        return batch, False
    plain = carry_out_draws(batch, transforms).batch
    # Else it ran in the workers, and in carry_out_draws.
    callables = [each for each in transforms[batch.stage] if not each.starts_in_worker]
    if callables:
        with drawing(batch.stage):
            for transform in callables:
                with told_of_shared_draws(transform, plain):
                    plain = transform.apply(plain, None)
    return plain, True


def _is_combined(batch: Batch) -> bool:
    """Return whether these are batches of several loaders, of which some wait."""
    values = batch.values() if type(batch) is dict else batch
    several = type(batch) in (dict, list, tuple)
    return several and any(isinstance(value, StagedBatch) for value in values)


def _each(batches: Batch, function: Callable[[Batch], Batch]) -> Batch:
    if type(batches) is dict:
        return {key: function(batch) for key, batch in batches.items()}
    return type(batches)(map(function, batches))

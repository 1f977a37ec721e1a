"""The transforms of each stage, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from lightning_fastdata.augment.stage_transform import SuitsSamples
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.errors import TransformError
from lightning_fastdata.plugin.contracts import ImageForm
from lightning_fastdata.plugin.loggers.pictures import image_form
from lightning_fastdata.types import STAGES, Stage

if TYPE_CHECKING:
    from lightning_fastdata.augment.placement import Place
    from lightning_fastdata.augment.stage_transform import StageTransform


class StageTransforms:
    """What was registered for each stage; an Albumentations pipeline is always the first.

    Args:
        augment: A transform for training, or a dict with stages as keys, or None.
        image: Where the image is in a sample; see :func:`as_batch_transform`.
        mask: Where the mask is.

    Raises:
        TransformError: As :meth:`register`.
    """

    def __init__(self, augment: Any, *, image: str | int | None, mask: str | int | None) -> None:
        self._image, self._mask = image, mask
        self._of: dict[Stage, list[StageTransform]] = {stage: [] for stage in STAGES}
        self._explained: dict[Stage, tuple[StageTransform, StageTransform]] = {}
        """Of each stage, what was registered, and what it was last made to suit a dataset."""
        for stage, transform in _by_stage(augment).items():
            self.register(transform, stage)

    def __getitem__(self, stage: Stage) -> list[StageTransform]:
        """Return the transforms of a stage in their order."""
        return self._of[stage]

    def worker_part(self, stage: Stage) -> StageTransform | None:
        """Return the transform of a stage that starts in the workers, if there is one."""
        registered = self._of[stage]
        return registered[0] if registered and registered[0].starts_in_worker else None

    def worker_part_for(self, stage: Stage, samples: Iterable[Any]) -> StageTransform | None:
        """Return what starts in the workers, as it suits a dataset; it is explained so from now on.

        Args:
            stage: The stage.
            samples: Of the dataset, read as far as is needed; none: as it suits any.
        """
        part = self.worker_part(stage)
        if part is None or not isinstance(part, SuitsSamples):
            return part
        suited = part.for_samples(samples)
        self._explained[stage] = part, suited
        return suited

    def run_on_device(self, stage: Stage, *, pipeline: bool) -> bool:
        """Return whether anything of a stage runs on the device.

        Args:
            stage: The stage.
            pipeline: Whether an Albumentations pipeline would run there.
        """
        return any(pipeline or not made.starts_in_worker for made in self._of[stage])

    def repeats(self, stage: Stage) -> int:
        """Return how often each sample of the loader is in a batch behind the transforms."""
        return int(getattr(self.worker_part(stage), "repeats", 1))

    def image_form(self, stage: Stage) -> ImageForm:
        """Return what is known of the images of a stage behind its transforms."""
        return image_form(self._of[stage], self._image)

    def register(self, transform: Any, stage: Stage) -> Callable[[], None]:
        """Add a transform to a stage, and return what removes it again.

        Raises:
            TransformError: The stage does not exist, the transform is of no known kind, or it
                would be a second Albumentations pipeline or one that comes too late.
        """
        if stage not in STAGES:
            raise TransformError(
                f"There is no stage {stage!r} to register a transform for; stages are "
                f"{', '.join(STAGES)}."
            )
        made = as_batch_transform(transform, image=self._image, mask=self._mask)
        registered = self._of[stage]
        if made.starts_in_worker and registered:
            raise TransformError(
                f"The Albumentations pipeline {made.name} was registered for stage {stage!r} after "
                f"{registered[0].name}. It starts in the workers and has to be the first and only "
                "one: register it first, or join two pipelines in one Compose."
            )
        registered.append(made)

        def remove() -> None:
            if made in registered:
                registered.remove(made)

        return remove

    def explain(self, where: Callable[[Stage], tuple[Place, str]]) -> list[str]:
        """Return, for each transform, where each of its operations runs and why.

        Args:
            where: Returns for a stage where the pixels of its pipeline are computed, and why.
        """
        return [
            f"augment, {stage}\n{_explain(self._as_used(stage, made), *where(stage))}"
            for stage, registered in self._of.items()
            for made in registered
        ]

    def _as_used(self, stage: Stage, registered: StageTransform) -> StageTransform:
        known, used = self._explained.get(stage, (None, registered))
        return used if known is registered else registered


def _explain(transform: StageTransform, place: Place, why: str) -> str:
    if not transform.starts_in_worker:
        return transform.explain()
    if place == "workers":
        return f"all of it in the workers, by Albumentations itself: {why}"
    return f"on the device: {why}\n{transform.explain()}"


def _by_stage(augment: Any) -> dict[Stage, Any]:
    if augment is None:
        return {}
    if isinstance(augment, Mapping):
        return {cast("Stage", stage): t for stage, t in augment.items() if t is not None}
    return {"train": augment}

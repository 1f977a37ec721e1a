"""A loader that is to be made, and the pipeline that runs on what it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_fastdata.augment.stage_transform import PlaceSwitch, SwitchedTransform
from lightning_fastdata.planning.facts.pipeline_trial import rests_on

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch.utils.data import Dataset

    from lightning_fastdata.augment.stage_transform import StageTransform
    from lightning_fastdata.planning.facts.pipeline_trial import Trial
    from lightning_fastdata.types import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """A loader that is to be made for a stage, as far as its pipelines rest on it."""

    dataset: Dataset[Any]
    """What it reads."""
    stage: Stage
    """What it is for."""
    name: str
    """How the user knows its dataset."""
    seed: int
    """Of the draws."""
    collate_fn: Callable[[list[Any]], Any] | None
    """The user's; None: the default collation."""
    composes: tuple[Any, ...]
    """The pipelines that the dataset calls itself."""
    batch_size: int = 1
    """Samples in a batch of this rank; 1 where single samples come."""
    against: str | None = None
    """Why the dataset's own pipeline may leave nothing to the device; None: it may."""
    trainer: Trainer | None = None
    """Who runs the stage; None: nobody yet, and everything is left to the workers."""

    @property
    def rests_on(self) -> tuple[Any, ...]:
        """What a trial of the dataset rests on."""
        return rests_on(
            self.dataset,
            self.composes,
            seed=self.seed,
            collate_fn=self.collate_fn,
            against=self.against,
        )


class DatasetPipeline(NamedTuple):
    """The pipeline that runs on a dataset; at most one of them."""

    transform: StageTransform | None
    """The data module's, which starts in the workers, as it suits the dataset."""
    own: Trial | None
    """A trial of those that the dataset calls itself, if they leave something over."""

    def loader_settings(
        self, *, on_device: bool, switch: PlaceSwitch | None = None
    ) -> dict[str, Any]:
        """Return what a loader takes for pixels on the device; with a switch, in some epochs."""
        transform = self.transform
        if transform is not None and switch is not None:
            transform = SwitchedTransform(transform, switch)
        return {
            "transform": transform,
            "on_device": transform is not None and on_device,
            "recording": self.own.recording(switch) if self.own is not None and on_device else None,
        }

"""What the Albumentations pipelines that datasets call themselves leave to the device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_fastdata.loading.pipeline_trial import IN_WORKERS, Trial, try_recording

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from lightning_fastdata.augment.placement import Place
    from lightning_fastdata.types import Stage

_LOG = logging.getLogger(__name__)


class OwnPipelines:
    """The pipelines of the datasets of one data module."""

    def __init__(self) -> None:
        self._trials: dict[tuple[Stage, str], Trial] = {}

    def tried(
        self,
        dataset: Dataset[Any],
        *,
        stage: Stage,
        name: str,
        seed: int,
        collate_fn: Callable[[list[Any]], Any] | None,
    ) -> Trial | None:
        """Try out a dataset; None if it has no pipelines, or none that leave something over.

        Args:
            dataset: The dataset.
            stage: What its loader is for.
            name: How the user knows it.
            seed: Of the draws.
            collate_fn: The user's.
        """
        trial = try_recording(dataset, seed=seed, collate_fn=collate_fn)
        if trial is None:
            return None
        if (stage, name) not in self._trials:
            _LOG.info("%s: its own pipeline: %s", name, trial.explain().splitlines()[0])
        self._trials[stage, name] = trial
        return trial if trial.defers else None

    def on_device(self, stage: Stage) -> bool:
        """Return whether a loader of a stage leaves something to the device, as far as known."""
        return any(trial.defers for (of, _), trial in self._trials.items() if of == stage)

    def explain(self, where: Callable[[Stage], tuple[Place, str]]) -> list[str]:
        """Return, for each dataset with pipelines, where each of their operations runs and why.

        Args:
            where: Returns for a stage where pixels are computed, and why.
        """
        parts = []
        for (stage, name), trial in self._trials.items():
            place, why = where(stage)
            told = trial.explain()
            if trial.defers:
                told = f"{why}\n{told}" if place == "device" else f"{IN_WORKERS}: {why}"
            parts.append(f"pipeline of {name}\n{told}")
        return parts

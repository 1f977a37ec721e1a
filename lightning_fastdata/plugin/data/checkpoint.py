"""What Lightning puts into its checkpoints for a data module, and takes out of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from lightning_fastdata.plugin.data.progress import KEY
from lightning_fastdata.plugin.data.time_travel import TimeTravel

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_fastdata.plugin.contracts import DataModule
    from lightning_fastdata.plugin.data.module_loaders import ModuleLoaders


class SavesProgress(TimeTravel):
    """The part of a data module that Lightning saves and restores."""

    _trainer: Trainer | None
    _loaders: ModuleLoaders

    def run_seed(self) -> int:
        """Return the seed of order and draws."""
        return self._loaders.seed(cast("DataModule", self))

    def state_dict(self) -> dict[str, Any]:
        """Return how far the training has come; Lightning puts it into its checkpoints."""
        return {KEY: {**self._loaders.progress.state_dict(self._trainer), **self._run_state()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on behind the batch after which a checkpoint was written; Lightning calls it.

        Raises:
            OptionsError: The state is none of this class, or of a later version.
        """
        if KEY in state_dict:
            self._loaders.progress.load_state_dict(state_dict[KEY], self._trainer)
            self._load_run(state_dict[KEY])

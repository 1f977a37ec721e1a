"""How far the training of a data module has come, as it is kept in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.position import VERSION, Place, Position, tell_new_stream
from lightning_fastdata.plugin.seams.loaders import with_paths
from lightning_fastdata.plugin.seams.trainer import (
    has_ended,
    is_to_be_restored,
    mend_counts,
    move_place,
    training_place,
)

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_fastdata.plugin.data.datamodule import DataModuleHooks as DataModule

KEY: Final = "lightning_fastdata"
"""Under which the state stands in that of the data module."""


class TrainingProgress:
    """Where the training loaders of a data module were when a run was saved that goes on now."""

    def __init__(self) -> None:
        self._saved: dict[str, Position] = {}
        self._place: Place | None = None
        """Where the run was that goes on."""

    @property
    def place(self) -> Place | None:
        """Where the run was that goes on; None: none does."""
        return self._place

    @property
    def seed(self) -> int | None:
        """The seed of the run that goes on; None: none does, or it is not known."""
        return next((state.seed for state in self._saved.values()), None)

    def state_dict(self, trainer: Trainer | None) -> dict[str, Any]:
        """Return the position in each training loader, as plain data.

        Tuners save and restore a run around their trials: as long as no batch has followed what was
        loaded, that is returned.
        """
        loaders = dict(_training_loaders(trainer))
        place = training_place(trainer)
        if place.last:
            place = Place(place.epoch + 1, 0, last=False)
        if self._saved and not any(loader.begun for loader in loaders.values()):
            states = {path: state.as_dict() for path, state in self._saved.items()}
            place = place if self._place is None else self._place
        else:
            states = {path: loader.state_dict() for path, loader in loaders.items()}
        return {
            "version": VERSION,
            "epoch": place.epoch,
            "batches": place.taken,
            "loaders": states,
        }

    def load_state_dict(self, state: object, trainer: Trainer | None) -> None:
        """Go on from a state with the next iteration of each training loader.

        Raises:
            OptionsError: It is none, or of a later version.
        """
        loaders = state.get("loaders") if isinstance(state, Mapping) else None
        if not isinstance(loaders, Mapping):
            raise OptionsError(
                f"The checkpoint holds {state!r:.200} for the data module, where the positions of "
                "its training loaders were expected. It was not written by FastDataModule."
            )
        self._saved = {str(path): Position.from_dict(one) for path, one in loaders.items()}
        self._place = None
        if isinstance(state, Mapping) and "epoch" in state:
            self._place = Place(int(state["epoch"]), int(state["batches"]), last=False)
            if trainer is not None:
                mend_counts(trainer, self._place.epoch)
        for path, loader in _training_loaders(trainer):
            if path in self._saved:
                loader.load_state_dict(self._saved[path].as_dict())

    def of(self, loader: object, trainer: Trainer | None) -> Position | None:
        """Return where a loader was; None: not known."""
        loaders = dict(_training_loaders(trainer))
        path = next((path for path, one in loaders.items() if one is loader), None)
        if trainer is None or path is None or path not in self._saved:
            return None
        state = self._saved[path]
        if state.lanes is not None and trainer.global_rank:
            if state.epoch and state.lanes:
                why = "its state was saved on rank 0, for the part that it reads"
                tell_new_stream(loaders[path].dataset, state, why)
            state = self._saved[path] = replace(state, lanes=[], digest=None)
        anew = loaders[path].cut_anew(state)
        if anew.batches != state.batches:
            self._saved[path] = anew
            if len(loaders) == 1:
                move_place(trainer, state.epoch, state.batches, anew.batches)
        return self._saved[path]


class TrainingRun:
    """The training that takes the batches of a data module's loaders."""

    def __init__(self, module: DataModule, progress: TrainingProgress) -> None:
        self._module = module
        self._progress = progress

    @property
    def began(self) -> bool:
        """Whether the data module has a trainer."""
        return self._module.trainer is not None

    @property
    def over(self) -> bool:
        """Whether the trainer has come to its end, or was interrupted."""
        return has_ended(self._module.trainer)

    def place(self) -> Place:
        """Return where the run is.

        A run that goes on from a checkpoint is where that was saved, also while Lightning has not
        restored its own counts yet: of a stream it takes the first batch then, if the
        LightningModule asks for ``estimated_stepping_batches``.
        """
        trainer = self._module.trainer
        saved = self._progress.place
        if saved is not None and trainer is not None and is_to_be_restored(trainer):
            return saved
        return training_place(trainer)

    def epoch(self) -> int:
        """Return the epoch, counted from 0, of the batches that come next."""
        return self.place().epoch

    def resumed(self, loader: object) -> Position | None:
        """Return where a loader was when the run was saved that goes on now; None: not known."""
        return self._progress.of(loader, self._module.trainer)


def _training_loaders(trainer: Trainer | None) -> Iterator[tuple[str, FastDataLoader]]:
    loaders = None if trainer is None else trainer.train_dataloader
    for path, loader in with_paths(loaders):
        if isinstance(loader, FastDataLoader):
            yield "/".join(map(str, path)), loader

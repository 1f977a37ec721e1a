"""The callback by which ``fastdata prove`` has the epochs of a training be parts of a trial."""
# ruff: noqa: ARG002  # hooks are called with all that Lightning has

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.host import clock
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.plugin import seams
from lightning_fastdata.plugin.throughput import ThroughputHooks
from lightning_fastdata.prove import ProveSettings
from lightning_fastdata.prove.session import Session, TrialEndedError
from lightning_fastdata.prove.trials import Trial

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_fastdata.types import Stage

_LEFT_OUT: Final = (
    "Checkpoint", "EarlyStopping", "Timer", "LearningRateFinder", "BatchSizeFinder", "ProgressBar",
    "StochasticWeightAveraging", "LearningRateMonitor", "SaveConfigCallback", "ModelSummary",
)  # fmt: skip
"""Names of callback classes that write files, print, end the training, or change it by epochs."""


class ProvingHooks:
    """Runs a trial in the place of a training, and ends the script after it."""

    def __init__(self, settings: ProveSettings) -> None:
        super().__init__()
        self.settings = settings
        self.session: Session | None = None
        self._loaders: dict[str, object] = {}
        self._limits: dict[str, float | int | None] = {}
        self._every: tuple[Any, Any] = (1, 1.0)
        self._most_batches = -1
        """Batches after which the training ends; below 0: it has no limit of steps."""
        self._advanced = False
        self._began_s = clock.unix_s() - 1.0  # times of files are coarse

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep loggers and checkpoints out of the way, and have the loaders come from the trial.

        Raises:
            OptionsError: Several processes train together.
        """
        self._unsave_config(trainer)
        logs = Path(self.settings.file).with_name("logs")
        logs.mkdir(parents=True, exist_ok=True)
        made = seams.hide_loggers(trainer, str(logs))
        if stage != "fit" or seams.attributes_of(trainer).fast_dev_run:
            return
        # On the instance: a script may ask for checkpoints of its own, also where it goes on.
        vars(trainer)["save_checkpoint"] = seams.nothing
        if self.session is not None:
            raise TrialEndedError(0)
        settings = self.settings
        trial = Trial(script=settings.script)
        self.session = Session(
            trial,
            Path(settings.file),
            budget_s=settings.budget_s,
            device=trainer.strategy.root_device,
            make_fast=self._fast_loaders(trainer),
        )
        if trainer.world_size > 1:
            error = OptionsError(
                f"{trainer.world_size} processes train together, and `fastdata prove` tries one. "
                "Give the script one device, as by devices=1."
            )
            self.session.ended_by(error)
            raise error
        trial.facts["given_to_fit"] = self.session.make_fast is not None
        trial.facts["home"] = seams.home_of(seams.package_of(trainer))
        trial.facts["logs"] = [str(folder) for folder in made]
        self._leave_out(trainer, trial)
        if trainer.max_epochs is not None and trainer.max_epochs > 0:
            self.session.epochs = trainer.max_epochs
        self._most_batches = trainer.max_steps * trainer.accumulate_grad_batches
        by_clock = seams.end_validations_by_clock(trainer)
        if by_clock:
            trial.notes.append("Validations come by the clock, and are in no figure.")
        every = None if by_clock else trainer.val_check_interval
        self._every = trainer.check_val_every_n_epoch, every
        self._limits = {"train": trainer.limit_train_batches, "val": trainer.limit_val_batches}
        trainer.limit_train_batches = 1.0
        if seams.attributes_of(trainer).overfit_batches:
            # Its limits are those above; Lightning would make loaders of its own of the trial's.
            seams.attributes_of(trainer).overfit_batches = 0
            trial.notes.append("overfit_batches turns shuffling off, and the trial did not.")
        if trainer.limit_val_batches:
            trainer.limit_val_batches = 1.0
        trainer.check_val_every_n_epoch, trainer.val_check_interval = 1, 1.0
        trainer.num_sanity_val_steps = 0
        # Ask for loaders anew until it is known how many steps the parts of an epoch have.
        seams.attributes_of(trainer).reload_dataloaders_every_n_epochs = 1
        seams.watch_sources(trainer, ("train", "val"), self._give)

    def _unsave_config(self, trainer: Trainer) -> None:
        """Remove the file that LightningCLI has written of this run: the next one would find it."""
        for callback in seams.attributes_of(trainer).callbacks:
            name = getattr(callback, "config_filename", None)
            # With `overwrite` it may have been there before, and no run minds it.
            new = not getattr(callback, "overwrite", False)
            if not (new and getattr(callback, "already_saved", False) and isinstance(name, str)):
                continue
            file = Path(trainer.log_dir or trainer.default_root_dir, name)
            with suppress(OSError):
                if file.stat().st_mtime >= self._began_s:
                    file.unlink()

    def _leave_out(self, trainer: Trainer, trial: Trial) -> None:
        left_out, kept = [], []
        for callback in seams.attributes_of(trainer).callbacks:
            names = {kind.__name__ for kind in type(callback).__mro__}
            if names & set(_LEFT_OUT):
                left_out.append(type(callback).__name__)
                continue
            kept.append(callback)
            if isinstance(callback, ThroughputHooks):
                callback.summary, callback.report_path = False, False
        seams.attributes_of(trainer).callbacks = kept
        said = ", ".join(dict.fromkeys(left_out))
        trial.notes.append(
            "Loggers are silent, learning rate schedules stand still, and nothing is saved by the "
            f"trainer{f'; left out: {said}' if said else ''}. What these take is in no figure."
        )

    def _fast_loaders(self, trainer: Trainer) -> Callable[[str, Any], Any] | None:
        """Return what makes loaders as ``from_loaders`` would; None: `fit` was given no loaders."""
        owner = seams.loaders_owner(trainer.fit_loop)
        if owner is None or hasattr(owner, "training_step") or hasattr(owner, "prepare_data"):
            return None
        home = importlib.import_module(seams.home_of(seams.package_of(trainer)))

        def make(stage: str, loader: Any) -> Any:
            data = home.FastDataModule.from_loaders(**{stage: loader}, num_workers="auto")
            return data.train_dataloader() if stage == "train" else data.val_dataloader()

        return make

    def _give(self, stage: Stage, loaders: object) -> object:
        """Return what a loop reads in the place of the loaders of the script."""
        session = self.session
        if session is None:
            return None
        if stage not in self._loaders:
            self._loaders[stage] = seams.mapped(
                loaders, lambda own: session.loader(stage, own, _limit(own, self._limits[stage]))
            )
        if stage == "train":
            train = list(seams.flattened(loaders))
            session.validations = (
                _validations(*self._every, dataset_length(train[0])) if train else 0.0
            )
            if train and self._most_batches > 0:
                session.ends_after(self._most_batches)
            session.advance()
            self._advanced = True
        # A new form each time, as Lightning keeps counts in it.
        return seams.mapped(self._loaders[stage], lambda one: one)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the next part of the trial, unless the loaders were asked for just now."""
        if self.session is None:
            return
        if not self._advanced:
            self.session.advance()
        self._advanced = False
        if self.session.settled:
            seams.attributes_of(trainer).reload_dataloaders_every_n_epochs = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let nothing but the trial end the training."""
        if self.session is None:
            return
        trainer.fit_loop.max_epochs = -1
        trainer.fit_loop.min_epochs = 10**9
        trainer.fit_loop.epoch_loop.max_steps = -1
        for config in trainer.strategy.lr_scheduler_configs:  # steps may call them by hand
            vars(config.scheduler)["step"] = seams.nothing
        if pl_module.automatic_optimization:
            # A schedule for a fixed number of steps raises an error after these.
            trainer.strategy.lr_scheduler_configs = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note when a step ends."""
        if self.session is not None:
            self.session.stepped()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note when the validation has ended."""
        if self.session is not None:
            self.session.validated()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Keep what the trial knows so far where the script fails."""
        if self.session is not None:
            self.session.ended_by(exception)


def _limit(loader: object, limit: float | int | None) -> int | None:
    """Return the number of batches that a limit of the trainer leaves; None: all of them."""
    length = dataset_length(loader)
    if isinstance(limit, float):
        return None if length is None or limit >= 1.0 else max(1, int(length * limit))
    return limit


def _validations(every_epochs: int | None, interval: object, batches: int | None) -> float:
    """Return how often an epoch validates, on average; without an interval: never."""
    if interval is None:
        return 0.0
    once = 1.0
    if isinstance(interval, float) and interval > 0:
        once = float(int(1 / interval + 1e-9))
    elif isinstance(interval, int) and batches:
        once = batches / interval if every_epochs is None else float(batches // interval)
    return once / (every_epochs or 1)

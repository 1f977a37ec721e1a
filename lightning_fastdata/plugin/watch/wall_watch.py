"""Tells the wall clock of a run what its trainer is at, by what the trainer announces."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from lightning_fastdata.insight.measure.wall import Activity, WallClock
from lightning_fastdata.plugin.seams.hooks import overridden_hook
from lightning_fastdata.plugin.seams.internals import attributes_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_fastdata.plugin.seams.profiler_tee import Listener

_OTHER: Final = Activity("other")
_WAIT: Final = Activity("wait")
_LOGGING: Final = Activity("logging")
_VALIDATION: Final = Activity("validation")
_WAIT_OF_VALIDATION: Final = Activity("validation", "waiting for batches")
_FIRST_EPOCH: Final = Activity("epoch_starts", "first epoch")
_LATER_EPOCHS: Final = Activity("epoch_starts", "later epochs")
_OF_STEPS: Final = {
    "run_training_batch": Activity("compute"),
    "batch_to_device": Activity("transfer"),
    "on_after_batch_transfer": Activity("augment"),
}
HOOKS_OF: Final = {"fit": "train", "validate": "validation", "test": "test", "predict": "predict"}
"""A trainer's method -> what the names of its hooks and steps have in them."""
_NEXT_TO_NOTHING: Final = ("on_train_batch_start", "on_before_optimizer_step")
"""Hooks of ours that cost less in each step than it costs to time them."""
_HOOKS: Final = ("batch_start", "batch_end", "epoch_start", "epoch_end", "start", "end")
"""Hooks of a module that a run waits for, beside its steps."""


class WallWatch:
    """Counts the time of a run.

    Args:
        trainer: Whose run.
        ours: The callback whose own time is told apart.
        method: Of the trainer: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
    """

    def __init__(self, trainer: Trainer, ours: object, method: str = "fit") -> None:
        self.clock = WallClock()
        self._fits = method == "fit"
        kind = HOOKS_OF[method]
        self._hooks = frozenset(f"on_{kind}_{when}" for when in _HOOKS)
        self._batch_ends = f"on_{kind}_batch_end"
        fetches = "train_dataloader" if self._fits else "val" if kind == "validation" else kind
        self._fetches = f"{fetches}_next"
        self._of_steps = dict(_OF_STEPS)
        if not self._fits:
            self._of_steps[f"{kind}_step"] = _OF_STEPS["run_training_batch"]
        self._trainer = trainer
        self._ours = ours
        self._epoch_start = _FIRST_EPOCH
        self._starting = True
        self._interrupted = _OTHER

    def restart(self) -> None:
        """Begin anew where the training begins, after what tuners ran before it."""
        self.clock.forget()
        self._epoch_start, self._starting = _FIRST_EPOCH, True
        self.clock.turn_to(_FIRST_EPOCH)

    def loaders_came(self) -> None:
        """The training's loaders are there: what follows starts their workers."""
        if self._starting:
            self.clock.turn_to(self._epoch_start)

    def validation_began(self) -> None:
        """A validation within a fit has begun, if it was not announced before."""
        if self._fits and self.clock.state is not _VALIDATION:
            self._interrupted = self.clock.state
            self.clock.turn_to(_VALIDATION)

    def validation_ended(self) -> None:
        """The training goes on where it was."""
        if self.clock.state is _VALIDATION:
            self.clock.turn_to(self._interrupted)

    def ended(self) -> None:
        """No more steps come."""
        self.clock.turn_to(_OTHER)

    def listener(self, action: str) -> Listener | None:
        """Return what to call at begin and end of an action, by the name it is announced with."""
        clock = self.clock
        owner, _, last = action.rpartition(".")
        if action == "run_training_epoch":
            return _nothing, self._epoch_ended
        if last == self._fetches:
            return self._wait_began, self._wait_ended
        if last == "val_next":
            return partial(clock.enter, _WAIT_OF_VALIDATION), clock.leave
        if last in self._of_steps:
            return partial(self._step_part, self._of_steps[last]), clock.leave
        if action == "save_checkpoint":
            return self._entering(Activity("checkpoints"))
        if owner.startswith("[Callback]"):
            activity = self._of_callback(owner.removeprefix("[Callback]"), last)
            return None if activity is None else self._entering(activity)
        if owner.startswith("[LightningModule]"):
            return self._of_module(last)
        return None

    def _entering(self, activity: Activity) -> Listener:
        return partial(self.clock.enter, activity), self.clock.leave

    def _of_callback(self, key: str, hook: str) -> Activity | None:
        callbacks = attributes_of(self._trainer).callbacks
        callback = next((each for each in callbacks if each.state_key == key), None)
        if overridden_hook(callback, hook) is None:
            return None
        if callback is self._ours:
            return None if hook in _NEXT_TO_NOTHING else Activity("measuring")
        name = f"{type(callback).__name__}.{hook}"
        saves = any(kind.__name__ == "Checkpoint" for kind in type(callback).__mro__)
        return Activity("checkpoints" if saves else "callbacks", name)

    def _of_module(self, hook: str) -> Listener | None:
        if hook == "on_validation_model_zero_grad":
            return _nothing, self.validation_began
        if hook not in self._hooks:
            return None
        module = self._trainer.lightning_module
        written = overridden_hook(module, hook) is not None
        enter, leave = self._entering(Activity("callbacks", f"{type(module).__name__}.{hook}"))
        if hook != self._batch_ends:
            return (enter, leave) if written else None
        # What follows it reduces and logs the metrics of the step.
        if not written:
            return _nothing, self._step_ended

        def ended() -> None:
            leave()
            self._step_ended()

        return enter, ended

    def _step_ended(self) -> None:
        if self.clock.state is _OTHER and self._logs():
            self.clock.turn_to(_LOGGING)

    def _logs(self) -> bool:
        """Return whether metrics go to a logger at the end of this step.

        In others Lightning lets go of the batch, which takes long for large ones.
        """
        trainer = self._trainer
        every = attributes_of(trainer).log_every_n_steps
        return bool(trainer.loggers and every and trainer.global_step % every == 0)

    def _wait_began(self) -> None:
        if self._starting:
            self.clock.turn_to(self._epoch_start)
            self.clock.enter(self._epoch_start)
        else:
            self.clock.turn_to(_OTHER)
            self.clock.enter(_WAIT)

    def _wait_ended(self) -> None:
        self.clock.leave()
        if self._starting:
            self._starting = False
            self.clock.turn_to(_OTHER)

    def _step_part(self, activity: Activity) -> None:
        # The batches of a validation pass the same hooks.
        self.clock.enter(_VALIDATION if self.clock.state is _VALIDATION else activity)

    def _epoch_ended(self) -> None:
        self._epoch_start, self._starting = _LATER_EPOCHS, True
        self.clock.turn_to(_LATER_EPOCHS)


def _nothing() -> None:
    pass

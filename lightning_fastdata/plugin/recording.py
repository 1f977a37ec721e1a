"""One run of a trainer, measured: which marks belong to which stage.

Callbacks have no hook around the fetch of a batch or its transfer, but the loops announce both to
``trainer.profiler``, a public attribute and the only public place that sees every fetch. A tee
takes its place, and forwards every call to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from lightning_fastdata.insight.machine import HostMeter
from lightning_fastdata.insight.stage import StageMeter, not_known
from lightning_fastdata.insight.wall import Activity, WallClock
from lightning_fastdata.plugin import seams

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_fastdata.insight.step_costs import PaddingMeter
    from lightning_fastdata.types import Batch, Stage

Listener: TypeAlias = tuple[tuple[Callable[[], None], ...], tuple[Callable[[], None], ...]]
"""Functions that are called at the start of an action, and functions called at its end."""

_NOTHING: Final[AbstractContextManager[object]] = nullcontext()
_OWN: Final = frozenset(("profiler", "profile", "_listened"))
_OTHER: Final = Activity("other")
_WAIT: Final = Activity("wait")
_COMPUTE: Final = Activity("compute")
_LOGGING: Final = Activity("logging")
_VALIDATION: Final = Activity("validation")
_WAIT_OF_VALIDATION: Final = Activity("validation", "waiting for batches")
FIRST_EPOCH: Final = Activity("epoch_starts", "first epoch")
LATER_EPOCHS: Final = Activity("epoch_starts", "later epochs")
_HOOKS_OF: Final = {"fit": "train", "validate": "validation", "test": "test", "predict": "predict"}
"""A trainer's method -> the word for it in the names of its hooks and steps."""
_BEFORE_TRANSFER: Final = "on_before_batch_transfer"
_NEXT_TO_NOTHING: Final = ("on_train_batch_start", "on_before_optimizer_step")
"""Hooks of the measuring callback that cost less in each step than it costs to time them."""
_IN_STEPS: Final = frozenset(
    ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
)
"""Hooks of callbacks that are called within a step, of which they are no part."""
_HOOKS: Final = (
    *("batch_start", "batch_end", "epoch_start", "epoch_end", "start", "end"),
    *("model_eval", "model_train", "model_zero_grad"),
)
"""Ends of the names of a module's hooks that a run waits for, beside its steps."""


class ProfilerTee:
    """A profiler that forwards to another one and calls listeners on the way.

    Args:
        profiler: The profiler of the user, or Lightning's own.
        find: Returns the listener of an action, by the name with which it is announced, such as
            ``"[_TrainingEpochLoop].train_dataloader_next"``, or None; asked once for each name.
        tell: Takes what a listener raises, which the training must not see.

    Attributes:
        profile: Takes the name of an action and returns the block that times it, as
            ``Profiler.profile`` does.
    """

    def __init__(
        self,
        profiler: Any,
        find: Callable[[str], Listener | None],
        tell: Callable[[Exception], None],
    ) -> None:
        self.profiler = profiler
        self._listened = cache(partial(_listened, find, tell))
        # Lightning's default does nothing at the price of a generator per block. A subclass of it
        # has another name and is asked. A step has some twenty blocks: looked up, they cost next to
        # nothing.
        idle = type(profiler).__name__ == "PassThroughProfiler"
        self.profile: Callable[[str], AbstractContextManager[object]] = (
            self._listened if idle else self._profile
        )

    def start(self, action_name: str) -> None:
        """Forward, then call the listener: the user's profiler is not part of the interval."""
        self.profiler.start(action_name)
        self._listened(action_name).__enter__()

    def stop(self, action_name: str) -> None:
        """Call the listener, then forward."""
        self._listened(action_name).__exit__(None, None, None)
        self.profiler.stop(action_name)

    @contextmanager
    def _profile(self, action_name: str) -> Iterator[object]:
        with self.profiler.profile(action_name) as value, self._listened(action_name):
            yield value

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object]]:
        # The listeners belong to one run of one trainer; a copy of the trainer is not measured.
        return seams.itself, (self.profiler,)

    def __getattr__(self, name: str) -> object:
        return getattr(self.profiler, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:  # Lightning writes to its profiler (`_lightning_module`, `_local_rank`, ...)
            setattr(self.profiler, name, value)


def _listened(
    find: Callable[[str], Listener | None], tell: Callable[[Exception], None], action_name: str
) -> AbstractContextManager[object]:
    """Return a block that calls the listener of an action at its start and at its end."""
    listener = find(action_name)
    return _NOTHING if listener is None else _Listened(*listener, tell)


class _Listened(AbstractContextManager[None]):
    """A block that may be entered again and again, also within itself."""

    __slots__ = ("_begin", "_end", "_tell")

    def __init__(
        self,
        begin: tuple[Callable[[], None], ...],
        end: tuple[Callable[[], None], ...],
        tell: Callable[[Exception], None],
    ) -> None:
        self._begin, self._end, self._tell = begin, end, tell

    def __enter__(self) -> None:
        try:
            for call in self._begin:
                call()
        except Exception as error:
            self._tell(error)

    def __exit__(self, *_: object) -> None:
        try:
            for call in self._end:
                call()
        except Exception as error:
            self._tell(error)


def attach_tee(
    trainer: Trainer,
    find: Callable[[str], Listener | None],
    tell: Callable[[Exception], None],
) -> Callable[[], None]:
    """Put a tee before the trainer's profiler, and return a function that takes it away again."""
    measured = seams.attributes_of(trainer)
    tee = measured.profiler = ProfilerTee(measured.profiler, find, tell)

    def detach() -> None:
        holder: seams.TrainerAttributes | ProfilerTee = measured
        while holder.profiler is not tee and isinstance(holder.profiler, ProfilerTee):
            holder = holder.profiler
        if holder.profiler is tee:
            holder.profiler = tee.profiler

    return detach


class WallWatch:
    """Counts the time of a trainer's run by what it announces; that of callback ``ours`` apart."""

    def __init__(self, trainer: Trainer, ours: object, method: str = "fit") -> None:
        self.clock = WallClock()
        self._fits = method == "fit"
        kind = _HOOKS_OF[method]
        kinds = (kind, "validation") if self._fits else (kind,)
        hooks = (f"on_{each}_{when}" for each in kinds for when in _HOOKS)
        self._hooks = frozenset((*hooks, "on_fit_end", "lr_scheduler_step"))
        self._batch_ends = f"on_{kind}_batch_end"
        fetches = "train_dataloader" if self._fits else seams.STAGES_OF[method][0]
        self._fetches = f"{fetches}_next"
        self.step = "run_training_batch" if self._fits else f"{kind}_step"
        self._trainer = trainer
        self._ours = ours
        self._epoch_start = FIRST_EPOCH
        self._starting = True
        self._interrupted = self._asked_in = _OTHER

    def restart(self) -> None:
        """Begin anew where the training begins, after what tuners ran before it."""
        self.clock.forget()
        self._epoch_start, self._starting = FIRST_EPOCH, True
        self.epoch_starts()

    def epoch_starts(self) -> None:
        """The training asks for loaders, or begins with them: what follows starts an epoch."""
        if self._starting:
            self.clock.turn_to(self._epoch_start)

    def _epoch_ended(self) -> None:
        # What follows reduces and logs the metrics of the epoch, behind which none may come.
        self._epoch_start, self._starting = LATER_EPOCHS, True
        self.clock.turn_to(_LOGGING)

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
        """Return what to call at start and end of an action, by the name that announces it."""
        owner, _, last = action.rpartition(".")
        if action == "run_training_epoch":
            return (self.epoch_starts,), (self._epoch_ended,)
        if last == "train_dataloader":
            return (self.epoch_starts,), ()
        if last == self._fetches:
            return (self._wait_began,), (self._wait_ended,)
        if last == "val_next":
            return self._entering(_WAIT_OF_VALIDATION)
        if last == self.step:
            return (self._step_began,), (self._step_over,)
        if last in ("batch_to_device", _BEFORE_TRANSFER):
            return (self._step_began,), ()
        if action == "save_checkpoint":
            return self._entering(Activity("checkpoints"))
        if owner.startswith("[Callback]"):
            activity = self._of_callback(owner.removeprefix("[Callback]"), last)
            return None if activity is None else self._entering(activity)
        return self._of_module(last) if owner.startswith("[LightningModule]") else None

    def _entering(self, activity: Activity) -> Listener:
        return (partial(self.clock.enter, activity),), (self.clock.leave,)

    def _of_callback(self, key: str, hook: str) -> Activity | None:
        callbacks = seams.attributes_of(self._trainer).callbacks
        callback = next((each for each in callbacks if each.state_key == key), None)
        if seams.overridden_hook(callback, hook) is None:
            return None
        if callback is self._ours:
            return None if hook in _NEXT_TO_NOTHING else Activity("measuring")
        name = f"{type(callback).__name__}.{hook}"
        saves = any(kind.__name__ == "Checkpoint" for kind in type(callback).__mro__)
        return Activity("checkpoints" if saves else "callbacks", name)

    def _of_module(self, hook: str) -> Listener | None:
        if hook not in self._hooks:
            return None
        module = self._trainer.lightning_module
        then: tuple[Callable[[], None], ...] = ()
        if hook == self._batch_ends:  # what follows it reduces and logs the metrics of the step
            then = (self._step_ended,)
        elif hook == "on_validation_model_zero_grad":
            then = (self.validation_began,)
        if seams.overridden_hook(module, hook) is None:
            return ((), then) if then else None
        enter, leave = self._entering(Activity("callbacks", f"{type(module).__name__}.{hook}"))
        return enter, (*leave, *then)

    def _step_ended(self) -> None:
        if self.clock.state is not _OTHER:
            return
        # In other steps Lightning lets go of the batch, which takes long for large ones.
        trainer = self._trainer
        every = seams.attributes_of(trainer).log_every_n_steps
        if trainer.loggers and every and trainer.global_step % every == 0:
            self.clock.turn_to(_LOGGING)

    def _wait_began(self) -> None:
        self._asked_in = self.clock.state
        self.clock.turn_to(self._epoch_start if self._starting else _WAIT)

    def _wait_ended(self) -> None:
        self._starting = False
        # A step may fetch its batch by itself.
        self.clock.turn_to(_COMPUTE if self._asked_in is _COMPUTE else _OTHER)

    def _step_began(self) -> None:
        # The batches of a validation pass the same hooks.
        if self.clock.state is _OTHER or self.clock.state is _LOGGING:
            self.clock.turn_to(_COMPUTE)

    def _step_over(self) -> None:
        if self.clock.state is _COMPUTE:
            self.clock.turn_to(_OTHER)


class _LooksAtBatches:
    """Shows training batches to a meter, and moves batches to the device as before."""

    def __init__(self, trainer: Trainer, meter: PaddingMeter) -> None:
        self.trainer, self.meter = trainer, meter
        self.move = trainer.strategy.batch_to_device

    def __call__(self, batch: Batch, *where: Any, **named: Any) -> Batch:
        if self.meter.looks and self.trainer.training:
            self.meter.look(batch)
        return self.move(batch, *where, **named)


class Recording:
    """Turns the announcements of Lightning's profiler into marks on the right timeline.

    Args:
        trainer: The trainer that is measured.
        ours: The callback that measures it, whose own time is counted apart.
        method: Method of the trainer: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.

    Attributes:
        main: Measures what the method is for: the training of a fit, else the only stage.
        evaluated: Measures what is evaluated: the validation of a fit, else the only stage.
        augments: Whether something runs in ``on_after_batch_transfer`` in a stage; if not, no
            augmentation is measured, so that none is reported as 0.
        in_transfer: Whether the trainer is moving a batch of one of its loaders.
        optimizer_stepped: Whether the open batch has ended in an optimizer step.
        batches_stepped: Number of batches that ended in an optimizer step; of all, if that is
            manual.
    """

    def __init__(self, trainer: Trainer, ours: object = None, method: str = "fit") -> None:
        self._trainer = trainer
        self.method, self.stages, self.fits = method, seams.STAGES_OF[method], method == "fit"
        self.wall = WallWatch(trainer, ours, method)
        self.augments: Callable[[Stage], bool] = lambda _stage: False
        self.in_transfer = self.optimizer_stepped = False
        self._fetching: StageMeter | None = None
        self._moving: StageMeter | None = None
        self._augmenting: StageMeter | None = None
        self.batches_stepped = 0
        device = trainer.strategy.root_device
        self.meters = tuple(StageMeter(stage, device) for stage in self.stages)
        self.main, self.evaluated = self.meters[0], self.meters[-1]
        self._shown: object = None
        self.host = HostMeter()

    def loaders(self) -> object:
        """Return the loaders of the main stage, in whatever form they come; None: there are none.

        A trainer that has been fitted calls the validation loaders of the fit its own also in
        ``validate``, so that the loaders that were shown are preferred there. Elsewhere the trainer
        may have made others from these, as it does of any loader in ``predict``.
        """
        if self._shown is not None and self.main.stage == "val":
            return self._shown
        name = "train_dataloader" if self.fits else f"{self.main.stage}_dataloaders"
        found: object = getattr(self._trainer, name)
        return self._shown if found is None and not self.fits else found

    def val_loaders(self) -> object:
        """Return the loaders of the validation of a fit; None: there are none."""
        found: object = self._trainer.val_dataloaders if self.fits else None
        return found

    def watch(self, stage: Stage, loaders: object) -> None:
        """Take stamps of what the trainer's loaders of a stage deliver."""
        meter = self.main if stage == self.main.stage else self.evaluated
        meter.stamps.watch(seams.flattened(loaders))
        # Without a CombinedLoader, which Lightning shows before it takes it apart, several loaders
        # of a training are read in the same steps, and others one after the other.
        mode = seams.combined_mode(loaders)
        if stage == "train" if mode is None else mode != "sequential":
            meter.parts = tuple(path for path, _ in seams.with_paths(loaders))
        if stage == self.main.stage:
            self._shown = loaders
            self.wall.epoch_starts()

    def restart(self) -> None:
        """Forget everything measured so far: what tuners ran before the training began."""
        for meter in self.meters:
            meter.restart()
        # Loaders may have been made anew unseen, or have no source that could be asked for them.
        self.watch(self.main.stage, self.loaders())
        if self.fits:
            self.wall.restart()
            self.watch("val", self.val_loaders())
            trainer = self._trainer
            look = _LooksAtBatches(trainer, self.main.padding)
            seams.replace_for_one_run(trainer, trainer.strategy, "batch_to_device", look)
        self.batches_stepped = 0
        self.host = HostMeter()

    def stop(self) -> None:
        """Take no more stamps."""
        for meter in self.meters:
            meter.stamps.stop()

    def notes(self) -> tuple[str, ...]:
        """Return why it is not known why batches were late, for stages in which they were."""
        summaries = [(meter, meter.summary()) for meter in self.meters]
        return not_known(m for m, summary in summaries if summary is not None and summary.stalls)

    def listener(self, action: str) -> Listener | None:
        """Return what to call when Lightning announces an action; None: nothing."""
        # The last word is the part that does not depend on the names of classes.
        last = action.rpartition(".")[2]
        inner, outer = self._of_steps.get(last), self.wall.listener(action)
        if outer is not None and last in _IN_STEPS:  # of a callback: the module's own are work
            inner = (self._aside_began,), (self._aside_ended,)
        if inner is None or outer is None:
            return inner or outer
        return (*outer[0], *inner[0]), (*inner[1], *outer[1])

    @cached_property
    def _of_steps(self) -> Mapping[str, Listener]:
        transfer = (self._transfer_began,), (self._transfer_ended,)
        work = (self._work_began,), (self._work_ended,)
        hook = (_BEFORE_TRANSFER,) if seams.written_hook(self._trainer, _BEFORE_TRANSFER) else ()
        return {
            "train_dataloader_next": ((self._fetch_began,), (self._fetch_ended,)),
            **dict.fromkeys(("validation_step", self.wall.step), work),  # the former in a fit, too
            f"{self.evaluated.stage}_next": ((self._evaluation_fetch_began,), (self._fetch_ended,)),
            **dict.fromkeys(("batch_to_device", *hook), transfer),
            "on_after_batch_transfer": ((self._augment_began,), (self._augment_ended,)),
        }

    def _fetch_began(self) -> None:
        self._fetching = self.main
        self.main.wait_began()

    # Callbacks at the start and end of a batch are no part of the step.
    def _work_began(self) -> None:
        if self._fetching is not None:  # not in the sanity check
            self._fetching.timeline.work_began()

    def _work_ended(self) -> None:
        if self._fetching is not None:
            self._fetching.timeline.work_ended()

    def _aside_began(self) -> None:
        self.main.timeline.aside_began()

    def _aside_ended(self) -> None:
        self.main.timeline.aside_ended()

    def _evaluation_fetch_began(self) -> None:
        # The sanity check fetches under the same name; it is not measured.
        self._fetching = None if self._trainer.sanity_checking else self.evaluated
        if self._fetching is not None:
            self._fetching.wait_began()

    def _fetch_ended(self) -> None:
        if self._fetching is not None:
            self._fetching.timeline.wait_ended()

    def _transfer_began(self) -> None:
        self.in_transfer = True
        # The batch that is moved is the last one fetched: asking the trainer costs microseconds.
        self._moving = self._fetching
        if self._moving is not None:
            self._moving.timeline.transfer_began()

    def _transfer_ended(self) -> None:
        self.in_transfer = False
        if self._moving is not None:
            self._moving.timeline.transfer_ended()
            self._moving = None

    def _augment_began(self) -> None:
        if self._moving is not None and self.augments(self._moving.stage):
            self._augmenting = self._moving
            self._augmenting.timeline.augment_began()

    def _augment_ended(self) -> None:
        if self._augmenting is not None:
            self._augmenting.timeline.augment_ended()
            self._augmenting = None

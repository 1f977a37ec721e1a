"""What a data module and a callback ask of their trainer; the former may have none."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_fastdata.errors import OptionsError, TransformError
from lightning_fastdata.loading.position import Place
from lightning_fastdata.plugin.seams.hooks import home_of, overridden_hook, package_of
from lightning_fastdata.plugin.seams.internals import (
    attributes_of,
    batches_that_stepped,
    began_from_file,
    count_fetched,
    counts_to_load,
)
from lightning_fastdata.tree import held
from lightning_fastdata.types import STAGES, Stage

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_fastdata.plugin.module import DataModule

STAGES_OF: Final[Mapping[str, tuple[Stage, ...]]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
}
"""A trainer's method -> its stages, the one that it is for first."""


def own_datamodule(trainer: Trainer) -> DataModule | None:
    """Return the trainer's data module if it is a FastDataModule, else None."""
    from lightning_fastdata.plugin.module import DataModule  # which imports this

    datamodule = attributes_of(trainer).datamodule
    return datamodule if isinstance(datamodule, DataModule) else None


def refuse_other_tree(datamodule: object, trainer: Trainer) -> None:
    """Raise OptionsError if a Trainer is of that package of Lightning which the module is not of.

    Lightning itself would say "Expected a parent".
    """
    ours, its = package_of(datamodule), package_of(trainer)
    if ours and its and ours != its:
        raise OptionsError(
            f"{type(datamodule).__name__} is a data module of {ours}, and the Trainer one of "
            f"{its}, which takes its own only. Write `from {home_of(its)} import FastDataModule, "
            f"DataThroughputCallback`, or `from {ours} import Trainer`."
        )


def has_cuda(trainer: Trainer) -> bool:
    """Return whether a trainer runs on CUDA; some strategies have no device before they launch."""
    return any(kind.__name__ == "CUDAAccelerator" for kind in type(trainer.accelerator).__mro__)


def loss_scaler(trainer: Trainer) -> torch.amp.GradScaler | None:
    """Return what scales the loss of a trainer in half precision; None: nothing does."""
    return getattr(trainer.precision_plugin, "scaler", None)


def running_stage(trainer: Trainer | None) -> Stage | None:
    """Return the stage of the trainer method that runs now; ``"train"`` during all of a fit."""
    method = None if trainer is None else trainer.state.fn
    return None if method is None else STAGES_OF[method.value][0]


def of_ranks(trainer: Trainer, value: int) -> int:
    """Return the largest of what all ranks give here."""
    shared = torch.tensor(value, dtype=torch.int64, device=trainer.strategy.root_device)
    if trainer.world_size > 1:
        torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX)
    return int(shared)


def training_place(trainer: Trainer | None) -> Place:
    """Return how far a training has come.

    A batch is taken when its training step has ended: if the step fails, or a checkpoint is written
    before, the weights know nothing of it.
    """
    if trainer is None:
        return Place(0, 0, last=False)
    loop: Any = trainer.fit_loop
    epochs, batches = loop.epoch_progress.current, loop.epoch_loop.batch_progress
    if not epochs.ready == epochs.started == epochs.processed + 1:  # between two epochs
        if _was_cut(trainer):
            return Place(int(epochs.processed) - 1, int(batches.current.processed), last=False)
        return Place(int(epochs.processed), 0, last=False)
    taken = int(batches.current.processed)
    last = bool(batches.is_last_batch) and taken == batches.current.ready
    return Place(int(epochs.processed), taken, last=last, within=began_from_file(trainer))


def _was_cut(trainer: Trainer) -> bool:
    """Return whether a training was ended within its last epoch, which Lightning counts as over.

    So ``max_steps``, ``max_time`` and ``should_stop`` do.
    """
    loop: Any = trainer.fit_loop
    batches, steps = loop.epoch_loop.batch_progress, trainer.max_steps
    stopped = trainer.should_stop or 0 <= steps <= trainer.global_step
    return stopped and not batches.is_last_batch and batches.current.processed > 0


def is_to_be_restored(trainer: Trainer) -> bool:
    """Return whether a fit goes on from a checkpoint, whose counts are not restored yet."""
    total: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    fits = running_stage(trainer) == "train" and trainer.ckpt_path is not None
    return fits and not began_from_file(trainer) and not total.ready


def mend_counts(trainer: Trainer, epoch_saved: int) -> None:
    """Have a training that is about to go on load counts that Lightning 2.6 goes on from rightly.

    It tells what comes next from which of its counts differ, and is wrong in four cases. Totals
    hold a batch for ever whose step was interrupted, so that the next checkpoint after a step goes
    on one batch short. After a checkpoint of an epoch's last step, the next epoch is not counted as
    begun. Between two epochs, an epoch is left out or counted twice where the batches of the
    one before are still counted. And an epoch within which the training was ended is counted as
    over, where by our own ``epoch_saved`` it is not.
    """
    loops = counts_to_load(trainer)
    if not {"epoch_progress", "epoch_loop.batch_progress", "epoch_loop.state_dict"} <= loops.keys():
        return
    epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
    epoch, batch = epochs["current"], batches["current"]
    if epoch["processed"] == epoch_saved + 1 and batch["processed"]:
        for name in ("processed", "completed"):
            epochs["total"][name] -= epoch[name] - epoch_saved
            epoch[name] = epoch_saved
    if batch["ready"] > batch["processed"]:
        batches["is_last_batch"] = False
    stepped = batch["processed"] - batch["completed"]
    within = epoch["ready"] == epoch["started"] == epoch["processed"] + 1
    if within and stepped and batches["is_last_batch"]:
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
        over = epoch["started"]
    else:
        over = epoch["processed"]
    if not within or over == epoch["started"]:
        for name in epoch:
            epochs["total"][name] += over - epoch[name]
            epoch[name] = over
            batch[name] = 0
        batches["is_last_batch"], stepped = False, 0
    total = batches["total"]
    batch["ready"] = batch["started"] = batch["processed"]
    total["ready"] = total["started"] = total["processed"]
    total["completed"] = total["processed"] - stepped


def move_place(trainer: Trainer, epoch: int, taken: int, counted: int) -> None:
    """Have a training that took so many batches of an epoch count them as another number.

    Its loader gives what is left of the epoch in larger or smaller batches, and Lightning ends the
    epoch by the number of batches.
    """
    if training_place(trainer)[:2] != (epoch, taken):
        return
    loop: Any = trainer.fit_loop
    current = loop.epoch_loop.batch_progress.current
    for name in ("ready", "started", "processed", "completed"):
        setattr(current, name, getattr(current, name) + counted - taken)
    count_fetched(trainer, taken, counted)


def has_ended(trainer: Trainer | None) -> bool:
    """Return whether what a trainer was last asked for is over."""
    return trainer is not None and (trainer.state.finished or trainer.interrupted)


def first_epoch() -> int:
    """Return 0: evaluation draws the same each time, so that its metrics can be compared."""
    return 0


def augmenting_stages(trainer: Trainer, pl_module: LightningModule) -> Callable[[Stage], bool]:
    """Return what says whether something runs in ``on_after_batch_transfer`` in a stage.

    A data module knows it once it has made the stage's loaders.
    """
    ours = own_datamodule(trainer)
    owners = [pl_module] if ours is not None else [pl_module, attributes_of(trainer).datamodule]
    written = any(overridden_hook(owner, "on_after_batch_transfer") for owner in owners)
    return ours.augments_on_device if ours is not None and not written else lambda _stage: written


def written_hook(trainer: Trainer, name: str) -> str:
    """Return which transfer hook of the user runs, e.g. ``"Net.on_after_batch_transfer"``, or "".

    Lightning calls that of its data module, if it has one of its own.
    """
    data, module = attributes_of(trainer).datamodule, trainer.lightning_module
    ours = own_datamodule(trainer)
    if overridden_hook(data, name) if ours is None else name in ours.written_hooks():
        return f"{type(data).__name__}.{name}"
    return f"{type(module).__name__}.{name}" if overridden_hook(module, name) else ""


def steps_logged_by(trainer: Trainer, counted: int) -> int:
    """Return the step of Lightning's own x axis; where that is not known, what was counted."""
    stepped = batches_that_stepped(trainer)
    return counted if stepped is None else int(stepped)


def check_hooks_run(pl_module: LightningModule) -> None:
    """Refuse to augment for a training step whose batches pass no transfer hook."""
    if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
        raise TransformError(
            f"{type(pl_module).__name__}.training_step(dataloader_iter) fetches its batches "
            "itself, and Lightning then calls no on_after_batch_transfer, so that `augment` would "
            "never run. Use training_step(batch, batch_idx), or call the transform in the step "
            "and leave out `augment`."
        )


def print_line(trainer: Trainer, text: str) -> None:
    """Print a line above the bar, if there is one."""
    bar: Any = trainer.progress_bar_callback
    if getattr(bar, "is_enabled", False) and hasattr(bar, "print"):
        bar.print(text)
        return
    sys.stdout.write(f"{text}\n")


def close_progress_bar(trainer: Trainer) -> None:
    """Close the bar, whose own teardown may come after ours and would draw over the summary.

    Both of Lightning's bars are closed by these public names, and closing twice is harmless.
    """
    bar = trainer.progress_bar_callback
    rich_progress = held(bar, "progress")
    if rich_progress is not None:
        rich_progress.stop()
        return
    for stage in STAGES:
        with suppress(AttributeError, TypeError):  # TQDM's raise a TypeError before first use
            getattr(bar, f"{stage}_progress_bar").close()


def trainer_like(datamodule: object) -> Trainer:
    """Return a trainer on the CPU, of the package that a data module belongs to."""
    package = package_of(datamodule)
    said = logging.getLogger(f"{package}.utilities.rank_zero")
    level = said.level
    said.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer: Trainer = importlib.import_module(package).Trainer(
                accelerator="cpu",
                devices=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
    finally:
        said.setLevel(level)
    return trainer


def hide_loggers(trainer: Trainer) -> list[Path]:
    """Have a trainer log nowhere, and return the folders in which its loggers would have written.

    Loggers wrote nothing so far, as Lightning took this process for another than the first.
    """
    rank_zero_only.rank = trainer.global_rank
    named = [getattr(one, "log_dir", None) for one in trainer.loggers]
    folders = [Path(folder) for folder in named if folder is not None]
    _silence(trainer)
    return folders


def _silence(trainer: Trainer) -> None:
    loggers = importlib.import_module(f"{package_of(trainer)}.loggers.logger")
    trainer.loggers = [loggers.DummyLogger() for _ in trainer.loggers]


@contextmanager
def unseen_steps(trainer: Trainer, pl_module: LightningModule) -> Iterator[None]:
    """Hide what happens in the block from callbacks, loggers and profiler; ``self.log`` is silent.

    All that is replaced for it is as it was behind the block.
    """
    profilers = importlib.import_module(f"{package_of(trainer)}.profilers")
    hidden, attributes = attributes_of(trainer), vars(pl_module)
    kept = hidden.callbacks, trainer.loggers, hidden.profiler
    shadowed = {name: attributes[name] for name in {"log", "log_dict"} & attributes.keys()}
    hidden.callbacks = []
    _silence(trainer)
    hidden.profiler = profilers.PassThroughProfiler()
    attributes.update(log=nothing, log_dict=nothing)
    try:
        yield
    finally:
        hidden.callbacks, trainer.loggers, hidden.profiler = kept
        del attributes["log"], attributes["log_dict"]
        attributes.update(shadowed)


def nothing(*_: object, **__: object) -> None:
    """Take the place of ``self.log``, ``self.log_dict`` and ``trainer.save_checkpoint``."""

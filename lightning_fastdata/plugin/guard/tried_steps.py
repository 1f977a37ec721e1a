"""Steps that the batch-size guard tries, as the fit would do them, and undoes; their batches.

These are of any size, made as the data module makes its own.
"""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import IterableDataset, default_collate

from lightning_fastdata.device.backend import is_out_of_memory, synchronize
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.executors.kinds import KINDS
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.plugin.data.datasets import (
    GivenLoader,
    datasets_of,
    in_form_of,
    named,
    taken_apart,
)
from lightning_fastdata.plugin.guard.prediction import Probe
from lightning_fastdata.plugin.guard.replay import rows_of, samples_of
from lightning_fastdata.plugin.guard.snapshots import Undo
from lightning_fastdata.plugin.seams.hooks import overridden_hook
from lightning_fastdata.plugin.seams.internals import attributes_of
from lightning_fastdata.plugin.seams.trainer import loss_scaler

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_fastdata.device.backend import MemoryReader
    from lightning_fastdata.plugin.contracts import DataModule
    from lightning_fastdata.types import Batch

_TRAINED: Final = 2
"""Training steps of each size: the second one has the optimizer's state and the gradients of the
first in memory."""
_TIMED: Final = 3
"""The same where the time counts: the first ones load kernels and choose algorithms."""


class NoLossError(Exception):
    """``training_step`` returned None, so that there is no backward pass to measure."""


def collates(datamodule: DataModule) -> bool:
    """Return whether training batches are collated by a function of the user's."""
    datasets = [dataset for _, dataset in named(datasets_of(datamodule, "train"), "")]
    own = [taken_apart(each, 1)[1].get("collate_fn", datamodule.collate_fn) for each in datasets]
    return any(each is not None and each is not default_collate for each in own)


def guard_rows(datasets: object) -> int | None:
    """Return the samples of the longest dataset; None if one is a stream, or there is none.

    ``datasets`` are as a data module's method returns them.
    """
    known = [dataset for _, dataset in named(datasets, "")]
    if any(isinstance(item, GivenLoader) and item.batch_size is None for item in known):
        return None
    known = [taken_apart(item, 1)[0] for item in known]
    lengths = [None if isinstance(d, IterableDataset) else dataset_length(d) for d in known]
    return None if None in lengths else max((n for n in lengths if n is not None), default=None)


def guard_batch(datamodule: DataModule, rows: int) -> Batch:
    """Return a batch of training."""
    datasets = datasets_of(datamodule, "train")
    batches = [_first_rows(datamodule, each, rows) for _, each in named(datasets, "")]
    return in_form_of(datasets, batches)


def _first_rows(datamodule: DataModule, dataset: Any, rows: int) -> Batch:
    """Return one batch with that many rows, from all over the dataset.

    Short datasets repeat. The loader is the real one, with its transforms. One worker reads, so
    that nothing of the dataset is opened in the training process before all workers start.
    """
    dataset, known = taken_apart(dataset, rows)
    rows = known.get("batch_size", rows)
    length = len(dataset)
    with warnings.catch_warnings():
        # What there is to say of the dataset is said when its own loader is made.
        warnings.simplefilter("ignore", FastDataWarning)
        loader = datamodule.make_loader(
            dataset,
            stage="train",
            batch_size=rows,
            collate_fn=known.get("collate_fn", datamodule.collate_fn),
            sampler=[i * length // rows if rows < length else i % length for i in range(rows)],
            drop_last=False,
            num_workers=1,
            persistent_workers=False,
        )
    loader.ahead = None  # steps are tried on it several times
    if KINDS[loader.executor].caller_reads:
        loader.executor = "workers"
    try:
        return next(iter(loader))
    finally:
        loader.close()


class Repeated:
    """Gives batches of any size: the samples of a small one, again and again.

    Reading thousands of samples takes longer than training on them. A batch whose samples cannot be
    told apart is read at each size.
    """

    def __init__(self, batch_of: Callable[[int], Batch], rows: int) -> None:
        self._batch_of, self._rows = batch_of, rows
        self._few: Batch | None = None
        self._known: int | None = None

    def __call__(self, rows: int) -> Batch:
        """Return a batch with that many rows."""
        if self._few is None:
            self._few = self._batch_of(self._rows)
            self._known = rows_of(self._few)
        if self._known != self._rows:
            return self._batch_of(rows)
        return samples_of(self._few, [i % self._rows for i in range(rows)], self._rows)


class TriedSteps:
    """Tries steps of any size on a trainer, and undoes them.

    Args:
        trainer: It has set up its strategy for a fit; nobody sees its steps.
        pl_module: The module it trains.
        batch_of: Gives a training batch with that many rows, on the CPU, as the loader does.
        reader: Of the device that the module is on.
        let_go: Undoes what a step does, but for the values of tensors.
        clock: Seconds from any start; None: the time of steps does not count.
        batches_ahead: Batches that are on the device beside the one that is trained on.
    """

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        *,
        batch_of: Callable[[int], Batch],
        reader: MemoryReader,
        let_go: Undo,
        clock: Callable[[], float] | None,
        batches_ahead: int,
    ) -> None:
        self.trainer, self.pl_module = trainer, pl_module
        self.batch_of, self.reader, self.let_go, self.clock = batch_of, reader, let_go, clock
        self.batches_ahead = batches_ahead
        self._ahead: list[Batch] = []

    def __call__(self, rows: int) -> Probe:
        """Return what steps on that many rows took; what they made is freed.

        Raises:
            NoLossError: The training step returned no loss.
            Exception: Whatever it raised, but for a lack of memory.
        """
        batch, times_s = self.batch_of(rows), []
        self.reader.reset_peak()
        try:
            for _ in range(_TRAINED if self.clock is None else _TIMED):
                times_s.append(self._trained_s(batch))
            batch = None
            step_s = None if self.clock is None else min(times_s[1:])
            return Probe(rows, self.reader.peak_bytes(), step_s)
        except Exception as error:
            if is_out_of_memory(error):
                return Probe(rows, None)
            error.add_note(
                f"Raised in a training step on {rows} rows that the batch-size guard tried before "
                "the fit. If training itself would not raise it, set the guard's policy to 'off'."
            )
            raise
        finally:
            self._ahead.clear()
            self.let_go()
            gc.collect()
            self.reader.reset_peak()

    def _moved(self, batch: Batch) -> Batch:
        trainer, pl_module = self.trainer, self.pl_module
        datamodule: Any = attributes_of(trainer).datamodule
        owned = overridden_hook(datamodule, "on_before_batch_transfer") is not None
        owner = datamodule if owned else pl_module
        batch = owner.on_before_batch_transfer(trainer.precision_plugin.convert_input(batch), 0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def _trained_s(self, batch: Batch) -> float:
        """Do what the fit loop does with its first batch, in its order; return how long it took."""
        trainer, pl_module = self.trainer, self.pl_module
        strategy = trainer.strategy
        optimizer = strategy.optimizers[0]
        self._ahead = [self._moved(batch) for _ in range(self.batches_ahead)]
        batch = self._moved(batch)
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), int | float | torch.Tensor):
                group["lr"] = 0.0 * group["lr"]  # the parameters stay as they are
        scaler = loss_scaler(trainer)
        if scaler is not None and scaler.is_enabled():
            # At its usual first scale gradients often overflow; the optimizer step, and the state
            # that it allocates, would then be left out.
            scaler.load_state_dict({**scaler.state_dict(), "scale": 1.0})

        def step() -> torch.Tensor | Mapping[str, Any] | None:
            arguments = _arguments(pl_module.training_step, batch)
            if trainer.world_size == 1:
                return strategy.training_step(*arguments)
            # Not through the wrapper of DistributedDataParallel, whose collectives would wait for a
            # rank that has run out of memory. Backward, it leaves gradients alone for that, too.
            with trainer.precision_plugin.train_step_context():
                return pl_module.training_step(*arguments)

        @torch.enable_grad()
        def closure() -> object:
            output = step()
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if loss is None:
                raise NoLossError
            pl_module.optimizer_zero_grad(trainer.current_epoch, 0, optimizer)
            strategy.backward(loss / trainer.accumulate_grad_batches, optimizer)
            return loss.detach()

        began_s = self._now_s()
        # through `optimizers()`, because its `step` goes by the strategy and the precision plugin
        stepped: Any = pl_module.optimizers()
        pl_module.optimizer_step(trainer.current_epoch, 0, stepped, closure)
        return self._now_s() - began_s

    def _now_s(self) -> float:
        if self.clock is None:
            return 0.0
        synchronize(self.trainer.strategy.root_device)
        return self.clock()


def _arguments(step: Callable[..., Any], batch: Batch) -> tuple[Any, ...]:
    """Return what a step of a module is called with."""
    wanted = inspect.signature(step).parameters.values()
    with_index = len(wanted) > 1 or any(own.kind is own.VAR_POSITIONAL for own in wanted)
    return (batch, 0) if with_index else (batch,)

"""What a data module saves of its training, and any of its batches, made again without training.

A batch is read by a loader of its own, and goes through the transfer hooks of a copy of the data
module, so that a training that runs meanwhile is not disturbed.
"""

from __future__ import annotations

import copy
import multiprocessing
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from lightning_fastdata.batches.libraries import tell_epoch
from lightning_fastdata.batches.staged import as_plain, move, row_words
from lightning_fastdata.device.prefetch import drawn_under
from lightning_fastdata.errors import FastDataWarning, OptionsError, printable
from lightning_fastdata.executors.kinds import KINDS
from lightning_fastdata.images.folder import files_of
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.order.run_record import RunRecord
from lightning_fastdata.planning.options import LoaderOptions
from lightning_fastdata.plugin.data.module_loaders import ModuleLoaders
from lightning_fastdata.plugin.data.training_run import (
    KEY,
    record_of_loader,
    run_record,
    training_loader,
)
from lightning_fastdata.plugin.placing.transfer import Prefetching
from lightning_fastdata.plugin.placing.trial import Placing
from lightning_fastdata.plugin.seams.loaders import flattened
from lightning_fastdata.plugin.seams.trainer import trainer_of_class, training_place
from lightning_fastdata.randomness.global_generators import kept_random_state

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch.utils.data import Dataset

    from lightning_fastdata.plugin.contracts import DataModule
    from lightning_fastdata.types import Batch, Stage

_NO_LOADER: Final = (
    "Batches are made again of one training loader that batches a dataset with a length; "
    "{name} has {has}."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedBatch:
    """A batch of a run, made again."""

    step: int
    """Number of the batch over all epochs, from 0."""
    epoch: int
    """Counted from 0."""
    number: int
    """Of the batch within its epoch, from 0."""
    rank: int
    """Who got it."""
    indices: tuple[int, ...]
    """Of its samples in the dataset, in the order of the batch."""
    files: tuple[str, ...] | None
    """The file of each sample; None where the dataset shows none."""
    batch: Batch
    """As the model gets it, on the CPU."""
    rows: int
    """Of the batch: several for a sample that is augmented several times."""

    def text(self) -> str:
        """Return which batch it is, and for each row its sample and its numbers."""
        place = f"epoch {self.epoch}, batch {self.number} ({self.step} of the run)"
        lines = [f"{place}, rank {self.rank}: {len(self.indices)} samples"]
        for row in range(self.rows):
            at = row * len(self.indices) // self.rows
            file = "" if self.files is None else f"  {printable(self.files[at], keep='')}"
            lines.append(f"row {row}: sample {self.indices[at]}{file}")
            lines += [f"    {words}" for words in row_words(self.batch, row, self.rows)]
        return "\n".join(lines)

    def saved(self) -> dict[str, Any]:
        """Return it as what ``torch.load(weights_only=True)`` loads: plain values and tensors."""
        return {field.name: as_plain(getattr(self, field.name)) for field in fields(self)}


class TimeTravel:
    """The part of a data module that saves its training, and makes batches of it again."""

    _trainer: Trainer | None
    _loaders: ModuleLoaders
    _run: RunRecord | None = None
    """The record of the run so far, as it was when it was asked for last."""

    def run_seed(self) -> int:
        """Return the seed of order and draws."""
        return self._loaders.seed(cast("DataModule", self))

    def run_record(self) -> RunRecord | None:
        """Return what decides the training batches of the run; None: they cannot be found again."""
        return run_record(self) or self._run

    def state_dict(self) -> dict[str, Any]:
        """Return how far the training has come; Lightning puts it into its checkpoints."""
        progress, run = self._loaders.progress.state_dict(self._trainer), self.run_record()
        return {KEY: {**progress, "run": None if run is None else run.as_dict()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on behind the batch after which a checkpoint was written; Lightning calls it.

        Raises:
            OptionsError: The state is none of this class, or of a later version.
        """
        if KEY not in state_dict:
            return
        state = state_dict[KEY]
        self._loaders.progress.load_state_dict(state, self._trainer)
        try:
            self._run = RunRecord.from_dict(state["run"]) if state.get("run") else None
        except OptionsError as error:  # the training goes on without
            text = f"The batches before this resume cannot be made again. {error}"
            warnings.warn(text, FastDataWarning, stacklevel=2)

    def batch_at(self, step: int, *, rank: int = 0, run: RunRecord | None = None) -> ReplayedBatch:
        """Return the batch that a training step got, made again, also while a training runs.

        Without a trainer the datasets have to be there, as after ``setup("fit")``; what the
        trainer's own hooks and its precision change is then left out.

        Args:
            step: Number of the batch over all epochs, from 0, as ``fit_loop.total_batch_idx``.
            rank: Whose batch.
            run: The run that it belongs to. Default: that of the trainer or of the checkpoint that
                was loaded last, else a training on one device, of whole epochs.

        Raises:
            OptionsError: There is no such step or rank, or the order of the training is not one
                that follows from seed and epoch.
        """
        run = self.run_record() if run is None else run
        with kept_random_state(), torch.no_grad():
            return _Replay(self, run).batch(step, rank)


class _Replay:
    """What batches of a run are made again with: a loader, and a copy of the data module."""

    def __init__(self, module: Any, run: RunRecord | None) -> None:
        trainer: Trainer | None = module.trainer
        loader = None if trainer is None else training_loader(trainer)
        self.twin = _apart(module, run)
        self.trainer = trainer if loader is not None else None
        """Of the run that is under way."""
        if loader is None:
            loader = _new_loader(self.twin, run)
        self.loader = loader
        found = record_of_loader(self.twin, loader, None) if run is None else run
        if found is None:
            raise OptionsError(_NO_LOADER.format(name=type(module).__name__, has="another one"))
        self.run = found
        length = dataset_length(loader.dataset)
        if length != found.length:
            raise OptionsError(
                f"The dataset has {length} samples, and that of the run had {found.length}. Give "
                "the data module the data that the run was trained on."
            )

    def batch(self, step: int, rank: int) -> ReplayedBatch:
        epoch, number = self.run.locate(step)
        order = self.run.order_of(epoch, rank=rank)
        if number >= len(order):
            raise OptionsError(
                f"Rank {rank} got no batch {number} in epoch {epoch}, which has {len(order)}."
            )
        indices: list[int] = order.batch(number).tolist()
        dataset = self.loader.dataset
        if KINDS[self.loader.executor].is_torch and self.trainer is not None:
            # Workers of torch read the epoch of some datasets in memory that they share.
            dataset = copy.deepcopy(dataset)
        try:
            batch = self._read(
                dataset,
                indices,
                epoch,
                collate_fn=self.loader.collate_fn,
                transform=self.loader.transform,
                on_device=self.loader.on_device,
                staged=self.loader.staged,
            )
            batch = self._through_hooks(batch, epoch, (rank, number))
        finally:
            if self.trainer is not None:
                tell_epoch(dataset, training_place(self.trainer).epoch)
        transform = self.loader.transform
        return ReplayedBatch(
            step=step,
            epoch=epoch,
            number=number,
            rank=rank,
            indices=tuple(indices),
            files=files_of(dataset, indices),
            batch=batch,
            rows=len(indices) * (1 if transform is None else transform.repeats),
        )

    def _read(
        self, dataset: Dataset[Any], indices: list[int], epoch: int, **arguments: Any
    ) -> Batch:
        """Return the batch of these samples, as a loader with one batch delivers it."""
        loader, kind = self.loader, KINDS[self.loader.executor]
        # A dataset may open files lazily, which processes must not share that are forked later.
        apart = kind.side_processes or (kind.is_torch and loader.num_workers > 0)
        if apart:
            arguments["multiprocessing_context"] = loader.multiprocessing_context
        reader = FastDataLoader(
            dataset,
            batch_sampler=[indices],
            num_workers=int(apart),
            worker_init_fn=loader.worker_init_fn,
            seed=self.run.seed,
            epoch=lambda: epoch,
            executor="workers" if apart else "inline",
            **arguments,
        )
        try:
            return next(iter(reader))
        finally:
            reader.close()

    def _through_hooks(self, batch: Batch, epoch: int, number: tuple[int, int]) -> Batch:
        """Return a batch on the CPU, as it comes out of the transfer hooks."""
        trainer, twin = self.trainer, self.twin
        device = torch.device("cpu") if trainer is None else trainer.strategy.root_device

        def drawing(_: Stage) -> AbstractContextManager[None]:
            return drawn_under(self.run.seed, epoch, number, device)

        twin._drawing = drawing  # by the batch in question, not by that of the training
        if trainer is not None:
            batch = trainer.precision_plugin.convert_input(batch)
        batch = twin.on_before_batch_transfer(batch, 0)
        batch = twin.transfer_batch_to_device(batch, device, 0)
        batch = twin.on_after_batch_transfer(batch, 0)
        return move(batch, torch.device("cpu"))


def _apart(module: Any, run: RunRecord | None) -> Any:
    """Return a copy of a data module that shares its datasets and transforms, and decides alone."""
    twin = copy.copy(module)
    place = "workers" if run is None else run.spans[-1].place
    twin._prefetching = Prefetching("off")
    twin.placing = Placing("gpu" if place == "device" else "cpu")
    twin._loaders = ModuleLoaders(module._transforms, twin._prefetching)
    twin.notes = []
    return twin


def _new_loader(twin: Any, run: RunRecord | None) -> FastDataLoader:
    """Return the training loader of a data module without a run, made as for one on the CPU."""
    if run is not None:
        twin.seed, twin.batch_size, twin.drop_last = (
            run.seed,
            run.spans[-1].batch_size,
            run.drop_last,
        )
    forks = "fork" in multiprocessing.get_all_start_methods()
    given = {"num_workers": 1, "multiprocessing_context": "fork"} if forks else {"num_workers": 0}
    twin.options = LoaderOptions(executor="workers" if forks else "inline", **given)
    twin._trainer = trainer_of_class(type(twin))
    try:
        loaders = list(flattened(twin.train_dataloader()))
    finally:
        twin._trainer = None
    if len(loaders) != 1 or not isinstance(loaders[0], FastDataLoader):
        raise OptionsError(_NO_LOADER.format(name=type(twin).__name__, has=f"{len(loaders)}"))
    return loaders[0]

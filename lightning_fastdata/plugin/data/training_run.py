"""A run: how far its training has come, kept in checkpoints, and the record of what decides it."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import torch
from torch.utils.data import BatchSampler, IterableDataset

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.executors.stream_position import counts_only
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.position import VERSION, LoaderState, Place
from lightning_fastdata.loading.resume import own_version
from lightning_fastdata.order.block_shuffle import BlockShuffleSampler
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.order.run_record import RunRecord, RunSpan
from lightning_fastdata.order.samplers import RankSampler, rows_in
from lightning_fastdata.plugin.seams.loaders import flattened, with_paths
from lightning_fastdata.plugin.seams.trainer import (
    is_to_be_restored,
    mend_counts,
    move_place,
    training_place,
)

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_fastdata.plugin.contracts import DataModule
    from lightning_fastdata.types import PixelPlace

KEY: Final = "lightning_fastdata"
"""Under which the state stands in that of the data module."""
_LARGEST_REPORT_BYTES: Final = 2**26
_PLAIN: Final = ("BatchSampler", "RankBatchSampler")
"""Batch samplers that leave the order to their sampler."""


class TrainingProgress:
    """Where the training loaders of a data module were when a run was saved that goes on now."""

    def __init__(self) -> None:
        self._saved: dict[str, LoaderState] = {}
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
        self._saved = {str(path): LoaderState.from_dict(one) for path, one in loaders.items()}
        self._place = None
        if isinstance(state, Mapping) and "epoch" in state:
            self._place = Place(int(state["epoch"]), int(state["batches"]), last=False)
            if trainer is not None:
                mend_counts(trainer, self._place.epoch)
        for path, loader in _training_loaders(trainer):
            if path in self._saved:
                loader.load_state_dict(self._saved[path].as_dict())

    def of(self, loader: object, trainer: Trainer | None) -> LoaderState | None:
        """Return where a loader was; None: not known."""
        loaders = dict(_training_loaders(trainer))
        path = next((path for path, one in loaders.items() if one is loader), None)
        if trainer is None or path is None or path not in self._saved:
            return None
        state = self._saved[path]
        if state.stream is not None and trainer.global_rank:
            state = self._saved[path] = replace(
                state, stream=counts_only(state.stream, state.epoch)
            )
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

    def resumed(self, loader: object) -> LoaderState | None:
        """Return where a loader was when the run was saved that goes on now; None: not known."""
        return self._progress.of(loader, self._module.trainer)


def _training_loaders(trainer: Trainer | None) -> Iterator[tuple[str, FastDataLoader]]:
    loaders = None if trainer is None else trainer.train_dataloader
    for path, loader in with_paths(loaders):
        if isinstance(loader, FastDataLoader):
            yield "/".join(map(str, path)), loader


@runtime_checkable
class _Seeded(Protocol):
    seed: int


@runtime_checkable
class _MayDropLast(Protocol):
    drop_last: bool


def run_record(module: Any) -> RunRecord | None:
    """Return what decides the training batches of a data module in the run of its trainer.

    None: it has no trainer that has made its loaders, or makes batches that cannot be found again:
    of a stream, of several loaders, or of a loader that is not this package's.
    """
    trainer: Trainer | None = module.trainer
    loader = None if trainer is None else training_loader(trainer)
    if trainer is None or loader is None:
        return None
    now = record_of_loader(module, loader, trainer)
    if now is not None:
        before: RunRecord | None = module._run
        if before is not None:
            now = before.continued(now)
        else:
            span = now.spans[0]
            if span.batch == span.epoch * span.batches_per_epoch:  # as it was from the beginning
                now = replace(now, spans=(replace(span, epoch=0, batch=0, step=0),))
        module._run = now
    return now


def record_of_loader(
    module: Any, loader: FastDataLoader, trainer: Trainer | None
) -> RunRecord | None:
    """Return the record as of the epoch that is under way; without a trainer, of a run to come.

    None: the batches cannot be found again.
    """
    sampler: object = loader.batch_sampler
    length = dataset_length(loader.dataset)
    if loader.num_workers and not loader.in_order:
        return None  # they came as they were ready
    if sampler is None or isinstance(loader.dataset, IterableDataset) or not length:
        return None
    span = RunSpan(
        batch_size=int(rows_in(sampler) or module.batch_size),
        batches_per_epoch=max(1, len(loader)),
        place=_place(loader),
    )
    batches = 0
    if trainer is not None:
        if not 0 < trainer.num_training_batches < math.inf:
            return None
        batches = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        span = _present_span(span, loader, trainer)
    return RunRecord(
        datamodule=type(module).__qualname__,
        seed=loader.seed,
        length=length,
        order=_order_name(sampler, loader.seed),
        drop_last=isinstance(sampler, _MayDropLast) and bool(sampler.drop_last),
        batches=batches,
        spans=(span,),
        package=own_version(),
    )


def _present_span(span: RunSpan, loader: FastDataLoader, trainer: Trainer) -> RunSpan:
    """Return the span as of the epoch that is under way, or ended last."""
    loop = trainer.fit_loop
    progress: Any = loop.epoch_loop.batch_progress
    taken, accumulated = progress.current.ready, trainer.accumulate_grad_batches
    epoch = max(0, loop.epoch_progress.current.ready - 1)
    span = replace(
        span,
        batches_per_epoch=int(trainer.num_training_batches),
        world_size=trainer.world_size,
        accumulate_grad_batches=accumulated,
        place=_place(loader),
        epoch=epoch,
        batch=progress.total.ready - taken,
    )
    done = progress.current.processed
    whole = done == span.batches_per_epoch
    return replace(
        span, step=trainer.global_step - (span.steps_per_epoch if whole else done // accumulated)
    )


def _place(loader: FastDataLoader) -> PixelPlace:
    return "device" if loader.transform is not None and loader.on_device else "workers"


def _order_name(batch_sampler: object, seed: int) -> str:
    """Return who decides the order: the class, and its seed if that is not the samples' one."""
    sampler = batch_sampler
    if isinstance(batch_sampler, BatchSampler) and type(batch_sampler).__name__ in _PLAIN:
        sampler = batch_sampler.sampler
    name = type(sampler).__name__
    if isinstance(sampler, RankSampler) and sampler.blocks is not None:
        name = BlockShuffleSampler.__name__
    return (
        f"{name}(seed={sampler.seed})"
        if isinstance(sampler, _Seeded) and sampler.seed != seed
        else name
    )


def training_loader(trainer: Trainer) -> FastDataLoader | None:
    """Return the training loader of a trainer; None: none of ours, or several."""
    loaders = trainer.train_dataloader
    found = [] if loaders is None else list(flattened(loaders))
    one = found[0] if len(found) == 1 else None
    return one if isinstance(one, FastDataLoader) else None


# -- files ----------------------------------------------------------------------------------------


def read_run(path: str | Path) -> tuple[RunRecord, dict[str, Any]]:
    """Return the record of a run, and the hyperparameters of its data module, from a file.

    The file is a checkpoint of Lightning, which is read without running code that it names, or a
    ``report.json``, which has no hyperparameters.

    Raises:
        OptionsError: It cannot be read so, or has no record of a run.
    """
    file = Path(path)
    try:
        with file.open("rb") as opened:
            zipped = opened.read(2) == b"PK"
        run, hyperparameters = _read_checkpoint(file) if zipped else (_read_report(file), {})
    except OSError as error:
        raise OptionsError(f"{path} cannot be read: {error.strerror or error}.") from error
    if run is None:
        raise OptionsError(
            f"{path} has no record of a run. Checkpoints and reports of a training with one "
            "FastDataModule, one training loader and no stream have one."
        )
    return RunRecord.from_dict(run), hyperparameters


def _read_checkpoint(file: Path) -> tuple[object, dict[str, Any]]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as error:
        raise OptionsError(
            f"{file} cannot be read without running code that it names, or is damaged: "
            f"{str(error).partition(chr(10))[0]:.300} Give the report.json of the run."
        ) from error
    values = found.values() if isinstance(found, dict) else ()
    ours = [one[KEY] for one in values if isinstance(one, dict) and KEY in one]
    run = next((one["run"] for one in ours if isinstance(one, dict) and one.get("run")), None)
    given = found.get("datamodule_hyper_parameters") if run is not None else None
    return run, dict(given) if isinstance(given, Mapping) else {}


def _read_report(file: Path) -> object:
    size = file.stat().st_size
    if size > _LARGEST_REPORT_BYTES:
        raise OptionsError(
            f"{file} has {size} bytes, and a report has {_LARGEST_REPORT_BYTES} at most. Name a "
            "report.json, or a checkpoint of Lightning."
        )
    try:
        report = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise OptionsError(
            f"{file} is neither a checkpoint of Lightning nor a report.json: {error}."
        ) from error
    return report.get("run") if isinstance(report, dict) else None

"""Any batch of a training, made again without training: its content follows from keys alone.

What a sample is follows from (seed, epoch, index), and which samples a batch holds from (length,
seed, epoch, batch size, ranks). The batch is read by a loader of its own, and goes through the
transfer hooks of a copy of the data module.
"""

from __future__ import annotations

import copy
import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_fastdata.batches.staged import move
from lightning_fastdata.device.prefetch import drawn_under
from lightning_fastdata.errors import OptionsError, check, is_whole
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.options import LoaderOptions
from lightning_fastdata.order.epoch_order import EpochOrder, check_rank, dataset_length, whole
from lightning_fastdata.order.samplers import deciding, epoch_order, tell_samplers
from lightning_fastdata.plugin import seams
from lightning_fastdata.plugin.module import DataModule
from lightning_fastdata.plugin.placing import Placing
from lightning_fastdata.plugin.transforms import Prefetching
from lightning_fastdata.randomness.global_generators import kept_random_state
from lightning_fastdata.sources.files import files_of
from lightning_fastdata.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedBatch:
    """A batch of a training, made again."""

    epoch: int
    """Epoch of the batch, counted from 0."""
    number: int
    """Number of the batch within its epoch, counted from 0."""
    rank: int
    """Rank that got the batch."""
    indices: tuple[int, ...]
    """Indices of the batch's samples in the dataset, in the order of the batch."""
    files: tuple[str, ...] | None
    """The file of each sample; None where the dataset shows none."""
    batch: Batch
    """The batch as the model gets it, on the CPU."""


def replayed(
    module: DataModule,
    epoch: int | None,
    number: int,
    *,
    rank: int = 0,
    ranks: int = 1,
    seed: int | None = None,
    saved: Mapping[str, Any] | None = None,
    per_epoch: int | None = None,
) -> ReplayedBatch:
    """Return a training batch of a data module, made again as for a training on the CPU.

    Args:
        module: The data module, whose datasets are there, as after ``setup("fit")``.
        epoch: Epoch of the batch, from 0, as ``trainer.current_epoch``. None: ``number`` counts
            over all epochs.
        number: Number of the batch in its epoch, from 0, as the ``batch_idx`` of ``training_step``.
        rank: Rank that got the batch.
        ranks: Number of ranks that trained together.
        seed: Seed of the training. Default: that of the data module.
        saved: State of the loader in a checkpoint of the training, with its batch size and length.
        per_epoch: Batches that a rank took in each epoch, where ``epoch`` is None. Default: all.

    Raises:
        OptionsError: There is no such batch, the order of the training is none that follows from
            seed and epoch, or the training had batches or a dataset of another size.
    """
    check("epoch", epoch, epoch is None or is_whole(epoch, 0), "whole numbers from 0")
    counted = "step" if epoch is None else "batch"
    check(counted, number, is_whole(number), "whole numbers from 0")
    check_rank(rank, whole("ranks", ranks))
    fine = per_epoch is None or (type(per_epoch) is int and per_epoch > 0)
    check("batches_per_epoch", per_epoch, fine, "None and whole numbers of at least 1")
    with kept_random_state(), torch.no_grad():
        saved = saved or {}
        size, length = saved.get("batch_size"), saved.get("length")
        twin: Any = _apart(module, seed, size)
        loader = _training_loader(twin)
        order = _order_of(loader, epoch or 0, rank, ranks)
        if size not in (None, order.batch_size):
            # The training had another batch_size, or a hook of the module scales it by the devices.
            twin.batch_size = max(1, twin.batch_size * size // order.batch_size)
            loader = _training_loader(twin)
            order = _order_of(loader, epoch or 0, rank, ranks)
        if size not in (None, order.batch_size):
            raise OptionsError(
                f"The training of the checkpoint had batches of {size} samples, and the loader of "
                f"{type(module).__name__} has {order.batch_size} where the data module has "
                f"batch_size={twin.batch_size} and its trainer one device, as here: the batches "
                f"would be others. Name a data module whose loader has {size} then."
            )
        last = [_order_name(one) for one in module._training_loaders().values()]
        trained, ours = saved.get("order", last[0] if len(last) == 1 else None), _order_name(loader)
        if trained not in (None, ours):
            raise OptionsError(
                f"The training took the order of {trained}, as overfit_batches has it, and the "
                f"data module that of {ours}: its batches would be others."
            )
        if length not in (None, order.length):
            raise OptionsError(
                f"The training of the checkpoint had length {length}, and the data module has "
                f"{order.length}: its batches would be others. Name one that is as it was."
            )
        if epoch is None and number >= 0:
            epoch, number = divmod(number, per_epoch or max(1, len(order)))
            order = _order_of(loader, epoch, rank, ranks)
        if epoch is None or number not in range(len(order)):
            raise OptionsError(
                f"Rank {rank} of {ranks} got no batch {number} in epoch {epoch or 0}, which has "
                f"{len(order)}, counted from 0."
            )
        indices: list[int] = order.batch(number).tolist()
        cpu = torch.device("cpu")
        # Draws are keyed by the batch in question, not by that of a training.
        twin._drawing = lambda _: drawn_under(twin.run_seed(), epoch, (rank, number), cpu)
        batch = twin.on_before_batch_transfer(_read(loader, indices, epoch), 0)
        batch = twin.transfer_batch_to_device(batch, cpu, 0)
        batch = move(twin.on_after_batch_transfer(batch, 0), cpu)
    files = files_of(loader.dataset, indices)
    where = {"epoch": epoch, "number": number, "rank": rank}
    return ReplayedBatch(**where, indices=tuple(indices), files=files, batch=batch)


def _apart(module: DataModule, seed: int | None, trained: int | None) -> DataModule:
    """Return a copy of a data module, with the same datasets and transforms, that decides alone."""
    if module.chooses_batch_size and trained is None:
        raise OptionsError(
            'Batches cannot be made again with batch_size="auto". Give the data module the number '
            "that the training had, which its log tells."
        )
    twin = copy.copy(module)
    twin.seed = module.seed if seed is None else seed
    twin._prefetching = Prefetching("off")
    twin.placing = Placing("gpu" if module.augment_on == "gpu" else "cpu")
    twin._plans, twin.notes, twin._fit_trainer = {}, [], None
    # A dataset may open files lazily, and processes that are forked later must not share them.
    if "fork" in multiprocessing.get_all_start_methods():
        how = {"executor": "workers", "num_workers": 1, "multiprocessing_context": "fork"}
    else:
        how = {"executor": "inline", "num_workers": 0}
    twin.options = LoaderOptions(**how)  # type: ignore[arg-type]
    return twin


def _training_loader(twin: DataModule) -> FastDataLoader:
    """Return the training loader of a data module, made as for a training on the CPU."""
    twin._trainer = seams.trainer_like(twin)
    try:
        loaders = list(seams.flattened(twin.train_dataloader()))
    finally:
        twin._trainer = None
    one = loaders[0] if len(loaders) == 1 else None
    if not isinstance(one, FastDataLoader) or not dataset_length(one.dataset):
        over = "" if one is None else f", over {type(one.dataset).__name__}"
        raise OptionsError(
            "Batches are made again of one training loader of this package over a dataset with a "
            f"length; {type(twin).__name__} has {len(loaders)} loaders{over}."
        )
    return one


def _order_name(loader: FastDataLoader) -> str:
    return type(deciding(loader.batch_sampler)).__name__


def _order_of(loader: FastDataLoader, epoch: int, rank: int, ranks: int) -> EpochOrder:
    """Return which samples the batches of an epoch held on one rank of several."""
    tell_samplers(epoch, loader.batch_sampler)
    order = epoch_order(loader.batch_sampler, epoch)
    if not isinstance(order, EpochOrder):
        on = f" on {ranks} ranks" if ranks > 1 else ""
        raise OptionsError(
            f"The order of this training is that of {_order_name(loader)}"
            f"{on}, which does not follow from seed and epoch alone here, so that its batches "
            "cannot be found again."
        )
    return replace(order, rank=rank, world_size=ranks)


def _read(loader: FastDataLoader, indices: list[int], epoch: int) -> Batch:
    """Return the batch of these samples, as a loader with one batch delivers it."""
    reader = FastDataLoader(
        loader.dataset,
        batch_sampler=[indices],
        num_workers=loader.num_workers,
        executor=loader.executor,
        multiprocessing_context=loader.multiprocessing_context,
        worker_init_fn=loader.worker_init_fn,
        seed=loader.seed,
        epoch=lambda: epoch,
        collate_fn=loader.collate_fn,
        transform=loader.transform,
        on_device=loader.on_device,
        staged=loader.staged,
    )
    try:
        return next(iter(reader))
    finally:
        reader.close()

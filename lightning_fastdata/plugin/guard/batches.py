"""Batches of any size for steps that are tried, made as the data module makes its own."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, default_collate

from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.executors.kinds import KINDS
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.plugin.data.datasets import GivenLoader, in_form_of, named, taken_apart

if TYPE_CHECKING:
    from lightning_fastdata.plugin.contracts import DataModule
    from lightning_fastdata.types import Batch, Stage


def collates(datamodule: DataModule) -> bool:
    """Return whether training batches are collated by a function of the user's."""
    datasets = [dataset for _, dataset in named(datamodule.train_dataset(), "")]
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


def guard_batch(datamodule: DataModule, stage: Stage, rows: int) -> Batch:
    """Return a batch of training (``"train"``) or of the one validation dataset (``"val"``)."""
    datasets = datamodule.train_dataset() if stage == "train" else datamodule.val_dataset()
    batches = [_first_rows(datamodule, each, rows, stage) for _, each in named(datasets, "")]
    return in_form_of(datasets, batches) if stage == "train" else batches[0]


def _first_rows(datamodule: DataModule, dataset: Any, rows: int, stage: Stage) -> Batch:
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
            stage=stage,
            batch_size=rows,
            collate_fn=known.get("collate_fn", datamodule.collate_fn),
            sampler=[i * length // rows if rows < length else i % length for i in range(rows)],
            drop_last=False,
            num_workers=1,
            persistent_workers=False,
        )
    if KINDS[loader.executor].caller_reads:
        loader.executor = "workers"
    try:
        return next(iter(loader))
    finally:
        loader.close()

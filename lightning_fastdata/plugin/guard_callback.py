"""The callback through which a FastDataModule checks its batch size before training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from lightning_fastdata.batch_size import CudaMemoryReader, skipped
from lightning_fastdata.loading.order import dataset_length
from lightning_fastdata.loading.probe import shallow_copy
from lightning_fastdata.plugin.guard import apply_decision, run_guard
from lightning_fastdata.plugin.trainer_facts import has_cuda

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_fastdata.batch_size import GuardDecision, MemoryReader
    from lightning_fastdata.types import Batch


class GuardHooks:
    """Runs the batch-size guard of the trainer's FastDataModule when a fit starts.

    A FastDataModule adds it to a trainer on CUDA; it does nothing for other data modules.

    Args:
        reader: Reads the device's memory. Default: the CUDA device of the trainer; on another
            device nothing is checked.
    """

    def __init__(self, reader: MemoryReader | None = None) -> None:
        super().__init__()
        self.reader = reader
        self.decision: GuardDecision | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Measure two small training steps, decide, and apply the decision."""
        datamodule = trainer.datamodule
        guard: Any = getattr(datamodule, "guard", "off")
        device = trainer.strategy.root_device
        if guard == "off" or not hasattr(datamodule, "batch_for_guard"):
            return
        reader = self.reader
        if reader is None:
            if device.type != "cuda":
                return
            reader = CudaMemoryReader(device)
        rows = datamodule.rows_for_guard()
        if rows is None:
            why = (
                "the training data is a stream, or comes from the module's own train_dataloader(), "
                "so that no batch of another size can be made"
            )
            self.decision = skipped(datamodule.batch_size, trainer.accumulate_grad_batches, why)
        else:
            self.decision = run_guard(
                trainer,
                pl_module,
                batch_of=datamodule.batch_for_guard,
                batch_size=datamodule.batch_size,
                policy=guard,
                reader=reader,
                dataset_rows=rows,
            )
        datamodule.notes[:] = [apply_decision(self.decision, trainer, datamodule)]


def attach_guard(trainer: Any, guard: type) -> None:
    """Add the guard to a trainer that runs on CUDA, unless it has one.

    Lightning calls callbacks in order, so the guard comes first and decides before anything else
    looks at the batch size.
    """
    if has_cuda(trainer) and not any(isinstance(own, guard) for own in trainer.callbacks):
        trainer.callbacks.insert(0, guard())


def guard_rows(datasets: Iterable[Any]) -> int | None:
    """Return the samples of the longest dataset; None if one is a stream, or there is none."""
    known = list(datasets)
    lengths = [None if isinstance(d, IterableDataset) else dataset_length(d) for d in known]
    return None if None in lengths else max((n for n in lengths if n is not None), default=None)


def first_rows(datamodule: Any, dataset: Any, rows: int) -> Batch:
    """Return one training batch with that many rows, from the first samples of the dataset.

    Short datasets repeat. The loader is the real one, with its transforms, but no workers.
    """
    length = len(dataset)
    loader = datamodule.make_loader(
        shallow_copy(dataset),
        stage="train",
        batch_size=rows,
        sampler=[i % length for i in range(rows)],
        drop_last=False,
        num_workers=0,
    )
    return next(iter(loader))

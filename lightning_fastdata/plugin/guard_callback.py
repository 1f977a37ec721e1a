"""The callback through which a FastDataModule checks its batch size before training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_fastdata.batch_size import CudaMemoryReader
from lightning_fastdata.loading.probe import shallow_copy
from lightning_fastdata.plugin.guard import apply_decision, run_guard

if TYPE_CHECKING:
    from lightning_fastdata.batch_size import GuardDecision, MemoryReader
    from lightning_fastdata.types import Batch


class GuardHooks:
    """Runs the batch-size guard of the trainer's FastDataModule when a fit starts.

    A FastDataModule adds it to its trainer; it does nothing for other data modules.

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
        guard = getattr(datamodule, "guard", "off")
        device = trainer.strategy.root_device
        if guard == "off" or not hasattr(datamodule, "batch_for_guard"):
            return
        reader = self.reader
        if reader is None:
            if device.type != "cuda":
                return
            reader = CudaMemoryReader(device)
        self.decision = run_guard(
            trainer,
            pl_module,
            batch_of=datamodule.batch_for_guard,
            batch_size=datamodule.batch_size,
            policy=guard,
            reader=reader,
            dataset_rows=datamodule.rows_for_guard(),
        )
        sentence = apply_decision(self.decision, trainer, datamodule)
        datamodule.notes.append(sentence)


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

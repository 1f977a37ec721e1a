"""The callback that ``fastdata run`` adds to every Trainer of a script."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fastdata.plugin.seams.trainer import print_line
from lightning_fastdata.plugin.watch.plain_loaders import PlainLoaders
from lightning_fastdata.plugin.watch.throughput import ThroughputHooks

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class AddedHooks(ThroughputHooks):
    """A DataThroughputCallback that leaves the measuring to one that the script has.

    Args:
        fast: Put a FastDataLoader in the place of plain DataLoaders where the batches stay the
            same; the loaders that stay are named with the reason.
        report: Where the report is written. Default: as of ``DataThroughputCallback``.
    """

    def __init__(self, *, fast: bool = False, report: str | None = None) -> None:
        super().__init__(report=report or True)
        self.fast = fast

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin to measure, unless another callback does."""
        callbacks: list[object] = list(trainer.callbacks)  # type: ignore[attr-defined]
        own = [c for c in callbacks if isinstance(c, ThroughputHooks) and c is not self]
        measures = own[0] if own else self
        if self.fast and measures.change_loaders is None:

            def tell(line: str) -> None:
                if trainer.is_global_zero:
                    print_line(trainer, f"fastdata run --fast: {line}")

            measures.change_loaders = PlainLoaders(tell)
        if not own:
            super().setup(trainer, pl_module, stage)

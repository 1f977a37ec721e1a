"""Lightning's transfer hooks of a FastDataModule: the one place where batches are transformed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_fastdata.batches.streams import DeviceStreams, device_streams
from lightning_fastdata.plugin.placing.staging import inside
from lightning_fastdata.plugin.seams.hooks import HOOKS, overridden_hook

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from lightning_fastdata.plugin.placing.prefetching import Prefetching
    from lightning_fastdata.plugin.placing.stage_transforms import StageTransforms
    from lightning_fastdata.plugin.placing.trial import Placing
    from lightning_fastdata.types import Batch


class TransferHooks:
    """Before, during and after the transfer of a batch; each calls the LightningModule's hook."""

    _trainer: Any
    _transforms: StageTransforms
    _prefetching: Prefetching
    placing: Placing

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Run the LightningModule's hook of this name, if it has one."""
        hook = self._hook_of_module("on_before_batch_transfer")
        return batch if hook is None else inside(batch, lambda b: hook(b, dataloader_idx))

    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Batch:
        """Move the batch and what was drawn for its transform to the device."""
        hook = self._hook_of_module("transfer_batch_to_device")
        move = super().transfer_batch_to_device if hook is None else hook  # type: ignore[misc]
        return self._prefetching.transfer(
            batch, lambda b: move(b, device, dataloader_idx), device, self._transforms
        )

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Run the stage's transforms, then the LightningModule's hook of this name."""
        batch, transformed = self.placing.finish(batch, self._transforms)
        hook = self._hook_of_module("on_after_batch_transfer")
        if hook is not None:
            batch = hook(batch, dataloader_idx)
        if transformed:
            # Lightning converts to the precision's dtype before the transfer; uint8 images became
            # floating point only now.
            batch = self._trainer.precision_plugin.convert_input(batch)
        return batch

    def device_streams(self, device: torch.device) -> DeviceStreams | None:
        """Return the streams of a device on which ``prefetch`` moves batches; None: it has none."""
        return device_streams(device)

    def written_hooks(self) -> frozenset[str]:
        """Return the transfer hooks that the class itself overrides."""
        cls = type(self)
        return frozenset(n for n in HOOKS if getattr(cls, n) is not getattr(TransferHooks, n))

    def _hook_of_module(self, name: str) -> Callable[..., Batch] | None:
        trainer = self._trainer
        return None if trainer is None else overridden_hook(trainer.lightning_module, name)

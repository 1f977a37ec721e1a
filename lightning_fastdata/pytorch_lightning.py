"""The same classes for projects on ``pytorch_lightning``.

``lightning.pytorch`` and ``pytorch_lightning`` are separate class trees, and each Trainer takes
data modules of its own tree only. Import from here if your project says
``import pytorch_lightning``; nothing else imports this module.
"""

from __future__ import annotations

from pytorch_lightning import Callback, LightningDataModule
from pytorch_lightning.utilities import CombinedLoader

from lightning_fastdata.plugin.guard.callback import GuardHooks
from lightning_fastdata.plugin.module import DataModule
from lightning_fastdata.plugin.proving import ProvingHooks
from lightning_fastdata.plugin.seams import EmptyLoaders
from lightning_fastdata.plugin.throughput import AddedHooks, ThroughputHooks


class NoLoaders(EmptyLoaders, CombinedLoader):  # type: ignore[misc]
    __doc__ = EmptyLoaders.__doc__


class BatchSizeGuard(GuardHooks, Callback):  # type: ignore[misc]
    __doc__ = GuardHooks.__doc__


class FastDataModule(DataModule, LightningDataModule):  # type: ignore[misc]  # noqa: D101
    __doc__ = DataModule.__doc__

    _guard_callback = BatchSizeGuard
    _no_loaders = NoLoaders


class DataThroughputCallback(ThroughputHooks, Callback):  # type: ignore[misc]  # noqa: D101
    __doc__ = ThroughputHooks.__doc__


class AddedCallback(AddedHooks, Callback):  # type: ignore[misc]
    __doc__ = AddedHooks.__doc__


class ProvingCallback(ProvingHooks, Callback):  # type: ignore[misc]
    __doc__ = ProvingHooks.__doc__


__all__ = ["DataThroughputCallback", "FastDataModule"]

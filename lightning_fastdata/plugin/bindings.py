"""FastDataModule and DataThroughputCallback for projects on ``lightning.pytorch``."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.utilities import CombinedLoader

from lightning_fastdata.plugin.guard.callback import GuardHooks
from lightning_fastdata.plugin.module import DataModule
from lightning_fastdata.plugin.proving import ProvingHooks
from lightning_fastdata.plugin.seams import EmptyLoaders
from lightning_fastdata.plugin.throughput import AddedHooks, ThroughputHooks


class NoLoaders(EmptyLoaders, CombinedLoader):  # noqa: D101
    __doc__ = EmptyLoaders.__doc__


class BatchSizeGuard(GuardHooks, Callback):  # noqa: D101 - its docstring is the shared one
    __doc__ = GuardHooks.__doc__


# Lightning's from_datasets() takes any keyword.
class FastDataModule(DataModule, LightningDataModule):  # type: ignore[misc]  # noqa: D101
    __doc__ = DataModule.__doc__

    _guard_callback = BatchSizeGuard
    _no_loaders = NoLoaders


class DataThroughputCallback(ThroughputHooks, Callback):  # noqa: D101
    __doc__ = ThroughputHooks.__doc__


class AddedCallback(AddedHooks, Callback):  # noqa: D101
    __doc__ = AddedHooks.__doc__


class ProvingCallback(ProvingHooks, Callback):  # noqa: D101
    __doc__ = ProvingHooks.__doc__

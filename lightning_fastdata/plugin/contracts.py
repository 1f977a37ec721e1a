"""What the rooms of the plugin ask of a FastDataModule, without knowing its class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import Trainer
    from torch.utils.data import Dataset

    from lightning_fastdata.augment import BatchImages
    from lightning_fastdata.batches.streams import DeviceStreams
    from lightning_fastdata.caches.folders import CacheFolder
    from lightning_fastdata.loading.loader import FastDataLoader
    from lightning_fastdata.planning.options import LoaderOptions
    from lightning_fastdata.plugin.guard.prediction import GuardPolicy
    from lightning_fastdata.plugin.placing.trial import Placing
    from lightning_fastdata.types import Shuffle, Stage


@runtime_checkable
class DataModule(Protocol):
    """A FastDataModule as its loaders, the callback and the batch-size guard know it."""

    batch_size: int
    chooses_batch_size: bool
    """No batch size was asked for; that of now is one to begin with."""
    options: LoaderOptions | dict[Stage, LoaderOptions]
    shuffle: Shuffle | Mapping[str, Shuffle] | None
    cache: CacheFolder | None
    collate_fn: Callable[[list[Any]], Any] | None
    drop_last: bool
    seed: int | None
    guard: GuardPolicy
    placing: Placing
    """Where the pixels of its pipelines are computed, and why."""
    notes: list[str]
    """What the report of the run has to mention."""

    @property
    def trainer(self) -> Trainer | None:
        """The trainer that uses it; None before the first run."""

    def train_dataset(self) -> object:
        """Return what it is trained on."""

    def val_dataset(self) -> object:
        """Return what it is validated on; None: nothing."""

    def train_dataloader(self) -> object:
        """Return the loaders of training."""

    def val_dataloader(self) -> object:
        """Return the loaders of validation."""

    def make_loader(
        self, dataset: Dataset[Any], *, stage: Stage, name: str | None = None, **overrides: Any
    ) -> FastDataLoader:
        """Return the loader for a dataset."""

    def register_transform(
        self, transform: object, *, stage: Stage = "train"
    ) -> Callable[[], None]:
        """Add a transform to a stage, and return what removes it again."""

    def augments_on_device(self, stage: Stage) -> bool:
        """Return whether its last transfer hook transforms the batches of a stage."""

    def augmentation_settled(self, stage: Stage) -> bool:
        """Return whether it was found out where pixels of a stage are best computed."""

    def repeats_of(self, stage: Stage) -> int:
        """Return how often each sample is in a batch that the steps of a stage get."""

    def image_form(self, stage: Stage) -> BatchImages:
        """Return what is known of the images that the steps of a stage get."""

    def device_streams(self, device: torch.device) -> DeviceStreams | None:
        """Return the streams of a device on which batches are moved; None: it has none."""

    def written_hooks(self) -> frozenset[str]:
        """Return the transfer hooks that its own class overrides."""

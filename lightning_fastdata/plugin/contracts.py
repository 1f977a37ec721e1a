"""What the rooms of the plugin call a FastDataModule, whose module imports theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from lightning_fastdata.plugin.data.datamodule import DataModuleHooks

DataModule: TypeAlias = "DataModuleHooks"
"""A FastDataModule as its loaders, the callback and the batch-size guard know it."""

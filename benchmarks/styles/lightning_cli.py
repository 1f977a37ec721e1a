"""LightningCLI with a data module of the project's own."""

import sys

import lightning.pytorch as pl
from lightning.pytorch.cli import LightningCLI
from pieces import HOW, Model, Photos, loader, result, trainer

if HOW == "module":
    from lightning_fastdata import FastDataModule

    class Data(FastDataModule):
        def __init__(self, batch_size: int = 16) -> None:
            super().__init__(batch_size=batch_size)

        def train_dataset(self):
            return Photos()

else:

    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return loader()


if __name__ == "__main__":
    pl.seed_everything(1)
    sys.argv[1:] = ["fit"]
    callbacks = trainer().callbacks if HOW != "plain" else []
    cli = LightningCLI(
        Model,
        Data,
        seed_everything_default=1,
        save_config_callback=None,
        trainer_defaults={
            "max_epochs": 2,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": [c for c in callbacks if type(c).__name__ == "DataThroughputCallback"],
        },
    )
    result(cli.model)

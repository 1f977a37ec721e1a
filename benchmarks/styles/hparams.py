"""Loaders in the LightningModule, made from its hyperparameters."""

import lightning.pytorch as pl
from pieces import HOW, Model, Photos, result, trainer
from torch.utils.data import DataLoader


class WithLoaders(Model):
    def __init__(self, batch_size: int = 16, num_workers: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return DataLoader(
            Photos(),
            batch_size=self.hparams.batch_size,
            num_workers=self.hparams.num_workers,
            shuffle=True,
        )


if __name__ == "__main__":
    pl.seed_everything(1)
    model = WithLoaders()
    if HOW == "module":
        from lightning_fastdata import FastDataModule

        data = FastDataModule.from_loaders(model.train_dataloader())
        trainer().fit(model, datamodule=data)
    else:
        trainer().fit(model)
    result(model)

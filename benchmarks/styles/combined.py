"""Two loaders at once, by Lightning's CombinedLoader."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from pieces import Model, Photos, fit, loader


class Both(Model):
    def training_step(self, batch, batch_idx):
        (images, indices), (more, others) = batch["labelled"], batch["unlabelled"]
        return self.step(torch.cat([images, more]), torch.cat([indices, others]))


if __name__ == "__main__":
    pl.seed_everything(1)
    loaders = {"labelled": loader(Photos(320)), "unlabelled": loader(Photos(480))}
    fit(Both(), CombinedLoader(loaders, "max_size_cycle"))

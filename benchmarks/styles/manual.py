"""Manual optimization, with two optimizers in turn."""

import lightning.pytorch as pl
import torch
from pieces import Model, fit, loader


class Manual(Model):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()[batch_idx % 2]
        optimizer.zero_grad()
        self.manual_backward(self.step(*batch))
        optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=rate) for rate in (0.01, 0.02)]


if __name__ == "__main__":
    pl.seed_everything(1)
    fit(Manual(), loader())

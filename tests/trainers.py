"""A trainer and a model as small as can be, which several tests give their batches to."""

import lightning as L
import torch


class Keeps(L.LightningModule):
    """Learns on tuples or dicts with an image, and remembers the batches."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch)
        image = batch["image"] if isinstance(batch, dict) else batch[0]
        return self.scale * image.float().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


def quiet_trainer(folder=None, **options):
    """Return a trainer on the CPU for one epoch, which logs, keeps and shows nothing.

    Args:
        folder: where it may write; None: where Lightning does.
        **options: arguments of ``Trainer`` that win over these.
    """
    silent = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return L.Trainer(**silent | options)

"""A trainer and a model as small as can be, which several tests give their batches to."""

import itertools

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


class Learner(L.LightningModule):
    """Learns nothing, and remembers what a function says of each training batch.

    Args:
        note: of a batch; without it the batches themselves are remembered.
    """

    def __init__(self, note=lambda batch: batch):
        super().__init__()
        self.note, self.seen = note, []
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.seen.append(self.note(batch))
        return self.weight * 1.0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)

    @property
    def joined(self):
        """What was noted of all batches, as one list."""
        return list(itertools.chain.from_iterable(self.seen))


def trained(data, note=lambda batch: batch, *, folder=None, resume=None, **options):
    """Return what a function says of each training batch of a fit.

    Args:
        data: a data module, or what a trainer takes as its training loaders.
        note: of a batch.
        folder: where the trainer may write.
        resume: a file of a checkpoint to go on from.
        **options: arguments of ``Trainer``.
    """
    model = Learner(note)
    quiet_trainer(folder, **options).fit(model, data, ckpt_path=resume)
    return model.seen


def quiet_trainer(folder=None, **options):
    """Return a trainer on the CPU for one epoch, which logs, keeps and shows nothing.

    Args:
        folder: where it may write; None: where Lightning does.
        **options: arguments of ``Trainer`` that win over these.
    """
    silent = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return L.Trainer(**silent | options)

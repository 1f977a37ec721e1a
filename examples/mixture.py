"""Two sources in proportion: licences and code, seven to three, and later half and half.

A small network learns to tell the next byte. TensorBoard shows what part of the samples came from
each source, and how often each was read.

python examples/mixture.py [--small]
"""

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import Dataset

from lightning_fastdata import DataThroughputCallback, FastDataModule, Mixture

SMALL = "--small" in sys.argv
ROOT = Path(__file__).resolve().parents[1]
BATCH, STEPS = 32, 30 if SMALL else 1000


class Pieces(Dataset):
    """Pieces of 65 bytes of some files, int64."""

    def __init__(self, *files):
        text = b"".join(file.read_bytes() for file in files)
        self.pieces = torch.tensor(list(text[: len(text) // 65 * 65])).view(-1, 65)

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, index):
        return self.pieces[index]


class Speller(LightningModule):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.recurrent = nn.GRU(32, 64, batch_first=True)
        self.read_out = nn.Linear(64, 256)

    def training_step(self, text):
        states, _ = self.recurrent(self.embed(text[:, :-1]))
        logits = self.read_out(states).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, text[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 3e-3)


def main():
    prose = Pieces(ROOT / "LICENSE")
    code = Pieces(*sorted((ROOT / "examples").glob("*.py")))
    mixture = Mixture(
        {"prose": prose, "code": code},
        weights={
            0: {"prose": 0.7, "code": 0.3},
            STEPS // 2: {"prose": 0.5, "code": 0.5},
        },
        samples_a_step=BATCH,
    )
    data = FastDataModule.from_datasets(mixture, batch_size=BATCH)
    trainer = Trainer(
        max_epochs=-1,
        max_steps=STEPS,
        accelerator="cpu",
        log_every_n_steps=10,
        callbacks=[DataThroughputCallback()],
    )
    trainer.fit(Speller(), datamodule=data)
    epochs = mixture.epochs(*divmod(STEPS * BATCH, len(mixture)))
    print(", ".join(f"{name} was read {times:.1f} times" for name, times in epochs.items()))


if __name__ == "__main__":
    main()

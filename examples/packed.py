"""Documents packed one behind the other: no padding, and attention stays within each.

A small transformer learns to spell the sources of this package, byte by byte.

python examples/packed.py [--small]
"""

import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

from lightning_fastdata import DataThroughputCallback, FastDataModule, pack

SMALL = "--small" in sys.argv
PACKAGE = Path(__file__).resolve().parents[1] / "lightning_fastdata"
TOKENS = 1024


def functions():
    """Return the functions and classes of some modules, each as a list of bytes."""
    sources = (file.read_text(encoding="utf-8") for file in sorted(PACKAGE.glob("*/*.py")))
    texts = [text for source in sources for text in source.split("\n\n\n")]
    return [list(text.encode()[:TOKENS]) for text in texts[: 200 if SMALL else None] if text]


def within_documents(cu_seqlens):
    """Return where a token may look: at itself and what is before it in its document."""
    document = torch.repeat_interleave(cu_seqlens.diff())
    return (document[:, None] == document).tril()


class Speller(LightningModule):
    """A transformer of one layer. On a GPU, FlashAttention takes ``cu_seqlens`` for the mask."""

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(TOKENS, width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.read_out = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, 256)
        )

    def training_step(self, batch):
        x = self.bytes(batch["input_ids"]) + self.places(batch["position_ids"])
        query, key, value = self.mixed(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mask = within_documents(batch["cu_seqlens"])
        seen = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        logits = self.read_out(x + self.out(seen.transpose(1, 2).flatten(2)))
        # The token behind each; the first of a document has no label, and -100 counts nowhere.
        loss = nn.functional.cross_entropy(logits[0, :-1], batch["labels"][0, 1:])
        self.log("loss", loss, prog_bar=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


if __name__ == "__main__":
    packs = pack(functions(), TOKENS)
    print(f"{len(packs)} packs, of which {packs.waste:.1%} is empty")
    data = FastDataModule.from_datasets(packs, batch_size=1, collate_fn=packs.collate)
    trainer = Trainer(
        max_epochs=1 if SMALL else 5, callbacks=[DataThroughputCallback()], log_every_n_steps=10
    )
    trainer.fit(Speller(), datamodule=data)

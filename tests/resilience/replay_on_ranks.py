"""A training on two ranks that keeps what their steps saw. Argument: the folder to write to."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from conformance.forked_ranks import on_ranks
from resilience.test_replay import Data, augmentation, fit, options


def main():
    rank = int(os.environ["LOCAL_RANK"])
    data = Data(4, options=options("inline"), augment=augmentation(), seed=5)
    seen = fit(data, strategy="ddp", devices=2)
    torch.save(seen, Path(sys.argv[1]) / f"{rank}.pt")


if __name__ == "__main__":
    on_ranks(2, main)

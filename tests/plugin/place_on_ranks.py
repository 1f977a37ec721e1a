"""A program of two ranks, each of which puts its pixels where it finds best.

Argument: the folder to write to.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
from conformance.forked_ranks import on_ranks
from plugin.test_placing import COSTS, placed, train


def main():
    folder, rank = Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
    ranks = {"strategy": "ddp", "devices": 2}
    expected, _ = train(folder, place="cpu", workers=0, trainer=ranks)
    # The device of rank 1 cannot do its part.
    costs = COSTS if rank == 0 else replace(COSTS, refusal="it has no memory", device_ms=None)
    model, module = train(folder, placing=placed(costs), workers=1, trainer=ranks)
    same = all(
        torch.equal(one, other)
        for epoch, batches in expected.images.items()
        for one, other in zip(batches, model.images[epoch], strict=True)
    )
    labels = {epoch: torch.cat(labels).tolist() for epoch, labels in model.labels.items()}
    told = {"same": same, "labels": labels, "places": getattr(module, "places", {})}
    (folder / f"{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    on_ranks(2, main)

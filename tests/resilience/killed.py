"""A program whose trainings are killed: each in a process of its own, after its checkpoint.

Arguments: folder, and the cases as JSON: name -> [feature, loader, step of the checkpoint].
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from resilience.cells import EPOCHS, FEATURES, Raises, make_model, make_module
from resilience.runs import train


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder, feature, loader, at):
    folder.mkdir()
    torch.set_num_threads(1)
    model = make_model(feature, folder / "record")
    model.raising = Raises(kill, at + 1)
    save = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=at)
    arguments = {"max_epochs": EPOCHS, **FEATURES[feature].get("trainer", {})}
    train(model, make_module(feature, loader), folder, callbacks=[save], **arguments)


if __name__ == "__main__":
    for name, (feature, loader, at) in json.loads(sys.argv[2]).items():
        process = os.fork()
        if process == 0:
            main(Path(sys.argv[1]) / name, feature, loader, at)
            os._exit(0)
        _, status = os.waitpid(process, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            sys.exit(f"{name} was not killed: status {status}")

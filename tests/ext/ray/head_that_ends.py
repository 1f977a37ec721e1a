"""A training whose cluster is broken in its midst, and one that goes on from its checkpoint.

Arguments: what ends (``gcs_server``: the head's; ``raylet``: of the training's machine), or
``nothing``, and the folder of the checkpoint (of ``nothing``, several).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from ray.cluster_utils import Cluster
from torch.utils.data import Dataset

from lightning_fastdata import FastDataModule, LoaderOptions
from lightning_fastdata.errors import WorkerError


class Rows(Dataset):
    def __len__(self) -> int:
        return 1200

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index), torch.rand(10_000)  # large enough for the object store


class Data(FastDataModule):
    def __init__(self, executor: str) -> None:
        super().__init__(4, options=LoaderOptions(num_workers=2, executor=executor), seed=5)

    def train_dataset(self) -> Any:
        return Rows()


class Model(LightningModule):
    """Does something when its tenth step begins, and is slow from then on."""

    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.layer, self.act = torch.nn.Linear(1, 1), act
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 10 and self.act is not None:
            self.act()
        if batch_idx >= 10 and self.act is not None:
            time.sleep(0.25)
        self.seen.append([batch[0].tolist(), hashlib.sha256(batch[1].numpy()).hexdigest()])
        return self.layer(torch.ones(1)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def trainer_of(folder: Path) -> Trainer:
    last = ModelCheckpoint(folder, save_last=True, every_n_train_steps=5)
    return Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[last],
        default_root_dir=folder,
    )  # fmt: skip


def break_off(what: str, folder: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)

    def end() -> None:
        cluster.head_node.all_processes[what][0].process.kill()

    model = Model(end)
    try:
        trainer_of(folder).fit(model, datamodule=Data("ray"))
    except WorkerError as error:
        Path(folder, "error.txt").write_text(str(error), encoding="utf-8")
    Path(folder, "before.json").write_text(json.dumps(model.seen), encoding="utf-8")
    for node in cluster.list_all_nodes():
        node.kill_all_processes(check_alive=False, allow_graceful=False)
    os._exit(0)  # Ray would wait for its head


def go_on(folder: Path) -> None:
    rest, whole = Model(), Model()
    trainer_of(folder).fit(rest, datamodule=Data("ray"), ckpt_path=str(folder / "last.ckpt"))
    trainer_of(folder / "whole").fit(whole, datamodule=Data("workers"))
    Path(folder, "after.json").write_text(json.dumps([rest.seen, whole.seen]), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "nothing":
        for each in sys.argv[2:]:
            go_on(Path(each))
    else:
        break_off(sys.argv[1], Path(sys.argv[2]))

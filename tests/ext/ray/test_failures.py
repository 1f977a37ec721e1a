"""Actors and nodes that end: nothing is lost, nothing comes twice, and order and content stay."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import sys
import threading
from functools import partial
from typing import Any

import psutil
import pytest
import ray
import torch
from ext.ray.clusters import actors, wait_until
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import Dataset

from lightning_fastdata import DataThroughputCallback, FastDataLoader, FastDataModule, LoaderOptions
from lightning_fastdata.errors import FastDataWarning, WorkerError
from lightning_fastdata.executors.ray import Ray

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("cluster")


class Rows(Dataset):
    """Of samples one kills (``deadly``), one never comes (``stuck``), and one raises (``bad``)."""

    def __init__(self, length: int = 320, deadly: int = -1, stuck: int = -1, bad: int = -1) -> None:
        self.length, self.deadly, self.stuck, self.bad = length, deadly, stuck, bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index == self.deadly:
            os.kill(os.getpid(), signal.SIGSEGV)
        if index == self.stuck:
            threading.Event().wait()
        if index == self.bad:
            raise OSError(f"sample {index} is damaged")
        return torch.full((5000,), index), torch.rand(3)


def loader_of(executor: str, dataset: Any = None, **how: Any) -> FastDataLoader:
    how = {"batch_size": 4, "shuffle": True, "num_workers": 3, "seed": 3, **how}
    order = torch.Generator().manual_seed(5)
    return FastDataLoader(dataset or Rows(), executor=executor, generator=order, **how)


def plain(batch: Any) -> list[bytes]:
    return [column.numpy().tobytes() for column in batch]


def rows(loader: FastDataLoader) -> list[list[bytes]]:
    seen = [plain(batch) for batch in loader]
    loader.close()
    return seen


@pytest.fixture(scope="module")
def expected() -> list[list[bytes]]:
    return rows(loader_of("workers"))


def test_actors_are_killed_alone_and_all_at_once(cluster, expected) -> None:
    loader, seen, dice = loader_of("ray"), [], random.Random(3)
    for number, batch in enumerate(loader):
        seen.append(plain(batch))
        if number in (10, 30, 50):
            wait_until(lambda: actors(cluster))
            there = actors(cluster)
            for actor in there if number == 50 else dice.choices(there or [None]):
                with contextlib.suppress(psutil.Error, AttributeError):  # it may just have ended
                    actor.kill()
    assert seen == expected
    assert loader.faults.deaths  # of those that had started
    loader.close()


def test_a_slow_network_delays_batches_and_changes_nothing(cluster, expected) -> None:
    """An actor that is stopped for a second answers no call and hands over no batch, as one behind
    a line that drops its packets for that long; then all of it comes at once, and late, though
    others were asked for the same batches meanwhile."""
    loader, dice, over = loader_of("ray"), random.Random(5), threading.Event()

    def hold_up() -> None:
        while not over.wait(0.1):
            for actor in dice.choices(actors(cluster) or [None]):
                with contextlib.suppress(psutil.Error, AttributeError):
                    actor.suspend()
                    stopped.append(actor.pid)
                    over.wait(1.0)
                    actor.resume()

    stopped: list[int] = []
    batches = iter(loader)
    seen = [plain(next(batches))]
    slow = threading.Thread(target=hold_up)
    slow.start()
    try:
        for batch in batches:
            seen.append(plain(batch))
            if len(seen) % 10 == 0:
                count = len(stopped)
                wait_until(lambda count=count: len(stopped) > count)
    finally:
        over.set()
        slow.join()
    assert seen == expected
    assert len(stopped) >= 7
    assert loader.faults.deaths == 0
    loader.close()


def test_a_loader_reads_though_another_one_holds_all_cpus(expected) -> None:
    first = loader_of("ray", num_workers=5, persistent_workers=True)
    assert len(list(first)) == len(expected)
    assert rows(loader_of("ray", num_workers=1)) == expected
    first.close()


def test_actors_run_where_their_options_say(cluster) -> None:
    node = cluster.add_node(num_cpus=1, resources={"fast": 1})
    there = Ray(resources={"fast": 1}, num_cpus=0.5)
    options = LoaderOptions(executor=there, num_workers=1)
    loader = FastDataModule.from_datasets(Rows(4), options=options).train_dataloader()
    next(iter(loader))
    assert has_actor(psutil.Process(node.all_processes["raylet"][0].process.pid))
    loader.close()
    cluster.remove_node(node)


def has_actor(raylet: psutil.Process) -> bool:
    return any("ray::ReadingActor" in " ".join(each.cmdline()) for each in raylet.children())


def test_a_node_comes_is_used_and_goes(cluster, expected) -> None:
    loader, seen = loader_of("ray", num_workers=6), []
    for number, batch in enumerate(loader):
        seen.append(plain(batch))
        if number == 10:
            node = cluster.add_node(num_cpus=2)
            raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
            wait_until(partial(has_actor, raylet))
        if number == 50:
            cluster.remove_node(node, allow_graceful=False)
    assert seen == expected
    loader.close()


def test_a_sample_that_kills_is_named() -> None:
    loader = loader_of("ray", Rows(24, deadly=13), shuffle=False, num_workers=2)
    batches = iter(loader)
    assert [int(next(batches)[0][0, 0]) for _ in range(3)] == [0, 4, 8]
    with pytest.raises(WorkerError, match="Sample 13 of the dataset was being read each of the 2"):
        next(batches)
    loader.close()


def test_a_sample_that_hangs_is_named() -> None:
    how = {"shuffle": False, "num_workers": 2, "timeout": 1.5}
    loader = loader_of("ray", Rows(24, stuck=5), **how)
    told = pytest.warns(FastDataWarning, match=r"actor \d on \S+ has got nowhere for 1.5 s")
    with told, pytest.raises(WorkerError, match="Sample 5 of the dataset was read twice"):
        list(loader)
    loader.close()


@pytest.mark.filterwarnings("ignore::lightning_fastdata.errors.FastDataWarning")
def test_bad_samples_go_by_the_same_rule() -> None:
    how = {"on_bad_sample": "replace", "num_workers": 1}
    ours, theirs = (loader_of(each, Rows(60, bad=7), **how) for each in ("ray", "workers"))
    assert rows(ours) == rows(theirs)
    assert ours.faults.samples == 1


def test_an_epoch_goes_on_with_another_number_of_actors(expected) -> None:
    first = loader_of("ray", num_workers=1)
    seen = [plain(batch) for batch in itertools.islice(first, 57)]
    state = first.state_dict()
    first.close()
    then = loader_of("ray", num_workers=2)
    then.load_state_dict(state)
    assert seen + rows(then) == expected


class Module(FastDataModule):
    def __init__(self, executor: str) -> None:
        super().__init__(4, options=LoaderOptions(num_workers=1, executor=executor), seed=5)

    def train_dataset(self) -> Any:
        return Rows(64)

    def val_dataset(self) -> Any:
        return Rows(16)


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append((self.current_epoch, plain(batch)))
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(("val", plain(batch)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def trained(executor: str, folder: Any) -> tuple[list[Any], Any]:
    model, watch = Model(), DataThroughputCallback()
    trainer = Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_checkpointing=False, default_root_dir=folder, callbacks=[watch],
    )  # fmt: skip
    trainer.fit(model, Module(executor))
    return model.seen, watch


def test_a_training_with_validation_sees_the_same_batches(tmp_path, cluster) -> None:
    ours, watch = trained("ray", tmp_path / "ours")
    theirs, _ = trained("workers", tmp_path / "theirs")
    assert ours == theirs
    assert watch.report.stages[0].stage == "train"
    wait_until(lambda: not actors(cluster))

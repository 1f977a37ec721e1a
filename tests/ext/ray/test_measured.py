"""What actors do is measured and explained, and their number is found."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ext.ray.clusters import wait_until
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import Dataset, Subset
from verdicts.known import NO_LOADER, of_loop

from lightning_fastdata import DataThroughputCallback, FastDataLoader, FastDataModule, LoaderOptions
from lightning_fastdata.ext.ray import cluster
from lightning_fastdata.ext.ray.cluster import ClusterWatch
from lightning_fastdata.ext.ray.crew import room_for_actors
from lightning_fastdata.insight.evidence import Evidence, evidence_of
from lightning_fastdata.insight.finding import Finding
from lightning_fastdata.insight.steps import StepHistory, StepTiming
from lightning_fastdata.insight.verdict import findings
from lightning_fastdata.insight.waits import CauseTotals, WaitCutter
from lightning_fastdata.loading.simulate import LoaderSetup
from lightning_fastdata.loading.source import setup_of
from lightning_fastdata.loading.tuner import Tuner
from lightning_fastdata.stamps.batch_stamps import BatchStamps

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("cluster")


QUICK, LARGE, LONG = range(3)
"""Kinds of samples, which an index has as its thousands."""


class Kinds(Dataset):
    """Samples that are large, or take long."""

    def __len__(self) -> int:
        return 3000

    def __getitem__(self, index: int) -> Any:
        kind = index // 1000
        time.sleep(0.02 if kind == LONG else 0.0)
        return np.full(4_000_000 if kind == LARGE else 1000, index % 100, np.int8)


class Reads:
    """A loader whose actors stay while tests read one kind of samples after the other."""

    def __init__(self) -> None:
        self.batches = list[list[int]]()
        how = {"batch_sampler": self, "persistent_workers": True, "num_workers": 4}
        self.loader = FastDataLoader(Kinds(), executor="ray", **how)
        self.actors: set[int] = set()
        """Those that have read."""
        wait_until(self.all_have_read)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def all_have_read(self) -> bool:
        tasks = [task for batch in self.stamps(LONG, 12) for task in batch.tasks]
        self.actors |= {task.process for task in tasks}
        return len(self.actors) == self.loader.num_workers

    def stamps(self, kind: int, batches: int) -> list[BatchStamps]:
        """Return the stamps of some batches of a kind."""
        self.batches = [[1000 * kind + number % 120] * 4 for number in range(batches)]
        records: deque[BatchStamps] = deque()
        self.loader.record_stamps(records)
        for _ in self.loader:
            pass
        return list(records)

    def shows(self, kind: int, batches: int) -> dict[str, Finding]:
        """Return by code what they show, where a cluster has four CPUs free."""
        stamps = self.stamps(kind, batches)
        (task,) = stamps[-1].tasks
        task = task._replace(way=task.way._replace(free_cpus=4.0))
        stamps[-1] = stamps[-1]._replace(tasks=(task,))
        evidence = shown_by(stamps, setup_of(self.loader, cpus=2.0, step_cpus=0.1))
        return {each.code: each for each in findings(evidence)}


def shown_by(stamps: list[BatchStamps], setup: LoaderSetup | None) -> Evidence:
    """Return what the stamps of a plain loop show; each wait counts as a stall."""
    history, totals = StepHistory(), CauseTotals()
    for number, (batch, later) in enumerate(pairwise(stamps)):
        wait_ms = (batch.delivered_ns - batch.requested_ns) / 1e6
        step_ms = (later.requested_ns - batch.requested_ns) / 1e6
        times = {"wait_ms": wait_ms, "stall_ms": wait_ms, "compute_ms": step_ms - wait_ms}
        history.append(
            StepTiming(number, batch.samples, int(batch.first), step_ms=step_ms, **times)
        )
    for batch in stamps:
        totals.add(batch)
    summary = replace(history.summarize("train", duration_s=1.0), causes=totals.summary())
    return of_loop(summary, evidence=evidence_of(summary, NO_LOADER, stamps, setup))


@pytest.fixture(scope="module")
def reads(cluster):
    read = Reads()
    yield read
    read.loader.close()


def test_batches_carry_their_way_and_the_parts_of_their_waits_add_up(reads) -> None:
    stamps = reads.stamps(QUICK, 100)
    assert len({task.process for batch in stamps for task in batch.tasks}) >= 2
    cutter = WaitCutter()
    for batch in stamps:
        cutter.note(batch)
    for batch in stamps:
        (task,) = batch.tasks
        assert task.way.taken_ns > 0
        assert task.began_ns <= task.ended_ns <= task.way.landed_ns <= batch.delivered_ns
        parts, _ = cutter.cut(batch)
        assert min(parts) >= -1e-3
        assert sum(parts) == pytest.approx(batch.delivered_ns - batch.requested_ns, abs=10)


@pytest.mark.realtime
def test_large_batches_that_cost_nothing_to_make_are_bound_by_their_way(reads) -> None:
    codes = reads.shows(LARGE, 40)
    assert "their actors" in codes["FD308"].cause
    assert codes["FD308"].gain.after_ms < codes["FD308"].gain.before_ms


@pytest.mark.realtime
def test_small_batches_that_take_long_need_more_actors_and_not_a_network(reads) -> None:
    reads.loader.set_workers(1)
    reads.stamps(QUICK, 20)  # what was given to the others is done
    codes = reads.shows(LONG, 30)
    assert "FD308" not in codes
    told = next(iter(codes.values()))
    assert told.code == "FD303"
    assert told.remedy.startswith("LoaderOptions(num_workers=")
    assert told.gain.factor > 1.5


def test_a_cluster_is_looked_at_from_time_to_time_and_told_once(monkeypatch) -> None:
    now_s, looks = [0.0], []

    def read() -> float:
        looks.append(now_s[0])
        return float(len(looks))

    monkeypatch.setattr(cluster, "clock", SimpleNamespace(monotonic=lambda: now_s[0]))
    watch = ClusterWatch(read)
    assert watch.news() is None
    wait_until(lambda: watch.news() == 1.0)
    now_s[0] = 5.0
    assert watch.news() is None
    now_s[0] = 11.0
    watch.news()
    wait_until(lambda: watch.news() is not None)
    assert looks == [0.0, 11.0]


def test_a_cluster_that_does_not_answer_keeps_nobody() -> None:
    def read() -> float:
        raise ConnectionError("it is gone")

    watch = ClusterWatch(read)
    assert watch.news() is watch.news() is None


def test_without_a_number_there_are_as_many_actors_as_free_cpus_but_one() -> None:
    def planned() -> FastDataLoader:
        return FastDataLoader(Kinds(), 4, executor="ray")

    wait_until(lambda: room_for_actors("ray") == 4)  # actors of tests before this one go
    loader = planned()
    assert loader.plan.num_workers == 4
    assert "CPUs for 4" in loader.plan.explain()
    assert isinstance(loader.training.tuner, Tuner)
    assert loader.training.tuner.most_workers == 4
    few = FastDataLoader(Kinds(), 4, executor="ray", num_workers=3)
    assert (few.num_workers, few.training.tuner) == (3, None)
    assert few.plan is None


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(torch.ones(1)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_training_with_actors_is_explained_and_tuned_as_any_other(tmp_path, capsys) -> None:
    module = FastDataModule.from_datasets(
        Subset(Kinds(), range(400)), batch_size=4, options=LoaderOptions(executor="ray")
    )
    watch = DataThroughputCallback()
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_checkpointing=False, default_root_dir=tmp_path, callbacks=[watch],
    )  # fmt: skip
    trainer.fit(model=Model(), datamodule=module)
    told = capsys.readouterr().out
    stage = watch.report.stages[0]
    assert stage.causes.batches > 0
    # A part of the wait like all others, which may be none where each batch is there in time.
    assert watch.report.as_dict()["stages"]["train"]["causes"]["wait"]["network_ms"] >= 0
    for move in watch.report.moves:
        assert 1 <= move.after <= 4
        assert f"num_workers {move.before} -> {move.after} at batch {move.batch}" in told

"""The first finding of a run is the cause that was planted in it.

By default one magnitude of each cause; ``FASTDATA_PLANTED=all`` plants all of them.
"""

from __future__ import annotations

import os
import time
from collections import deque

import pytest
import torch
from torch.utils.data import Dataset, default_collate

from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.insight.evidence import evidence_of
from lightning_fastdata.insight.findings import findings
from lightning_fastdata.insight.simulate import LoaderSetup
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.worker_count import look_ahead_batches

BATCH = 16
CPUS = float(read_cpu_limit().usable_cpus)
NEIGHBOURS = "FD315"
"""Whatever else runs on the machine of the test is there, too, and not planted."""


def magnitudes(*values):
    return values if os.environ.get("FASTDATA_PLANTED") == "all" else values[:1]


def spin(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Samples(Dataset):
    def __init__(self, batches, *, blocked_s=0.0, cpu_s=0.0, slow_s=0.0, slow_every=0):
        self.batches, self.blocked_s, self.cpu_s = batches, blocked_s, cpu_s
        self.slow_s, self.slow_every = slow_s, slow_every

    def __len__(self):
        return self.batches * BATCH

    def __getitem__(self, index):
        if self.slow_every and index % self.slow_every == self.slow_every // 2:
            time.sleep(self.slow_s)
        if self.blocked_s:
            time.sleep(self.blocked_s)
        if self.cpu_s:
            spin(self.cpu_s)
        return torch.zeros(1000)


class SlowCollate:
    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, samples):
        spin(self.seconds)
        return default_collate(samples)


class SlowStart:
    def __init__(self, seconds):
        self.seconds = seconds

    def __call__(self, worker):
        time.sleep(self.seconds)


def evidence_from(dataset, *, workers, step_s, gap_s=0.0, epochs=1, **settings):
    """Train in a plain loop and return the evidence of its steps."""
    loader = FastDataLoader(dataset, BATCH, num_workers=workers, executor="workers", **settings)
    records = deque()
    loader.record_stamps(records)
    gaps = []
    try:
        for _ in range(epochs):
            for _ in loader:
                time.sleep(step_s)
                if gap_s:
                    began = time.perf_counter()
                    time.sleep(gap_s)
                    gaps.append(time.perf_counter() - began)
    finally:
        loader.close()
    split = "collate_fn" not in settings
    setup = LoaderSetup(
        workers=workers,
        look_ahead=look_ahead_batches(workers, prefetch=None, batch_size=BATCH, split=split),
        scheduling="sample" if split else "queue",
        cpus=CPUS,
        step_cpus=0.05,
    )
    return evidence_of(
        list(records),
        setup,
        gap_ms=1e3 * sum(gaps) / len(gaps) if gaps else None,
        persistent_workers=settings.get("persistent_workers", False),
    )


def first(evidence):
    found = [each for each in findings(evidence) if each.code != NEIGHBOURS]
    assert found, evidence
    return found[0]


@pytest.mark.parametrize("blocked_s", magnitudes(0.004, 0.002, 0.010))
def test_throttled_reads_are_storage_latency_and_more_workers_help(blocked_s):
    found = first(evidence_from(Samples(60, blocked_s=blocked_s), workers=1, step_s=0.005))
    assert found.code == "FD303", found
    assert found.remedy.startswith("LoaderOptions(num_workers=")
    assert found.gain.factor > 2


@pytest.mark.parametrize("cpu_s", magnitudes(0.002, 0.001, 0.005))
def test_a_heavy_transform_on_one_worker_is_too_few_workers(cpu_s):
    evidence = evidence_from(Samples(60, cpu_s=cpu_s), workers=1, step_s=0.002)
    found = first(evidence)
    assert found.code == "FD305", (found, evidence.parts)


@pytest.mark.parametrize("workers", magnitudes(8, 6, 12))
def test_more_workers_than_cpus_are_told_so(workers):
    if workers / 2 < CPUS:
        pytest.skip("needs fewer CPUs than half the workers")
    evidence = evidence_from(Samples(120, cpu_s=0.001), workers=workers, step_s=0.001)
    found = first(evidence)
    assert found.code == "FD306", (found, evidence.parts)
    assert f"{workers} workers" in found.cause
    assert "more workers" in found.leave_alone


@pytest.mark.parametrize("collate_s", magnitudes(0.02, 0.01, 0.05))
def test_slow_collation_is_told_so(collate_s):
    dataset = Samples(60, blocked_s=0.0001)
    found = first(
        evidence_from(dataset, workers=1, step_s=0.004, collate_fn=SlowCollate(collate_s))
    )
    assert found.code == "FD307", found
    assert "collate_fn" in found.remedy
    assert found.gain.basis == "floor"


@pytest.mark.parametrize("slow_s", magnitudes(0.4, 0.25, 1.0))
def test_a_slow_sample_in_160_is_told_by_its_index(slow_s):
    dataset = Samples(100, blocked_s=0.0005, slow_s=slow_s, slow_every=160)
    evidence = evidence_from(dataset, workers=2, step_s=0.006)
    found = first(evidence)
    assert found.code == "FD302", (found, evidence.parts)
    assert {s.index % 160 for s in evidence.slow_samples[:3]} == {80}
    assert "in_order=False" in found.remedy or "prefetch_factor" in found.remedy


@pytest.mark.parametrize("start_s", magnitudes(0.3, 0.1, 1.0))
def test_workers_that_start_anew_each_epoch_are_told_so(start_s):
    evidence = evidence_from(
        Samples(20), workers=1, step_s=0.02, epochs=4, worker_init_fn=SlowStart(start_s)
    )
    found = first(evidence)
    assert found.code == "FD310", (found, evidence)
    assert found.remedy == "LoaderOptions(persistent_workers=True)"
    kept = evidence_from(
        Samples(20), workers=1, step_s=0.02, epochs=4, worker_init_fn=SlowStart(start_s),
        persistent_workers=True,
    )  # fmt: skip
    assert kept.epoch_wait_ms < evidence.epoch_wait_ms


@pytest.mark.parametrize("gap_s", magnitudes(0.01, 0.005, 0.03))
def test_a_host_that_keeps_the_device_waiting_is_told_so(gap_s):
    evidence = evidence_from(Samples(60), workers=1, step_s=0.02, gap_s=gap_s)
    codes = [each.code for each in findings(evidence)]
    assert "FD314" in codes, evidence
    assert set(codes) <= {"FD314", "FD319", NEIGHBOURS}, evidence
    assert codes[0] == "FD314"


@pytest.mark.parametrize("step_s", magnitudes(0.04, 0.02, 0.1))
def test_cheap_data_under_a_heavy_step_is_no_cause(step_s):
    evidence = evidence_from(Samples(40), workers=1, step_s=step_s)
    assert evidence.stall_share < 0.03, evidence
    assert {each.code for each in findings(evidence)} <= {"FD319"}

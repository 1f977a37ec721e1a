"""What a verdict promises comes true: who follows it has the step that was told."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from misses import each
from rig.machine import sleep
from rig.virtual_crew import on_machine

from lightning_fastdata.insight.verdict import findings, judge
from verdicts.known import evidence_with
from verdicts.workloads import Samples, Training, sleep_for, slow_collate, train


def followed(training, workers):
    with on_machine():
        return train(training.with_options(num_workers=workers, executor="auto"))


def collated_late(samples):
    sleep(0.02)
    return torch.stack(samples)


@each(
    ("costs", "loader", "code"),
    [
        ({"slow_s": 1.0, "slow_every": 160}, {}, "FD302"),
        ({"blocked_s": 0.001, "slow_s": 0.3, "slow_every": 160}, {}, "FD302"),
        ({"blocked_s": 0.002}, {}, "FD303"),
        ({}, {"collate_fn": collated_late}, "FD307"),
        ({}, {"collate_fn": partial(slow_collate, 0.02)}, "FD307"),
    ],
)
def test_the_step_that_a_loader_without_workers_is_promised_with_some_comes_true(
    costs, loader, code
):
    training = Training(
        dataset=Samples(4800, **costs), step=sleep_for(0.002), batch_size=8, loader=loader
    )
    first = findings(followed(training, 0))[0]
    assert first.code == code
    assert "num_workers" in first.remedy or code == "FD302"
    for told in (n for n in range(1, 65) if f"num_workers={n})" in first.remedy):
        after = followed(training, told).times.step_ms
        assert after == pytest.approx(first.gain.after_ms, rel=0.2), told


def test_a_first_step_that_compiles_makes_no_workers_idle():
    def steps(first_s):
        left = [first_s]
        return lambda batch, timeline: sleep(left.pop() if left else 0.002)

    training = Training(dataset=Samples(480, blocked_s=0.002), step=steps(0.002), batch_size=8)
    compiles = replace(training, step=steps(5.0))
    usual, late = (followed(each, 2) for each in (training, compiles))
    assert usual.busy_share > 0.9
    assert late.busy_share == pytest.approx(usual.busy_share, abs=0.05)


def test_where_no_single_cost_stands_out_the_workers_that_help_are_told_and_help():
    training = Training(
        dataset=Samples(960, blocked_s=0.0009, cpu_s=0.0009),
        step=sleep_for(0.002),
        batch_size=8,
        loader={"collate_fn": partial(slow_collate, 0.006)},
    )
    (first,) = judge(followed(training, 2)).findings
    assert (first.code, first.severity) == ("FD104", "high")
    (told,) = (n for n in range(3, 65) if first.remedy == f"LoaderOptions(num_workers={n})")
    after = followed(training, told).times.step_ms
    assert after == pytest.approx(first.gain.after_ms, rel=0.15)


@each("workers", [1, 2])
def test_a_slow_sample_that_is_a_batch_by_itself_is_told_what_its_repair_gains(workers):
    slow = Samples(640, blocked_s=0.002, slow_s=0.4, slow_every=80)
    training = Training(
        dataset=slow, step=sleep_for(0.003), batch_size=1, loader={"num_workers": workers}
    )
    first = findings(followed(training, workers))[0]
    assert (first.code, first.severity) == ("FD302", "high")
    assert first.remedy.startswith("repair these samples: ")
    repaired = replace(training, dataset=Samples(640, blocked_s=0.002))
    after = followed(repaired, workers).times.step_ms
    assert after == pytest.approx(first.gain.after_ms, rel=0.1)


@each("batch_size", [1, 4])
def test_where_a_quarter_of_all_samples_is_slow_as_storage_is_the_workers_that_help_are_told(
    batch_size,
):
    slow = Samples(960, blocked_s=0.0005, slow_s=0.008, slow_every=4)
    training = Training(dataset=slow, step=sleep_for(0.0005 * batch_size), batch_size=batch_size)
    first = findings(followed(training, 1))[0]
    assert first.code == "FD303"
    (told,) = (n for n in range(2, 65) if f"num_workers={n})" in first.remedy)
    after = followed(training, told).times.step_ms
    assert after == pytest.approx(first.gain.after_ms, rel=0.2)


@each(
    ("code", "costs"),
    [
        ("FD303", {"blocked_s": 0.0015, "cpu_s": 0.001}),
        ("FD305", {"blocked_s": 0.001, "cpu_s": 0.0015}),
    ],
)
def test_what_is_gained_at_most_holds_for_each_of_several_remedies(code, costs):
    training = Training(dataset=Samples(480, **costs), step=sleep_for(0.002), batch_size=8)
    with on_machine():
        evidence = evidence_with(train(training), closed={"num_workers": "it is tuned"})
    first = findings(evidence)[0]
    assert first.code == code
    assert first.remedy.endswith("or cache samples (FastDataModule(cache='auto'))")
    # Samples that are kept cost next to nothing: neither the storage nor a CPU is waited for.
    kept = replace(training, dataset=Samples(480))
    assert followed(kept, 1).times.step_ms >= 0.9 * first.gain.after_ms

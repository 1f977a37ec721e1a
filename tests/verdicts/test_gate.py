"""Advice survives being followed: what may be told of a run, and what is left out, with the reason.

Nothing here rests on real time: figures are given, or a Trainer runs on a virtual clock.
"""

from __future__ import annotations

import json
import math
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from insight import made_up
from insight.made_up import history_of, timing
from misses import each
from rig.virtual_crew import on_machine
from torch.utils.data import DataLoader, Dataset
from trainers import Learner, quiet_trainer

from lightning_fastdata import (
    DataThroughputCallback,
    FastDataLoader,
    FastDataModule,
    LoaderOptions,
    StepTimer,
)
from lightning_fastdata.host import clock
from lightning_fastdata.insight import stage as measured
from lightning_fastdata.insight.evidence import evidence_of
from lightning_fastdata.insight.finding import (
    FAMILIES,
    KEEP,
    Advice,
    Finding,
    Gain,
    LoaderFacts,
    closed_options,
    passed,
    read_loader,
)
from lightning_fastdata.insight.machine import MachineSeen
from lightning_fastdata.insight.report import RunReport
from lightning_fastdata.insight.steps import StageSummary, StepHistory
from lightning_fastdata.insight.verdict import COSTS, findings
from lightning_fastdata.insight.waits import CauseTotals, WaitParts
from lightning_fastdata.insight.wall import WallTime
from lightning_fastdata.loading import loader as loading
from lightning_fastdata.loading.tuner import Move, Tuner
from lightning_fastdata.stamps.batch_stamps import BatchStamps, TaskStamps
from verdicts.healthy import Stream
from verdicts.known import evidence_with, judge
from verdicts.test_findings import CODES, RULES, TABLE, late
from verdicts.workloads import Samples, Training, sleep_for
from verdicts.workloads import Stage as RunningStage

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from trainings.followed import unlawful

OPTIONS = ("num_workers", "prefetch_factor", "in_order", "executor", "persistent_workers", "cache",
           "pin_memory", "augment_on")  # fmt: skip

gains = st.none() | st.builds(
    Gain, before_ms=st.floats(1, 100), after_ms=st.floats(0, 100), basis=st.just("floor")
)
advices = st.builds(
    Advice,
    text=st.text("abc", min_size=1, max_size=5),
    changes=st.lists(st.sampled_from(OPTIONS), max_size=2).map(tuple),
    gain=gains,
    joins=st.booleans(),
    for_speed=st.booleans(),
)


# The gate


@given(
    st.lists(advices, max_size=5).map(tuple), gains,
    st.dictionaries(st.sampled_from(OPTIONS), st.just("chosen")),
)  # fmt: skip
def test_what_is_given_gains_and_changes_nothing_that_is_closed(advice, gain, closed):
    proposed = Finding(
        code="FD303", severity="high", cause="late", remedy="", gain=gain, advice=advice
    )
    told = passed(proposed, closed)

    def allowed(each):
        if set(each.changes) & set(closed):
            return False
        own = each.gain or gain
        return not each.for_speed or (own is not None and own.factor > 1.03)

    first = next((each for each in advice if allowed(each)), None)
    assert told.advice == ()
    if first is None:
        assert (told.remedy, told.severity) == ("", "fine")
        return
    assert told.severity == "high"
    assert told.gain == (first.gain or gain)
    beside = [e.text for e in advice if e is not first and allowed(e) and e.joins]
    joined = first.gain is None and beside
    assert told.remedy == first.text or joined
    assert set(told.remedy.split(", or ")) <= {first.text, *beside}


@pytest.mark.parametrize("code", CODES)
def test_what_the_report_tells_is_lawful(code):
    told = judge(stage(), evidence=TABLE[code][0])
    written = json.loads(json.dumps(RunReport(stages=(stage(),), verdict=told).as_dict()))
    assert unlawful(written["verdict"]) == []
    for found in written["verdict"]["findings"]:
        assert "advice" not in found


# What is closed


class Fixed(Dataset):
    def __init__(self, length=64):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"a": torch.full((3,), float(index))}


class Drawn(Fixed):
    def __getitem__(self, index):
        return {"a": torch.rand(3)}


def of_module(dataset, **options):
    module = FastDataModule.from_datasets(dataset, dataset, batch_size=4, **options)
    return module.train_dataloader(), module.val_dataloader()


def test_what_the_package_chose_is_closed_and_what_the_user_set_is_not():
    for loader in (*of_module(Fixed()), FastDataLoader(Fixed(), 4, num_workers="auto")):
        assert {"num_workers", "executor", "prefetch_factor"} <= set(closed_options(loader))
    options = LoaderOptions(num_workers=1, executor="workers")
    for loader in of_module(Fixed(), options=options):
        assert not {"num_workers", "executor"} & set(closed_options(loader))
        loader.close()
    assert "num_workers" not in closed_options(FastDataLoader(Fixed(), 4, num_workers=2))
    assert set(closed_options(DataLoader(Fixed(), 4))) == {"cache"}
    assert set(closed_options(DataLoader(Fixed(), 4), prefix="val.")) == {"val.cache"}


def test_workers_that_start_anew_as_by_torch_may_be_told_to_stay():
    """Where the package has none of its own choice, that they start anew is torch's default."""
    loader = FastDataLoader(Fixed(), 4, num_workers=2)
    assert "persistent_workers" not in closed_options(loader)
    kept, _ = of_module(Fixed(), options=LoaderOptions(num_workers=1, executor="workers"))
    assert "persistent_workers" in closed_options(kept)
    slow = evidence_with(TABLE["FD310"][0], loader=read_loader(loader))
    # It may be the sampler that is slow to start, of which workers know nothing.
    assert findings(slow)[0].remedy.startswith(f"{KEEP.text}, or a dataset and a sampler that")


def test_a_cache_is_told_only_where_samples_were_seen_to_be_fixed():
    assert "cache" not in closed_options(of_module(Fixed())[0])
    stream = of_module(Stream(12), options=LoaderOptions(split=False))[0]
    for loader in (of_module(Drawn())[0], DataLoader(Fixed(), 4), stream):
        assert "cache" in closed_options(loader)


def test_of_a_given_number_of_workers_it_is_seen_as_they_read():
    for dataset, closed in ((Fixed(), False), (Drawn(), True)):
        loader = FastDataLoader(dataset, 4, num_workers=1)
        assert "cache" in closed_options(loader)
        loader.record_stamps(deque())
        list(loader)
        assert ("cache" in closed_options(loader)) is closed
        loader.close()


def known_stream():
    """A stream of a library that shares its shards out among workers."""
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": [1, 2, 3, 4]}).to_iterable_dataset(num_shards=4)


@each(
    ("make", "divides"),
    [
        (lambda: DataLoader(Stream(12)), False),
        (lambda: FastDataLoader(Stream(12)), False),
        (lambda: FastDataLoader(Stream(12), num_workers=1, split=False), False),
        (lambda: FastDataLoader(Stream(12), num_workers=1, split=True), True),
        (lambda: DataLoader(known_stream()), True),
        (lambda: FastDataLoader(known_stream(), num_workers=2), True),
        (lambda: FastDataLoader(known_stream(), executor="torch"), True),
    ],
)
def test_more_workers_are_told_of_a_stream_only_if_it_is_known_to_divide_itself(make, divides):
    """Each worker of another one gives the whole stream: samples come several times."""
    loader = make()
    assert ("num_workers" not in closed_options(loader)) is divides
    assert ("val.num_workers" not in closed_options(loader, prefix="val.")) is divides
    closed = closed_options(loader)
    told = findings(evidence_with(TABLE["FD303"][0], closed=closed))[0]
    assert ("num_workers" in told.remedy) is divides
    assert divides or "split=True" in told.leave_alone


def test_what_this_run_has_tried_is_not_told_again():
    mine = Tuner(most_workers=8, cpus=8.0)
    training = loading.Training(tuner=mine)
    loader = FastDataLoader(Fixed(), 4, num_workers=2, executor="workers", training=training)
    mine.moves.append(
        Move(batch=51, before=2, after=4, step_before_ms=10.0, wait_before_ms=5.0,
             step_expected_ms=6.0, step_seen_ms=11.0, why="late", outcome="taken back")
    )  # fmt: skip
    closed = closed_options(loader)
    assert "num_workers 2 -> 4 at batch 51" in closed["num_workers"]
    first = findings(evidence_with(TABLE["FD303"][0], closed=closed))[0]
    assert "num_workers" not in first.remedy
    assert "2 -> 4 at batch 51" in first.leave_alone


# Validation


def run_of(**parts_s):
    named = {"validation": {"waiting for batches": parts_s.pop("val_waits", 0.0)}}
    return WallTime(
        total_s=sum(parts_s.values()), parts_s=parts_s, named_s=named, steps=100, samples=800
    )


STARVED = evidence_with(step_ms=50.0, wait_ms=0.1, stall_ms=0.1, val_workers=0,
                   loader=LoaderFacts(usable_cpus=4),
                   wall=run_of(compute=5.0, validation=4.0, val_waits=3.5))  # fmt: skip


def test_validation_that_the_package_loads_is_no_fault_of_the_user():
    told = judge(stage(stall=0.1), evidence=STARVED)
    assert told.kind == "starved in validation"
    assert "num_workers 0 -> 4" in told.findings[0].remedy
    for own in (
        evidence_with(STARVED, closed=closed_options(of_module(Fixed())[1], prefix="val.")),
        evidence_with(STARVED, val_workers=4),
    ):
        told = judge(stage(stall=0.1), evidence=own)
        assert told.kind == "compute-bound"
        assert not any("validation" in each.remedy for each in told.findings)


# What is known besides


def test_the_first_batch_of_an_epoch_is_said_to_come_when_its_start_has_ended():
    # Workers of torch start in iter(), so that the first batch itself is hardly waited for.
    summary = replace(stage(stall=0.1), cold_steps=3, cold_wait_ms=20.0)
    wall = replace(run_of(compute=5.0), named_s={"epoch_starts": {"later epochs": 1.6}})
    for known, told in (({"wall": wall}, "800 ms"), ({}, "20 ms")):
        seen = judge(summary, evidence=evidence_with(**known)).evidence
        assert f"first batch of an epoch after {told}" in seen


def test_no_transform_is_said_to_run_on_a_device_where_there_is_none():
    facts = LoaderFacts(augment_on="device")
    for device, where in (("cpu", "in the training process"), ("cuda", "on the device")):
        told = judge(replace(stage(), device=device), facts)
        assert f"transforms run {where}" in told.evidence


# Waits that no option shortens


def stage(stall=20.0, step=40.0, **how):
    return made_up.stage(stall, step - stall, steps=60, **how)


@given(
    stall=st.floats(0.01, 1.5), step=st.floats(5.01, 12), workers=st.sampled_from([None, 0, 1, 4]),
    part=st.sampled_from(["read_cpu_ms", "read_blocked_ms", "handover_ms", "unpack_ms", None]),
)  # fmt: skip
def test_a_wait_as_long_as_handing_over_takes_is_not_blamed(stall, step, workers, part):
    facts = LoaderFacts(num_workers=workers, usable_cpus=4)
    seen = evidence_with()
    if part is not None:
        seen = evidence_with(late({part: stall}), step_ms=step, wait_ms=stall, stall_ms=stall)
    told = judge(stage(stall, step), facts, seen)
    assert told.kind in ("balanced", "compute-bound")
    assert not [
        each for each in told.findings if each.severity == "high" or "workers" in each.remedy
    ]


@given(stall=st.floats(1.6, 40), rest=st.floats(1, 14))
def test_a_longer_wait_is_blamed(stall, rest):
    told = judge(stage(stall, stall + rest), LoaderFacts(num_workers=0, usable_cpus=4))
    assert (told.kind, told.code) == ("data-bound", "FD101")


def test_who_waits_and_gains_nothing_by_workers_is_told_how_to_learn_why():
    for workers, cpus in ((0, 1), (0, 2), (1, 2)):
        told = judge(stage(39.9, 40.0), LoaderFacts(num_workers=workers, usable_cpus=cpus))
        first = told.findings[0]
        more = f"num_workers {workers} -> {cpus}"
        learn = "batches straight from a FastDataLoader"
        assert first.remedy.startswith(learn if cpus == 1 else more)
        assert (first.gain is None) == (cpus == 1)
        assert first.severity == "high"


# Single steps that took long


@given(
    place=st.integers(0, 94), many=st.integers(1, 3), seconds=st.floats(0.5, 20),
    stall=st.floats(0, 3), phase=st.sampled_from(["stall", "compute"]),
)  # fmt: skip
def test_a_long_step_is_named_and_the_run_is_judged_without(place, many, seconds, stall, phase):
    all_steps, others = StepHistory(), StepHistory()
    places = {(place + 7 * number) % 95 for number in range(many)}
    for number in range(95):
        long = 1000 * seconds * (number in places)
        all_steps.append(
            timing(number, stall + long * (phase == "stall"), 38 + long * (phase != "stall"))
        )
        if not long:
            others.append(timing(number, stall, 38.0))
    with_it, without = (each.summarize("train", duration_s=9.0) for each in (all_steps, others))
    assert [each.step for each in with_it.long_steps] == sorted(places)
    for name in ("wait", "stall", "compute", "step"):
        one, other = getattr(with_it, name), getattr(without, name)
        assert one.mean_ms == pytest.approx(other.mean_ms, abs=1e-6)
        assert one.share == pytest.approx(other.share, abs=1e-9)
    assert with_it.samples_per_s == pytest.approx(without.samples_per_s)
    facts = LoaderFacts(num_workers=1, usable_cpus=2)
    told, calm = judge(with_it, facts), judge(without, facts)
    assert (told.kind, told.code) == (calm.kind, calm.code)
    said = "; ".join(told.evidence)
    assert all(f"step {each} took" in said for each in places)
    assert "is judged without" in said


def test_what_comes_again_and_again_is_no_long_step():
    stalls = (900.0 if number % 50 == 7 else 0.1 for number in range(400))
    steps = (timing(number, stall, 38.0) for number, stall in enumerate(stalls))
    found = history_of(*steps).summarize("train", duration_s=9.0)
    assert found.long_steps == ()
    assert found.stall.share > 0.1


def test_causes_and_costs_are_without_the_batch_that_took_long():
    with on_machine():
        usual = trained(Samples(60 * 16, cpu_s=0.001))
    with on_machine():
        once = trained(Samples(60 * 16, cpu_s=0.001, slow_s=3.0, slow_every=1000))
    assert len(once[0].long_steps) == 1
    assert once[1].causes.wait.total_ms == pytest.approx(usual[1].causes.wait.total_ms, rel=0.1)
    assert max(cost.blocked_ns for cost in once[1].costs) < 1e9
    assert [f.code for f in findings(once[1])] == [f.code for f in findings(usual[1])]


@pytest.mark.parametrize(("wait_ms", "compute_ms"), [(500, 100), (100, 500)])
def test_no_cost_is_of_a_batch_whose_step_took_long_by_waiting_or_by_computing(wait_ms, compute_ms):
    ms, now, stamps = 1_000_000, 0, []
    for number in range(40):
        wait, compute = (wait_ms, compute_ms) if number == 30 else (20, 10)
        ended = now + wait * ms
        task = TaskStamps(0, now, ended, ended - now, 0, 4, ended - now, 0, 0, None)
        stamps.append(BatchStamps(number, 4, now, ended, (task,), first=not number))
        now = ended + compute * ms
    long = timing(30, wait_ms, compute_ms)
    summary = StageSummary(stage="train", steps=40, samples=160, duration_s=2.0)
    usual = evidence_of(summary, LoaderFacts(), stamps).costs
    assert len(usual) == 38, "the first is left out; of the last one the step is not known"
    costs = evidence_of(replace(summary, long_steps=(long,)), LoaderFacts(), stamps).costs
    assert [each.cpu_ns for each in costs] == [20 * ms] * 37


def trained(dataset):
    run = RunningStage.start(Training(dataset=dataset, step=sleep_for(0.01)))
    try:
        run.epoch()
        summary, totals = run.summary(), CauseTotals()
        for batch in run.records:
            totals.add(batch)
        causes = totals.summary(without=len(summary.long_steps))
        seen = run.evidence(parts=causes.wait)
        return summary, seen
    finally:
        run.loader.close()


# Who has the CPUs


def beside_others(**more):
    return MachineSeen(**{"other_cpus": 1.8, "machine_cpus": 2.0, "queued_share": 0.7, **more})


def test_a_plain_loader_and_ours_are_both_held_up_by_other_programs():
    plain = evidence_with(step_ms=40.0, wait_ms=24.0, stall_ms=24.0, machine=beside_others())
    facts = LoaderFacts(num_workers=1, usable_cpus=2)
    ours = evidence_with(TABLE["FD315"][0], machine=MachineSeen(machine_cpus=2.0, other_cpus=1.8))
    for evidence in (plain, ours):
        told = judge(stage(24.0), facts, evidence)
        assert (told.kind, told.code) == ("held up by other programs", "FD315")
        assert told.findings[0].gain.factor > 1.03
    alone = evidence_with(plain, machine=beside_others(other_cpus=0.1, queued_share=0.05))
    assert judge(stage(24.0), facts, alone).code == "FD102"


@pytest.mark.parametrize(
    ("workers", "known"),
    [(1, {"queued_share": 0.05}), (1, {"other_cpus": 0.3}), (0, {"queued_share": 0.4})],
)
def test_other_programs_are_blamed_only_for_what_would_go_without_them(workers, known):
    seen = evidence_with(step_ms=40.0, wait_ms=24.0, stall_ms=24.0, machine=beside_others(**known))
    told = judge(stage(24.0), LoaderFacts(num_workers=workers, usable_cpus=4), seen)
    assert told.kind == "data-bound"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_number_of_workers_that_the_package_chose_is_not_called_too_few(workers):
    facts = LoaderFacts(num_workers=workers, usable_cpus=8)
    for parts in (None, WaitParts(read_cpu_ms=24.0)):
        seen = evidence_with(step_ms=40.0, stall_ms=24.0, parts=parts)
        blamed = judge(stage(24.0), facts, seen).findings
        own = judge(
            stage(24.0), facts, evidence_with(seen, closed={"num_workers": "chosen"})
        ).findings
        assert any(each.family == "too few workers" for each in blamed) is (parts is None)
        assert not any(each.family == "too few workers" for each in own)


def test_workers_are_not_told_to_take_the_cpus_of_others():
    facts, seen = LoaderFacts(num_workers=0, usable_cpus=8), {"step_ms": 40.0, "stall_ms": 24.0}
    busy = evidence_with(**seen, machine=MachineSeen(other_cpus=5.0, machine_cpus=8.0))
    alone, beside = (
        judge(stage(24.0), facts, each).findings[0] for each in (evidence_with(**seen), busy)
    )
    assert "num_workers 0 -> 8" in alone.remedy
    assert "num_workers 0 -> 3" in beside.remedy


# Findings of their own, by a Trainer on a virtual clock


class Model(Learner):
    def __init__(self, making_s):
        super().__init__()
        self.making_s = making_s

    def training_step(self, batch, batch_idx):
        clock.sleep(0.02)
        return super().training_step(batch, batch_idx)

    def train_dataloader(self):
        clock.sleep(self.making_s)
        return DataLoader(torch.zeros(32, 4), 2)


def fitted(tmp_path, model, **options):
    callback = DataThroughputCallback(summary=False)
    quiet_trainer(tmp_path, max_epochs=4, callbacks=[callback], **options).fit(model)
    return callback.report


@pytest.mark.usefixtures("virtual")
def test_loaders_that_are_made_anew_are_told(tmp_path):
    report = fitted(tmp_path, Model(0.6), reload_dataloaders_every_n_epochs=1)
    assert (report.verdict.kind, report.verdict.code) == ("paused between epochs", "FD310")
    first = report.verdict.findings[0]
    assert "reload_dataloaders_every_n_epochs=0" in first.remedy
    assert "persistent_workers" not in first.remedy
    assert unlawful(report.as_dict()["verdict"]) == []
    wall = report.wall
    assert first.gain.saved_ms * wall.steps / 1000 == pytest.approx(3 * 0.6)
    assert sum(wall.parts_s.values()) == pytest.approx(wall.total_s)


@pytest.mark.usefixtures("virtual")
@pytest.mark.parametrize(
    ("making_s", "trainer"),
    [
        (0.01, {"reload_dataloaders_every_n_epochs": 1}),
        (0.6, {}),  # once, before the first epoch
    ],
)
def test_little_of_it_is_not_told(tmp_path, making_s, trainer):
    report = fitted(tmp_path, Model(making_s), **trainer)
    assert report.verdict.kind == "compute-bound"
    assert not {"FD310", "FD320"} & {each.code for each in report.verdict.findings}


class Replay(Dataset):
    """Samples of which a step may change one."""

    def __init__(self):
        self.rows = torch.zeros(32, 4)

    def __len__(self):
        return 32

    def __getitem__(self, index):
        clock.sleep(10.0)  # beside which what this process really takes is nothing
        return self.rows[index]


class Replays(Learner):
    def __init__(self, dataset, *, changes):
        super().__init__()
        self.dataset, self.changes = dataset, changes

    def training_step(self, batch, batch_idx):
        clock.sleep(20.0)
        if self.changes:
            self.dataset.rows[batch_idx] += 1
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("virtual")
@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("loader", [DataLoader, FastDataLoader])
def test_workers_are_not_told_where_they_would_read_what_was_there_before_the_steps(
    tmp_path, monkeypatch, loader, changes
):
    monkeypatch.setattr(measured, "_COMPARED_WITHIN_S", math.inf)  # however busy the machine is
    dataset, timer = Replay(), StepTimer("cpu")
    callback = DataThroughputCallback(summary=False, report=False)
    fit = quiet_trainer(tmp_path, callbacks=[callback]).fit
    here = loader(dataset, 2, num_workers=0)
    fit(Replays(dataset, changes=changes), here)
    for number, _ in enumerate(timer.batches(here)):
        clock.sleep(20.0)
        dataset.rows[number] += changes
    for report in (callback.report, timer.report()):
        assert report.verdict.kind == "data-bound"
        told = " ".join(f"{each.cause} {each.remedy}" for each in report.verdict.findings)
        assert ("num_workers" in told) is not changes
        assert not (changes and "cache" in told)


class Own(DataLoader):
    def __iter__(self):
        yield from super().__iter__()


@pytest.mark.usefixtures("virtual")
@each("make", [DataLoader, Own, lambda *given: iter(DataLoader(*given))])
def test_why_batches_are_late_is_told_by_a_loader_of_this_package(make, tmp_path):
    callback = DataThroughputCallback(summary=False, report=False)
    quiet_trainer(tmp_path, callbacks=[callback]).fit(Learner(), make(SlowStream(), 2))
    assert callback.report.verdict.code == "FD104"
    assert "FastDataLoader" in callback.report.verdict.findings[0].remedy


class SlowStream(Stream):
    def __init__(self):
        super().__init__(32)

    def __iter__(self):
        for row in super().__iter__():
            clock.sleep(1.0)
            yield row


@each("settings", ["LoaderOptions", "FastDataLoader", "DataLoader"])
def test_settings_are_those_of_the_class_that_has_them(settings):
    slow = evidence_with(
        TABLE["FD310"][0],
        loader=LoaderFacts(persistent_workers=False),
        settings_in=settings,
    )
    assert findings(slow)[0].remedy.startswith(f"{settings}(persistent_workers=True)")


def test_about_a_dozen_families_have_every_code_once():
    codes = " ".join(FAMILIES.values()).split()
    assert sorted(codes) == sorted({rule.code for rule in (*RULES, *COSTS)})
    assert len(codes) == len(set(codes))
    assert 10 <= len(FAMILIES) <= 14
    made = (Finding(code=code, severity="fine", cause="") for code in (*codes, "FD999"))
    assert [bool(each.family) for each in made] == [True] * len(codes) + [False]

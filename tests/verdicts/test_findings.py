"""Each finding holds for the evidence it is about, and for nothing less."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loading.made_up import cost, setup
from misses import each
from thoroughness import max_examples

import lightning_fastdata
from lightning_fastdata.insight.finding import (
    KEEP,
    SMALL_COSTS,
    Finding,
    Gain,
    LoaderFacts,
    gain_text,
)
from lightning_fastdata.insight.machine import MachineSeen
from lightning_fastdata.insight.ranks import RankTiming
from lightning_fastdata.insight.steps import PhaseSummary
from lightning_fastdata.insight.verdict import COSTS, RULES, findings
from lightning_fastdata.insight.waits import LineShare, OperationShare, SlowSample, WaitParts
from lightning_fastdata.insight.wall import WallTime
from lightning_fastdata.stamps.batch_stamps import ReadRates
from verdicts.known import UNKNOWN, evidence_with

CODES = [
    *("FD302", "FD303", "FD304", "FD305", "FD306", "FD307", "FD308", "FD315", "FD323", "FD324"),
    *("FD310", "FD312", "FD313", "FD316", "FD318", "FD320"),
]
LATE_BATCHES = frozenset(CODES[:10])
DOCS = Path(__file__).parents[2] / "docs" / "verdicts"


def costs(**each):
    return (cost(**each),) * 40


def late(parts, *, share=0.6, **other):
    """A step of 40 ms which waits for a share of it."""
    values = {"step_ms": 40.0, "wait_ms": 40 * share, "stall_ms": 40 * share}
    return evidence_with(**{**values, "parts": WaitParts(**parts), **other})


def run_of(**parts_s):
    """The wall time of a run: all starts of epochs are of later ones, 40 % of validation waits."""
    named = {
        "epoch_starts": {"later epochs": parts_s.get("epoch_starts", 0.0)},
        "validation": {"waiting for batches": 0.4 * parts_s.get("validation", 0.0)},
    }
    return WallTime(
        total_s=sum(parts_s.values()), parts_s=parts_s, named_s=named, steps=100, samples=800
    )


def stalling(*stalls_ms):
    return tuple(
        RankTiming(rank=rank, host="a", steps=20, stall_ms=ms) for rank, ms in enumerate(stalls_ms)
    )


SLOW = SlowSample(index=133, ms=400.0, typical_ms=2.0, path="/data/133.jpg")
FINE = {"step_ms": 40.0, "wait_ms": 0.0, "stall_ms": 0.1}
BLUR = OperationShare(name="albumentations Blur", share=0.6, augments=True)
IO = {"costs": costs(blocked=40.0), "setup": setup()}
CPU = {"costs": costs(cpu=40.0), "setup": setup()}
QUEUED = {"costs": costs(cpu=10.0), "setup": setup()}
"""Costs of a step of 40 ms that waits for CPUs for most of it."""

TABLE = {
    "FD302": (late({"slow_sample_ms": 14.0, "read_cpu_ms": 10.0}, slow_samples=(SLOW,)), "58%"),
    "FD303": (late({"read_blocked_ms": 20.0, "read_cpu_ms": 4.0}, **IO), "83%"),
    "FD304": (
        late({"read_blocked_ms": 20.0}, read_rates=ReadRates(2, 100.0, 8, 104.0), **IO),
        "8 workers read 104 samples/s and 2 of them 100",
    ),
    "FD305": (late({"read_cpu_ms": 20.0, "collate_ms": 4.0}, **CPU), "83%"),
    "FD306": (
        late(
            {"read_cpu_ms": 8.0, "read_runqueue_ms": 16.0},
            costs=costs(cpu=40.0), setup=setup(8, cpus=2.0), operations=(BLUR,),
        ),
        "8 workers and the training share 2 CPUs",
    ),
    "FD307": (late({"collate_ms": 20.0}, costs=costs(collate=30.0), setup=setup()), "100%"),
    "FD308": (late({"handover_ms": 6.0, "read_ms": 4.0, "collate_ms": 4.0, "read_cpu_ms": 4.0,
                    "read_blocked_ms": 1.0}), "32%"),
    "FD310": (
        evidence_with(**FINE, cold_steps=2, wall=run_of(epoch_starts=0.8, compute=9.2)),
        "0.8 s each",
    ),
    "FD312": (evidence_with(**FINE, transfer_ms=4.0, device="cuda"), "10%"),
    "FD313": (evidence_with(**FINE, augment_ms=8.0), "20%"),
    "FD315": (
        late({"read_cpu_ms": 8.0, "read_runqueue_ms": 16.0}, runqueue_share=0.6, **QUEUED),
        "1.0 of 8 CPUs",
    ),
    "FD316": (
        evidence_with(**FINE, ranks=stalling(0.1, 9.0, 0.2, 0.1)),
        "rank 1 on a stalls 9.0 ms",
    ),
    "FD320": (
        evidence_with(**FINE, wall=run_of(checkpoints=2.0, logging=1.0, compute=7.0)),
        "checkpoints took 2.0",
    ),
    "FD318": (evidence_with(**FINE, wall=run_of(validation=2.0, compute=8.0)), "0.8 s of its 2.0"),
    "FD323": (late({"sampler_ms": 18.0, "handover_ms": 1.0, "read_cpu_ms": 5.0}), "75%"),
    "FD324": (late({"unpack_ms": 12.0, "handover_ms": 4.0, "read_cpu_ms": 8.0}), "50%"),
}  # fmt: skip


@each("code", CODES)
def test_the_first_finding_is_what_the_evidence_is_about(code):
    evidence, figure = TABLE[code]
    found = findings(evidence)[0]
    assert found.code == code
    assert figure in found.cause
    assert found.remedy
    assert found.severity != "fine"


@each(("workers", "free"), [(0, 1), (1, 1), (1, 4), (4, 4), (9, 4)])
def test_validation_is_never_told_to_have_the_workers_that_it_has(workers, free):
    evidence = evidence_with(
        TABLE["FD318"][0],
        val_workers=workers,
        loader=LoaderFacts(usable_cpus=4),
        machine=MachineSeen(machine_cpus=4.0, other_cpus=4.0 - free),
    )
    (found,) = (each for each in findings(evidence) if each.code == "FD318")
    wanted = f"num_workers {workers} -> {free} for" if workers < free else ""
    assert wanted in found.remedy
    assert bool(wanted) == bool(found.remedy)


@each(
    ("workers", "free", "computes_s", "saved_s"),
    # Of 8 s of waiting: one worker hides what validation computes, and several read side by side.
    [(0, 1, 2.0, 2.0), (0, 4, 2.0, 8.0), (1, 2, 2.0, 5.0), (1, 4, 0.0, 6.0), (0, 1, 0.0, None)],
)
def test_workers_of_validation_are_said_to_save_no_more_than_they_can(
    workers, free, computes_s, saved_s
):
    wall = run_of(validation=8.0 + computes_s, compute=10.0 - computes_s)
    wall = replace(wall, named_s={"validation": {"waiting for batches": 8.0}})
    known = {"val_workers": workers, "loader": LoaderFacts(usable_cpus=free)}
    (found,) = (f for f in findings(evidence_with(**FINE, wall=wall, **known)) if f.code == "FD318")
    if saved_s is None:  # one worker takes as long as there is nothing beside which it could read
        assert found.remedy.startswith("validate less often")
        saved_s = 8.0
    else:
        assert found.remedy == f"num_workers {workers} -> {free} for the validation loader"
    assert found.gain.saved_ms * wall.steps / 1000 == pytest.approx(saved_s)


@each(
    ("code", "cost"),
    [
        ("FD310", {"cold_steps": 2, "wall": run_of(epoch_starts=0.8, compute=9.2)}),
        ("FD312", {"transfer_ms": 4.0, "device": "cuda"}),
        ("FD313", {"augment_ms": 8.0}),
    ],
)
def test_nobody_is_told_to_leave_a_loader_alone_that_another_finding_wants_changed(code, cost):
    for beside, alone in ((FINE, True), ({}, False)):
        evidence = TABLE["FD303"][0] if not alone else evidence_with()
        found = {f.code: f for f in findings(evidence_with(evidence, **{**beside, **cost}))}
        assert ("FD303" in found) is not alone
        assert bool(found[code].leave_alone) is alone


def test_nothing_measured_gives_no_findings():
    assert findings(evidence_with()) == ()


@each("code", CODES)
def test_a_stall_under_three_percent_is_no_matter_of_the_loader(code):
    evidence = evidence_with(TABLE[code][0], step_ms=40.0, wait_ms=1.0, stall_ms=1.0)
    assert not LATE_BATCHES & {found.code for found in findings(evidence)}


@pytest.mark.cases(5)
@each("code", CODES)
def test_a_finding_goes_when_any_single_fact_of_it_was_not_measured(code):
    """No fact may be taken for granted: what is left out gives fewer findings, never an error."""
    evidence, _ = TABLE[code]
    before = {found.code for found in findings(evidence)}
    gone = set()
    for name, unknown in UNKNOWN.items():
        gone |= before - {f.code for f in findings(evidence_with(evidence, **{name: unknown}))}
    assert code in gone


def test_findings_come_by_severity_then_by_clearly_larger_gains_then_by_the_table():
    everything = evidence_with(
        TABLE["FD302"][0], transfer_ms=3.0, augment_ms=9.0, cold_steps=3,
        wall=run_of(epoch_starts=75.0, validation=20.0, compute=5.0), ranks=stalling(1.0, 20.0),
    )  # fmt: skip
    found = findings(everything)
    ranks = [("high", "moderate", "fine").index(each.severity) for each in found]
    assert ranks == sorted(ranks)
    for one, other in pairwise(found):
        if one.severity == other.severity:
            gains = [1.0 if each.gain is None else each.gain.factor for each in (one, other)]
            assert gains[1] < 1.5 * 1.5 * gains[0]
            assert gains[0] > 1.5 * gains[1] or one.code < other.code or gains[0] > gains[1]
    assert found[0].code == "FD310"
    assert {"FD302", "FD310", "FD312", "FD313", "FD316", "FD318"} <= {each.code for each in found}


def test_neighbours_that_hold_up_what_would_be_late_anyway_come_second():
    evidence = late(
        {"read_cpu_ms": 17.0, "read_runqueue_ms": 7.0},
        costs=costs(cpu=32.0, step=10.0), setup=setup(1, cpus=2.0),
    )  # fmt: skip
    assert [found.code for found in findings(evidence)] == ["FD305", "FD315"]


def test_a_storage_at_its_limit_is_slow_to_single_readers_and_no_sample_is_to_blame():
    evidence = evidence_with(
        TABLE["FD304"][0], busy_share=0.99, slow_samples=(SLOW,),
        parts=WaitParts(read_blocked_ms=12.0, slow_sample_ms=10.0),
    )  # fmt: skip
    assert [found.code for found in findings(evidence)] == ["FD304"]
    # Behind a sample that is slow by itself, workers run out of work.
    assert "FD302" in {found.code for found in findings(evidence_with(evidence, busy_share=0.6))}


@pytest.mark.parametrize(
    ("part", "cause", "remedy"),
    [
        ("pin_ms", "page-locked memory is 83%", "images as uint8"),
        ("network_ms", "from their actors is 83%", "actors on nearer nodes"),
    ],
)
def test_batches_that_are_made_and_not_here_are_told_by_their_way(part, cause, remedy):
    evidence = late({part: 20.0, "read_cpu_ms": 4.0})
    found = findings(evidence)[0]
    assert found.code == "FD308"
    assert cause in found.cause
    assert remedy in found.remedy


PINNED, KEPT = LoaderFacts(pinned=True), LoaderFacts(persistent_workers=True)


@each(
    ("code", "known", "told", "left_out"),
    [
        ("FD302", {}, r"repair these samples: /data/133\.jpg \(400 ms, others 2\)$", None),
        ("FD303", {"settings_in": "FastDataLoader"}, r"FastDataLoader\(num_workers=", None),
        ("FD303", {"setup": setup(0, inline=True)}, ".*executor='workers', num_workers=", None),
        ("FD308", {"setup": setup(scheduling="batch")}, ".*executor='workers'", None),
        ("FD308", {"setup": setup(scheduling="sample")}, ".*threads of the training process", None),
        ("FD310", {"loader": KEPT}, "", "persistent_workers"),
        ("FD312", {}, ".*pin_memory=True", None),
        ("FD312", {"loader": PINNED}, "", "pin_memory"),
        ("FD312", {"device": "cpu"}, "", "pin_memory"),
    ],
)
def test_a_remedy_is_what_can_still_be_set_for_a_loader_as_it_is(code, known, told, left_out):
    found = findings(evidence_with(TABLE[code][0], **known))[0]
    assert found.code == code
    assert re.match(told, found.remedy)
    assert left_out is None or left_out not in found.remedy


def test_storage_latency_is_answered_by_as_many_workers_as_hide_it():
    found = findings(TABLE["FD303"][0])[0]
    # Reading takes 40 ms and the step 10 ms: four workers keep up, give or take the hand-over.
    assert found.remedy in ("LoaderOptions(num_workers=4)", "LoaderOptions(num_workers=6)")
    assert found.gain.basis == "independent"
    assert gain_text(found.gain).startswith("at most ")
    assert found.gain.before_ms == 40.0
    assert found.gain.factor > 2


def test_no_workers_are_recommended_where_none_help():
    slow_storage = evidence_with(TABLE["FD303"][0], setup=setup(8), costs=costs(blocked=40.0))
    found = findings(slow_storage)[0]
    assert "num_workers" not in found.remedy
    assert "more than 8" in found.leave_alone


def test_saturated_cpus_are_answered_by_the_operation_that_costs_most():
    """Fewer workers that are as fast gain nothing, and nobody is told to have them."""
    found = findings(TABLE["FD306"][0])[0]
    assert found.remedy.startswith("cheaper transforms (albumentations Blur takes 60% of reading)")
    assert found.gain.basis == "floor"


@pytest.mark.parametrize("code", ["FD305", "FD306"])
def test_a_device_is_advised_to_augment_only_where_it_could(code):
    evidence = evidence_with(TABLE[code][0], setup=None)
    for could in (True, False):
        facts = {"loader": LoaderFacts(augment_on="cpu"), "device": "cuda" if could else "cpu"}
        found = findings(evidence_with(evidence, **facts))[0]
        assert found.code == code
        assert "cheaper transforms" in found.remedy
        assert ("augmentation on the device" in found.remedy) is could


def test_a_used_up_quota_counts_as_own_work_on_many_cpus():
    evidence = late({"read_cpu_ms": 20.0}, machine=MachineSeen(throttled_cpus=0.8), **CPU)
    assert [found.code for found in findings(evidence)] == ["FD306"]


@pytest.mark.parametrize(
    ("rates", "code", "basis"),
    [
        (None, "FD303", "independent"),
        (ReadRates(2, 100.0, 4, 195.0), "FD303", "simulated"),
        (ReadRates(2, 100.0, 4, 145.0), "FD303", "independent"),
        (ReadRates(2, 100.0, 4, 110.0), "FD304", "floor"),
        (ReadRates(2, 100.0, 4, 80.0), "FD304", "floor"),
    ],
)
def test_what_half_of_the_workers_read_tells_whether_more_of_them_would_help(rates, code, basis):
    found = findings(evidence_with(TABLE["FD304"][0], read_rates=rates))[0]
    assert (found.code, found.gain.basis) == (code, basis)
    assert ("num_workers" in found.remedy) == (code == "FD303")


@each(
    ("call", "basis"),
    [
        ("multiprocessing SemLock.__enter__", "independent"),
        ("filelock BaseFileLock.acquire", "independent"),
        ("threading Condition.wait", "simulated"),
    ],
)
def test_a_gain_of_more_workers_is_not_promised_where_a_lock_between_them_was_seen(call, basis):
    """However short the wait for it was: with more workers it is longer."""
    rates = ReadRates(2, 100.0, 4, 195.0)
    called = (OperationShare(name=call, share=0.06),)
    seen = evidence_with(TABLE["FD304"][0], read_rates=rates, operations=called)
    assert findings(seen)[0].gain.basis == basis


@pytest.mark.parametrize("part", ["sampler_ms", "unpack_ms", "handover_ms"])
def test_what_the_training_process_does_itself_is_told_from_a_millisecond_on(part):
    small = late({part: 0.9}, share=0.9 / 40)
    told = late({part: 2.4}, share=2.4 / 40)
    codes = {"FD323", "FD324", "FD308"}
    assert not codes & {found.code for found in findings(evidence_with(small, stall_ms=0.9))}
    assert len(codes & {found.code for found in findings(told)}) == 1


@max_examples(100)
@given(
    shares=st.lists(st.floats(0, 1), min_size=13, max_size=13), stall=st.floats(0.03, 0.99),
)  # fmt: skip
def test_gains_never_promise_less_than_no_time(shares, stall):
    names = [field.name for field in fields(WaitParts)]
    evidence = late(dict(zip(names, shares, strict=True)), share=stall, transfer_ms=60.0)
    for found in findings(evidence):
        assert found.gain is None or 0 <= found.gain.after_ms <= found.gain.before_ms


def test_every_code_that_the_package_can_give_has_a_place_of_its_own_to_link_to():
    given = {
        code
        for file in Path(lightning_fastdata.__file__).parent.rglob("*.py")
        for code in re.findall(r'"(FD\d{3})"', file.read_text())
    }
    assert {"FD000", "FD001", "FD104", *CODES} <= given
    assert given == {page.stem for page in DOCS.glob("FD*.md")}


def test_what_people_see_beside_a_code_does_not_name_another_cause():
    for code, word in (("FD307", "collation"), ("FD308", "hand-over"), ("FD323", "sampler")):
        assert word in Finding(code=code, severity="high", cause="").family


def test_the_index_and_the_pages_have_each_rule_of_the_catalogue():
    index, rules = (DOCS / "index.md").read_text(), {rule.code: rule for rule in reversed(RULES)}
    costs = {rule.code: rule.title for rule in COSTS}
    titles = {code: rule.title for code, rule in rules.items()} | costs
    for code, title in titles.items():
        assert (DOCS / f"{code}.md").read_text().startswith(f"# {code}: {title}\n")
    shown = re.findall(r"^\| \[(FD\d{3})\]\(\1\.md\) \| ([^|]+?) \|$", index, re.MULTILINE)
    assert shown == sorted(costs.items())
    rows = re.findall(r"^\| \[(FD\d{3})\]\(\1\.md\) \| (.+?) \| (.+?) \|$", index, re.MULTILINE)
    assert [(code, title) for code, title, _ in rows] == [
        (code, rules[code].title) for code in sorted(rules)
    ]
    for code, _, replaced in rows:
        ranges = re.findall(r"FD(\d{3})(?: to FD(\d{3}))?", replaced)
        codes = {f"FD{n}" for a, b in ranges for n in range(int(a), int(b or a) + 1)}
        assert rules[code].replaces == SMALL_COSTS | codes


@each(
    ("code", "known", "cause"),
    [
        ("FD312", {"device": "cpu"}, "many objects"),
        ("FD312", {"transfer_hook": "Net.moves"}, "Net.moves takes 4.0 ms"),
        ("FD312", {"before_hook": "Net.before"}, "Net.before with the copy to the device takes"),
        ("FD312", {"before_hook": "A.b", "transfer_hook": "A.m"}, "A.b with A.m takes 4.0 ms"),
        ("FD312", {"before_hook": "Net.before", "device": "cpu"}, "Net.before takes 4.0 ms"),
        ("FD313", {"augment_hook": "Net.augments"}, "Net.augments takes 8.0 ms"),
    ],
)
def test_what_moves_and_augments_batches_is_named(code, known, cause):
    found = findings(evidence_with(TABLE[code][0], **known))[0]
    assert cause in found.cause
    # The line after 50 steps has no cause before the remedy.
    hooks = [hook for name, hook in known.items() if name.endswith("_hook")]
    assert all(hook in found.remedy for hook in hooks)


def test_less_than_a_millisecond_is_no_cost_of_a_cpu():
    known = {"step_ms": 10.0, "transfer_ms": 0.9}
    small = evidence_with(TABLE["FD312"][0], device="cpu", **known)
    # Nor are a few long ones, in which the process had no CPU.
    bursts = replace(small.summary.transfer, mean_ms=2.3, p50_ms=0.1)
    rare = replace(small, summary=replace(small.summary, transfer=bursts))
    for evidence in (small, rare):
        assert "FD312" not in {each.code for each in findings(evidence)}


@each(
    ("changes", "told"),
    [
        ({}, True),
        ({"stall_ms": 10.0}, False),
        ({"augment_hook": "Net.on_after_batch_transfer"}, False),
        ({"settings_in": "FastDataLoader"}, False),
        ({"closed": {"augment_on": "the workers were found to be faster"}}, False),
    ],
)
def test_a_device_that_augments_while_no_batch_is_waited_for_may_leave_it_to_the_workers(
    changes, told
):
    shown = {each.code: each for each in findings(evidence_with(TABLE["FD313"][0], **changes))}
    remedy = shown["FD313"].remedy
    assert ("FastDataModule(augment_on='cpu')" in remedy) is told
    assert "fewer or cheaper transforms" in remedy


def test_workers_that_end_are_to_be_kept_first_and_a_stream_keeps_what_its_iter_opens():
    evidence = evidence_with(TABLE["FD310"][0], loader=LoaderFacts(persistent_workers=False))
    assert findings(evidence)[0].remedy.startswith("LoaderOptions(persistent_workers=True)")
    keep, opens = KEEP.text, "have the dataset keep what its __iter__ opens"
    for kept, told in ((False, f"{keep}, or {opens}"), (True, opens)):
        stream = LoaderFacts(persistent_workers=kept, streamed=True)
        assert findings(evidence_with(evidence, loader=stream))[0].remedy == told
    closed = evidence_with(evidence, loader=LoaderFacts(persistent_workers=False, streamed=True))
    closed = evidence_with(closed, closed={"persistent_workers": "as it was chosen"})
    assert findings(closed)[0].remedy == opens


@each(("computes", "named"), [(0.0, True), (0.35, True), (0.45, False)])
def test_where_reading_waits_only_a_line_is_named_that_waits(computes, named):
    """Where 45 % of reading compute, a line of 60 % may wait for less than a fifth of it."""
    for code in ("FD303", "FD304"):
        evidence = evidence_with(
            TABLE[code][0],
            parts=WaitParts(read_cpu_ms=20 * computes, read_blocked_ms=20 * (1 - computes)),
            lines=(LineShare(file="a.py", line=3, function="get", calls="", share=0.6),),
        )
        found = findings(evidence)[0]
        assert found.code == code
        assert ("60% of reading is in get (a.py:3)" in found.cause) is named


def test_batches_that_are_page_locked_do_not_hide_that_they_are_long_handed_over():
    parts = {"handover_ms": 7.0, "pin_ms": 8.0, "read_cpu_ms": 5.0, "collate_ms": 4.0}
    (found,) = (each for each in findings(late(parts)) if each.code == "FD308")
    assert found.cause.startswith("handing complete batches over is 29%")


def test_hand_over_beside_busy_cpus_is_waiting_for_them():
    evidence = late({"handover_ms": 8.0, "read_runqueue_ms": 8.0, "read_cpu_ms": 8.0}, **CPU)
    assert "FD308" not in {found.code for found in findings(evidence)}


def test_a_small_part_of_the_machine_in_other_hands_does_not_explain_long_queues():
    for others, code in ((1.0, "FD315"), (0.3, "FD306")):
        machine = MachineSeen(machine_cpus=2.0, other_cpus=others)
        assert findings(evidence_with(TABLE["FD315"][0], machine=machine))[0].code == code


def test_without_other_programs_a_model_on_the_cpus_is_faster_too():
    parts = {"read_cpu_ms": 3.0, "read_runqueue_ms": 3.0}
    known = {"step_ms": 40.0, "wait_ms": 6.0, "stall_ms": 6.0, "runqueue_share": 0.6, **QUEUED}
    for device, after_ms in (("cpu", 16.0), ("cuda", 34.0)):
        found = findings(evidence_with(late(parts), device=device, **known))
        (gain,) = (each.gain for each in found if each.code == "FD315")
        assert gain.after_ms == pytest.approx(after_ms)
    gone = Gain(before_ms=40.0, after_ms=0.0, basis="floor")
    assert gain_text(gone) == "at most all 40.0 ms of a step"


def test_nothing_is_said_to_make_a_step_shorter_than_its_own_work_takes():
    # Workers and the training lack a CPU for 60 % of the time each, which is more than a step.
    machine = MachineSeen(queued_share=1.0, queued_most=0.6, machine_cpus=2.0, other_cpus=1.0)
    known = {"setup": setup(1, cpus=2.0), "machine": machine}
    parts = {"read_cpu_ms": 8.0, "read_runqueue_ms": 8.0}
    found, *_ = findings(late(parts, costs=costs(cpu=10.0), **known))
    assert (found.code, "for 60% of the time;" in found.cause) == ("FD315", True)
    assert 10.0 <= found.gain.after_ms < 12.0
    # A step that would take as long without other programs is not held up by them.
    found = findings(late(parts, costs=costs(cpu=40.0), **known))
    assert "FD315" not in {each.code for each in found}


@each("code", ["FD303", "FD307", "FD308", "FD312", "FD313", "FD323", "FD324"])
def test_a_share_of_a_step_is_the_one_that_the_verdict_and_the_bars_tell(code):
    evidence, figure = TABLE[code]
    told = findings(evidence)[0].cause
    gap = PhaseSummary(mean_ms=10.0, p50_ms=10.0, p95_ms=10.0, share=0.0)
    paused = replace(evidence, summary=replace(evidence.summary, gap=gap))
    (found,) = (each for each in findings(paused) if each.code == code)
    assert found.cause == told
    assert figure in told


def test_no_number_of_workers_is_said_to_make_a_step_shorter_than_it_computes():
    # By the recorded batches a step computes for 1 ms; it was measured to do so for 16.
    known = {"costs": costs(blocked=40.0, step=1.0), "setup": setup(1, cpus=2.0)}
    found, *_ = findings(late({"read_blocked_ms": 24.0}, **known))
    assert (found.code, "num_workers=" in found.remedy) == ("FD303", True)
    assert found.gain.after_ms == pytest.approx(16.0)


def test_nobody_is_told_to_add_workers_and_to_leave_them_alone():
    short = {"read_cpu_ms": 8.0, "read_runqueue_ms": 16.0}
    waits = {"read_blocked_ms": 20.0, "read_runqueue_ms": 4.0}
    for parts, workers, leaves in ((short, 2, True), (waits, 2, False), (short, 0, False)):
        known = {"costs": costs(blocked=10.0, cpu=1.0), "setup": setup(workers, cpus=8.0)}
        found = findings(late(parts, runqueue_share=0.6, **known))
        (told,) = (each for each in found if each.code == "FD315")
        assert ("more workers" in told.leave_alone) is leaves


@pytest.mark.parametrize(("blocked", "wanted"), [(0.0, "0.6"), (10.0, "0.3")])
def test_the_own_work_of_a_training_that_reads_itself_is_what_it_reads(blocked, wanted):
    parts = {"read_cpu_ms": 8.0, "read_runqueue_ms": 16.0}
    reads_itself = {"costs": costs(cpu=10.0, blocked=blocked), "setup": setup(0, cpus=2.0)}
    (found,) = (f for f in findings(late(parts, **reads_itself)) if f.code == "FD315")
    assert f"own work needs {wanted} of 2 CPUs" in found.cause


def test_no_worker_is_said_to_lack_a_cpu_where_the_training_reads():
    parts = {"read_cpu_ms": 12.0, "read_runqueue_ms": 6.0}
    found, *_ = findings(late(parts, costs=costs(cpu=40.0), setup=setup(0, cpus=0.5)))
    assert found.code == "FD306"
    assert found.cause == "the training process waits for a CPU for 33% of the wait for data"


def test_a_share_of_the_wait_for_data_is_not_told_as_one_of_the_time():
    short = late({"read_cpu_ms": 8.0, "read_runqueue_ms": 16.0})
    others = replace(short.machine, machine_cpus=2.0, other_cpus=1.0)
    for code, machine in (("FD306", short.machine), ("FD315", others)):
        for queued, reads, told in (
            (None, None, "67% of the wait for data"),
            (None, 0.7, "70% of the time to read"),
            (0.8, 0.7, "80% of the time"),
        ):
            seen = replace(machine, queued_share=queued)
            known = {"machine": seen, "runqueue_share": reads, **QUEUED}
            if code == "FD306":
                known |= {"costs": costs(cpu=40.0), "setup": setup(2, cpus=0.5)}
            found, *_ = findings(evidence_with(short, **known))
            assert (found.code, f"{told};" in f"{found.cause};") == (code, True)


def test_more_actors_are_told_up_to_the_cpus_that_are_free():
    few = late({"read_blocked_ms": 20.0}, free_cpus=6.0, costs=costs(blocked=80.0),
               setup=setup(2, scheduling="actors"))  # fmt: skip
    assert findings(few)[0].remedy == "LoaderOptions(num_workers=8)"
    for free, told in ((1.0, "num_workers=3"), (0.0, ""), (None, "")):
        remedy = findings(evidence_with(few, free_cpus=free))[0].remedy
        assert ("num_workers" in remedy) == bool(told)
        assert told in remedy

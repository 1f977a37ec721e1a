"""Uneven shares of a stream, and one of several loaders: what follows from the evidence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import max_examples

from lightning_fastdata import FastDataLoader
from lightning_fastdata.insight.measure.stage_stamps import StageStamps
from lightning_fastdata.insight.model.evidence import Evidence
from lightning_fastdata.insight.verdicts.catalogue import findings
from lightning_fastdata.insight.verdicts.late_batches import working_workers
from lightning_fastdata.insight.waits.attribution import WaitParts
from lightning_fastdata.insight.waits.several_loaders import LoaderKey, OneOfSeveral
from lightning_fastdata.plugin.seams.loaders import keyed
from lightning_fastdata.stamps.batch_stamps import BatchStamps, TaskStamps
from lightning_fastdata.tuning.simulate import BatchCost, LoaderSetup
from lightning_fastdata.tuning.simulate import simulate

MS = 1e6


def costs(read_ms=40.0, step_ms=10.0):
    each = BatchCost(
        samples=4, cpu_ns=0.0, blocked_ns=read_ms * MS, collate_ns=0.0, slowest_ns=read_ms * MS / 4,
        handover_ns=0.1 * MS, taking_ns=0.05 * MS, step_ns=step_ms * MS,
    )  # fmt: skip
    return (each,) * 40


def setup(workers):
    return LoaderSetup(
        workers=workers, look_ahead=2 * workers, scheduling="batch", cpus=8.0, step_cpus=0.1
    )


def late(**other):
    """A step of 40 ms that waits for 30 of them, all of it reading."""
    values = {"step_ms": 40.0, "wait_ms": 30.0, "stall_ms": 30.0, "costs": costs()}
    return Evidence(**{**values, "parts": WaitParts(read_blocked_ms=30.0), **other})


@pytest.mark.parametrize(
    ("samples", "uneven"),
    [
        ((), False),
        ((0, 0), False),
        ((100, 100), False),
        ((89, 11), False),
        ((90, 10), True),
        ((0, 100), True),
        ((50, 0, 50, 0), True),
        ((50, 50, 50, 0), False),
        ((100, 0, 0), True),
        ((50, 50, 0), False),
        ((120, 40, 40, 40), True),
        ((120, 60, 60, 60), False),
    ],
)
def test_shares_are_uneven_if_few_make_nearly_everything_or_one_twice_its_share(samples, uneven):
    evidence = late(setup=setup(max(2, len(samples))), stream_samples=samples)
    codes = [each.code for each in findings(evidence)]
    assert codes == (["FD325"] if uneven else ["FD303"])
    assert "FD325" not in {f.code for f in findings(replace(evidence, stall_ms=1.0, wait_ms=1.0))}


@max_examples(100)
@given(samples=st.lists(st.integers(0, 1000), max_size=16))
def test_the_working_workers_are_the_fewest_that_make_nine_tenths(samples):
    found, ordered = working_workers(tuple(samples)), sorted(samples, reverse=True)
    if not sum(samples):
        assert found == 0
    else:
        assert sum(ordered[:found]) >= 0.9 * sum(samples) > sum(ordered[: found - 1])


def test_even_shares_gain_what_so_many_workers_do_instead_of_those_that_work():
    evidence = late(setup=setup(4), stream_samples=(0, 400, 0, 0))
    gain = findings(evidence)[0].gain
    alone, all_four = (simulate(costs(), replace(setup(4), workers=n)).step_ms for n in (1, 4))
    assert gain.after_ms == pytest.approx(40.0 * all_four / alone)
    assert findings(replace(evidence, costs=()))[0].gain is None


ONE = OneOfSeveral(label="loader 'a'", wait_ms=30.0, wait_share=1.0)


def test_what_is_wrong_with_one_loader_is_told_of_it_and_the_rest_of_the_step():
    evidence = late(setup=setup(1), one_of=ONE, gap_ms=20.0)
    found = {each.code: each for each in findings(evidence)}
    assert found["FD303"].cause.startswith("loader 'a': waiting for storage")
    assert found["FD303"].remedy.startswith("loader 'a': LoaderOptions(num_workers=")
    assert "loader" not in found["FD314"].cause + found["FD314"].remedy


def test_a_loader_that_causes_little_of_the_stall_is_left_alone():
    evidence = late(setup=setup(1), one_of=replace(ONE, wait_share=0.03))
    assert "FD303" not in {each.code for each in findings(evidence)}


def test_a_gain_is_no_larger_than_another_loader_allows():
    free = late(setup=setup(1), one_of=ONE)
    quick = replace(free, one_of=replace(ONE, limits=(("loader 'b'", 5.0), ("loader 'c'", 6.0))))
    slow = replace(free, one_of=replace(ONE, limits=(("loader 'b'", 35.0), ("loader 'c'", 6.0))))
    assert findings(quick)[0] == findings(free)[0]
    found = findings(slow)[0]
    assert found.gain.after_ms == 35.0
    assert "loader 'b' as well, because of which no step takes less than 35.0 ms" in found.remedy


def test_a_loader_in_half_of_the_steps_gains_only_there():
    every = findings(late(setup=setup(1), one_of=ONE))[0].gain
    half = replace(ONE, batches_per_step=0.5)
    gain = findings(late(setup=setup(1), one_of=half))[0].gain
    assert every.after_ms < gain.after_ms < gain.before_ms


def test_another_loader_that_hides_behind_the_waits_for_one_limits_what_it_gains():
    loaders = [FastDataLoader(torch.zeros(8), 2, num_workers=1) for _ in range(2)]
    stamps = StageStamps("data")
    stamps.watch(loaders, [LoaderKey((name,)) for name in "ab"])
    for number in range(40):
        # A step waits 30 ms for the one; the other one takes 20 of its 50 for a batch.
        asked, came = 50 * number * MS, (50 * number + 30) * MS
        for loader, began, made in ((loaders[0], asked, came), (loaders[1], came - 20 * MS, came)):
            task = TaskStamps(0, began, made, None, None, 2, made - began, 0, 0, 0)
            got = (asked, came) if loader is loaders[0] else (came, came)
            loader.records.append(BatchStamps(number, 2, *got, (task,), 0, first=not number))
        stamps.step_ended()
    found = stamps.one_of(50.0)
    assert (found.label, found.limits) == (
        "loader 'a'", (("loader 'b'", pytest.approx(20.0, rel=0.05)),)
    )  # fmt: skip


def test_keys_are_those_of_the_nested_lists_and_dicts():
    loaders = {"a": [object(), {"x": object()}], 3: object(), "none": None}
    names = [(key.name, key.label) for key, _ in keyed(loaders)]
    assert names == [
        ("a[0]", "loader 'a'[0]"), ("a[1]['x']", "loader 'a'[1]['x']"), ("3", "loader 3")
    ]  # fmt: skip
    assert keyed({"only": object()}) == keyed(object()) == keyed(None) == []
    assert LoaderKey(("a",)) == LoaderKey(("a",))

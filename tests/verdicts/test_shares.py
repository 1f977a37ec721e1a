"""Uneven shares of a stream, and one of several loaders: what follows from the evidence."""

from __future__ import annotations

from functools import partial

import pytest
from loading import made_up
from loading.made_up import cost

from lightning_fastdata.insight.finding import LoaderFacts
from lightning_fastdata.insight.verdict import findings
from lightning_fastdata.insight.waits import WaitParts
from lightning_fastdata.plugin.seams import labelled
from verdicts.known import evidence_with

COSTS = (cost(blocked=40.0, samples=4),) * 40
setup = partial(made_up.setup, scheduling="batch")


def late(**other):
    """A step of 40 ms that waits for 30 of them, all of it reading."""
    values = {"step_ms": 40.0, "wait_ms": 30.0, "stall_ms": 30.0, "costs": COSTS}
    return evidence_with(**{**values, "parts": WaitParts(read_blocked_ms=30.0), **other})


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
    assert "FD325" not in {
        f.code for f in findings(evidence_with(evidence, stall_ms=1.0, wait_ms=1.0))
    }


def test_even_shares_gain_no_more_than_the_wait_and_than_the_busiest_worker_has_less_to_do():
    for samples, after_ms in (((0, 400, 0, 0), 10.0), ((100, 0), 20.0)):
        (found,) = findings(late(setup=setup(len(samples)), stream_samples=samples))
        assert found.gain.after_ms == pytest.approx(after_ms)


def test_what_is_wrong_with_one_of_several_loaders_is_told_of_it():
    evidence = late(setup=setup(1), loader=LoaderFacts(loader="loader 'a'"), transfer_ms=20.0)
    found = {each.code: each for each in findings(evidence)}
    assert found["FD303"].cause.startswith("loader 'a': waiting for storage")
    assert found["FD303"].remedy.startswith("loader 'a': LoaderOptions(num_workers=")
    assert "loader" not in found["FD312"].cause + found["FD312"].remedy


def test_of_one_of_several_loaders_its_own_part_of_the_waits_is_what_it_costs_and_gains():
    evidence = late(costs=(), loader=LoaderFacts(loader="loader 'a'"), loader_share=0.4)
    (found,) = findings(evidence)
    assert "costs 30% of each step" in found.cause
    assert found.gain.after_ms == pytest.approx(40.0 - 0.4 * 30.0)


def test_labels_are_the_keys_of_the_nested_lists_and_dicts():
    loaders = {"a": [object(), {"x": object()}], 3: object(), "none": None}
    labels = [label for label, _ in labelled(loaders)]
    assert labels == ["loader 'a'[0]", "loader 'a'[1]['x']", "loader 3"]
    assert labelled({"only": object()}) == labelled(object()) == labelled(None) == []

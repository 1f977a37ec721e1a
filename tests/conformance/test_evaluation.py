"""Several ranks evaluate what one would: every sample once, in step, to the same means."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest
from conformance.evaluate_on_ranks import TURNS
from conformance.forked_ranks import launched
from thoroughness import LONG

PROGRAM = Path(__file__).with_name("evaluate_on_ranks.py")
CASES = [(11, 3), (7, 4), *([(9, 4), (10, 2), (10, 3), (7, 2)] if LONG else [])]
RANKS = (1, 2, 3) if LONG else (1, 2)
METHODS = {"validate": "val", "test": "test", "predict": "predict"}


pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    """What each rank saw, by the number of ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    launched(PROGRAM, ",".join(map(str, RANKS)), str(folder), json.dumps(CASES))
    return {
        ranks: [json.loads((folder / f"{ranks}-{rank}.json").read_text()) for rank in range(ranks)]
        for ranks in RANKS
    }


@pytest.fixture(scope="module")
def alone(of_ranks):
    return of_ranks[1][0]


@pytest.fixture(scope="module", params=RANKS[1:])
def together(request, of_ranks):
    return of_ranks[request.param]


def batches(result, stage, loader=0):
    return [indices for number, indices in result["seen"][stage] if number == loader]


def shares(together, name, stage, loader=0):
    """Each rank's batches of a run that did not fail."""
    assert [rank[name]["error"] for rank in together] == [None] * len(together)
    return [batches(rank[name], stage, loader) for rank in together]


def flat(batches_of_ranks):
    return sorted(chain.from_iterable(chain.from_iterable(batches_of_ranks)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("length", "size"), CASES)
def test_every_sample_is_evaluated_once_in_as_many_batches_on_each_rank(
    together, length, size, method
):
    found = shares(together, f"{method} {length} {size}", METHODS[method])
    assert flat(found) == list(range(length))
    assert len({len(rank) for rank in found}) == 1
    assert all(0 < len(batch) <= size for rank in found for batch in rank)


@pytest.mark.parametrize("method", ["validate", "test"])
@pytest.mark.parametrize(("length", "size"), CASES)
def test_logged_means_are_those_of_one_device(alone, together, length, size, method):
    name, stage = f"{method} {length} {size}", METHODS[method]
    expected = alone[name]["metrics"][f"{stage}_loss"]
    for rank in together:
        assert rank[name]["metrics"][f"{stage}_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", TURNS)
def test_what_was_logged_over_the_ranks_may_be_logged_again_by_the_same_trainer(
    alone, together, name
):
    """In a further run, and in a training whose first validation comes late."""
    assert len(alone[name]) == len(TURNS[name]["runs"])
    for rank in together:
        # Other numbers of ranks train in other steps.
        expected = alone[name] if name == "evaluations" else together[0][name]
        assert isinstance(rank[name], list), rank[name]
        assert rank[name] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("length", "size"), CASES)
def test_predictions_come_with_their_indices_and_are_those_of_one_device(
    alone, together, length, size
):
    name = f"predict {length} {size}"
    expected = dict(enumerate(chain.from_iterable(alone[name]["predicted"])))
    found = {}
    for rank in together:
        result = rank[name]
        assert result["batches"] == batches(result, "predict")
        assert result["epoch"] in (result["batches"], [result["batches"]])
        for indices, values in zip(result["batches"], result["predicted"], strict=True):
            found.update(zip(indices, values, strict=True))
    assert found == pytest.approx(expected, rel=1e-5)


def test_validation_within_a_fit_shares_likewise(together):
    """Two steps of the sanity check come first."""
    found = shares(together, "fit", "val")
    assert flat([rank[2:] for rank in found]) == list(range(11))
    assert [rank[:2] for rank in found] == [rank[2:4] for rank in found]


def test_a_hook_of_one_rank_alone_may_make_loaders(together):
    """As callbacks do that log pictures: the other ranks are not asked for anything."""
    looked = [rank["fit"]["looked"] for rank in together]
    assert [len(batches) for batches in looked] == [2] + [0] * (len(together) - 1)
    assert looked[0][1] == shares(together, "fit", "val")[0][0]


@pytest.mark.parametrize(("loader", "length"), [(0, 7), (1, 11)])
def test_each_of_several_loaders_is_shared(alone, together, loader, length):
    found = shares(together, "several", "val", loader)
    assert flat(found) == list(range(length))
    name = f"val_loss/dataloader_idx_{loader}"
    expected = alone["several"]["metrics"][name]
    assert [rank["several"]["metrics"][name] for rank in together] == pytest.approx(
        [expected] * len(together), rel=1e-5
    )


def test_limits_cut_every_rank_alike(together):
    whole = -(-40 // (4 * len(together)))
    assert [len(rank) for rank in shares(together, "limited", "val")] == [whole // 2] * len(
        together
    )


def test_without_lightnings_sampler_every_rank_evaluates_everything(alone, together):
    expected = batches(alone["unshared"], "val")
    assert shares(together, "unshared", "val") == [expected] * len(together)


@pytest.mark.parametrize(
    ("name", "stage"), [("sampled", "test"), ("sampled to predict", "predict")]
)
def test_the_order_of_a_users_own_sampler_is_shared_likewise(alone, together, name, stage):
    found = shares(together, name, stage)
    assert len({len(rank) for rank in found}) == 1
    steps = [list(chain(*step)) for step in zip(*found, strict=True)]
    assert list(chain(*steps)) == list(range(len(flat(found))))[::-1]
    for rank, seen in zip(together, found, strict=True):
        assert rank[name]["metrics"] == pytest.approx(alone[name]["metrics"], rel=1e-5)
        assert stage == "test" or rank[name]["batches"] == seen


def test_lightnings_warning_of_doubled_samples_is_not_given_where_there_are_none(together):
    for name in ("validate 11 3", "test 7 4", "several", "sampled"):
        assert not any("replicates" in text for text in together[0][name]["warned"])


@pytest.mark.parametrize(
    ("name", "stage"), [("fewer", "val"), ("ones", "val"), ("few to predict", "predict")]
)
def test_where_no_even_share_exists_samples_come_again_and_that_is_said(together, name, stage):
    found = shares(together, name, stage)
    assert len({len(rank) for rank in found}) == 1
    length, ranks = len(set(flat(found))), len(together)
    assert len(flat(found)) == -(-length // ranks) * ranks > length
    (said,) = (text for text in together[0][name]["warned"] if "taken again" in text)
    assert "batch_size" in said


def test_batches_of_one_that_come_out_even_are_shared(together):
    found = shares(together, "ones to predict", "predict")
    assert flat(found) == list(range(2 * len(together)))

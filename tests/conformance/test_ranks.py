"""Ranks tell rank 0 what their steps took: the slow one is named, and nobody waits for it."""

from __future__ import annotations

import json
import multiprocessing
import socket
from pathlib import Path

import pytest
import torch.distributed as dist
from conformance.forked_ranks import launched
from processes import hang
from virtual_time import VirtualClock

from lightning_fastdata.host import clock
from lightning_fastdata.insight.ranks import RankRecords
from lightning_fastdata.insight.steps import StepHistory, StepTiming

pytestmark = pytest.mark.timeout(600)

PROGRAM = Path(__file__).with_name("train_on_ranks.py")
SLEEP_MS = 10
"""Of one sample; a batch has two, and the rest of a step takes 10 ms."""
EVEN = {"batches": [12, 12], "sleep_s": [0, 0], "in_turns": True}
COUNTED = {**EVEN, "counted": True, "in_turns": False}
"""Collectives are counted, by the profiler, which is slow; those of turns would be, too."""
CASES = {
    "rank 1 sleeps": {**EVEN, "sleep_s": [0, SLEEP_MS / 1e3], "max_epochs": 2},
    "rank 0 sleeps": {**EVEN, "sleep_s": [0.01, 0]},
    "foreign": {**EVEN, "sleep_s": [0, 0.01], "ours": False},
    "healthy": {**EVEN, "step_s": 0.05},
    "rank 1 has fewer": {"batches": [8, 6], "sleep_s": [0, 0], "max_epochs": -1, "max_steps": 16},
    "rank 0 has fewer": {"batches": [6, 8], "sleep_s": [0, 0], "max_epochs": -1, "max_steps": 16},
    "one epoch": {**COUNTED, "max_epochs": 1},
    "four epochs": {**COUNTED, "max_epochs": 4},
    "one epoch, not measured": {**COUNTED, "max_epochs": 1, "measured": []},
    "four epochs, not measured": {**COUNTED, "max_epochs": 4, "measured": []},
    "rank 0 alone is measured": {**COUNTED, "measured": [0]},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What each of two ranks measured, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    launched(PROGRAM, "2", str(folder), json.dumps(CASES))
    return [json.loads((folder / f"2-{rank}.json").read_text()) for rank in range(2)]


def findings(result):
    return result["report"]["verdict"]["findings"]


def logged(result):
    return [row for row in result["rows"] if "data_ranks/stall_max_ms" in row]


def test_the_rank_whose_data_is_slow_is_named_first_with_its_host_and_reason(trained):
    result = trained[0]["rank 1 sleeps"]
    first = findings(result)[0]
    assert first["code"] == "FD316"
    assert first["cause"].startswith(f"rank 1 on {socket.gethostname()} stalls ")
    assert "reading waited for storage" in first["cause"]
    assert first["gain"]["factor"] > 1
    assert "FD001" not in {each["code"] for each in findings(result)}
    assert f"on average, rank 1 on {socket.gethostname()} " in result["text"]
    zero, one = result["report"]["ranks"]
    assert (zero["rank"], one["rank"]) == (0, 1)
    # Lightning fetches ahead: one of eleven warm steps has only the end of the stream to wait for.
    assert one["stall_ms"] == pytest.approx(2 * SLEEP_MS * 10 / 11)
    assert zero["stall_ms"] == 0
    assert one["compute_ms"] == pytest.approx(10)
    assert zero["compute_ms"] == pytest.approx(10 + one["stall_ms"])
    assert logged(result)


def test_what_rank_0_hears_is_what_rank_1_measured(trained):
    for name in ("rank 1 sleeps", "foreign"):
        heard = trained[0][name]["report"]["ranks"][1]
        own = trained[1][name]["report"]["stages"]["train"]
        for phase in ("step", "stall", "wait", "compute"):
            assert heard[f"{phase}_ms"] == pytest.approx(own[phase]["mean_ms"])
        assert heard["steps"] == own["steps"] - own["cold_steps"]


def test_rank_0_is_named_where_it_is_the_slow_one_after_what_to_do_about_it(trained):
    result = trained[0]["rank 0 sleeps"]
    codes = [each["code"] for each in findings(result)]
    assert "FD316" in codes
    assert codes[0] != "FD316"
    assert "on average, rank 0 on" in result["text"]


def test_ranks_of_a_foreign_loader_are_told_without_a_reason(trained):
    first = findings(trained[0]["foreign"])[0]
    assert first["code"] == "FD316"
    assert first["cause"].endswith("every rank waits for the last one")


def test_healthy_ranks_stall_alike(trained):
    result = trained[0]["healthy"]
    assert "FD316" not in {each["code"] for each in findings(result)}
    assert "ranks 2 ranks stall " in result["text"]


@pytest.mark.parametrize("who", ["rank 0", "rank 1"])
def test_a_rank_that_has_fewer_batches_hangs_nobody(trained, who):
    """It ends its epochs earlier, so that the ranks are in different epochs of the same step."""
    result = trained[0][f"{who} has fewer"]
    assert [rank[f"{who} has fewer"]["steps"] for rank in trained] == [16, 16]
    assert [each["rank"] for each in result["report"]["ranks"]] == [0, 1]


def test_there_is_no_collective_of_ours(trained):
    for rank in trained:
        for epochs in ("one epoch", "four epochs"):
            measured, other = (rank[f"{epochs}{more}"] for more in ("", ", not measured"))
            assert measured["collectives"] == other["collectives"]
        assert rank["four epochs"]["collectives"] > rank["one epoch"]["collectives"]


def test_one_rank_alone_may_have_the_callback(trained):
    ranks = [each["rank 0 alone is measured"] for each in trained]
    assert ranks[0]["report"]["notes"] == ["Nothing was heard of rank 1."]
    assert ranks[1]["report"] is None
    assert [each["steps"] for each in ranks] == [12, 12]


def test_other_ranks_than_the_first_report_themselves(trained):
    for result in trained[1].values():
        assert not result["rows"]
        assert result["report"] is None or result["report"]["ranks"] == []


# Several ranks in one process, which share a store as they would from afar.


def steps_of(*stalls):
    history = StepHistory()
    for stall in stalls:
        history.append(
            StepTiming(history.steps, 1, False, wait_ms=stall, stall_ms=stall, step_ms=10.0)
        )
    return history.summarize("train", duration_s=1.0) if stalls else None


def two(store):
    return [RankRecords(store, rank=rank, world_size=2, host=f"host-{rank}") for rank in range(2)]


def stalls(records):
    return [rank.stall_ms for rank in records.so_far]


def test_a_rank_leaves_one_record_of_all_its_steps_and_rank_0_knows_the_newest():
    store = dist.HashStore()
    zero, one = two(store)
    keys = []
    for epoch in range(3):
        one.epoch_ended(steps_of(*[1.0, 3.0] * (epoch + 1)))
        keys.append(store.num_keys())
    assert len(set(keys)) == 1
    assert one.so_far == one.complete == ()
    zero.epoch_ended(steps_of(5.0))
    assert [(r.host, r.steps, r.stall_ms) for r in zero.so_far] == [
        ("host-0", 1, 5.0),
        ("host-1", 6, 2.0),
    ]
    assert zero.complete == zero.so_far
    assert zero.notes() == ()


def test_a_rank_without_steps_tells_so():
    zero, one = two(dist.HashStore())
    one.epoch_ended(None)
    zero.epoch_ended(steps_of(1.0))
    assert stalls(zero) == [1.0, None]
    assert zero.complete == ()


class Later(VirtualClock):
    """Has something done as soon as a time has come."""

    def __init__(self, seconds, act):
        super().__init__()
        self.due_ns, self.act = self.monotonic_ns() + round(seconds * 1e9), act

    def advance(self, ns):
        super().advance(ns)
        if self.act is not None and self.monotonic_ns() >= self.due_ns:
            act, self.act = self.act, None
            act()


@pytest.mark.parametrize(("later_s", "heard"), [(0.5, [1.0, 5.0]), (1.9, [1.0, 5.0]), (2.1, [1.0])])
def test_a_rank_that_tells_a_little_later_is_waited_for_at_the_end_of_the_run(later_s, heard):
    zero, one = two(dist.HashStore())
    zero.epoch_ended(steps_of(1.0))
    with clock.installed(Later(later_s, lambda: one.epoch_ended(steps_of(5.0)))):
        zero.ended()
    assert stalls(zero) == heard


def test_a_rank_that_never_tells_is_hardly_waited_for_and_mentioned(virtual):
    zero, _ = two(dist.HashStore())
    for _ in range(3):
        began = clock.monotonic()
        zero.epoch_ended(steps_of(1.0))
        assert clock.monotonic() - began < 0.1
    assert zero.notes() == ("Nothing was heard of rank 1.",)


def test_a_later_fit_does_not_read_what_an_earlier_one_left():
    store = dist.HashStore()
    _, one = two(store)
    one.epoch_ended(steps_of(500.0))
    zero, one = two(store)
    one.epoch_ended(steps_of(5.0))
    zero.epoch_ended(steps_of(1.0))
    assert stalls(zero) == [1.0, 5.0]


def serve_a_store(port):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.put(store.port)
    hang()


@pytest.mark.usefixtures("virtual")
def test_a_store_that_is_gone_is_mentioned_and_fails_nothing():
    context = multiprocessing.get_context("fork")
    port = context.SimpleQueue()
    server = context.Process(target=serve_a_store, args=(port,))
    server.start()
    try:
        store = dist.TCPStore("127.0.0.1", port.get(), wait_for_workers=False)
        zero, _ = two(store)
    finally:
        server.kill()
        server.join()
    zero.epoch_ended(steps_of(1.0))
    assert zero.so_far == ()
    (note,) = zero.notes()
    assert note.startswith("What the other ranks measured is not known: Dist")


def test_ranks_without_a_store_are_mentioned():
    (zero, _) = two(None)
    zero.epoch_ended(steps_of(1.0))
    assert "no store that the ranks share" in zero.notes()[0]

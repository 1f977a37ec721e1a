"""Each number that loggers get stands in a table of the page on measuring, and no other does."""

from __future__ import annotations

import re
from pathlib import Path

from lightning_fastdata.batches.bad_samples import FaultLog
from lightning_fastdata.insight.machine import fault_scalars
from lightning_fastdata.insight.ranks import RankTiming, rank_metrics
from lightning_fastdata.insight.stage import window_means
from lightning_fastdata.insight.steps import StepHistory, StepTiming
from lightning_fastdata.insight.waits import PART_WORDS
from lightning_fastdata.insight.wall import WallTime
from lightning_fastdata.plugin.boards import MAIN, wall_scalars

PAGE = (Path(__file__).parents[2] / "docs" / "measuring.md").read_text()
BY_THE_PLUGIN = {"data_tune/workers", "data_val/stall_percent"}


def rows():
    """Return what the tables say of each number, by its full name."""
    found, group = {}, ""
    for line in PAGE.splitlines():
        if row := re.match(r"\| `(data\w*)/\.\.\.` \|", line):
            group = f"{row[1]}/"
        elif not line.startswith("|"):
            group = ""
        elif row := re.match(r"\| `([^`]+)` \| ([^|]+) \|", line):
            name = f"{group}{row[1]}"
            if re.match(r"data\w*/", name):
                assert name not in found
                found[name] = row[2]
    return found


def test_what_is_measured_has_a_row_on_the_page_and_nothing_else_has():
    step = StepTiming(
        step=0, samples=1, cold=0, wait_ms=1.0, stall_ms=1.0, transfer_ms=1.0, augment_ms=1.0,
        compute_ms=1.0, gap_ms=1.0, step_ms=4.0,
    )  # fmt: skip
    history = StepHistory()
    history.append(step)
    rank = RankTiming(rank=0, host="a", steps=1, step_ms=4.0, stall_ms=1.0, compute_ms=1.0)
    faults = FaultLog()
    faults.samples = faults.retries = faults.deaths = 1
    measured = {
        *fault_scalars([faults]),
        *(f"data{name}" for name in window_means(history.window())),
        *(f"data_wait/{part}" for part in PART_WORDS),
        *rank_metrics([rank, rank]),
        *wall_scalars(WallTime(total_s=1.0, parts_s={"compute": 1.0}, steps=1, samples=1)),
    }
    assert measured | BY_THE_PLUGIN == rows().keys()
    assert {part: rows()[f"data_wait/{part}"] for part in PART_WORDS} == PART_WORDS


def test_loggers_get_twenty_numbers_at_most_by_default_six_of_them_in_the_first_group():
    assert len(MAIN) == 20
    assert rows().keys() >= MAIN
    assert len([name for name in MAIN if name.startswith("data/")]) == 6

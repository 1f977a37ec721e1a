"""What is told of a training that runs: read back whole, cleaned up, and shown as it is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict

import psutil
import pytest
import torch
from misses import each
from processes import until
from torch.utils.data import IterableDataset

from lightning_fastdata import FastDataLoader
from lightning_fastdata.insight.live import (
    PaceMeter,
    Status,
    WorkerWatch,
    page_text,
    read_all,
)
from lightning_fastdata.insight.measure.stage import StageMeter

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers need Linux")
NOW_S = 1_000_000.0


def status(**changes) -> Status:
    told = {
        "pid": 11,
        "written_s": NOW_S,
        "group": "a",
        "rank": 0,
        "world_size": 1,
        "script": "/home/me/train.py",
        "log_dir": "/logs/version_3",
        "started_s": NOW_S - 60,
        "method": "fit",
        "activity": "computing a step",
        "epoch": 2,
        "step": 300,
        "lines": (" computing a step; epoch 2, step 300",),
    }
    return Status(**{**told, **changes})


@each("text", ["", "[]", "{}", '{"pid": 1}', '{"lines": [1]}', '{"lines": 1}', "\x00", "1e999"])
def test_what_another_version_has_written_is_passed_over(text):
    assert Status.from_json(text) is None


def test_what_a_dead_process_has_left_is_not_shown_and_removed_when_it_is_old(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    own_s = psutil.Process().create_time()
    own = os.getpid()
    paths = [tmp_path / f"{name}.json" for name in (f"{gone.pid}-0", f"{own}-0", f"{own}-1")]
    for path in paths:
        path.write_text(json.dumps(asdict(status(pid=own))))
    os.utime(paths[2], (own_s - 10, own_s - 10))  # the same number, of a process before this one
    now_s = time.time()
    assert [each.pid for each in read_all(tmp_path, now_s)] == [own]
    assert paths[0].exists()
    read_all(tmp_path, now_s + 100)
    assert [path.exists() for path in paths] == [False, True, False]


@each(
    ("quiet_s", "step_ms", "steps_per_s", "hangs"),
    [
        (9.0, 5.0, 0.0, False),
        (11.0, 5.0, 0.0, True),
        (29.0, 3000.0, 0.0, False),
        (31.0, 3000.0, 0.0, True),
        (49.0, 5.0, 0.2, False),  # something else takes the time between steps
    ],
)
def test_a_step_that_takes_much_longer_than_others_is_called_a_hang(
    virtual, quiet_s, step_ms, steps_per_s, hangs
):
    pace = PaceMeter()
    pace.steps_per_s, pace.means = steps_per_s, {"data/step_ms": step_ms}
    virtual.sleep(quiet_s)
    assert pace.hangs is hangs


def test_a_process_that_tells_nothing_is_said_to_be_silent():
    silent = "nothing heard for 7.0 s, last it was computing a step"
    assert silent in page_text([status()], NOW_S + 7)
    assert silent not in page_text([status()], NOW_S + 4)


def test_trainings_are_listed_with_all_their_ranks():
    two = {"world_size": 2, "group": "b"}
    ranks = [status(rank=n, pid=20 + n, lines=(f" of rank {n}",), **two) for n in range(2)]
    text = page_text([status(), *ranks], NOW_S)
    assert "pid 20 · 2 of 2 ranks" in text
    assert "pid 11" in text
    assert " of rank 0\n of rank 1" in text
    late = page_text([*ranks, status(rank=2, pid=22, **two, written_s=NOW_S - 9)], NOW_S)
    assert "rank 2 (pid 22): nothing heard for 9.0 s" in late


@pytest.mark.parametrize("several", [False, True])
def test_names_of_files_give_no_orders_to_terminals(several):
    evil = "[bold]\x1b[31m\u202e"
    told = status(**dict.fromkeys(("script", "log_dir", "activity"), evil), lines=(evil,))
    text = page_text([told, *([status(pid=12, group=evil)] if several else [])], NOW_S + 9)
    assert "\x1b[31m" not in text
    assert "\u202e" not in text
    assert "[bold]" in text


def test_the_pace_is_that_of_the_last_ten_seconds(virtual):
    meter = StageMeter("train", torch.device("cpu"))
    pace = PaceMeter()
    began_s = pace.step_ended_s
    # 20 s of steps of 100 ms, then 20 s of steps of 200 ms, of which the batch takes the half.
    for wait_ms, work_ms in [(50, 50)] * 200 + [(100, 100)] * 100:
        meter.timeline.wait_began()
        virtual.sleep(wait_ms / 1e3)
        meter.timeline.wait_ended()
        virtual.sleep(work_ms / 1e3)
        meter.step_ended(4)
        pace.step_ended(meter)
    assert pace.steps_per_s == pytest.approx(5.0)
    assert pace.text() == ", 5 steps/s, 200 ms a step, 50% of it waiting for data"
    assert (pace.steps, pace.step_ended_s - began_s) == (300, pytest.approx(40.0))


class Stream(IterableDataset):
    def __init__(self, file):
        self.file = file

    def __iter__(self):
        yield from (torch.tensor(i) for i in range(4))
        until(lambda: not self.file.exists())


@linux
def test_that_workers_read_a_stream_is_seen_from_outside(tmp_path):
    file = tmp_path / "stuck"
    file.touch()
    loader = FastDataLoader(Stream(file), 2, num_workers=2, executor="workers")
    watch, batches = WorkerWatch(), iter(loader)
    for _ in range(3):  # more of the stream is asked for as it is taken
        next(batches)

    def look():
        return watch.look([loader], hangs=False)

    until(lambda: "reading" in "".join(look()[1]))
    batches_text, lines = look()
    assert len(lines) == 2
    assert re.fullmatch(r", \d+ batches ready, [1-9]\d* being made", batches_text)
    file.unlink()
    assert len(list(batches)) == 1
    assert look()[1] == []  # they have ended with the epoch

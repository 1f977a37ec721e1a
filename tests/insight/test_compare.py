"""Two reports are put side by side as arithmetic says, and what is no report is refused."""

from __future__ import annotations

import json

import pytest
from insight.made_up import stage

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.insight.report import SCHEMA_VERSION, RunReport, side_by_side


def report(stall=32.1, **facts):
    return RunReport(stages=tuple(stage(stall, 41.6, name=n) for n in ("train", "val")), **facts)


@pytest.fixture
def files(tmp_path):
    """The files of a run with 73.7 ms a step and of one with 83.7 ms."""
    paths = tmp_path / "a.json", tmp_path / "b.json"
    report(machine={"device": "cpu"}).write_json(paths[0])
    report(stall=42.1, machine={"device": "cuda"}).write_json(paths[1])
    return paths


def rows(files):
    """Return the columns of a comparison by the first of each row."""
    lines = side_by_side(*files).splitlines()
    return {line.split()[0]: line.split()[1:] for line in lines if line}


def test_the_table_shows_both_numbers_and_the_change(files):
    table = rows(files)
    assert table["stages.train.step.mean_ms"] == ["73.7", "83.7", "+13.6%"]
    assert table["stages.val.step.mean_ms"] == ["73.7", "83.7", "+13.6%"]
    assert table["stages.train.steps"] == ["20", "20", "+0.0%"]
    assert "stages.train.transfer.mean_ms" not in table
    assert "machine.device: cpu in a, cuda in b" in side_by_side(*files)


def test_what_one_run_did_not_measure_is_left_open(files):
    first = json.loads(files[0].read_text())
    del first["stages"]["val"]
    files[0].write_text(json.dumps(first))
    assert rows(files)["stages.val.step.mean_ms"] == ["-", "83.7"]


def test_something_from_nothing_has_no_change_in_percent(files):
    report(stall=0.0).write_json(files[0])
    assert rows(files)["stages.train.stall.mean_ms"] == ["0", "42.1"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file"),
        (b"", "not JSON"),
        (b"[1, 2]", "no schema_version"),
        (b'{"stages": {}}', "no schema_version"),
        (b'{"schema_version": 99}', f"schema version 99; .* reads {SCHEMA_VERSION}"),
        (b'{"schema_version": %d}' % SCHEMA_VERSION, "no whole report"),
        (b"\xff\xfe", "UTF-8"),
    ],
)
def test_a_file_that_is_no_report_is_named_with_the_reason(files, content, said):
    if content is None:
        files[1].unlink()
    else:
        files[1].write_bytes(content)
    with pytest.raises(OptionsError, match=rf"(?s)b\.json.*{said}"):
        side_by_side(*files)

"""Files of ours: what is written follows no link, and what is read back is checked."""

from __future__ import annotations

import json
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import max_examples

from demo.photos import Cut, cut_photographs
from lightning_fastdata.errors import DatasetError, OptionsError
from lightning_fastdata.host.system_calls import cache_folder, write_atomically
from lightning_fastdata.insight.report import SCHEMA_VERSION, side_by_side

PHASE = {"mean_ms": 1.5, "p50_ms": 1.0, "p95_ms": 2.0}
REPORT = {
    "schema_version": SCHEMA_VERSION,
    "summary": ["fastdata"],
    "stages": {"train": {"step": PHASE, "stall_share": 0.5, "causes": {"wait": {"read": 1.0}}}},
    "wall": {"total_s": 3.0, "samples_per_s": 9, "parts_s": {"step": 1.0}},
    "machine": {"cpus": 2},
    "versions": {"torch": "2.6"},
    "verdict": {"kind": "healthy", "code": "FD000"},
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("reports")


def replaced(value, draw, depth):
    """Put something else in the place of one part of a report, some levels down."""
    if depth == 0 or not isinstance(value, dict) or not value:
        return draw(JSON)
    key = draw(st.sampled_from(sorted(value)))
    return {**value, key: replaced(value[key], draw, depth - 1)}


@given(data=st.data())
@max_examples(300)
def test_whatever_a_report_holds_it_is_compared_or_refused(data, folder):
    whole, path = folder / "whole.json", folder / "other.json"
    whole.write_text(json.dumps(REPORT))
    other = replaced(REPORT, data.draw, data.draw(st.integers(1, 5)))
    path.write_text(json.dumps(other).replace("Infinity", "1e999"))
    try:
        said = side_by_side(whole, path)
    except OptionsError as error:
        said = str(error)
    assert said


@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"a":' * 100_000, b"\x80\x04.", b"1" * 9999])
def test_reports_made_to_break_the_reader_are_refused(content, tmp_path):
    path = tmp_path / "report.json"
    path.write_bytes(content)
    with pytest.raises(OptionsError, match="report"):
        side_by_side(path, path)


def test_a_huge_report_is_not_read_whole(tmp_path):
    path = tmp_path / "report.json"
    with path.open("wb") as file:
        file.truncate(1 << 36)
    with pytest.raises(OptionsError, match="64 MiB"):
        side_by_side(path, path)


def test_names_in_a_report_give_no_orders_to_a_terminal(tmp_path):
    path = tmp_path / "report.json"
    stage = {"\x1b[2J": REPORT["stages"]["train"], "train": {}}
    path.write_text(json.dumps({**REPORT, "stages": stage}))
    assert "\x1b" not in side_by_side(path, path)


@pytest.mark.parametrize("mask", [0o077, 0o022])
def test_a_report_replaces_a_link_and_follows_the_umask(mask, tmp_path):
    other = tmp_path / "other"
    other.write_text("mine")
    path = tmp_path / "report.json"
    path.symlink_to(other)
    before = os.umask(mask)
    try:
        write_atomically(path, "text \udcff")
    finally:
        os.umask(before)
    assert other.read_text() == "mine"
    assert not path.is_symlink()
    assert path.read_text() == "text \\udcff"
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    assert sorted(one.name for one in tmp_path.iterdir()) == ["other", "report.json"]


@pytest.mark.parametrize("manifest", ["{", "[" * 100_000, "[]", "null", '{"other": 1}'])
def test_a_folder_whose_manifest_is_not_ours_is_left_alone(manifest, tmp_path):
    cut = Cut(train_per_class=1, val_per_class=1)
    folder = cut_photographs(tmp_path / "photos", cut)
    (name,) = (one for one in folder.iterdir() if one.is_file())
    name.write_text(manifest)
    with pytest.raises(DatasetError, match="left alone"):
        cut_photographs(folder, cut)
    assert name.read_text() == manifest


def test_caches_are_where_the_environment_says(monkeypatch, tmp_path):
    assert str(cache_folder()) == os.environ["LIGHTNING_FASTDATA_CACHE"]
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LIGHTNING_FASTDATA_CACHE", "~/own")  # as a file of settings has it
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("LIGHTNING_FASTDATA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lightning_fastdata"

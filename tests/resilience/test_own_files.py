"""Files of ours: what is written follows no link, and what is read back is checked."""

from __future__ import annotations

import os
import stat

import pytest

from demo.photos import Cut, cut_photographs
from lightning_fastdata.errors import DatasetError, OptionsError
from lightning_fastdata.host.system_calls import cache_folder, write_atomically
from lightning_fastdata.insight.report.compare import compare_files


@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"a":' * 100_000, b"\x80\x04.", b"1" * 9999])
def test_reports_made_to_break_the_reader_are_refused(content, tmp_path):
    path = tmp_path / "report.json"
    path.write_bytes(content)
    with pytest.raises(OptionsError, match="report"):
        compare_files(path, path)


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
    monkeypatch.delenv("LIGHTNING_FASTDATA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lightning_fastdata"

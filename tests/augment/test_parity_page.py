"""The page about parity names every operation, and says what was measured."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import parity as parity_page
from benchmarks import v2_pipelines
from benchmarks.parity import OperationParity, PixelParity
from lightning_fastdata.augment.ops import DEVICE_OPS

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"


def named(page):
    return re.findall(r"^\| `(\w+)`", page, re.MULTILINE)


def test_the_published_page_has_a_row_for_every_registered_operation():
    assert set(named(PAGE.read_text())) == set(DEVICE_OPS)


def test_transforms_with_and_without_a_device_form_are_all_there_are():
    import albumentations as A

    others = parity_page.without_device_form()
    assert not set(others) & set(DEVICE_OPS)
    assert {"RandomFog", "ImageCompression", "Lambda"} <= set(others)
    assert all(issubclass(getattr(A, name), A.BasicTransform) for name in others)
    assert ", ".join(f"`{name}`" for name in others) in PAGE.read_text()


def test_what_is_not_quite_equal_is_not_called_equal():
    near = PixelParity(largest=1.0, mean=1e-9, equal=1 - 1e-9, on_device=1.0)
    none = PixelParity(largest=0.0, mean=0.0, equal=1.0, on_device=0.0)
    row = OperationParity(
        name="Blur", arguments="", where="device", from_bytes=near, from_floats=none
    )
    cells = parity_page.table_row(row)
    assert cells[3:] == ("1", "1e-09", "99.9999 %", "CPU", "", "")


def test_the_published_page_has_a_row_for_every_pipeline_of_torchvision():
    text = PAGE.read_text().split("<!-- torchvision -->")[1].split("<!-- /torchvision -->")[0]
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if "%" in line]
    assert [row[0].strip() for row in rows] == list(v2_pipelines.PIPELINES)
    assert len(rows) >= 60
    assert {(row[1], row[6].strip()) for row in rows} == {("equal", "0")}


def test_the_page_of_operations_keeps_the_section_of_pipelines(tmp_path, monkeypatch):
    page = tmp_path / "parity.md"
    page.write_text("# Old\n\n## torchvision v2\n\nof another script\n")
    monkeypatch.setattr(parity_page, "measure_all", lambda *_, **__: [])
    monkeypatch.setattr("sys.argv", ["parity.py", "--write", str(page)])
    parity_page.main()
    written = page.read_text()
    assert "# Old" not in written
    assert written.endswith("\n## torchvision v2\n\nof another script\n")

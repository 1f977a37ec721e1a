"""The photographs of the demo: real, cut the same each time, complete or not there."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from thoroughness import max_examples
from torchvision.datasets import ImageFolder

from demo.photos import (
    PHOTOGRAPHS,
    Box,
    Cut,
    cut_photographs,
    draw_boxes,
    open_photograph,
    photograph_path,
    regions,
)
from lightning_fastdata.errors import DatasetError, OptionsError

if TYPE_CHECKING:
    from pathlib import Path

FEW = Cut(train_per_class=3, val_per_class=2)


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Path:
    return cut_photographs(tmp_path_factory.mktemp("data") / "few", FEW)


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.jpg"))
    }


def test_ten_or_more_colour_photographs_are_installed():
    assert len(PHOTOGRAPHS) >= 10
    for name in PHOTOGRAPHS:
        pixels = np.asarray(open_photograph(name))
        assert min(pixels.shape[:2]) >= 300
        assert np.ptp(pixels.astype(int), axis=2).max() > 30, f"{name} is gray"


def test_photographs_are_read_from_their_packages():
    assert all("site-packages" in str(photograph_path(name)) for name in PHOTOGRAPHS)


@pytest.mark.parametrize("stage", ["train", "val"])
def test_image_folder_reads_every_class(few, stage):
    folder = ImageFolder(few / stage)
    assert folder.classes == sorted(PHOTOGRAPHS)
    per_class = np.bincount([label for _, label in folder.samples])
    assert per_class.tolist() == [{"train": 3, "val": 2}[stage]] * len(PHOTOGRAPHS)


def test_files_are_colour_jpegs_of_the_promised_size(few):
    for path in few.rglob("*.jpg"):
        with Image.open(path) as image:
            assert image.format == "JPEG"
            assert image.mode == "RGB"
            assert 300 <= max(image.size) <= 500
            sampling = [(horizontal, vertical) for _, horizontal, vertical, _ in image.layer]
            assert sampling == [(2, 2), (1, 1), (1, 1)], "not 4:2:0"


def test_equal_cuts_give_equal_files(few, tmp_path):
    again = cut_photographs(tmp_path / "again", FEW, threads=1)
    assert digests(again) == digests(few)
    other = cut_photographs(tmp_path / "other", Cut(train_per_class=3, val_per_class=2, seed=1))
    assert digests(other) != digests(few)


def test_a_complete_folder_is_reused_and_another_cut_replaces_it(tmp_path):
    folder = cut_photographs(tmp_path / "photos", FEW)
    first = {path: path.stat().st_mtime_ns for path in folder.rglob("*.jpg")}
    cut_photographs(folder, FEW)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.jpg")} == first
    cut_photographs(folder, Cut(train_per_class=1, val_per_class=1))
    assert len(list(folder.rglob("*.jpg"))) == 2 * len(PHOTOGRAPHS)
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_a_folder_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(DatasetError, match=r"other files"):
        cut_photographs(tmp_path, FEW)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_cut_that_fails_leaves_nothing_behind(tmp_path):
    one_column_of_the_cat = Cut(train_per_class=1, val_per_class=3, val_share=0.003)
    with pytest.raises(DatasetError, match="no room for 3 different crops"):
        cut_photographs(tmp_path / "photos", one_column_of_the_cat)
    assert list(tmp_path.iterdir()) == []


@max_examples(50)
@given(
    width=st.integers(430, 1500),
    height=st.integers(300, 1500),
    seed=st.integers(0, 2**32 - 1),
)
def test_boxes_are_different_inside_their_region_and_long_enough(width, height, seed):
    cut = Cut()
    for region in regions(width, height, cut):
        boxes = draw_boxes(region, 40, cut, np.random.default_rng(seed))
        assert len(set(boxes)) == 40
        for box in boxes:
            assert region.left <= box.left < box.right <= region.right
            assert region.upper <= box.upper < box.lower <= region.lower
            sides = (box.right - box.left, box.lower - box.upper)
            assert 300 <= max(sides) <= 500


def test_no_training_crop_is_a_validation_crop(few):
    per_file = digests(few)
    assert len(set(per_file.values())) == len(per_file)


def test_training_never_sees_the_right_edge():
    train, val = regions(1000, 600, Cut())
    assert train == Box(0, 0, 700, 600)
    assert val == Box(500, 0, 1000, 600)


def test_an_unknown_photograph_is_named():
    with pytest.raises(OptionsError, match="'lena'"):
        photograph_path("lena")


def test_a_cut_has_at_least_one_crop_per_class():
    with pytest.raises(OptionsError, match="train_per_class=0"):
        Cut(train_per_class=0)

"""The parity report says what the pixels say."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from lightning_fastdata.errors import DatasetError, OptionsError
from lightning_fastdata.images.crops import CropRule
from lightning_fastdata.images.parity import folder_parity, parity, psnr_db


def test_exact_is_identical_to_the_tensor_path_and_within_a_level_of_pil(photos):
    rule = CropRule(size=64, horizontal_flip=0.5)
    files = list(photos.values())
    on_tensor = parity(files, rule, resamples=["exact"], reference="tensor", crops_per_file=4)
    assert len(on_tensor.rows) == 4 * len(files)
    assert all(math.isinf(row.psnr_db) for row in on_tensor.rows)
    on_pil = parity(files, rule, resamples=["exact"], crops_per_file=4)
    assert min(on_pil.of("exact")) > 55


def test_every_way_of_resizing_is_listed_with_its_worst_file(photos):
    ways = ["auto", "exact", "linear", "area"]
    report = parity(list(photos.values()), CropRule(size=64), resamples=ways, crops_per_file=3)
    assert [row.resample for row in report.rows[:4]] == ways
    table = str(report)
    assert "decoder simplejpeg" in table
    for way in ways:
        line = next(line for line in table.splitlines() if line.startswith(way))
        assert f"{min(report.of(way)):.1f}" in line
    assert np.median(report.of("exact")) > np.median(report.of("linear"))


def test_validation_crops_are_compared_as_validation_uses_them(photos):
    report = parity([photos["china"]], CropRule(size=64, crop="center"), reference="tensor")
    assert {row.filter for row in report.rows} == {"antialias"}
    assert all(math.isinf(row.psnr_db) for row in report.rows)


def test_decibels_follow_their_definition():
    black, grey = np.zeros((4, 4, 3), np.uint8), np.full((4, 4, 3), 51, np.uint8)
    assert psnr_db(black, black) == math.inf
    assert psnr_db(black, grey) == pytest.approx(20 * math.log10(5))


def test_nothing_to_compare_is_an_error(photos):
    with pytest.raises(DatasetError, match="no files"):
        parity([], CropRule(size=8))
    with pytest.raises(OptionsError, match="crops_per_file is 0"):
        parity([photos["china"]], CropRule(size=8), crops_per_file=0)
    with pytest.raises(OptionsError, match="'cv2'"):
        parity([photos["china"]], CropRule(size=8), reference="cv2")


def test_a_folder_is_compared_as_training_and_as_validation_use_it(folder):
    found = folder_parity(folder, count=5, size=48, seed=2)
    assert (found.files, found.total) == (5, 12)
    files = [row.path for row in found.validation.rows]
    assert len(set(files)) == 5
    assert {path.split("/")[-2] for path in files} >= {"Z", "b_cats"}  # from all over the folder
    crops = CropRule(size=48, horizontal_flip=0.5)
    assert found.train == parity(files, crops, resamples=["auto", "exact"], seed=2)
    assert found.validation == parity(files, CropRule(size=48, crop="center"), resamples=["exact"])
    text = "\n".join(found.lines())
    for how, report in (("auto", found.train), ("exact", found.train)):
        assert re.search(rf"train +{how} .* {min(report.of(how)):.1f} ", text)
    assert folder_parity(folder, count=100, size=8).files == 12

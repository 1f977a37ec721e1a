"""Crops are drawn by torchvision's law, and by nothing but the key of the sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from misses import each
from scipy import stats
from thoroughness import max_examples
from torchvision.transforms import RandomResizedCrop, v2

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.ext.images.resized_crop import (
    CropRule,
    keyed_uniform,
    random_resized_box,
    shorter_side_to,
)
from lightning_fastdata.types import SampleKey

SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
sides = st.integers(1, 3000)


def ours(count, height, width, scale=SCALE, ratio=RATIO):
    """One box per key, as a data set draws them: neighbouring indices, one epoch."""
    keys = (SampleKey(7, 3, index) for index in range(count))
    return np.array(
        [random_resized_box(height, width, scale, ratio, keyed_uniform(key)) for key in keys]
    )


def torchvisions(count, height, width, scale=SCALE, ratio=RATIO):
    torch.manual_seed(11)
    image = torch.empty(3, height, width)
    draw = RandomResizedCrop.get_params
    return np.array([draw(image, list(scale), list(ratio)) for _ in range(count)])


@pytest.mark.cases(3)
@each(
    ("height", "width", "scale", "ratio"),
    [
        (375, 500, SCALE, RATIO),
        (1200, 700, SCALE, RATIO),
        (300, 300, (0.5, 0.6), (1.0, 1.0)),
        (200, 900, (0.3, 1.0), (0.5, 4.0)),
    ],
)
def test_boxes_follow_the_law_of_torchvision(height, width, scale, ratio):
    mine = ours(4000, height, width, scale, ratio).T.astype(float)
    theirs = torchvisions(4000, height, width, scale, ratio).T.astype(float)

    def measures(top, left, rows, columns):
        free_rows, free_columns = np.maximum(height - rows, 1), np.maximum(width - columns, 1)
        return {
            "area": rows * columns,
            "ratio": columns / rows,
            "top": top / free_rows,
            "left": left / free_columns,
        }

    expected = measures(*theirs)
    for name, values in measures(*mine).items():
        assert stats.ks_2samp(values, expected[name]).pvalue > 0.001, name


@each(("height", "width"), [(50, 5000), (5000, 50), (10, 400)])
def test_the_box_of_last_resort_is_torchvisions(height, width):
    scale = (0.9, 1.0)
    np.testing.assert_array_equal(
        ours(20, height, width, scale), torchvisions(20, height, width, scale)
    )


def test_neighbouring_samples_and_epochs_draw_independently():
    grid = np.array(
        [
            [keyed_uniform(SampleKey(0, epoch, index))() for index in range(100)]
            for epoch in range(100)
        ]
    )
    assert stats.kstest(grid.ravel(), "uniform").pvalue > 0.001
    for shifted in (grid[1:], grid[:, 1:]):
        rows, columns = shifted.shape
        assert abs(np.corrcoef(grid[:rows, :columns].ravel(), shifted.ravel())[0, 1]) < 0.04
        assert abs(np.corrcoef(grid[-rows:, -columns:].ravel(), shifted.ravel())[0, 1]) > 0.99


def test_half_of_the_samples_are_flipped_whatever_their_box():
    rule = CropRule(size=32, horizontal_flip=0.5)
    placed = [rule.place(375, 500, keyed_uniform(SampleKey(1, 0, i))) for i in range(4000)]
    flips = np.array([place.flip for place in placed])
    assert stats.chisquare([flips.sum(), (~flips).sum()]).pvalue > 0.001
    areas = np.array([place.box.height * place.box.width for place in placed])
    assert stats.ks_2samp(areas[flips], areas[~flips]).pvalue > 0.001


@given(st.integers(0, 2**63), st.integers(0, 2**40), st.integers(0, 2**40))
@max_examples(50)
def test_equal_keys_draw_equal_numbers_and_different_keys_do_not(seed, epoch, index):
    key = SampleKey(seed, epoch, index)
    again, draws = keyed_uniform(key), keyed_uniform(key)
    wanted = [draws() for _ in range(5)]
    assert [again() for _ in range(5)] == wanted
    for other in (
        key._replace(seed=seed + 1),
        key._replace(epoch=epoch + 1),
        key._replace(index=index + 1),
    ):
        assert keyed_uniform(other)() != wanted[0]


def test_the_numbers_of_a_key_never_change():
    draw = keyed_uniform(SampleKey(1, 2, 3))
    assert [round(draw(), 6) for _ in range(3)] == [0.675205, 0.269982, 0.607129]


@given(sides, sides, st.sampled_from(["random_resized", "center", "stretch"]), st.integers(0, 99))
@max_examples(200)
def test_every_box_lies_in_its_picture_and_every_sample_in_its_resized_box(
    height, width, crop, index
):
    rule = CropRule(size=64, crop=crop, horizontal_flip=0.5)
    place = rule.place(height, width, keyed_uniform(SampleKey(0, 0, index)))
    box = place.box
    assert box.top >= 0
    assert box.left >= 0
    assert box.height >= 1
    assert box.width >= 1
    assert box.top + box.height <= height
    assert box.left + box.width <= width
    assert 0 <= place.top <= place.height - 64
    assert 0 <= place.left <= place.width - 64


@given(sides, sides, st.integers(1, 512))
@max_examples(100)
def test_the_shorter_side_is_resized_as_torchvision_does(height, width, length):
    image = torch.empty(0, height, width, dtype=torch.uint8)
    resized = v2.functional.resize(image, [length], antialias=True)
    assert shorter_side_to(length, height, width) == tuple(resized.shape[-2:])


@each(
    ("options", "said"),
    [
        ({"size": 0}, "size is 0"),
        ({"size": 8, "crop": "middle"}, "'middle'.*center"),
        ({"size": 8, "scale": (0.5, 0.1)}, r"scale is \(0.5, 0.1\)"),
        ({"size": 8, "ratio": (0.0, 1.0)}, r"ratio is \(0.0, 1.0\)"),
        ({"size": 8, "horizontal_flip": 1.5}, r"horizontal_flip is 1.5"),
        ({"size": 8, "crop": "center", "resize": 7}, "resize is 7"),
    ],
)
def test_an_impossible_rule_is_refused_with_its_value(options, said):
    with pytest.raises(OptionsError, match=said):
        CropRule(**options)

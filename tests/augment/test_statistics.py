"""The numbers behind augmentation: whether draws are as likely and independent as they should be.

All keys are fixed, so each p-value is a fixed number; none may fall below 1 in 10 000.
"""

from __future__ import annotations

import functools
import itertools

import albumentations as A
import numpy as np
import torch
from misses import each
from scipy import stats

from lightning_fastdata.randomness.seeds import reseeder
from lightning_fastdata.types import SampleKey

torch.set_num_threads(1)

ALPHA = 1e-4
DRAWS = 1500
IMAGE = np.zeros((4, 4, 3), np.uint8)
CHANCES = (0.1, 0.3, 0.5, 0.5, 0.8)


class Probe(A.ImageOnlyTransform):
    """Draws one number from each of the two generators, and keeps them."""

    def get_params(self):
        return {"python": self.py_random.random(), "numpy": float(self.random_generator.random())}

    def apply(self, img, **params):
        return img


def probes():
    return A.Compose([Probe(p=p) for p in CHANCES])


def drawn(compose, keys):
    """Return which transforms were applied ``[keys, transforms]``, and their two numbers."""
    applied, numbers = [], []
    for key in keys:
        reseeder(compose)(key)
        compose(image=IMAGE)
        params = [transform.params for transform in compose.transforms]
        applied.append([bool(one) for one in params])
        numbers.append([[one.get(name, np.nan) for name in ("python", "numpy")] for one in params])
    return np.array(applied), np.array(numbers)


SERIES = {
    "neighbouring samples": [SampleKey(0, 0, index) for index in range(DRAWS)],
    "every fourth sample": [SampleKey(0, 0, 4 * index) for index in range(DRAWS)],
    "epochs of one sample": [SampleKey(0, epoch, 17) for epoch in range(DRAWS)],
    "seeds of one sample": [SampleKey(seed, 0, 17) for seed in range(DRAWS)],
    "everything at once": [SampleKey(at, at, at) for at in range(DRAWS)],
}


@functools.cache
def drawn_in(series):
    return drawn(probes(), SERIES[series])


def independent(one, other) -> float:
    table = np.array([[np.sum((one == a) & (other == b)) for b in (0, 1)] for a in (0, 1)])
    return stats.chi2_contingency(table, correction=False).pvalue


@each("series", SERIES)
def test_transforms_are_applied_as_often_as_they_should_be(series):
    applied, _ = drawn_in(series)
    for column, chance in zip(applied.T, CHANCES, strict=True):
        assert stats.binomtest(int(column.sum()), len(column), chance).pvalue > ALPHA


@each("series", SERIES)
def test_whether_one_transform_is_applied_says_nothing_about_another(series):
    applied, _ = drawn_in(series)
    for one, other in itertools.combinations(range(len(CHANCES)), 2):
        assert independent(applied[:, one], applied[:, other]) > ALPHA


@each("series", SERIES)
def test_whether_a_transform_is_applied_says_nothing_about_the_next_sample(series):
    applied, _ = drawn_in(series)
    for column, gap in itertools.product(applied.T, (1, 2, 8)):
        assert independent(column[:-gap], column[gap:]) > ALPHA


@each("series", SERIES)
def test_drawn_numbers_are_uniform_and_none_is_drawn_twice(series):
    _, numbers = drawn_in(series)
    columns = numbers.reshape(len(numbers), -1).T
    for column in (column[~np.isnan(column)] for column in columns):
        assert stats.kstest(column, "uniform").pvalue > ALPHA
        assert len(np.unique(column)) == len(column)


@each("series", SERIES)
def test_drawn_numbers_say_nothing_about_other_transforms_generators_or_samples(series):
    _, numbers = drawn_in(series)
    columns = numbers.reshape(len(numbers), -1).T
    pairs = [*itertools.combinations(columns, 2), *((one[:-1], one[1:]) for one in columns)]
    for one, other in pairs:
        both = ~(np.isnan(one) | np.isnan(other))
        assert stats.spearmanr(one[both], other[both]).pvalue > ALPHA

"""MixUp and CutMix: torchvision's arithmetic, keyed by sample."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from augment.parity import photographs
from misses import each
from scipy import stats
from torchvision.transforms import v2

from lightning_fastdata.augment.mixing import CutMix, MixUp, cut_boxes, draw_numbers, stack_drawn
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.types import SampleKey

torch.set_num_threads(1)

HEIGHT, WIDTH, CLASSES = 60, 72, 5


@functools.cache
def pictures(count=6):
    found = [*photographs(HEIGHT, WIDTH), *(255 - one for one in photographs(HEIGHT, WIDTH))]
    return torch.from_numpy(np.stack(found[:count])).permute(0, 3, 1, 2).contiguous()


def drawn(step, count, *, seed=0, first=0):
    """Return the numbers of some samples, and a random number of each."""
    keys = [SampleKey(seed, 3, first + index) for index in range(count)]
    numbers, order = stack_drawn([draw_numbers((step,), key) for key in keys]).values()
    return torch.from_numpy(numbers), torch.from_numpy(order)[:, 0]


def many(step, count=3000):
    return drawn(step, count)[0]


@each("dtype", [torch.float32, torch.uint8])
def test_mixup_blends_as_torchvision_does(dtype):
    images = pictures().to(dtype) / 255 if dtype == torch.float32 else pictures()
    step, count = MixUp(0.7), len(images)
    numbers, _ = drawn(step, count)
    # So everybody's partner is the sample before, as in torchvision.
    made, kept = step.mix(images, numbers, torch.arange(count).roll(1))
    reference = v2.MixUp(num_classes=CLASSES)
    labels = torch.arange(count) % CLASSES
    for row, share in enumerate(numbers[:, 1].tolist()):
        params = {"labels": labels, "batch_size": count, "lam": share}
        want = reference.transform(images.float(), params)[row]
        want = want if dtype == torch.float32 else want.round()
        apart = (made[row].float() - want).abs().max()
        assert apart < 1e-6 or (dtype == torch.uint8 and apart <= 1)
        assert kept[row] == share


def test_cutmix_pastes_as_torchvision_does():
    images, step = pictures(), CutMix()
    count = len(images)
    numbers, _ = drawn(step, count)
    made, shares = step.mix(images, numbers, torch.arange(count).roll(1))
    reference = v2.CutMix(num_classes=CLASSES)
    labels = torch.arange(count) % CLASSES
    boxes = torch.stack(cut_boxes(numbers, HEIGHT, WIDTH), 1).tolist()
    for row, (x1, y1, x2, y2) in enumerate(boxes):
        kept = 1 - (x2 - x1) * (y2 - y1) / (WIDTH * HEIGHT)
        params = {"labels": labels, "batch_size": count, "box": (x1, y1, x2, y2)}
        params["lam_adjusted"] = kept
        assert torch.equal(made[row], reference.transform(images, params)[row])
        assert abs(shares[row] - kept) < 1e-12
    assert (made != images).any()


def test_cutmix_cuts_all_bands_of_a_square_that_has_more_of_them_than_rows():
    images, step = torch.rand(6, 20, 9, 9), CutMix()
    made, shares = step.mix(images, drawn(step, 6)[0], torch.arange(6).roll(1))
    cut = made != images
    assert torch.equal(cut.any(1), cut.all(1))
    assert torch.equal(1 - cut[:, 0].double().mean((1, 2)), shares)


def test_cutmix_rectangles_have_torchvisions_distribution():
    torch.manual_seed(0)
    reference = v2.CutMix(num_classes=CLASSES)
    theirs = [reference.make_params([pictures()]) for _ in range(1500)]
    left, top, right, bottom = (one.numpy() for one in cut_boxes(many(CutMix()), HEIGHT, WIDTH))
    wanted = np.array([one["box"] for one in theirs]).T
    for ours, theirs_ in zip((left, top, right, bottom), wanted, strict=True):
        assert stats.ks_2samp(ours, theirs_).pvalue > 1e-3
    kept = 1 - (right - left) * (bottom - top) / (HEIGHT * WIDTH)
    assert stats.ks_2samp(kept, [one["lam_adjusted"] for one in theirs]).pvalue > 1e-3


STEPS = [MixUp(), CutMix()]


@each("step", STEPS)
def test_the_numbers_of_a_sample_belong_to_its_key_alone(step):
    first, again = (draw_numbers((step,), SampleKey(1, 2, 3)) for _ in range(2))
    assert first == again
    assert len(first[0]) == step.count
    for other in (SampleKey(0, 2, 3), SampleKey(1, 0, 3), SampleKey(1, 2, 4), SampleKey(-1, 2, 3)):
        assert draw_numbers((step,), other)[0] != first[0]
    # What comes later in the list changes nothing of what comes before.
    longer, order = draw_numbers((step, CutMix()), SampleKey(1, 2, 3))
    assert (longer[: step.count], order[:1]) == first


@each(
    "make",
    [
        lambda: MixUp(0),
        lambda: MixUp(1.0, p=1.5),
        lambda: CutMix(-1),
        lambda: CutMix("1"),
        lambda: MixUp(1.0, p=None),
    ],
)
def test_impossible_values_are_refused_where_they_are_written(make):
    with pytest.raises(OptionsError):
        make()

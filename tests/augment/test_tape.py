"""What the recorder leaves alone: pixels that no operation asks for."""

from __future__ import annotations

import albumentations as A
import numpy as np
from augment.batches import keys

from lightning_fastdata.augment.albumentations.plan import analyse
from lightning_fastdata.augment.albumentations.tape import Recorder, phantom
from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.randomness.seeds import reseeder

SHAPE = (24, 24, 3)


def test_only_samples_that_draw_a_barrier_need_pixels_and_they_need_them_once() -> None:
    compose = A.Compose(
        [A.HorizontalFlip(p=1), A.CLAHE(p=0.3), A.MedianBlur(p=0.3), A.VerticalFlip(p=1)]
    )
    recorder = Recorder(compose, analyse(compose, DEVICE_OPS, size=SHAPE[:2]), DEVICE_OPS)
    image = np.random.default_rng(0).integers(0, 256, SHAPE, np.uint8)
    fetched = []
    for key in keys(60):
        calls = []

        def fetch(calls=calls):
            calls.append(1)
            return image

        reseeder(recorder.compose)(key)
        _, tape = recorder({"image": phantom(SHAPE, np.dtype(np.uint8))}, {"image": fetch})
        fetched.append(len(calls))
        left = [noted.name for noted in tape["image"].ops]
        assert left == (["VerticalFlip"] if calls else ["HorizontalFlip", "VerticalFlip"])
    assert set(fetched) == {0, 1}

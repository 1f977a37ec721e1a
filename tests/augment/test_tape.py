"""What the recorder leaves alone: pixels that no operation asks for."""

from __future__ import annotations

import albumentations as A
import numpy as np

from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.pipeline.plan import analyse
from lightning_fastdata.augment.record.tape import Recorder, phantom
from lightning_fastdata.randomness.seeds import reseed
from lightning_fastdata.types import SampleKey

SHAPE = (24, 24, 3)


def recorder_of(*transforms, **options) -> Recorder:
    compose = A.Compose(list(transforms), **options)
    return Recorder(compose, analyse(compose, DEVICE_OPS, size=SHAPE[:2]), DEVICE_OPS)


def record(recorder, index, data=None, sources=None):
    reseed((recorder.compose,), SampleKey(0, 0, index))
    return recorder(data or {"image": phantom(SHAPE, np.dtype(np.uint8))}, sources)


def never() -> np.ndarray:
    raise RuntimeError("pixels were touched")


TREE = [
    A.HorizontalFlip(p=0.5),
    A.OneOf([A.RandomGamma(), A.Affine(p=0.2), A.RandomBrightnessContrast()], p=0.7),
    A.SomeOf([A.VerticalFlip(), A.RandomGamma(), A.Affine()], n=2),
    A.RandomOrder([A.HorizontalFlip(), A.Sequential([A.VerticalFlip(), A.RandomGamma()])], n=2),
]


def test_no_pixel_is_touched_when_every_operation_has_a_device_form() -> None:
    recorder = recorder_of(*TREE, A.RandomCrop(16, 16), A.Normalize(), A.ToTensorV2())
    for index in range(20):
        result, tape = record(recorder, index, sources={"image": never})
        assert result["image"] is never
        assert [noted.name for noted in tape["image"].ops][-3:] == [
            *("RandomCrop", "Normalize", "ToTensorV2")
        ]


def test_only_samples_that_draw_a_barrier_need_pixels_and_they_need_them_once() -> None:
    recorder = recorder_of(
        A.HorizontalFlip(p=1), A.CLAHE(p=0.3), A.MedianBlur(p=0.3), A.VerticalFlip(p=1)
    )
    image = np.random.default_rng(0).integers(0, 256, SHAPE, np.uint8)
    fetched = []
    for index in range(60):
        calls = []

        def fetch(calls=calls):
            calls.append(1)
            return image

        _, tape = record(recorder, index, sources={"image": fetch})
        fetched.append(len(calls))
        left = [noted.name for noted in tape["image"].ops]
        assert left == (["VerticalFlip"] if calls else ["HorizontalFlip", "VerticalFlip"])
    assert set(fetched) == {0, 1}

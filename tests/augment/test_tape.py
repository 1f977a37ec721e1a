from __future__ import annotations

import albumentations as A
import numpy as np
import pytest

from lightning_fastdata.augment.ops.operation import DeviceOp, Encoded
from lightning_fastdata.augment.pipeline.plan import analyse
from lightning_fastdata.augment.record.tape import Recorder, phantom
from lightning_fastdata.randomness.seeds import reseed
from lightning_fastdata.types import SampleKey

SHAPE = (24, 24, 3)


def note(transform, params, shape, dtype):
    return Encoded((), {})


def op(name, encode=note, **rest):
    return DeviceOp(name=name, encode=encode, image=lambda x, *_: x, mask=lambda x, *_: x, **rest)


def form_only_for_uint8(transform, params, shape, dtype):
    return Encoded((), {}) if dtype == np.uint8 else None


OPS = {
    op.name: op
    for op in (
        op("HorizontalFlip"),
        op("VerticalFlip"),
        op("Affine"),
        op("RandomGamma"),
        op("RandomBrightnessContrast"),
        op("InvertImg", lambda *_: None),
        op("RandomCrop", out_shape=lambda t, _p, s: (t.height, t.width, *s[2:])),
        op("Normalize", out_dtype=lambda *_: np.dtype(np.float32)),
        op("ToTensorV2", out_shape=lambda _t, _p, s: (s[2], s[0], s[1])),
    )
}


def recorder_of(*transforms, size=SHAPE[:2], **options) -> Recorder:
    compose = A.Compose(list(transforms), **options)
    return Recorder(compose, analyse(compose, OPS, size=size), OPS)


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


def test_the_tape_lists_what_the_real_pipeline_applies_in_the_same_order() -> None:
    compose = A.Compose(TREE, save_applied_params=True)
    recorder = Recorder(compose, analyse(compose, OPS), OPS)
    lengths = set()
    image = np.zeros(SHAPE, np.uint8)
    for index in range(100):
        reseed((compose,), SampleKey(0, 0, index))
        real = [name for name, _ in compose(image=image)["applied_transforms"]]
        result, tape = record(recorder, index, {"image": image})
        ops = tape["image"].ops if "image" in tape else ()
        names = [noted.name for noted in ops]
        # Containers are listed too, beside the transforms in them.
        leaves = [name for name in real if name in OPS]
        assert [name for name, _ in result["applied_transforms"] if name in OPS] == leaves
        assert set(leaves) <= set(names)
        lengths.add(len(names))
    assert len(lengths) > 3


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
        A.HorizontalFlip(p=1), A.CLAHE(p=0.3), A.Blur(p=0.3), A.VerticalFlip(p=1)
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


def test_parameters_without_a_device_form_are_carried_out_on_the_spot() -> None:
    image = np.random.default_rng(0).integers(0, 256, SHAPE, np.uint8)
    recorder = recorder_of(A.HorizontalFlip(p=1), A.InvertImg(p=1), A.VerticalFlip(p=1))
    result, tape = record(recorder, 0, {"image": image})
    assert np.array_equal(result["image"], 255 - image[:, ::-1])
    assert [noted.name for noted in tape["image"].ops] == ["VerticalFlip"]


def test_a_sampler_that_reads_pixels_sees_them_as_they_are_by_then() -> None:
    image = np.zeros(SHAPE, np.uint8)
    seen = []

    class Look(A.ImageOnlyTransform):
        def get_params_dependent_on_data(self, params, data):
            seen.append(int(data["image"].max()))
            return {}

        def apply(self, img, **params):
            return img

    recorder = recorder_of(A.HorizontalFlip(p=1), A.InvertImg(p=1), A.VerticalFlip(p=1), Look(p=1))
    record(recorder, 0, {"image": image})
    assert seen == [255]


def test_a_phantom_cannot_be_written_to_and_is_shared() -> None:
    array = phantom(SHAPE, np.dtype(np.uint8))
    assert array is phantom(SHAPE, np.dtype("uint8"))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_targets_may_have_any_name() -> None:
    names = ("index", "transform", "original", "op", "key")
    recorder = recorder_of(
        A.HorizontalFlip(p=1), A.CLAHE(p=0.5), additional_targets=dict.fromkeys(names, "mask")
    )
    data = {"image": np.zeros(SHAPE, np.uint8)} | {
        name: np.full(SHAPE[:2], number) for number, name in enumerate(names)
    }
    for index in range(8):
        result, tape = record(recorder, index, data)
        assert [result[name].max() for name in names] == [0, 1, 2, 3, 4]
        assert set(tape) == {"image", *names}


def test_the_state_of_one_sample_is_gone_before_the_next() -> None:
    recorder = recorder_of(A.HorizontalFlip(p=1))
    first, second = (np.full(SHAPE, value, np.uint8) for value in (1, 2))
    record(recorder, 0, {"image": first})
    result, tape = record(recorder, 1, {"image": second})
    assert result["image"] is second
    assert len(tape["image"].ops) == 1


def test_a_draw_without_a_form_behind_a_change_of_dtype_is_computed_with_all_before_it() -> None:
    ops = OPS | {"Affine": op("Affine", form_only_for_uint8)}
    compose = A.Compose([A.Normalize(), A.Affine(p=1)])
    lenient = analyse(compose, OPS | {"Affine": op("Affine")})
    result, tape = record(Recorder(compose, lenient, ops), 0, {"image": np.zeros(SHAPE, np.uint8)})
    assert result["image"].dtype == np.float32
    assert tape["image"].ops == ()
    assert not analyse(compose, ops).defers


def test_replay_compose_is_recorded_like_any_other() -> None:
    compose = A.ReplayCompose([A.HorizontalFlip(p=0.5), A.RandomGamma(p=0.5)])
    recorder = Recorder(compose, analyse(compose, OPS), OPS)
    for index in range(10):
        result, tape = record(recorder, index)
        applied = [one["applied"] for one in result["replay"]["transforms"]]
        assert sum(applied) == len(tape["image"].ops if "image" in tape else ())

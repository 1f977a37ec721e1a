from __future__ import annotations

import warnings

import albumentations as A
import numpy as np
import pytest
from augment.parity import both, parity, photographs
from misses import each

from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.pipeline.dtypes import takes_dtype

warnings.filterwarnings("ignore", message="ShiftScaleRotate is a special case")

EXACT = {
    "noop": A.NoOp(p=1),
    "hflip": A.HorizontalFlip(p=1),
    "vflip": A.VerticalFlip(p=1),
    "transpose": A.Transpose(p=1),
    "rot90": A.RandomRotate90(p=1),
    "d4": A.D4(p=1),
    "random crop": A.RandomCrop(50, 61, p=1),
    "center crop": A.CenterCrop(51, 60, p=1),
    "crop": A.Crop(3, 4, 60, 47, p=1),
    **{
        f"padded crop, border {mode}": A.RandomCrop(
            190, 201, pad_if_needed=True, border_mode=mode, fill=77.0, fill_mask=9.0, p=1
        )
        for mode in range(5)
    },
    "pad": A.Pad((3, 5, 7, 2), fill=31.0, p=1),
    "pad if needed": A.PadIfNeeded(200, 210, border_mode=4, p=1),
    "resize nearest": A.Resize(67, 91, interpolation=0, p=1),
    "resize down": A.Resize(67, 91, p=1),
    "invert": A.InvertImg(p=1),
    "brightness contrast": A.RandomBrightnessContrast(p=1),
    "gamma": A.RandomGamma(p=1),
    "solarize": A.Solarize((0.2, 0.8), p=1),
    "posterize": A.Posterize((2, 6), p=1),
    "coarse dropout": A.CoarseDropout((1, 5), fill=99.0, fill_mask=3.0, p=1),
    "erasing": A.Erasing(p=1),
    "normalize": A.Normalize((0.485, 0.456, 0.4), (0.229, 0.224, 0.225), p=1),
    "to float": A.ToFloat(p=1),
    "to tensor": A.ToTensorV2(),
}
COLOUR_EXACT = {
    "gray": A.ToGray(p=1),
}
CLOSE = {
    "resize up": (A.Resize(301, 299, p=1), 0.998),
    "resized crop": (A.RandomResizedCrop((112, 96), p=1), 0.998),
    "sized crop": (A.RandomSizedCrop((40, 120), (112, 96), p=1), 0.998),
    "box blur": (A.Blur((3, 9), p=1), 0.999),
    "gaussian blur": (A.GaussianBlur(p=1), 0.999),
    "motion blur": (A.MotionBlur((3, 9), p=1), 0.99),
    **{
        f"affine, border {mode}": (
            A.Affine(
                scale=(0.6, 1.3), rotate=(-40, 40), shear=(-9, 9), translate_percent=(-0.2, 0.2),
                border_mode=mode, fill=120.0, p=1,
            ),
            0.999,
        )
        for mode in range(5)
    },
    "affine, fit": (A.Affine(rotate=(20, 20), fit_output=True, p=1), 0.999),
    "rotate": (A.Rotate(fill=200.0, p=1), 0.999),
    "shift scale rotate": (A.ShiftScaleRotate(p=1), 0.999),
    "perspective": (A.Perspective(fill=50.0, p=1), 0.999),
}  # fmt: skip
COLOUR_CLOSE = {
    "hsv": (A.HueSaturationValue(p=1), 0.999),
    "jitter": (A.ColorJitter(p=1), 0.999),
    "jitter without hue": (A.ColorJitter(hue=0, p=1), 0.99),
}
ALL = EXACT | COLOUR_EXACT | {name: one for name, (one, _) in (CLOSE | COLOUR_CLOSE).items()}


@each("name", [*EXACT, *COLOUR_EXACT])
def test_exact_operations_equal_albumentations_on_photographs(name):
    found = parity((EXACT | COLOUR_EXACT)[name], photographs(131, 170))
    assert found.largest == 0


@pytest.mark.cases(11)
@each("name", [*CLOSE, *COLOUR_CLOSE])
def test_other_operations_are_at_most_one_level_off(name):
    transform, share = (CLOSE | COLOUR_CLOSE)[name]
    found = parity(transform, photographs(131, 170))
    # Contrast or saturation after the hue shift can double a difference of one level.
    assert found.largest <= (2 if name == "jitter" else 1)
    assert found.exact >= share


@each("width", [1, 31, 32, 33, 112, 255, 257, 300])
def test_hue_equals_albumentations_at_any_width(width):
    """OpenCV truncates where it is vectorized and rounds in what is left of a row."""
    found = parity(COLOUR_CLOSE["hsv"][0], photographs(131, width))
    assert found.exact >= 0.999


@each(("length", "out"), [(6, 34), (6, 130), (148, 91), (212, 3), (97, 96)])
def test_nearest_reads_the_pixel_that_opencv_reads_where_the_last_bit_decides(length, out):
    ramp = np.arange(length, dtype=np.float32)[None, :, None].repeat(2, 0)
    transform = A.Resize(2, out, interpolation=0, p=1)
    assert parity(transform, [ramp / 256], seeds=[0]).largest == 0


@each("channels", [1, 4, 7])
@each("name", [name for name in EXACT if name != "normalize"])
def test_exact_operations_take_any_number_of_channels(name, channels):
    assert parity(EXACT[name], photographs(131, 170, channels), seeds=[1]).largest == 0


@each("channels", [1, 4])
@each("name", list(CLOSE))
def test_close_operations_take_any_number_of_channels(name, channels):
    transform, share = CLOSE[name]
    found = parity(transform, photographs(131, 170, channels), seeds=[1])
    assert found.largest <= 1
    assert found.exact >= share


OF_FLOATS = [
    name
    for name, transform in ALL.items()
    if takes_dtype(DEVICE_OPS[type(transform).__name__], np.dtype(np.float32))
]


@each("name", OF_FLOATS)
def test_float_images_agree_to_a_small_part_of_a_level(name):
    transform = ALL[name]
    if name == "coarse dropout" or getattr(transform, "fill", 0) not in (0,):
        transform = transform.__class__(**{**_arguments(transform), "fill": 0.25})
    found = parity(transform, photographs(131, 170, dtype=np.float32))
    assert found.largest <= 1e-4


def _arguments(transform):
    return {**transform.get_transform_init_args(), "p": 1}


@pytest.mark.cases(71)
@each("dtype", [np.uint8, np.float32])
@each("name", [*EXACT, *CLOSE])
def test_masks_equal_albumentations_exactly(name, dtype):
    transform = EXACT[name] if name in EXACT else CLOSE[name][0]
    masks = [(photo[..., 0] // 16).astype(dtype) for photo in photographs(131, 170)]
    for _, _, want, got in both(transform, photographs(131, 170), masks, seeds=[3]):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


@each("shape", [(1, 1), (1, 9), (9, 1), (2, 3)])
@each("name", ["hflip", "rot90", "resize up", "gaussian blur", "affine, border 4", "rotate"])
def test_tiny_images_are_no_special_case(name, shape):
    transform = EXACT[name] if name in EXACT else CLOSE[name][0]
    assert parity(transform, photographs(*shape)).largest <= 1


@each(
    "transform",
    [
        A.Resize(9, 9, interpolation=4, p=1),
        A.Affine(rotate=(9, 40), interpolation=2, p=1),
        A.RandomResizedCrop((9, 9), area_for_downscale="image", p=1),
        A.CoarseDropout(fill="inpaint_telea", p=1),
        A.ToGray(method="from_lab", p=1),
        A.Rotate(crop_border=True, p=1),
    ],
)
def test_parameters_without_a_device_form_are_declined(transform):
    image = photographs(40, 50)[0]
    transform(image=image)
    op = DEVICE_OPS[type(transform).__name__]
    assert op.encode(transform, transform.params, image.shape, image.dtype) is None

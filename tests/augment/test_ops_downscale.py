from __future__ import annotations

import albumentations as A
import numpy as np
import pytest
from augment.parity import extremes, parity, photographs
from hypothesis import given
from hypothesis import strategies as st
from misses import each
from thoroughness import max_examples

from lightning_fastdata.augment.ops import DEVICE_OPS

NEAREST, LINEAR, CUBIC, AREA = range(4)


def downscale(scale, down=NEAREST, up=NEAREST):
    pair = {"downscale": down, "upscale": up}
    return A.Downscale(scale, interpolation_pair=pair, p=1)


@each("scale", [(0.25, 0.25), (0.5, 0.5), (0.3, 0.3), (0.05, 0.99)])
@each("up", [NEAREST, LINEAR])
@each("down", [NEAREST, LINEAR, AREA])
def test_downscaling_equals_albumentations(down, up, scale):
    for images in (photographs(67, 94), photographs(64, 96), extremes(32, 25)):
        assert parity(downscale(scale, down, up), images, range(2)).largest == 0


@each("channels", [1, 4, 7])
@each("down", [NEAREST, LINEAR, AREA])
def test_downscaling_takes_any_number_of_channels(down, channels):
    if down == AREA and channels > 4:
        pytest.skip("OpenCV itself takes at most four channels here")
    assert parity(downscale((0.2, 0.9), down), photographs(67, 94, channels)).largest == 0


@each("down", [NEAREST, LINEAR, AREA])
def test_downscaling_of_float_images_goes_through_bytes(down):
    images = photographs(67, 94, dtype=np.float32)
    assert parity(downscale((0.2, 0.9), down, LINEAR), images).largest <= 1e-6


@max_examples(40)
@given(
    scale=st.floats(0.12, 0.99),
    down=st.sampled_from([NEAREST, LINEAR, AREA]),
    up=st.sampled_from([NEAREST, LINEAR]),
    size=st.tuples(st.integers(5, 70), st.integers(5, 70)),
)
def test_downscaling_is_at_most_one_level_off_for_any_scale_and_size(scale, down, up, size):
    images = [*photographs(*size), *extremes(*size)]
    found = parity(downscale((scale, scale), down, up), images, seeds=[0])
    # A mean may lie between two levels.
    assert found.largest <= (0 if down == up == NEAREST else 1)
    assert found.exact >= 0.99


@each(("down", "up"), [(CUBIC, LINEAR), (LINEAR, CUBIC), (NEAREST, AREA)])
def test_other_interpolations_are_left_to_the_cpu(down, up):
    transform = downscale((0.3, 0.3), down, up)
    image = photographs(40, 50)[0]
    transform(image=image)
    op = DEVICE_OPS["Downscale"]
    assert op.encode(transform, transform.params, image.shape, image.dtype) is None

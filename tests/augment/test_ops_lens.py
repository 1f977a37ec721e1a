from __future__ import annotations

import albumentations as A
import numpy as np
from augment.parity import extremes, parity, photographs
from hypothesis import given
from hypothesis import strategies as st
from misses import each
from thoroughness import max_examples

from lightning_fastdata.augment.ops import DEVICE_OPS

NEAREST, LINEAR, CUBIC, _, LANCZOS = range(5)


@each("mode", ["green_purple", "red_blue", "random"])
def test_chromatic_aberration_is_at_most_one_level_off(mode):
    transform = A.ChromaticAberration(mode=mode, p=1)
    for images in (photographs(131, 170), photographs(64, 96), extremes(40, 33)):
        found = parity(transform, images)
        assert found.largest <= 1
        assert found.exact >= 0.999


def test_chromatic_aberration_of_float_images_goes_through_bytes():
    found = parity(A.ChromaticAberration(p=1), photographs(67, 94, dtype=np.float32))
    assert found.largest <= 1 / 255 + 1e-6
    assert found.exact >= 0.999


@max_examples(25)
@given(
    first=st.floats(-0.9, 0.9),
    second=st.floats(-0.9, 0.9),
    interpolation=st.sampled_from([NEAREST, LINEAR]),
    size=st.tuples(st.integers(1, 60), st.integers(1, 60)),
)
def test_any_lens_bends_as_in_albumentations(first, second, interpolation, size):
    limits = [(first, first), (second, second)]
    transform = A.ChromaticAberration(*limits, interpolation=interpolation, mode="random", p=1)
    found = parity(transform, photographs(*size), seeds=[0])
    assert found.largest <= (0 if interpolation == NEAREST else 1)


def test_other_interpolations_are_left_to_the_cpu():
    transform = A.ChromaticAberration(interpolation=LANCZOS, p=1)
    image = photographs(40, 50)[0]
    transform(image=image)
    op = DEVICE_OPS["ChromaticAberration"]
    assert op.encode(transform, transform.params, image.shape, image.dtype) is None

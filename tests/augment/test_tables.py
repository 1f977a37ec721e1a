"""What operations note of a sample: tables and matrices, to the last bit."""

from __future__ import annotations

import albumentations as A
import numpy as np
from albucore import add_constant
from hypothesis import given
from hypothesis import strategies as st
from misses import each
from thoroughness import max_examples

from lightning_fastdata.augment.ops import DEVICE_OPS

SHAPE, BYTES = (5, 7, 3), np.dtype(np.uint8)
RAMP = np.arange(256, dtype=np.uint8)
WHOLE = st.integers(-400, 400)
BESIDE_WHOLE = st.builds(lambda whole, to: float(np.nextafter(whole, to)), WHOLE, WHOLE)
SHIFTS = st.one_of(st.floats(-400, 400), WHOLE.map(float), BESIDE_WHOLE)


def noted(transform, params):
    return DEVICE_OPS[type(transform).__name__].encode(transform, params, SHAPE, BYTES)


def shifted_hues(shift):
    return np.mod(np.arange(256, dtype=np.int16) + shift, 180).astype(np.uint8)


@max_examples(300)
@given(shift=SHIFTS.filter(bool))
def test_a_table_of_hues_has_every_sum_rounded_as_it_is_in_floats(shift) -> None:
    params = {"hue_shift": shift, "sat_shift": 0.0, "val_shift": 0.0}
    table = noted(A.HueSaturationValue(), params).arrays["table"]
    np.testing.assert_array_equal(table[:, 0], shifted_hues(shift))
    jitter = dict.fromkeys(("brightness", "contrast", "saturation"), 1.0)
    params = {**jitter, "hue": shift / 180, "order": [0, 1, 2, 3]}
    table = noted(A.ColorJitter(), params).arrays["hue_table"]
    np.testing.assert_array_equal(table[:, 0], shifted_hues(180 * (shift / 180)))


@max_examples(100)
@given(saturation=SHIFTS, value=SHIFTS)
def test_saturation_and_value_move_as_albucore_moves_bytes(saturation, value) -> None:
    params = {"hue_shift": 1.0, "sat_shift": saturation, "val_shift": value}
    table = noted(A.HueSaturationValue(), params).arrays["table"]
    np.testing.assert_array_equal(table[1:, 1], add_constant(RAMP[None], saturation)[0, 1:])
    np.testing.assert_array_equal(table[:, 2], add_constant(RAMP[None], value)[0])


@max_examples(100)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-9, 1e-8, 1e-5, 1.00002e-5, 1e-4, 0.3]))
def test_a_warp_notes_the_inverse_of_a_matrix_that_is_not_close_to_the_identity(seed, far) -> None:
    moved = np.random.default_rng(seed).uniform(-far, far, (2, 3))
    matrix = np.eye(3) + np.vstack([moved, np.zeros(3)])
    expected = np.eye(3) if np.allclose(matrix, np.eye(3)) else np.linalg.inv(matrix)
    found = noted(A.Affine(), {"matrix": matrix, "output_shape": SHAPE[:2]}).arrays
    np.testing.assert_array_equal(found["inverse"], expected.astype(np.float32))
    np.testing.assert_allclose(found["exact"], expected, rtol=0, atol=1e-12)


@each("scale", [1e-7, 1e-5])
def test_a_warp_that_leaves_nothing_of_an_image_stays_in_the_worker(scale) -> None:
    params = {"matrix": np.diag([scale, scale, 1]), "output_shape": SHAPE[:2]}
    assert (noted(A.Affine(), params) is None) == (scale**2 < 1e-12)


@each(
    ("fill", "expected"),
    [
        (5, (5, 0, 0)),
        (5.0, (5, 5, 5)),
        (np.float64(5), (5, 5, 5)),
        (np.int64(5), (5, 0, 0)),
        ([5, 6.0, 7], (5, 6, 7)),
        (np.array([5, 6]), (5, 6, 0)),
    ],
)
def test_a_fill_is_extended_over_the_channels_if_it_is_a_float(fill, expected) -> None:
    transform = A.Affine()
    transform.fill = fill
    params = {"matrix": np.diag([2.0, 2.0, 1.0]), "output_shape": SHAPE[:2]}
    np.testing.assert_array_equal(noted(transform, params).arrays["fill"], expected)

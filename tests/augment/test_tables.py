"""What operations note of a sample: tables and matrices, to the last bit."""

from __future__ import annotations

import albumentations as A
import numpy as np
from albucore import add_constant
from hypothesis import given
from hypothesis import strategies as st
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

"""A sample that was taken apart and put together is the same sample."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pytest
import torch
from alike import alike
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from misses import each
from PIL import Image
from thoroughness import max_examples
from torchvision import tv_tensors

from lightning_fastdata.caches.sample_file import (
    put_together,
    record_bytes,
    split,
    taken_apart,
    with_form,
)
from lightning_fastdata.errors import DatasetError

_DTYPES = st.sampled_from(["u1", "<i2", "<i4", "<i8", "<f2", "<f4", "<f8", "?", "<c8"])
_TORCH = [torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.bool, torch.complex64]


@st.composite
def _tensors(draw):
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    tensor = torch.randint(0, 2, shape).to(draw(st.sampled_from(_TORCH)))
    return tensor.transpose(0, -1) if tensor.dim() and draw(st.booleans()) else tensor


_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    _tensors(),
    arrays.arrays(_DTYPES, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)),
    st.sampled_from([np.float32(1.5), np.int64(-3), np.bool_(True)]),
)
_samples = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(-5, 5)), inner, max_size=3),
    ),
    max_leaves=6,
)


def read(whole):
    """Return the sample of a record behind its form; as a file gives it, it shares no memory."""
    return put_together(*split(np.frombuffer(bytearray(whole), np.uint8)))


CONJUGATE = torch.tensor([1 + 2j, 3 - 4j]).conj()
OF_A_TABLE = torch.arange(6.0).view(2, 3)[1:, 1]
"""A single number, whose stride is that of the table."""


@max_examples(200)
@example(sample=CONJUGATE)
@example(sample=CONJUGATE.imag)  # noted as negative
@example(sample=OF_A_TABLE)
@example(sample=["\udcc3\udca9", "\ud800"])  # half characters, as of names that are not UTF-8
@given(sample=_samples)
def test_a_sample_comes_back_from_bytes_and_json(sample):
    form, record = taken_apart(sample)
    assert record_bytes(form) == len(record)
    assert alike(read(with_form(form, record)), sample)


PIXELS = torch.arange(12, dtype=torch.uint8).view(3, 2, 2)


@each(
    "image",
    [
        *(Image.effect_noise((7, 5), 50).convert(mode) for mode in ("RGB", "L", "RGBA")),
        *(kind(PIXELS) for kind in (tv_tensors.Image, tv_tensors.Mask)),
    ],
)
def test_pictures_of_pil_and_torchvision_stay_what_they_are(image):
    assert alike(read(with_form(*taken_apart({"image": image})))["image"], image)


@each(
    ("sample", "named"),
    [
        ((1, Decimal(3)), r"decimal\.Decimal at sample\[1\]"),
        ({"a": {2.5: 1}}, r"dict with the keys \[2\.5\] at sample\['a'\]"),
        (np.array(["a"], object), "array of object"),
        (2**70, "more than 64 bits"),
        (np.zeros(2, np.longdouble), f"array of {np.dtype(np.longdouble)}"),
        (torch.zeros(3, requires_grad=True), "tensor of torch.Tensor"),
        (torch.zeros(3).to_sparse(), "sparse"),
        (Image.new("P", (2, 2)), "PIL.Image.Image"),
    ],
)
def test_what_cannot_be_kept_is_named(sample, named):
    with pytest.raises(DatasetError, match=named):
        taken_apart(sample)

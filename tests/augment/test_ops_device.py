from __future__ import annotations

import numpy as np
import torch
from augment.parity import parity, photographs
from augment.test_ops_histogram import TRANSFORMS
from augment.test_ops_parity import ALL as OPERATIONS
from augment.test_ops_sharpen import CONVOLUTIONS
from misses import each

from lightning_fastdata.augment.ops import DEVICE_OPS

ALL = OPERATIONS | TRANSFORMS | CONVOLUTIONS


def drawn(transform, image):
    transform.set_random_seed(3)
    result = transform(image=image)["image"]
    op = DEVICE_OPS[type(transform).__name__]
    return op, op.encode(transform, transform.params, image.shape, image.dtype), result


@each("count", [1, 2])
@each("name", list(ALL))
def test_no_operation_asks_the_device_for_a_value(name, count):
    """A meta tensor has no values: whoever wants one gets an error instead of a stalled queue."""
    image = photographs(61, 74)[0]
    op, encoded, expected = drawn(ALL[name], image)
    assert encoded is not None
    arrays = {
        name: torch.from_numpy(np.stack([array] * count)).to("meta")
        for name, array in encoded.arrays.items()
    }
    images = torch.from_numpy(np.stack([image] * count)).to("meta")
    out = op.image(images, dict(encoded.static), arrays)
    assert out.device.type == "meta"
    assert out.shape == (count, *expected.shape)


@each("name", list(ALL))
def test_a_batch_may_be_a_single_image(name):
    found = parity(ALL[name], photographs(61, 74)[:1], seeds=[5])
    assert found.largest <= 2
    assert found.exact >= 0.99

"""No operation leaves its precision to a setting of the user's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from augment.batches import on_device, pipeline
from augment.parity import photographs
from misses import each
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.parity import examples, make_example

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "vdot", "einsum",
            "matmul", "linear", "convolution", "_convolution", "conv1d", "conv2d", "conv3d",
            "cudnn_convolution", "_cdist_forward")  # fmt: skip
ROUNDED = {torch.float32, torch.float16, torch.bfloat16}


class Products(TorchDispatchMode):
    """Notes matrix products and convolutions in float32 or less."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [one for one in torch.utils._pytree.tree_leaves(args) if hasattr(one, "dtype")]
        if func.overloadpacket.__name__ in PRODUCTS and {one.dtype for one in given} & ROUNDED:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


OPERATIONS = [
    pytest.param(name, arguments, id=f"{name} {number}")
    for number, (name, arguments) in enumerate(examples())
]


@pytest.mark.cases(60)
@each(("name", "arguments"), OPERATIONS)
def test_no_operation_takes_a_matrix_product_or_convolution_of_float32(name, arguments):
    sized = {"height", "width"} & arguments.keys()
    transform = make_example(name, {**arguments, **dict.fromkeys(sized, 40)})
    side = 128 if name == "RandomSizedCrop" else 48
    for dtype in (np.uint8, np.float32):
        image = photographs(side, side, 3, dtype)[0]
        autocast = dtype == np.float32
        with Products() as products, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            on_device(pipeline(transform), [{"image": image, "mask": image[..., 0].copy()}])
        assert products.seen == []


def test_the_watch_sees_a_product():
    with Products() as products:
        _ = torch.ones(2, 2) @ torch.ones(2, 2)
    assert len(products.seen) == 1

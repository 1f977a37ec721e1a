"""How much a device is given for a batch, by operation of torchvision v2."""

from __future__ import annotations

import pytest
import torch

from benchmarks.v2_launches import OPERATIONS, Launches, counted, tapes_of
from lightning_fastdata.augment.replay.program import compile_tapes
from lightning_fastdata.augment.torchvision.forms import FORMS

SIZE, FEW = 224, 3
MORE = {
    "contrast": (9, 7),
    "saturation": (8, 6),
    "hue": (56, 52),
    "sharpness": (7, 5),
    "blur": (5, 2),
    "resized crop, not smoothed": (16, 12),
    "resized crop": (24, 20),
    "rotation": (4, 2),
    "affine, bilinear": (7, 4),
    "affine, bilinear, filled": (9, 6),
    "perspective, nearest": (7, 5),
    "perspective": (10, 7),
}
"""What takes more than three, of bytes and of floats: each of torch's roundings is an operator."""


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_takes_as_many_launches_for_any_batch_and_few_of_them(name):
    """A tensor without memory has no values: whoever waits for one gets an error."""
    for dtype, most in zip((torch.uint8, torch.float32), MORE.get(name, (FEW, FEW)), strict=True):
        tapes = tapes_of(name, SIZE, 32, dtype)
        launches = {
            len(counted(compile_tapes(batch), SIZE, dtype).operators)
            for batch in (tapes[:4], tapes, tapes * 8)
        }
        assert len(launches) == 1
        assert max(launches) <= most


def test_every_form_for_batches_is_counted():
    names = {
        step.name
        for name in OPERATIONS
        for tape in tapes_of(name, SIZE, 2, torch.uint8)
        for step in tape[()].ops
    }
    assert names == FORMS.keys()


def test_views_and_empty_memory_are_no_launches():
    values = torch.empty((4, 6), device="meta")
    with Launches() as seen:
        values.view(6, 4).mT.expand(2, 4, 6)[0].new_empty(3)
        assert seen.names == []
        values.add_(1).mul(2).view(24).expand(2, 24).clone()
    assert seen.names == ["add_", "mul", "clone"]
    memory = values.numel() * values.element_size()
    assert seen.bytes == (2 + 2 + 3) * memory

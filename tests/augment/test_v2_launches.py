"""How much a device is given for a batch, by operation of torchvision v2."""

from __future__ import annotations

import shutil

import pytest
import torch

from benchmarks.v2_launches import (
    OPERATIONS,
    Launches,
    counted,
    fused_batches,
    is_compiled,
    tapes_of,
)
from lightning_fastdata.augment.replay.program import compile_tapes
from lightning_fastdata.augment.torchvision.forms import FORMS

SIZE, FEW = 224, 3
COMPILED = [name for name in OPERATIONS if is_compiled(name)]


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_takes_as_many_launches_for_any_batch_and_few_or_is_compiled(name):
    """A tensor without memory has no values: whoever waits for one gets an error."""
    for dtype in (torch.uint8, torch.float32):
        tapes = tapes_of(name, SIZE, 32, dtype)
        launches = {
            len(counted(compile_tapes(batch), SIZE, dtype).operators)
            for batch in (tapes[:4], tapes, tapes * 8)
        }
        assert len(launches) == 1
        assert max(launches) <= FEW or name in COMPILED


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_what_is_compiled_is_few_kernels_for_any_batch_and_right(
    name, dtype, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    made = fused_batches(name, 160, dtype, (5, 32, 256))
    assert made.right
    assert made.launches <= FEW
    assert made.compilations == 1


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

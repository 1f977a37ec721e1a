from __future__ import annotations

import pytest
import torch

from lightning_fastdata.device.backend import read_device_usage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_the_device_tells_what_tensors_took_and_what_nobody_did():
    device = torch.device("cuda", 0)
    torch.cuda.reset_peak_memory_stats(device)
    before = read_device_usage(device)
    block = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    after = read_device_usage(device)
    assert after.peak_bytes - before.peak_bytes >= 200 * 2**20
    assert before.never_used_bytes - after.never_used_bytes >= 200 * 2**20
    del block
    torch.cuda.empty_cache()
    # Memory that is free again was used once.
    assert read_device_usage(device).never_used_bytes < before.never_used_bytes
    assert after.alloc_retries == before.alloc_retries

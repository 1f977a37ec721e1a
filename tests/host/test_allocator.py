from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import resource
import sys

import torch

from lightning_fastdata.host.memory import keep_freed_memory

torch.set_num_threads(1)
kept = sys.argv[1] == "keep" and keep_freed_memory()
parts = [torch.ones(200_000, dtype=torch.uint8) for _ in range(64)]


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.stack(parts)
        torch.stack(parts + parts)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


faults()
print(int(kept), faults())
"""


def run(how):
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how], capture_output=True, text=True, timeout=280, check=True
    )
    kept, faults = map(int, done.stdout.split())
    return kept, faults


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
def test_batches_of_a_known_size_fault_no_pages_once_freed_memory_is_kept():
    kept, faults = run("keep")
    if not kept:
        pytest.skip("this C library has no such setting")
    # Two batches, ten times, are 94,000 pages.
    assert faults < 1000

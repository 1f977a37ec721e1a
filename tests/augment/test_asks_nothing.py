"""Runs ``asks_nothing.py`` in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch


# What a pretended GPU leaves behind cannot be taken back: torch has threads for its gradients from
# then on, so that processes forked later cannot train (ddp_fork).
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu asks the device itself, which constants stay on"
)
def test_replaying_asks_nothing_of_a_gpu() -> None:
    file = Path(__file__).with_name("asks_nothing.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    if " passed" not in run.stdout:
        pytest.skip(run.stdout.strip().splitlines()[-1])

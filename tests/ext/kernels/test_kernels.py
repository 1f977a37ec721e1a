"""The kernels compile for GPUs, with the roundings that the operations rely on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def run(*command, check=True, **environment):
    """Run Python without the interpreter of Triton, unless the environment asks for it."""
    inherited = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=inherited | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        capture_output=True,
        text=True,
        check=check,
    )


@pytest.mark.slow
def test_the_kernels_compile_for_cuda_with_exactly_the_roundings_of_torch(tmp_path):
    script = Path(__file__).with_name("compile_kernels.py")
    done = run(script, check=False, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]


WITHOUT_A_DEVICE = """
import torch
from lightning_fastdata.augment.replay.warm_up import kernel_fault
print(kernel_fault(torch.device("cpu")))
"""


@pytest.mark.slow
def test_a_machine_on_which_triton_fails_is_told_why_and_goes_on(tmp_path):
    """Compiled kernels cannot be launched on a CPU, which stands for all that can go wrong."""
    for interpret in ("0", "1"):
        environment = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": interpret}
        told = run("-c", WITHOUT_A_DEVICE, **environment).stdout.strip()
        assert (told == "None") if interpret == "1" else ("Error: " in told)


@pytest.mark.slow
def test_what_a_kernel_becomes_is_counted_for_an_architecture():
    program = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu_architectures.py"
    done = run(program, "--kernels", "as it is", "--architectures", "90")
    [head, _, row] = [line for line in done.stdout.splitlines() if line.startswith("|")]
    names, values = ([cell.strip() for cell in line.split("|")[1:-1]] for line in (head, row))
    counted = dict(zip(names, values, strict=True))
    assert counted["sm"] == "90"
    assert all(int(counted[name]) > 0 for name in ("registers", "byte loads", "instructions"))

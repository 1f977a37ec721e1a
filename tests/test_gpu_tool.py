"""`make gpu`: what can be known of it without a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from misses import each
from rig.late_cuda import late_cuda

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("gpu_tool", ROOT / "tools" / "gpu.py")
tool = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tool)


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    """Have the modules of the sections found, which have names that those of tests have, too."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


@each("name", tool.SECTIONS)
def test_a_section_comes_as_far_as_the_device(name):
    from gpu_run import Rehearsed, Run

    run = Run("cuda", quick=True, rehearsal=True)
    with late_cuda("eager"), pytest.raises(Rehearsed):
        tool.measure_of(name)(run)


def test_a_machine_without_a_gpu_is_told_so(capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert tool.main(["races"]) == 2
    assert "CUDA device" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
@each("name", [name for name in tool.SECTIONS if name != "tests"])
def test_a_section_runs_to_its_end_without_a_gpu(name):
    """All but the one that would collect every test."""
    command = [sys.executable, str(ROOT / "tools" / "gpu.py"), name, "--device", "cpu", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"## {name}" in done.stdout

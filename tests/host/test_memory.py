from __future__ import annotations

import resource
import shutil
from typing import TYPE_CHECKING

import psutil
import pytest
from host.roots import V1_MOUNTS, host, root_of

from lightning_fastdata.host.memory import read_host_memory

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20


def test_meminfo_counts_in_kibibytes(tmp_path: Path) -> None:
    text = "MemTotal:       24684084 kB\nMemFree:  9 kB\nMemAvailable:   24192520 kB\n"
    memory = read_host_memory(root=root_of(tmp_path, {"proc/meminfo": text}))
    assert memory.ram_available_bytes == 24192520 * 1024
    memory = read_host_memory(root=root_of(tmp_path, {"proc/meminfo": "MemTotal:  5 kB\n"}))
    assert memory.ram_available_bytes > 5 * 1024


def test_the_tightest_memory_limit_above_the_process_holds(tmp_path: Path) -> None:
    below = {
        "job/memory.max": f"{100 * MIB}\n",
        "job/memory.current": f"{70 * MIB}\n",
        "job/memory.stat": f"inactive_file {10 * MIB}\n",
        "job/step/memory.max": "max\n",
        "job/step/memory.high": f"{200 * MIB}\n",
        "job/step/memory.current": f"{60 * MIB}\n",
    }
    meminfo = {"meminfo": f"MemAvailable: {1000 * 1024} kB\n"}
    root = host(tmp_path, cgroup="0::/job/step\n", below=below, proc=meminfo)
    memory = read_host_memory(root=root)
    assert memory.cgroup_available_bytes == 40 * MIB
    assert memory.ram_available_bytes == 1000 * MIB
    assert memory.available_bytes == 40 * MIB


def test_a_v1_memory_limit_holds(tmp_path: Path) -> None:
    below = {
        "memory/in/memory.limit_in_bytes": "1000\n",
        "memory/in/memory.usage_in_bytes": "400\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": "400\n",
    }
    root = host(tmp_path, cgroup="4:memory:/docker/abc/in\n", mounts=V1_MOUNTS, below=below)
    assert read_host_memory(root=root).cgroup_available_bytes == 600


def test_a_machine_without_cgroups_or_shared_memory_says_so(tmp_path: Path) -> None:
    memory = read_host_memory(root=tmp_path)
    assert memory.cgroup_available_bytes is None
    assert memory.shm_free_bytes is None
    assert memory.available_bytes == memory.ram_available_bytes > 0


def test_this_machine_agrees_with_psutil_and_the_file_system() -> None:
    memory = read_host_memory()
    virtual = psutil.virtual_memory()
    assert memory.ram_available_bytes == pytest.approx(virtual.available, rel=0.2)
    assert memory.shm_free_bytes == pytest.approx(shutil.disk_usage("/dev/shm").free, rel=0.2)
    assert (memory.open_files_soft or -1, memory.open_files_hard or -1) == resource.getrlimit(
        resource.RLIMIT_NOFILE
    )

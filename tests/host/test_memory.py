from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from lightning_fastdata.host.memory import (
    read_host_memory,
)

if TYPE_CHECKING:
    from pathlib import Path

V2_MOUNT = "35 25 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1_MOUNT = "36 31 0:33 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
MIB = 2**20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_meminfo_counts_in_kibibytes(tmp_path: Path) -> None:
    text = "MemTotal:       24684084 kB\nMemFree:  9 kB\nMemAvailable:   24192520 kB\n"
    memory = read_host_memory(root=write(tmp_path, {"proc/meminfo": text}))
    assert memory.ram_available_bytes == 24192520 * 1024
    memory = read_host_memory(root=write(tmp_path, {"proc/meminfo": "MemTotal:  5 kB\n"}))
    assert memory.ram_available_bytes > 5 * 1024


def test_the_tightest_memory_limit_above_the_process_holds(tmp_path: Path) -> None:
    outer, inner = "sys/fs/cgroup/job", "sys/fs/cgroup/job/step"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step\n",
            "proc/self/mountinfo": V2_MOUNT,
            "proc/meminfo": f"MemAvailable: {1000 * 1024} kB\n",
            f"{outer}/memory.max": f"{100 * MIB}\n",
            f"{outer}/memory.current": f"{70 * MIB}\n",
            f"{outer}/memory.stat": f"inactive_file {10 * MIB}\n",
            f"{inner}/memory.max": "max\n",
            f"{inner}/memory.high": f"{200 * MIB}\n",
            f"{inner}/memory.current": f"{60 * MIB}\n",
        },
    )
    memory = read_host_memory(root=root)
    assert memory.cgroup_available_bytes == 40 * MIB
    assert memory.ram_available_bytes == 1000 * MIB
    assert memory.available_bytes == 40 * MIB


def test_a_v1_memory_limit_holds(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory/docker"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker\n",
            "proc/self/mountinfo": V1_MOUNT,
            f"{folder}/memory.limit_in_bytes": "1000\n",
            f"{folder}/memory.usage_in_bytes": "400\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "400\n",
        },
    )
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


def test_a_lowered_open_file_limit_is_seen() -> None:
    code = (
        "from lightning_fastdata.host.memory import read_host_memory as r;"
        "m = r(); print(m.open_files_soft, m.open_files_hard)"
    )
    command = f'ulimit -Sn 200 && ulimit -Hn 300 && "{sys.executable}" -c "{code}"'
    out = subprocess.run(["sh", "-c", command], check=True, capture_output=True, text=True)
    assert out.stdout.split() == ["200", "300"]


def test_reading_memory_does_not_import_torch() -> None:
    code = (
        "import sys; from lightning_fastdata.host.memory import read_host_memory as r; r();"
        "print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "False"

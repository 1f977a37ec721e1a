"""Each command of ``fastdata`` says what it found, and ends in the code that it promises."""

from __future__ import annotations

import re

import pytest
from misses import each
from programs import run_program

from lightning_fastdata import __version__
from lightning_fastdata.cli import main
from lightning_fastdata.host.cpu import CpuLimit, read_cpu_limit
from lightning_fastdata.host.machine import doctor_text, loading_limits
from lightning_fastdata.host.memory import DeviceMemory, HostMemory

GIB = 2**30


def cpus(count: int, quota: float | None = None) -> CpuLimit:
    return CpuLimit(
        affinity_cpus=count,
        quota_cpus=quota,
        quota_source=None if quota is None else "/sys/fs/cgroup/cpu.max",
        ranks_on_host=1,
    )


def memory(**changes) -> HostMemory:
    roomy = {
        "ram_available_bytes": 64 * GIB,
        "cgroup_available_bytes": None,
        "shm_free_bytes": 32 * GIB,
        "open_files_soft": 65536,
        "open_files_hard": None,
    }
    return HostMemory(**{**roomy, **changes})


def test_the_doctor_reports_this_very_machine():
    done = run_program("-m", "lightning_fastdata", "doctor")
    assert done.returncode == 0, done.stderr
    assert read_cpu_limit().reason in done.stdout
    assert "/dev/shm" in done.stdout
    assert "torch " in done.stdout


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"fastdata {__version__}\n"


def test_a_roomy_machine_has_nothing_to_complain_of():
    assert list(loading_limits(cpu=cpus(16), memory=memory(), has_gpu=True)) == []
    text = doctor_text(cpu=cpus(16), memory=memory(), gpus=[], versions={"torch": "2.9"})
    assert "Nothing here limits loading" in text
    assert re.search(r"^torch +2\.9$", text, flags=re.MULTILINE)


@each(
    ("cpu", "held", "has_gpu", "said"),
    [
        (cpus(64, quota=4.0), memory(), True, "4 CPUs of the 64"),
        (cpus(2), memory(), True, "few for a GPU"),
        (cpus(2), memory(), False, "share 2 usable CPUs"),
        (cpus(1), memory(), False, "share 1 usable CPU:"),
        (cpus(1), memory(), True, "1 usable CPU is few"),
        (cpus(16), memory(shm_free_bytes=64 * 2**20), True, "/dev/shm has 64 MiB free. torch's"),
        (cpus(16), memory(open_files_soft=1024, open_files_hard=4096), True, "ulimit -n 4096"),
        (cpus(16), memory(cgroup_available_bytes=GIB), True, "1.00 GiB of memory"),
    ],
)
def test_each_limit_is_named_with_its_value(cpu, held, has_gpu, said):
    [limit] = loading_limits(cpu=cpu, memory=held, has_gpu=has_gpu)
    assert said in limit


def test_gpus_and_a_container_s_share_of_the_memory_are_shown():
    text = doctor_text(
        cpu=cpus(16),
        memory=memory(cgroup_available_bytes=8 * GIB),
        gpus=[("A GPU", DeviceMemory(free_bytes=10 * GIB, total_bytes=16 * GIB))],
        versions={},
    )
    assert "A GPU, 10.00 GiB of 16.00 GiB free" in text
    assert "8.00 GiB available in this container, 64.00 GiB on the machine" in text


@pytest.mark.parametrize("name", ["compair", "tune"])
def test_an_unknown_command_is_answered_with_the_known_ones(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name])
    assert ended.value.code == 2
    known = "run, prove, report, compare, doctor, replay"
    assert f"choose from {known}" in capsys.readouterr().err.replace("'", "")

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from host.roots import V1_MOUNTS, V2_MOUNT, host
from hypothesis import given
from hypothesis import strategies as st
from misses import each

from lightning_fastdata.host.cpu import (
    CpuLimit,
    parse_cpu_max,
    parse_cpu_stat,
    ranks_on_host,
    read_cgroup_folders,
    read_cpu_limit,
    read_cpu_throttling,
    tasks_on_node,
)


@each(
    ("text", "cpus"),
    [
        ("max 100000\n", None),
        ("150000 100000\n", 1.5),
        ("400000 100000\n", 4.0),
        ("50000 50000", 1.0),
        ("", None),
        ("100000 0", None),
        ("100000", None),
        ("nonsense", None),
    ],
)
def test_cpu_max_is_quota_over_period(text: str, cpus: float | None) -> None:
    assert parse_cpu_max(text) == cpus


def test_throttled_time_is_microseconds_in_both_versions() -> None:
    v2 = parse_cpu_stat("usage_usec 9\nnr_periods 40\nnr_throttled 10\nthrottled_usec 250000\n")
    v1 = parse_cpu_stat("nr_periods 40\nnr_throttled 10\nthrottled_time 250000000\n")
    assert v1 == v2
    assert v2 is not None
    assert (v2.periods, v2.throttled_periods, v2.throttled_us) == (40, 10, 250_000)
    assert parse_cpu_stat("usage_usec 9\nuser_usec 5\n") is None


@each(
    ("cgroup", "mounts", "expected"),
    [
        pytest.param(
            "0::/a/b\n", V2_MOUNT, ["", "/a", "/a/b"], id="every cgroup up to the mount point"
        ),
        pytest.param("0::/\n", V2_MOUNT, [""], id="own cgroup namespace"),
        pytest.param("0::/../other\n", V2_MOUNT, [""], id="outside the cgroup namespace"),
        pytest.param(
            "4:cpu,cpuacct:/docker/abc/in\n",
            V1_MOUNTS,
            ["/cpu,cpuacct", "/cpu,cpuacct/in"],
            id="v1 mount that shows only a part of the hierarchy",
        ),
        pytest.param("4:cpu:/else\n", V1_MOUNTS, ["/cpu,cpuacct"], id="v1 path outside the mount"),
        pytest.param("", "", [], id="no cgroups"),
    ],
)
def test_folders_lead_from_the_own_cgroup_to_the_mount_point(
    cgroup: str, mounts: str, expected: list[str], tmp_path: Path
) -> None:
    root = host(tmp_path, cgroup=cgroup, mounts=mounts)
    folders = read_cgroup_folders("cpu", root=root)
    assert [str(f) for f in reversed(folders)] == [f"/sys/fs/cgroup{tail}" for tail in expected]


def test_the_tightest_quota_above_the_process_holds(tmp_path: Path) -> None:
    below = {
        "pod/cpu.max": "250000 100000\n",
        "pod/app/cpu.max": "max 100000\n",
        "pod/app/worker/cpu.max": "800000 100000\n",
        "other/cpu.max": "1000 100000\n",
    }
    root = host(tmp_path, cgroup="0::/pod/app/worker\n", below=below)
    limit = read_cpu_limit(root=root, environ={}, affinity=lambda: 128)
    assert limit.quota_cpus == 2.5
    assert limit.quota_source == "/sys/fs/cgroup/pod/cpu.max"
    assert limit.usable_cpus == 3
    assert "2.5 (/sys/fs/cgroup/pod/cpu.max)" in limit.reason


def test_a_v1_container_quota_holds(tmp_path: Path) -> None:
    below = {
        "cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
        "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    root = host(tmp_path, cgroup="4:cpu,cpuacct:/docker/abc\n", mounts=V1_MOUNTS, below=below)
    limit = read_cpu_limit(root=root, local_ranks=2, environ={}, affinity=lambda: 128)
    assert (limit.quota_cpus, limit.usable_cpus) == (4.0, 2)


def test_a_machine_without_cgroups_has_only_its_affinity(tmp_path: Path) -> None:
    limit = read_cpu_limit(root=tmp_path, environ={}, affinity=lambda: 6)
    assert (limit.usable_cpus, limit.quota_cpus, limit.quota_source) == (6, None, None)


@given(
    affinity=st.integers(1, 512),
    quota=st.none() | st.floats(0.01, 1000),
    ranks=st.integers(1, 64),
    bound=st.booleans(),
)
def test_ranks_together_never_get_more_than_affinity_and_quota(
    affinity: int, quota: float | None, ranks: int, bound: bool
) -> None:
    limit = CpuLimit(
        affinity_cpus=affinity,
        quota_cpus=quota,
        quota_source=None if quota is None else "cpu.max",
        ranks_on_host=ranks,
        bound_to_rank=bound,
    )
    assert 1 <= limit.usable_cpus <= affinity
    if limit.usable_cpus > 1:
        assert bound or limit.usable_cpus * ranks <= affinity
        assert quota is None or limit.usable_cpus * ranks <= math.ceil(quota)
    assert f"{limit.usable_cpus} CPU" in limit.reason


@pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset")
def test_a_process_bound_to_one_cpu_gets_one() -> None:
    cpu = min(os.sched_getaffinity(0))
    code = "from lightning_fastdata.host.cpu import read_cpu_limit as r; print(r().usable_cpus)"
    out = subprocess.run(
        ["taskset", "-c", str(cpu), sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
    )
    assert out.stdout.strip() == "1"


@each(
    ("environ", "ranks"),
    [
        ({}, 1),
        ({"WORLD_SIZE": "16"}, 1),
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}, 8),
        ({"LOCAL_WORLD_SIZE": "", "SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "2", "SLURM_NTASKS_PER_NODE": "4"}, 2),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),1", "SLURM_NODEID": "2"}, 1),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2),1", "SLURM_NODEID": "1"}, 4),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"SLURM_NTASKS_PER_NODE": "many"}, 1),
    ],
)
def test_ranks_come_from_the_launcher(environ: dict[str, str], ranks: int) -> None:
    assert ranks_on_host(environ) == ranks


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=6))
def test_slurms_compressed_list_expands_to_one_entry_per_node(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{n}(x{k})" if k > 1 else str(n) for n, k in runs)
    expanded = [n for n, k in runs for _ in range(k)]
    assert [tasks_on_node(text, node) for node in range(len(expanded))] == expanded
    assert tasks_on_node(text, len(expanded)) is None


@pytest.mark.parametrize(
    ("environ", "affinity", "usable"),
    [
        pytest.param({"SLURM_CPUS_PER_TASK": "8"}, 8, 8, id="each task is bound to its own CPUs"),
        pytest.param({"SLURM_CPUS_PER_TASK": "8"}, 32, 8, id="tasks share the CPUs of the step"),
        pytest.param({}, 32, 8, id="nothing known about the binding"),
        pytest.param(
            {"SLURM_CPUS_PER_TASK": "8", "LOCAL_WORLD_SIZE": "2"}, 8, 4, id="torchrun in one task"
        ),
    ],
)
def test_an_affinity_that_slurm_gave_to_one_rank_is_not_divided(
    environ: dict[str, str], affinity: int, usable: int, tmp_path: Path
) -> None:
    environ = {"SLURM_NTASKS_PER_NODE": "4", **environ}
    limit = read_cpu_limit(root=tmp_path, environ=environ, affinity=lambda: affinity)
    assert limit.usable_cpus == usable


def test_the_callers_number_of_ranks_wins(tmp_path: Path) -> None:
    environ = {"LOCAL_WORLD_SIZE": "8"}
    limit = read_cpu_limit(root=tmp_path, local_ranks=2, environ=environ, affinity=lambda: 8)
    assert (limit.ranks_on_host, limit.usable_cpus) == (2, 4)


def test_throttling_is_read_from_the_cgroup_that_has_the_quota(tmp_path: Path) -> None:
    below = {
        "cpu.stat": "usage_usec 10\n",
        "pod/cpu.stat": "nr_periods 9\nnr_throttled 3\nthrottled_usec 77\n",
        "pod/app/cpu.stat": "nr_periods 0\nnr_throttled 0\nthrottled_usec 0\n",
    }
    root = host(tmp_path, cgroup="0::/pod/app\n", below=below)
    throttling = read_cpu_throttling(root=root)
    assert throttling is not None
    assert (throttling.throttled_periods, throttling.throttled_us) == (3, 77)

"""``fastdata doctor`` tells what limits loading here, ``fastdata parity`` how pixels differ."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_fastdata.cli import doctor_text, loading_limits, main
from lightning_fastdata.host.cpu import CpuLimit, cpu_limit, read_cpu_limit
from lightning_fastdata.host.memory import DeviceMemory, HostMemory

GIB = 2**30


def cpus(count: int, quota: float | None = None) -> CpuLimit:
    return cpu_limit(
        affinity_cpus=count,
        quota_cpus=quota,
        quota_source=None if quota is None else "/sys/fs/cgroup/cpu.max",
        ranks=1,
        bound_to_rank=False,
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
    done = subprocess.run(
        [sys.executable, "-m", "lightning_fastdata.cli", "doctor"],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert read_cpu_limit().reason in done.stdout
    assert "/dev/shm" in done.stdout
    assert "torch " in done.stdout


def test_a_roomy_machine_has_nothing_to_complain_of():
    assert list(loading_limits(cpu=cpus(16), memory=memory(), has_gpu=True)) == []
    text = doctor_text(cpu=cpus(16), memory=memory(), gpus=[], versions={"torch": "2.9"})
    assert "Nothing here limits loading" in text
    assert re.search(r"^torch +2\.9$", text, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("cpu", "held", "has_gpu", "said"),
    [
        (cpus(64, quota=4.0), memory(), True, "4 CPUs of the 64"),
        (cpus(2), memory(), True, "few for a GPU"),
        (cpus(2), memory(), False, "share 2 usable CPUs"),
        (cpus(16), memory(shm_free_bytes=64 * 2**20), True, "/dev/shm has 64 MiB free"),
        (cpus(16), memory(open_files_soft=1024, open_files_hard=4096), True, "ulimit -n 4096"),
        (cpus(16), memory(cgroup_available_bytes=GIB), True, "1.0 GiB of memory"),
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
    assert "A GPU, 10.0 GiB of 16.0 GiB free" in text
    assert "8.0 GiB available in this container, 64.0 GiB on the machine" in text


def test_an_error_of_ours_ends_in_one_sentence(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match="holds other files"):
        main(["demo", "--data", str(tmp_path), "--logs", str(tmp_path / "logs")])
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.fixture
def folder(tmp_path):
    """An image folder with the two photographs of scikit-learn in each of two classes."""
    import sklearn

    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for photo in (Path(sklearn.__file__).parent / "datasets/images").glob("*.jpg"):
            shutil.copy(photo, tmp_path / "images" / name)
    return tmp_path / "images"


def test_parity_prints_a_plain_table_of_the_users_own_files(folder, capsys):
    main(["parity", str(folder), "--count", "2", "--size", "64"])
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert f"2 of 4 files of {folder}, 64 px" in text
    found = re.findall(r"^(train|validation) +(auto|exact) +([\d.]+) +([\d.]+)", text, re.MULTILINE)
    assert [row[:2] for row in found] == [
        ("train", "auto"),
        ("train", "exact"),
        ("validation", "exact"),
    ]
    assert all(20 < float(worst) <= float(median) for *_, median, worst in found)
    # PIL and torch round differently, by one level.
    assert all(float(worst) > 55 for _, how, _, worst in found if how == "exact")


@pytest.mark.parametrize(
    ("arguments", "said"), [(["--count", "0"], "count is 0"), (["--size", "0"], "size is 0")]
)
def test_parity_refuses_what_it_cannot_compare(folder, arguments, said):
    with pytest.raises(SystemExit, match=said):
        main(["parity", str(folder), *arguments])


def test_parity_names_a_folder_that_is_none_and_a_file_that_is_damaged(folder):
    with pytest.raises(SystemExit, match="cannot be used as an image folder"):
        main(["parity", str(folder / "a")])
    (folder / "b" / "china.jpg").write_bytes(b"nothing")
    with pytest.raises(SystemExit, match=r"b/china\.jpg"):
        main(["parity", str(folder)])

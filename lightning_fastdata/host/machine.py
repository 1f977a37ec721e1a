"""This machine: what is installed, which GPUs it has, and what limits loading."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from lightning_fastdata.errors import VersionError
from lightning_fastdata.host.cpu import CpuLimit, read_cpu_limit
from lightning_fastdata.host.memory import DeviceMemory, HostMemory, size_text

if TYPE_CHECKING:
    import torch


LEAST: Final = {"torch": (2, 6), "lightning": (2, 5, 3), "pytorch-lightning": (2, 5, 3)}
"""Lowest versions that work, as in ``pyproject.toml``. Albumentations is checked when a pipeline
is run; with a version that does not work, the pipeline runs on the CPU."""
MALICIOUS: Final = dict.fromkeys(("lightning", "pytorch-lightning"), ((2, 6, 2), (2, 6, 3)))
"""Versions that were malicious uploads, not releases (GHSA-w37p-236h-pfx3)."""
_REPORTED: Final = (
    "lightning-fastdata", "torch", "torchvision", "lightning", "albumentations", "numpy",
)  # fmt: skip
_ASKED: Final = ("--query-gpu=name,memory.free,memory.total", "--format=csv,noheader,nounits")
_MOST_S: Final = 20.0
"""Most seconds to wait for ``nvidia-smi``: a driver that is not kept loaded takes some."""
_MIB: Final = 2**20
_GIB: Final = 2**30
_ENOUGH_OPEN_FILES: Final = 65536


def check_versions(installed: Callable[[str], str] = importlib.metadata.version) -> None:
    """Raise :class:`VersionError` if a package is installed in a version that does not work."""
    for name, least in LEAST.items():
        try:
            version = installed(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found = tuple(map(int, re.findall(r"\d+", (version or "").split("+")[0])[:3]))
        if found and found < least:
            needed = ".".join(map(str, least))
            raise VersionError(
                f"lightning_fastdata needs {name} {needed} or newer, and {version} is installed. "
                f"pip install --upgrade '{name}>={needed}'"
            )
        if found in MALICIOUS.get(name, ()):
            raise VersionError(
                f"{name} {version} was a malicious upload, not a release: GHSA-w37p-236h-pfx3 says "
                f"what to do about it. Then pip install '{name}>2.6.3'."
            )


def version_of(package: str) -> str | None:
    """Return the version of a package; None: it is not installed, or its version is unknown."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_versions() -> dict[str, str]:
    """Return the versions of Python, this package and those it uses; absent ones are left out."""
    found = {package: version_of(package) for package in _REPORTED}
    installed = {package: version for package, version in found.items() if version is not None}
    return {"python": platform.python_version(), **installed}


def describe_machine(device: torch.device) -> dict[str, str | int | float]:
    """Return the system, the number of usable CPUs, and the name of the model's device."""
    from lightning_fastdata.device.backend import name_of  # loads torch

    return {
        "system": f"{platform.system()} {platform.machine()}",
        "usable_cpus": read_cpu_limit().usable_cpus,
        "device": name_of(device),
    }


def doctor_text(
    *,
    cpu: CpuLimit,
    memory: HostMemory,
    gpus: Sequence[tuple[str, DeviceMemory | None]],
    versions: Mapping[str, str],
) -> str:
    """Return the text that ``fastdata doctor`` prints."""
    shm, soft, hard = memory.shm_free_bytes, memory.open_files_soft, memory.open_files_hard
    upper = "no upper limit" if hard is None else f"up to {hard}"
    left = memory.cgroup_available_bytes
    contained = left is not None and left <= memory.ram_available_bytes
    whole = f" in this container, {size_text(memory.ram_available_bytes)} on the machine"
    rows = [
        ("CPUs", cpu.reason),
        ("memory", f"{size_text(memory.available_bytes)} available{whole if contained else ''}"),
        ("/dev/shm", "none on this system" if shm is None else f"{size_text(shm)} free"),
        ("open files", "no limit" if soft is None else f"{soft} ({upper})"),
        *((f"GPU {index}", _gpu_text(*gpu)) for index, gpu in enumerate(gpus)),
        *([] if gpus else [("GPU", "none that this torch can use; training runs on the CPU")]),
        *versions.items(),
    ]
    width = max(len(name) for name, _ in rows)
    limits = list(loading_limits(cpu=cpu, memory=memory, has_gpu=bool(gpus)))
    head = "What limits loading here:" if limits else "Nothing here limits loading."
    facts = [f"{name:<{width}}  {value}" for name, value in rows]
    return "\n".join([*facts, "", head, *(f"- {limit}" for limit in limits)])


def _gpu_text(name: str, held: DeviceMemory | None) -> str:
    if held is None:
        return f"{name}, whose driver does not tell its memory"
    return f"{name}, {size_text(held.free_bytes)} of {size_text(held.total_bytes)} free"


def loading_limits(*, cpu: CpuLimit, memory: HostMemory, has_gpu: bool) -> Iterator[str]:
    """Yield the limits of data loading on this machine as text, each with a remedy."""
    if cpu.quota_cpus is not None and cpu.quota_cpus < cpu.affinity_cpus:
        yield (
            f"The container may use {cpu.quota_cpus:g} CPUs of the {cpu.affinity_cpus} that "
            f"programs see ({cpu.quota_source}). More workers than that only get throttled; ask "
            "for more CPUs (docker --cpus, Kubernetes limits.cpu)."
        )
    usable = f"{cpu.usable_cpus} usable CPU{'s' * (cpu.usable_cpus != 1)}"
    if has_gpu and cpu.usable_cpus < 4:
        yield (
            f"{usable} {'is' if cpu.usable_cpus == 1 else 'are'} few for a GPU. Let FastDataModule "
            "run the augmentation on the GPU (augment=...), and store images at the size you train "
            "with."
        )
    if not has_gpu and cpu.usable_cpus <= 2:
        yield (
            f"Training and loading share {usable}: loading ahead can hide waiting for files, but "
            "not computing."
        )
    if memory.shm_free_bytes is not None and memory.shm_free_bytes < 512 * _MIB:
        yield (
            f"/dev/shm has {size_text(memory.shm_free_bytes)} free. torch's own workers hand "
            "batches over there (a plain DataLoader has them), and die of a bus error when it is "
            'full; cache="ram" needs it, too. Start the container with --shm-size=8g or --ipc=host.'
        )
    if memory.open_files_soft is not None and memory.open_files_soft < 4096:
        raised = min(_ENOUGH_OPEN_FILES, memory.open_files_hard or _ENOUGH_OPEN_FILES)
        yield (
            f"{memory.open_files_soft} open files are allowed. Each tensor from torch's own "
            f"workers takes one for as long as it is kept: run `ulimit -n {raised}` before "
            "training if it fails with 'Too many open files'."
        )
    if memory.available_bytes < 2 * _GIB:
        yield (
            f"{size_text(memory.available_bytes)} of memory are available; every worker process "
            "takes a share of them. Free some, or use fewer workers (LoaderOptions(num_workers=1))."
        )


def read_gpus() -> list[tuple[str, DeviceMemory | None]]:
    """Return name and memory of each GPU that torch may use; None: the driver does not tell.

    The driver lists them: no CUDA context is opened, which takes hundreds of MiB on a GPU that may
    be at work. ``CUDA_VISIBLE_DEVICES`` may leave GPUs out.
    """
    from lightning_fastdata.device.backend import gpu_count

    gpus = gpu_count()
    lines = _listed_by_driver() if gpus else []
    if len(lines) == gpus:
        return [_parsed(line) for line in lines]
    return [(f"GPU {number}", None) for number in range(gpus)]


def _listed_by_driver() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = ["nvidia-smi", *([f"--id={visible}"] if visible else []), *_ASKED]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MOST_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()


def _parsed(line: str) -> tuple[str, DeviceMemory | None]:
    name, free, total = (part.strip() for part in line.rsplit(",", 2))
    # A GPU that shares memory with the CPU says "[N/A]".
    known = free.isdecimal() and total.isdecimal()
    return name, DeviceMemory(int(free) * _MIB, int(total) * _MIB) if known else None

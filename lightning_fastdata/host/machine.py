"""What this machine and its libraries are, for reports."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from lightning_fastdata.host.cpu import read_cpu_limit

if TYPE_CHECKING:
    import torch

PACKAGES = ("lightning-fastdata", "torch", "torchvision", "lightning", "albumentations", "numpy")


def read_versions() -> dict[str, str]:
    """Return the versions of this package and of those it stands on; absent ones are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def describe_machine(device: torch.device) -> dict[str, str | int | float]:
    """Return system, CPUs that may be used, and the device that computes.

    Args:
        device: The device that the model is on.
    """
    name = device.type
    if device.type == "cuda":
        import torch

        name = torch.cuda.get_device_name(device)
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "usable_cpus": read_cpu_limit().usable_cpus,
        "device": name,
    }

"""Compiles kernels into Triton's cache on disk; a program, which takes no GPU.

It reads from its input what :mod:`lightning_fastdata.augment.replay.warm_up` asks for.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from lightning_fastdata.augment.replay.kernels.fused import KERNELS, OPTIONS
from lightning_fastdata.host.system_calls import die_with


class _Device:
    """Stands for Triton's driver where there is no GPU, or none that is to be touched."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch  # type: ignore[no-any-return]

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002 - Triton's signature
        return 0


class _Tensor:
    """Stands for a tensor, of which Triton wants to know the dtype and where it lies."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def data_ptr(self) -> int:
        return 0


def compiled(kernel: Mapping[str, Any], capability: int) -> Any:
    """Return a kernel as Triton has compiled it for GPUs of a capability, such as 90."""
    driver.set_active(_Device(capability))
    arguments = [_Tensor(one) if isinstance(one, str) else one for one in kernel["arguments"]]
    launched = KERNELS[kernel["name"]]
    return launched.warmup(*arguments, grid=(1,), **kernel["constants"], **OPTIONS)


def main() -> None:
    """Compile what is asked for, several kernels at a time: the first batch waits for them."""
    asked = json.load(sys.stdin)
    die_with(asked["parent"])
    with ThreadPoolExecutor(asked["cpus"]) as pool:
        list(pool.map(lambda kernel: compiled(kernel, asked["capability"]), asked["kernels"]))
    os.write(asked["lock"], asked["done"].encode())


if __name__ == "__main__":
    main()

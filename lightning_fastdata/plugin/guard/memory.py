"""The memory of a device: what is free, what was taken, and errors that say it ran out."""

from __future__ import annotations

import math
import re
from typing import Final, Protocol

import torch

_MIB: Final = 2**20
_GIB: Final = 2**30
# cuDNN gives these three for a workspace that it could not get
_OUT_OF_MEMORY: Final = re.compile(
    "(CUDA|HIP|XPU|MPS backend)( error:)? out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    "|CUDNN_STATUS_(ALLOC_FAILED|NOT_SUPPORTED|INTERNAL_ERROR)"
    "|DefaultCPUAllocator: (can't allocate|not enough) memory"
)


class MemoryReader(Protocol):
    """Reads the memory of one device. All numbers are bytes."""

    def reset_peak(self) -> None:
        """Give cached memory back to the driver and start to measure a new peak."""

    def peak_bytes(self) -> int:
        """Return the most that live tensors of this process took since the last reset."""

    def free_bytes(self) -> int:
        """Return what live tensors of this process could take at most.

        What the driver says is free, and what torch's allocator has reserved already.
        """

    def total_bytes(self) -> int:
        """Return the memory of the device, or the part of it that this process may use."""


class CudaMemoryReader:
    """Reads the memory of one CUDA (or ROCm) device from the driver and from torch's allocator.

    The peak is that of allocated, not of reserved memory: the allocator reserves segments of 2 to
    20 MiB, so that at a few rows the reserved memory often does not grow at all. The difference,
    fragmentation, is part of what :func:`reserve_bytes` is for.
    """

    def __init__(self, device: torch.device | int | str = "cuda") -> None:
        named = torch.device(device)
        # Some of torch's memory functions take a device only with its index.
        index = torch.cuda.current_device() if named.index is None else named.index
        self._device = torch.device(named.type, index)

    def reset_peak(self) -> None:
        """Give cached memory back, and start to measure a new peak."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """Return the most that live tensors took since the last reset."""
        return torch.cuda.max_memory_allocated(self._device)

    def free_bytes(self) -> int:
        """Return the free memory, with what is reserved already."""
        free, _total = torch.cuda.mem_get_info(self._device)
        return min(free + torch.cuda.memory_reserved(self._device), self.total_bytes())

    def total_bytes(self) -> int:
        """Return the memory of the device, or the part that may be used."""
        # Absent before torch 2.7; without it a limit set by the user is not seen.
        read_fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)
        total = torch.cuda.mem_get_info(self._device)[1]
        return int(total * read_fraction(self._device))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device, or torch's host allocator, ran out of memory.

    Besides ``torch.OutOfMemoryError`` these are plain ``RuntimeError`` that name an allocator, a
    cuBLAS handle, or a cuDNN workspace. The cuDNN statuses ``NOT_SUPPORTED`` and ``INTERNAL_ERROR``
    have other causes too; such an error comes back at the smallest batch.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None


def reserve_bytes(total_bytes: int) -> int:
    """Return the memory to leave free: the larger of 5 % of the device and 512 MiB.

    It covers what :func:`predict_peak_bytes` misses, fragmentation, and growth of others.
    """
    return max(math.ceil(total_bytes / 20), 512 * _MIB)


def size_text(count: int) -> str:
    """Return bytes in words."""
    return f"{count / _GIB:.2f} GiB" if abs(count) >= _GIB else f"{count / _MIB:.0f} MiB"

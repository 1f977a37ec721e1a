"""Functions of devices of any type: the only module that asks torch for them.

torch has a module for each type of device (``torch.cuda``, ``torch.xpu``, ``torch.mps``, those of
other makers), in which the same functions have the same names. If a module lacks a name, its type
of device cannot do or does not tell this: it is None here, and no figure is shown for it. The CPU
is a device that has none of these functions.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, TypeAlias

import torch

from lightning_fastdata.errors import OptionsError, check

_STREAMS: Final = ("Stream", "Event", "stream", "current_stream")
_WITHOUT_PAGE_LOCKS: Final = ("cpu", "meta", "mps", "xla")
"""Types of devices that share the memory of the host, or do not read page-locked memory."""
_OUT_OF_MEMORY: Final = (
    r"\bout of memory\b",  # allocators of all devices, the driver, Triton's launcher
    r"NVML_SUCCESS == r INTERNAL ASSERT FAILED",  # on MIG, where it may not ask
    r"(CU|HIP)[A-Z]+_(STATUS_)?ALLOC_FAILED",  # of cuBLAS, cuSOLVER, cuSPARSE, cuFFT
    r"(CU|HIP)BLAS_STATUS_NOT_INITIALIZED when calling .(cu|hip)blasCreate",  # no room for a handle
    r"CUSPARSE_STATUS_INSUFFICIENT_RESOURCES",
    r"CUDNN_STATUS_(NOT_SUPPORTED|INTERNAL_ERROR)",  # no room for a workspace
    r"Unable to find a valid cuDNN algorithm to run convolution",
    r"was unable to find an engine to execute this computation",
    r"UR_RESULT_ERROR_OUT_OF_(DEVICE|HOST)_MEMORY",  # SYCL's, below XPU
    r"Invalid buffer size: [\d.]+ [KMGT]i?B",  # Metal's, below MPS
    r"DefaultCPUAllocator: (can't allocate|not enough) memory",
)
"""Patterns in the texts of out-of-memory errors that have no type of their own, as reported."""


# Which devices there are


def _module(device: torch.device) -> Any:
    """Return torch's module for the type of a device; None: there is none, or it is the CPU."""
    return None if device.type == "cpu" else getattr(torch, device.type, None)


def default_type() -> str:
    """Return the type of this machine's accelerator, such as ``"cuda"``, or else ``"cpu"``."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if found is None else found.type


def devices() -> list[torch.device]:
    """Return the devices of this process other than the CPU."""
    kind = default_type()
    count = 0 if kind == "cpu" else torch.accelerator.device_count()
    return [torch.device(kind, index) for index in range(count)]


def device_of(named: torch.device | str | int) -> torch.device:
    """Return a device by its name, or an accelerator by its index.

    Raises:
        OptionsError: It is no device, or this machine does not have it.
    """
    kind = default_type()
    try:
        if isinstance(named, int):
            device = torch.device("cuda" if kind == "cpu" else kind, named)
        else:
            device = torch.device(named)
    except (RuntimeError, TypeError) as error:
        raise OptionsError(
            f"device={named!r} is no device: {error}. Pass 'cpu', 'cuda' or a torch.device."
        ) from error
    check("device", named, is_there(device), "'cpu' and the accelerators of this machine")
    return device


def is_there(device: torch.device) -> bool:
    """Return whether this machine has a device, as far as torch knows; it opens none."""
    count = getattr(_module(device), "device_count", None)
    return count is None or (device.index or 0) < count()


def name_of(device: torch.device) -> str:
    """Return the name that a device has for itself, or else its type."""
    named = getattr(_module(device), "get_device_name", None)
    return device.type if named is None else str(named(device))


def gpu_count() -> int:
    """Return how many CUDA devices there are; torch asks their driver, and opens no device."""
    return torch.cuda.device_count()


# The current device; each thread has its own


def current(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a device is the current one of its type."""
    enter = getattr(_module(device), "device", None)
    block: AbstractContextManager[object] = nullcontext() if enter is None else enter(device)
    return block


def current_index() -> int:
    """Return the index of the current device of this thread, where there is an accelerator."""
    return torch.accelerator.current_device_index()


def set_current_index(index: int) -> None:
    """Make a device the current one of this thread."""
    torch.accelerator.set_device_index(index)


# Streams and events


def has_streams(device: torch.device) -> bool:
    """Return whether a device has streams that run side by side, and events in them."""
    return all(hasattr(_module(device), name) for name in _STREAMS)


def new_event(device: torch.device, *, timed: bool = False) -> torch.Event:
    """Return an event for the streams of a device, which can be ``timed`` or waited for."""
    # Blocking: a thread that waits for CUDA then sleeps, and leaves its CPU to the workers.
    waits = {"blocking": True} if device.type == "cuda" else {}
    how = {"enable_timing": True} if timed else waits
    event: torch.Event = _module(device).Event(**how)
    return event


def current_stream(device: torch.device) -> torch.Stream:
    """Return the current stream of a device that has streams."""
    stream: torch.Stream = _module(device).current_stream(device)
    return stream


class DeviceStreams:
    """A consumer's stream on a device, and a side stream next to it.

    The consumer's stream is the one that is current outside of :meth:`aside`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side: torch.Stream = _module(device).Stream(device)

    def aside(self) -> AbstractContextManager[object]:
        """Return a context in which the side stream is the current one."""
        block: AbstractContextManager[object] = _module(self.device).stream(self.side)
        return block

    def mark(self) -> torch.Event:
        """Return an event after all work that the current stream has been given so far."""
        event = new_event(self.device)
        event.record(current_stream(self.device))
        return event

    def wait(self, event: torch.Event) -> None:
        """Have the current stream wait for an event; the host does not."""
        current_stream(self.device).wait_event(event)

    def keep(self, tensor: torch.Tensor) -> None:
        """Have a tensor's memory reused only when the current stream is done with it.

        The stream has to finish all work that it has been given by the time the tensor, or the
        batch of a graph library, is freed.
        """
        if not isinstance(tensor, torch.Tensor) or tensor.device.type == self.device.type:
            tensor.record_stream(current_stream(self.device))


def device_streams(device: torch.device) -> DeviceStreams | None:
    """Return the streams of a device; None: it has none that could run side by side."""
    return DeviceStreams(device) if has_streams(device) else None


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all its work; for the CPU, return at once."""
    if device.type != "cpu" and device.type == default_type():
        torch.accelerator.synchronize(device)


# Memory


def reads_page_locked(kind: str) -> bool:
    """Return whether devices of a type copy from page-locked memory while the host goes on."""
    return kind not in _WITHOUT_PAGE_LOCKS


class MemoryReader:
    """Reads the memory of one device from the driver and from torch's allocator, in bytes.

    The peak is that of allocated, not of reserved memory: the allocator reserves segments of 2 to
    20 MiB, so that with a few more rows the reserved memory often does not grow at all. The
    difference, fragmentation, is covered by
    :func:`~lightning_fastdata.host.memory.reserve_bytes`.
    """

    def __init__(self, device: torch.device | str | int) -> None:
        named = device_of(device)
        self._module = _module(named)
        # Some of torch's memory functions take a device only with its index.
        index = self._module.current_device() if named.index is None else named.index
        self._device = torch.device(named.type, index)

    def reset_peak(self) -> None:
        """Give cached memory back to the driver, and start to measure a new peak."""
        self._module.empty_cache()
        self._module.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """Return the most bytes that live tensors of this process took since the last reset."""
        return int(self._module.max_memory_allocated(self._device))

    def free_bytes(self) -> int:
        """Return how many bytes live tensors of this process could take in all.

        These are the free bytes by the driver, and those that torch's allocator has reserved.
        """
        free, _total = self._module.mem_get_info(self._device)
        reserved = self._module.memory_reserved(self._device)
        return min(int(free + reserved), self.total_bytes())

    def total_bytes(self) -> int:
        """Return the memory of the device, or the part of it that this process may use."""
        # Absent before torch 2.7; without it a limit set by the user is not seen.
        read_fraction = getattr(self._module, "get_per_process_memory_fraction", lambda _: 1.0)
        total = self._module.mem_get_info(self._device)[1]
        return int(total * read_fraction(self._device))


def memory_reader(device: torch.device) -> MemoryReader | None:
    """Return a reader of the memory of a device; None: the device does not tell its memory."""
    return MemoryReader(device) if hasattr(_module(device), "mem_get_info") else None


def free_memory() -> None:
    """Give memory that is no longer used back to the devices."""
    gc.collect()
    for device in devices()[:1]:
        _module(device).empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device, or torch's host allocator, ran out of memory.

    Besides ``torch.OutOfMemoryError``, it may be a plain ``RuntimeError`` that says so in its text.
    Some of these have other causes, too (``CUDNN_STATUS_NOT_SUPPORTED``); such an error then comes
    again with the smallest batch.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        re.search(words, str(error)) for words in _OUT_OF_MEMORY
    )


# Random numbers


class FunctionsOfGenerator:
    """Acts as the generator of a device whose type has functions in its place, as Apple's does."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device

    def get_state(self) -> torch.Tensor:
        """Return the generator's state."""
        state: torch.Tensor = self._module.get_rng_state(self._device)
        return state

    def set_state(self, state: torch.Tensor) -> None:
        """Set the generator's state."""
        self._module.set_rng_state(state, self._device)

    def manual_seed(self, seed: int) -> None:
        """Seed the generator."""
        with current(self._device):
            self._module.manual_seed(seed)


DeviceGenerator: TypeAlias = torch.Generator | FunctionsOfGenerator


def generator_of(device: torch.device) -> DeviceGenerator | None:
    """Return the generator that operations of a device draw from; None: that of the CPU."""
    module = _module(device)
    generators: tuple[torch.Generator, ...] = getattr(module, "default_generators", ())
    if generators:
        return generators[module.current_device() if device.index is None else device.index]
    return FunctionsOfGenerator(module, device) if hasattr(module, "get_rng_state") else None


@contextmanager
def device_draws(device: torch.device) -> Iterator[None]:
    """Seed the device's generator from the CPU's for the block, and restore it afterwards."""
    generator = generator_of(device)
    if generator is None:
        yield
        return
    before = generator.get_state()
    generator.manual_seed(int(torch.randint(2**62, ())))
    try:
        yield
    finally:
        generator.set_state(before)


def generators_in_use() -> list[DeviceGenerator]:
    """Return the generators of all devices of this process, if it has begun to use them."""
    found = devices()
    if not found or not getattr(_module(found[0]), "is_initialized", lambda: True)():
        return []
    return [each for device in found if (each := generator_of(device)) is not None]

"""A pretended CUDA in the memory of the CPU, whose copies and kernels run as late as CUDA allows.

``with late_cuda("late-side") as cuda:`` puts it in the place of ``torch.cuda``, and takes it out
again. Code that uses CUDA runs on it unchanged. The host only queues work on streams; a schedule
decides when it is carried out:

- ``"eager"``: at once;
- ``"late"``: when the host waits for it;
- ``"late-side"``, ``"late-main"``, ``"late-other-device"``: the work of side streams, of default
  streams, of devices other than the first when the host or another stream waits for it, and all
  other work at once;
- ``"random"``: in an order that a seed picks among those that streams and events allow.

What it promises is what CUDA and torch promise, and no more:

- A stream carries out its work in order. Streams are ordered by events alone.
- Memory of the device that is let go is overwritten as early as torch's caching allocator may give
  it to somebody else: in the order of the stream it was allocated on, behind the streams of
  ``record_stream``.
- A copy from page-locked memory (``Tensor.pin_memory``, ``lock_memory``) reads it when it is
  carried out. A copy from ordinary memory waits for its stream first, and reads at once.
- The numbers that an operation draws are those of its place in the host's program.

Everything is queued, drawn and carried out in the calls of the host's program, so that one program
and one seed always give one order. Automatic garbage collection is off meanwhile, since it would
free memory of the device at other moments. Threads and processes of the package touch nothing of
this; where they decide when the program asks for something, the order is one of several, and the
laws hold in each. Autograd and kernels of Triton are not pretended.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import random
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

HELD: dict[str, Callable[[Stream], bool]] = {
    "eager": lambda stream: False,
    "late": lambda stream: True,
    "late-side": lambda stream: not stream.is_default,
    "late-main": lambda stream: stream.is_default,
    "late-other-device": lambda stream: stream.device.index != 0,
    "random": lambda stream: True,
}
"""By schedule: whether a stream does nothing before it is waited for."""
SCHEDULES = tuple(HELD)
POISON = 0xA5
"""Each byte of memory of the device that nobody has written, or that was let go."""
_GIB = 2**30
_machine: LateCuda | None = None


def installed() -> LateCuda:
    """Return the pretended CUDA that is in the place of torch's."""
    assert _machine is not None, "no pretended CUDA is installed"
    return _machine


@dataclass(eq=False)
class Mark:
    """A point in the work of a stream."""

    stream: Stream
    passed: bool = False
    at: int = 0
    """When it was passed, in pieces of work that the machine had carried out."""


@dataclass(frozen=True)
class Wait:
    """The stream goes on when another has passed a mark."""

    mark: Mark


@dataclass(frozen=True)
class HostWait:
    """The host has waited for work that the device had still to do."""

    call: str
    """What waited: ``"Event.synchronize"``, ``"copy from ordinary memory"``, ..."""
    copies: int
    """Copies from the host that had been queued by then."""
    notes: int
    """Notes that the device had come to when the wait was over."""
    noted: int
    """Notes that had been queued by then."""


class Stream:
    """Stands for ``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.machine = installed()
        self.device = self.machine.device(device)
        self.is_default = False
        self.cuda_stream = self.stream_id = self.machine.add(self)
        self.queue: deque[Callable[[], object] | Mark | Wait] = deque()

    def mark(self) -> Mark:
        """Queue a mark behind all work that was given so far."""
        mark = Mark(self)
        self.machine.push(self, mark)
        return mark

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.mark is not None:
            self.machine.push(self, Wait(event.mark))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.machine.host_waits("Stream.synchronize", self)

    def query(self) -> bool:
        self.machine.looked_at()
        return not self.queue

    def __enter__(self) -> Stream:
        self._context = self.machine.current(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(None, None, None)


class Event:
    """Stands for ``torch.cuda.Event``."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> None:
        self.machine = installed()
        self.timed = enable_timing
        self.mark: Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = self.machine.current_stream() if stream is None else stream
        if self.mark is not None and self.mark.stream.device != stream.device:
            raise RuntimeError("the event was recorded on another device before")
        self.mark = stream.mark()

    def wait(self, stream: Stream | None = None) -> None:
        (self.machine.current_stream() if stream is None else stream).wait_event(self)

    def query(self) -> bool:
        self.machine.looked_at()
        return self.mark is None or self.mark.passed

    def synchronize(self) -> None:
        if self.mark is not None:
            self.machine.host_waits("Event.synchronize", self.mark)

    def elapsed_time(self, other: Event) -> float:
        """Return the pieces of work between two events, as milliseconds."""
        if not (self.timed and other.timed):
            raise ValueError("both events must be created with enable_timing=True")
        if self.mark is None or other.mark is None:
            raise ValueError("both events must be recorded")
        if not (self.mark.passed and other.mark.passed):
            raise RuntimeError("device not ready")
        return float(other.mark.at - self.mark.at)


class EventOfOthers(Event):
    """Stands for ``torch.xpu.Event``, whose host does not sleep while it waits."""

    def __init__(self, enable_timing: bool = False) -> None:
        super().__init__(enable_timing)


class LateCuda:
    """Several CUDA devices of one process, and the host memory that they read."""

    def __init__(
        self, schedule: str, seed: int = 0, *, devices: int = 2, kind: str = "cuda"
    ) -> None:
        self.schedule = schedule
        self.kind = kind
        """The type of the devices, as torch names it."""
        self.device_count = devices
        self.generators = tuple(torch.Generator().manual_seed(n) for n in range(devices))
        self.waits: list[HostWait] = []
        """Each time that the host had to wait, in order."""
        self.calls: Counter[str] = Counter()
        """How often the host asked to wait, had it to or not."""
        self.copies: Counter[str] = Counter()
        """Copies from the host, by the kind of memory: ``"locked"``, ``"pinned"``, ``"ordinary"``.
        Locked is what :meth:`lock_memory` gave, pinned what ``Tensor.pin_memory`` gave."""
        self.copied = 0
        """Copies from the host that were carried out."""
        self.torn: list[str] = []
        """Page-locked memory that was written while a queued copy read from it."""
        self.locked: dict[int, int] = {}
        """Bytes by address, of memory that is locked now."""
        self._pinned: dict[int, int] = {}
        self._kept: list[np.ndarray] = []
        self.live_bytes = self.peak_bytes = 0
        """What tensors take on all devices, and the most that they took, as torch counts them."""
        self.notes = self.noted = 0
        """Notes that the device has come to, and that it was given."""
        self.order: list[int] = []
        """The number of the stream of each piece of work that was carried out."""
        self._held = HELD[schedule]
        self._random = random.Random(seed) if schedule == "random" else None
        self._lock = threading.RLock()
        self._busy = False
        self._streams: list[Stream] = []
        self._defaults: dict[int, Stream] = {}
        self._numbers = itertools.count(1)
        self._here = threading.local()

    # Streams and devices

    def add(self, stream: Stream) -> int:
        """Take up a stream, and return its number."""
        self._streams.append(stream)
        return len(self._streams)

    def device(self, device: Any = None) -> torch.device:
        """Return a device with its index, whichever way the caller named it."""
        if isinstance(device, int):
            device = torch.device(self.kind, device)
        index = None if device is None else torch.device(device).index
        return torch.device(self.kind, self.current_device() if index is None else index)

    def current_device(self) -> int:
        return getattr(self._here, "device", 0)

    def set_device(self, device: Any) -> None:
        self._here.device = self.device(device).index

    def default_stream(self, device: Any = None) -> Stream:
        device = self.device(device)
        if device.index not in self._defaults:
            stream = self._defaults[device.index] = Stream(device)
            stream.is_default = True
        return self._defaults[device.index]

    def current_stream(self, device: Any = None) -> Stream:
        device = self.device(device)
        streams: dict[int, Stream] = getattr(self._here, "streams", {})
        return streams.get(device.index) or self.default_stream(device)

    @property
    def side_streams(self) -> list[Stream]:
        """The streams that the program has made."""
        return [stream for stream in self._streams if not stream.is_default]

    @contextlib.contextmanager
    def current(self, stream: Stream | None) -> Iterator[None]:
        """Have a stream, and its device, be the current one; stands for ``torch.cuda.stream``."""
        if stream is None:
            yield
            return
        streams = self._here.__dict__.setdefault("streams", {})
        before = streams.get(stream.device.index)
        with self.on_device(stream.device):
            streams[stream.device.index] = stream
            try:
                yield
            finally:
                streams[stream.device.index] = before

    @contextlib.contextmanager
    def on_device(self, device: Any) -> Iterator[None]:
        """Have a device be the current one; stands for ``torch.cuda.device``."""
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            self._here.device = before

    # Work

    def push(self, stream: Stream, work: Callable[[], object] | Mark | Wait) -> None:
        """Queue work, and carry out as much as the schedule has be carried out at once."""
        with self._lock:
            stream.queue.append(work)
            if self._random is None:
                self._run_ahead()
            else:
                self._some_steps(self._random.randrange(3))

    def looked_at(self) -> None:
        """Go on a little, since the host has looked whether something is done."""
        with self._lock:
            self._some_steps(1)

    def note(self, device: torch.device) -> None:
        """Queue a note on the current stream of a device, say at the end of a training step."""

        def come_to() -> None:
            self.notes += 1

        self.noted += 1
        self.push(self.current_stream(device), come_to)

    def host_waits(self, call: str, until: Mark | Stream) -> None:
        """Carry out what has to be done before a mark, or all that a stream was given."""
        with self._lock:
            self.calls[call] += 1
            self._run_ahead()
            if isinstance(until, Stream):
                if not until.queue:
                    return
                mark = Mark(until)
                until.queue.append(mark)
            else:
                mark = until
            if mark.passed:
                return
            self._reach(mark)
            self.waits.append(HostWait(call, self.copies.total(), self.notes, self.noted))

    def synchronize(self, device: Any = None) -> None:
        """Wait for all streams of a device; stands for ``torch.cuda.synchronize``."""
        device = self.device(device)
        self.calls["synchronize"] += 1
        self._run_ahead()
        busy = [stream for stream in self._streams if stream.device == device and stream.queue]
        for stream in busy:
            self._reach(stream.mark())
        if busy:
            self.waits.append(HostWait("synchronize", self.copies.total(), self.notes, self.noted))

    def finish(self) -> None:
        """Carry out all that is queued; no wait of the program."""
        with self._lock:
            while any(stream.queue for stream in self._streams):
                for stream in self._streams:
                    self._reach(stream.mark())

    def _reach(self, mark: Mark) -> None:
        """Carry out what a mark waits for: nothing else, or at random something else as well."""
        while not mark.passed:
            if self._random is not None:
                self._some_steps(1)
                continue
            following = mark.stream.queue[0]
            if isinstance(following, Wait) and not following.mark.passed:
                self._reach(following.mark)
            else:
                self._step(mark.stream)
        self._run_ahead()

    def _run_ahead(self) -> None:
        """Have the streams that are not late do all that they can."""
        if self._random is not None or self._busy:
            return
        moved = True
        while moved:
            moved = False
            for stream in self._streams:
                while not self._held(stream) and self._is_able(stream):
                    self._step(stream)
                    moved = True

    def _some_steps(self, count: int) -> None:
        if self._random is None or self._busy:
            return
        for _ in range(count):
            able = list(filter(self._is_able, self._streams))
            if able:
                self._step(self._random.choice(able))

    @staticmethod
    def _is_able(stream: Stream) -> bool:
        if not stream.queue:
            return False
        following = stream.queue[0]
        return not isinstance(following, Wait) or following.mark.passed

    def _step(self, stream: Stream) -> None:
        work = stream.queue.popleft()
        self.order.append(stream.stream_id)
        if isinstance(work, Mark):
            work.passed, work.at = True, len(self.order)
        elif not isinstance(work, Wait):
            # Memory that this work lets go of queues work of its own, which is not begun within.
            self._busy = True
            try:
                work()
            finally:
                self._busy = False

    # Memory of the device

    def allocate(self, memory: torch.Tensor, stream: Stream) -> Block:
        """Return what keeps memory of the device; the caller has made it, and not written it."""
        storage = memory.untyped_storage()
        _bytes_of(storage).fill_(POISON)
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return Block(self, storage, stream)

    def let_go(
        self, storage: torch.UntypedStorage, stream: Stream, used_by: dict[Stream, None]
    ) -> None:
        """Overwrite memory as soon as the allocator of torch may give it to somebody else.

        It counts as free when the other streams that use it have passed: what its own stream is
        given next is behind all that it has to do, however late that is.
        """

        left = {stream: None, **used_by}

        def give_back() -> None:
            self.live_bytes -= storage.nbytes()

        def passed(each: Stream) -> None:
            del left[each]
            if each is not stream and left.keys() <= {stream}:
                give_back()
            if not left:
                _bytes_of(storage).fill_(POISON)

        # No stream waits for another: the allocator only keeps the memory back.
        with self._lock:
            if left.keys() == {stream}:
                give_back()
            for each in list(left):
                each.queue.append(partial(passed, each))

    # Memory of the host

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in page-locked memory, as ``Tensor.pin_memory`` does."""
        if tensor.device.type != "cpu":
            raise RuntimeError(f"cannot pin a tensor on {tensor.device}")
        if self.kind_of(tensor) != "ordinary":
            return tensor
        strides = torch.empty_like(tensor, device="meta").stride()
        # What is page-locked is the memory, which views of the tensor keep as well.
        memory = np.empty(max(1, tensor.nbytes), np.uint8)
        address = memory.ctypes.data
        self._pinned[address] = memory.nbytes
        weakref.finalize(memory, self._pinned.pop, address).atexit = False
        values = torch.from_numpy(memory)[: tensor.nbytes].view(tensor.dtype)
        return values.as_strided(tensor.shape, strides).copy_(tensor)

    def kind_of(self, tensor: torch.Tensor) -> str:
        """Return whether the memory of a tensor is ``locked``, ``pinned`` or ``ordinary``."""
        if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.numel():
            address = tensor.data_ptr()
            for kind, known in (("locked", self.locked), ("pinned", self._pinned)):
                if any(begin <= address < begin + size for begin, size in list(known.items())):
                    return kind
        return "ordinary"

    def copy_from_host(
        self, source: torch.Tensor, target: torch.Tensor, stream: Stream, *, non_blocking: bool
    ) -> None:
        """Queue a copy from the host into memory of the device."""
        kind = self.kind_of(source)
        self.copies[kind] += 1
        if kind == "ordinary":
            self.host_waits("copy from ordinary memory", stream)
        at_launch = source.clone()
        if kind == "ordinary":

            def copy() -> None:
                self.copied += 1
                target.copy_(at_launch)

            self.push(stream, copy)
        else:
            # Nobody keeps locked memory for a copy; torch keeps what it has pinned.
            read = _reader(source) if kind == "locked" else lambda: source
            number = next(self._numbers)

            def copy_late() -> None:
                self.copied += 1
                now = read()
                if not torch.equal(_as_bytes(now), _as_bytes(at_launch)):
                    self.torn.append(f"{kind} memory was written while copy {number} was queued")
                target.copy_(now)

            self.push(stream, copy_late)
        if not non_blocking:
            self.host_waits("copy that blocks", stream)

    def lock_memory(self, size: int) -> np.ndarray:
        """Return int64 memory of the host that is locked, and lives as long as this machine."""
        memory = np.empty(size, np.int64)
        self._kept.append(memory)
        self.locked[memory.ctypes.data] = memory.nbytes
        return memory


class Block:
    """Memory of the device, let go of when the last tensor that views it is gone."""

    def __init__(self, machine: LateCuda, storage: torch.UntypedStorage, stream: Stream) -> None:
        self.used_by: dict[Stream, None] = {}
        """The streams of ``record_stream``."""
        weakref.finalize(self, machine.let_go, storage, stream, self.used_by).atexit = False


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _reader(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return what reads the memory of a tensor by its address, without keeping it."""
    address, dtype, shape, strides = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))

    def read() -> torch.Tensor:
        memory = (ctypes.c_char * (span * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)

    return read


@contextlib.contextmanager
def late_cuda(
    schedule: str = "random", seed: int = 0, *, devices: int = 2, kind: str = "cuda"
) -> Iterator[LateCuda]:
    """Put a pretended CUDA in the place of torch's while the block runs; of XPU all but tensors."""
    global _machine  # noqa: PLW0603 - torch.cuda is one for the whole process, too
    from rig.late_tensor import LateMode

    assert _machine is None, "one pretended CUDA at a time"
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    with contextlib.ExitStack() as stack:
        stack.callback(gc.enable if collects else gc.disable)
        _machine = machine = LateCuda(schedule, seed, devices=devices, kind=kind)
        stack.callback(_forget)
        stack.enter_context(mock.patch.dict(os.environ))  # Lightning names the devices there
        for owner, names in _stand_ins(machine):
            for name, stand_in in names.items():
                stack.enter_context(mock.patch.object(owner, name, stand_in, create=False))
        # Without it torch.tensor(..., device="cuda") goes to the real device by itself.
        lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifts)
        _accept_tensors_on_cuda()
        with LateMode(machine):
            yield machine
            gc.collect()
        machine.finish()


def _accept_tensors_on_cuda() -> None:
    """Have torch accept tensors on CUDA where there is none, as its FakeTensorMode does.

    This alone cannot be undone. To a program that asks whether there is a CUDA it says nothing.
    """
    # Autograd counts devices at the first backward, and would start a thread for each of those that
    # are pretended; a process with such threads must not fork.
    torch.zeros((), requires_grad=True).backward()
    torch._C._ensureCUDADeviceGuardSet()


def _forget() -> None:
    global _machine  # noqa: PLW0603 - as above
    _machine = None


def _stand_ins(machine: LateCuda) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield what has names to be replaced, and what stands for them."""
    from lightning_fastdata.augment.replay import torch as replay
    from lightning_fastdata.augment.replay import warm_up

    generators = machine.generators

    def generator(device: Any = None) -> torch.Generator:
        return generators[machine.device(device).index]

    def seed_all(seed: int) -> None:
        for each in generators:
            each.manual_seed(seed)

    def set_all(states: list[torch.Tensor]) -> None:
        for each, state in zip(generators, states, strict=True):
            each.set_state(state)

    properties = SimpleNamespace(
        name="late", total_memory=80 * _GIB, major=9, minor=0, multi_processor_count=132
    )
    owner = getattr(torch, machine.kind)
    names = {
        "Stream": Stream,
        "Event": Event if machine.kind == "cuda" else EventOfOthers,
        "stream": machine.current,
        "device": machine.on_device,
        "current_stream": machine.current_stream,
        "default_stream": machine.default_stream,
        "current_device": machine.current_device,
        "set_device": machine.set_device,
        "device_count": lambda: machine.device_count,
        "synchronize": machine.synchronize,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "default_generators": generators,
        "get_rng_state": lambda device=None: generator(device).get_state(),
        "set_rng_state": lambda state, device=None: generator(device).set_state(state),
        "get_rng_state_all": lambda: [each.get_state() for each in generators],
        "set_rng_state_all": set_all,
        "manual_seed": lambda seed: generator().manual_seed(seed),
        "manual_seed_all": seed_all,
        "empty_cache": lambda: None,
        "set_per_process_memory_fraction": lambda fraction, device=None: None,
        "mem_get_info": lambda device=None: (60 * _GIB, 80 * _GIB),
        "memory_allocated": lambda device=None: machine.live_bytes,
        "max_memory_allocated": lambda device=None: machine.peak_bytes,
        "memory_reserved": lambda device=None: machine.live_bytes,
        "reset_peak_memory_stats": lambda device=None: None,
        "get_device_name": lambda device=None: "late",
        "get_device_properties": lambda device=None: properties,
        "get_per_process_memory_fraction": lambda device=None: 1.0,
        "power_draw": lambda device=None: 1,
    }
    yield owner, {name: each for name, each in names.items() if hasattr(owner, name)}
    yield (
        torch.accelerator,
        {
            "is_available": lambda: True,
            "current_accelerator": lambda check_available=False: torch.device(machine.kind),
            "current_device_index": machine.current_device,
            "set_device_index": machine.set_device,
            "device_count": lambda: machine.device_count,
            "synchronize": machine.synchronize,
        },
    )
    yield (
        torch.Tensor,
        {
            "pin_memory": lambda tensor, device=None: machine.pin(tensor),
            "is_pinned": lambda tensor, device=None: machine.kind_of(tensor) != "ordinary",
        },
    )
    for module in (warm_up, replay):
        yield module, {"has_kernels": lambda device: False}

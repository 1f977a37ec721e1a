"""A simulated device: streams, events and a caching allocator, run in any order they allow.

Work is queued by the host and carried out later, stream by stream, in an order that a random number
generator picks among all that the events allow. Memory is real: what is used again too early is
overwritten, and whoever reads it then reads something else.
"""

from __future__ import annotations

import random
import weakref
from collections import defaultdict, deque
from contextlib import contextmanager

import numpy as np

GARBAGE = -12345


class Event:
    def __init__(self, device):
        self.device = device
        self.passed = False

    def query(self):
        return self.passed

    def synchronize(self):
        while not self.passed:
            self.device.step()


class VirtualDevice:
    """Streams ``main`` and ``side``, and memory in blocks."""

    def __init__(self, seed=0, *, lazy=False):
        self.random = random.Random(seed)
        self.lazy = lazy
        """Do nothing before somebody waits: the host runs as far ahead as it can."""
        self.current = "main"
        self.queues = defaultdict(deque)
        self.free = defaultdict(list)
        self.held_until = []
        self.blocks = 0

    # Streams

    def launch(self, work):
        """Queue a function on the current stream."""
        self.queues[self.current].append(("work", work))
        self.some_steps()

    def some_steps(self):
        if not self.lazy:
            for _ in range(self.random.randrange(4)):
                self.step()

    def step(self):
        """Carry out one piece of work that may be next; return whether there was one."""
        able = [
            name
            for name, queue in sorted(self.queues.items())
            if queue and not (queue[0][0] == "wait" and not queue[0][1].passed)
        ]
        if not able:
            assert not any(self.queues.values()), "the streams wait for each other"
            return False
        kind, what = self.queues[self.random.choice(able)].popleft()
        if kind == "record":
            what.passed = True
        elif kind == "work":
            what()
        return True

    def drain(self):
        while self.step():
            pass

    def record(self):
        event = Event(self)
        self.queues[self.current].append(("record", event))
        return event

    # Memory

    def allocate(self, count):
        """Return a tensor from the current stream's share of the memory, as torch's allocator."""
        for events, stream, block in list(self.held_until):
            if all(event.query() for event in events):
                self.held_until.remove((events, stream, block))
                self.free[stream].append(block)
        pool = self.free[self.current]
        if pool:
            block = pool.pop()
        else:
            block = np.full(64, GARBAGE)
            self.blocks += 1
        return VirtualTensor(self, block[:count], block=block)

    def give_back(self, block, stream, used_by):
        events = []
        before = self.current
        for other in sorted(used_by - {stream}):
            self.current = other
            events.append(self.record())
        self.current = before
        self.held_until.append((events, stream, block))


class VirtualTensor:
    """A tensor on the device, or (without a block) in page-locked memory of the host."""

    ndim = 1

    def __init__(self, device, memory, block=None):
        self.virtual = device
        self.memory = memory
        self.is_cpu = block is None
        if block is None:
            # The host writes the next batch where the last one was.
            weakref.finalize(self, memory.fill, GARBAGE)
        else:
            self.used_by = set()
            weakref.finalize(self, device.give_back, block, device.current, self.used_by)

    def __len__(self):
        return len(self.memory)

    def to(self, _device, non_blocking=False):
        assert non_blocking
        return self.map(lambda numbers: numbers) if self.is_cpu else self

    def map(self, function):
        """Return a new tensor that the current stream will write."""
        out = self.virtual.allocate(len(self.memory))
        source, target = self.memory, out.memory
        self.virtual.launch(lambda: np.copyto(target, function(source)))
        return out

    def record_stream(self, stream):
        self.used_by.add(stream)


class VirtualStreams:
    """The streams of a virtual device; ``without`` leaves out precautions, to see that they count.

    ``"wait"``: nobody waits for anybody. ``"keep"``: memory that two streams use is free when the
    first is done. ``"source"``: events pass at once.
    """

    def __init__(self, device, without=()):
        self.device = device
        self.without = without

    @contextmanager
    def aside(self):
        before, self.device.current = self.device.current, "side"
        try:
            yield
        finally:
            self.device.current = before

    def mark(self):
        event = self.device.record()
        if "source" in self.without:
            event.query = lambda: True
        return event

    def wait(self, event):
        if "wait" not in self.without:
            self.device.queues[self.device.current].append(("wait", event))

    def keep(self, tensor):
        if "keep" not in self.without and not tensor.is_cpu:
            tensor.record_stream(self.device.current)


def host_batches(device, count, rows=8):
    """Yield batches in page-locked memory, all numbers of batch ``n`` being ``n``."""
    for number in range(count):
        yield [VirtualTensor(device, np.full(rows, number))]


def consume(device, batches, *, steps=3):
    """Train on batches: read each several times on the main stream; return what was read."""
    seen = []
    for batch in batches:
        reads = []
        seen.append(reads)
        for tensor in batch:
            memory = tensor.memory
            for _ in range(steps):
                device.launch(lambda memory=memory, reads=reads: reads.append(memory.tolist()))
                scratch = tensor.map(lambda numbers: numbers * 0 - 1)
                del scratch
        del batch, tensor, memory
    return seen


class HostStreams:
    """Streams for real tensors of the CPU, where every order of work is the host's; counted."""

    def __init__(self):
        self.sent = self.landed = 0

    @contextmanager
    def aside(self):
        self.sent += 1
        yield

    def mark(self):
        return self

    def query(self):
        return True

    def synchronize(self):
        pass

    def wait(self, event):
        self.landed += 1

    def keep(self, tensor):
        pass

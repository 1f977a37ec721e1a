"""Locked slots are written again only when the device is done with them, and unlocked in time."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
import torch
from device.virtual_device import VirtualDevice
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import max_examples
from torch.utils.data import Dataset

from lightning_fastdata.batches.slots import SlotPool
from lightning_fastdata.batches.streams import CudaLockDriver, PageLocks, cuda_page_locks
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.kinds import open_executor

torch.set_num_threads(1)
SIZE = 64 * 1024


class VirtualDriver:
    """Locks nothing, and knows the streams of a virtual device."""

    def __init__(self, device, *, refuses=None, fences=True):
        self.device = device
        self.refuses = refuses
        self.fences = fences
        self.locked = {}
        self.asked = 0

    def lock(self, address, size_bytes):
        self.asked += 1
        if self.refuses is not None:
            return self.refuses
        assert address not in self.locked
        self.locked[address] = size_bytes
        return None

    def unlock(self, address):
        self.device.drain()
        del self.locked[address]

    def note_consumer(self):
        pass

    def marks(self):
        events = []
        for stream in ("main", "side") if self.fences else ():
            before, self.device.current = self.device.current, stream
            events.append(self.device.record())
            self.device.current = before
        return events


def copies_through(device, pool, count):
    """Send ``count`` patterns through slots of a pool; return what the device has read of each."""
    read = []
    for number in range(count):
        slot = pool.take(SIZE)
        if slot is None:  # the bound is reached: memory of its own
            tensor = torch.full((8,), number, dtype=torch.uint8)
        else:
            np.frombuffer(slot.mapping, np.uint8)[:8] = number
            tensor = torch.from_numpy(pool.lease(slot)[:8])
        device.current = device.random.choice(["main", "side"])
        place = tensor.numpy().ctypes.data if slot is None else slot.mapping

        def copy(place=place, number=number, owned=None if slot is not None else tensor):
            seen = owned.tolist() if owned is not None else list(place[:8])
            read.append((number, seen))

        device.launch(copy)
        device.current = "main"
        del tensor  # the copy is still under way
    return read


@max_examples(40)
@given(seed=st.integers(0, 2**32), slots=st.integers(2, 5))
def test_a_slot_is_not_written_before_the_copies_from_it_are_done(seed, slots):
    device = VirtualDevice(seed, lazy=seed % 4 == 0)
    pool = SlotPool(limit_bytes=slots * SIZE, page_locks=PageLocks(VirtualDriver(device)))
    read = copies_through(device, pool, 20)
    device.drain()
    assert sorted(read) == [(number, [number] * 8) for number in range(20)]
    assert len(pool) <= slots


def test_without_fences_it_would_be():
    harmed = 0
    for seed in range(20):
        device = VirtualDevice(seed)
        driver = VirtualDriver(device, fences=False)
        pool = SlotPool(limit_bytes=2 * SIZE, page_locks=PageLocks(driver))
        read = copies_through(device, pool, 20)
        device.drain()
        harmed += sorted(read) != [(number, [number] * 8) for number in range(20)]
    assert harmed


def test_a_slot_comes_back_once_every_stream_has_passed():
    device = VirtualDevice(lazy=True)
    pool = SlotPool(limit_bytes=4 * SIZE, page_locks=PageLocks(VirtualDriver(device)))
    slot = pool.take(SIZE)
    owner = pool.lease(slot)
    device.launch(lambda: None)
    assert pool.free_count == 0
    del owner
    assert pool.free_count == 0
    device.drain()
    assert pool.free_count == 1
    assert pool.take(SIZE) is slot


@pytest.mark.cases(1)
@pytest.mark.parametrize("shared", [True, False])
def test_memory_is_unlocked_when_its_last_tensor_is_gone_and_not_before(shared):
    device = VirtualDevice(lazy=True)
    driver = VirtualDriver(device)
    pool = SlotPool(limit_bytes=4 * SIZE, shared=shared, page_locks=PageLocks(driver))
    first, second = pool.take(SIZE), pool.take(SIZE)
    pool.give_back(second)
    kept = torch.from_numpy(pool.lease(first))[4:8]
    assert len(driver.locked) == 2
    seen = []
    memory = [first.mapping]
    device.launch(lambda: seen.append(memory[0][4]))
    kept.fill_(9)
    pool.close()
    del first, second, pool
    gc.collect()
    assert len(driver.locked) == 1
    assert kept.tolist() == [9] * 4
    del kept
    gc.collect()
    assert not driver.locked
    assert seen == [9]  # what was under way was waited for


def test_a_refusal_is_told_once_and_leaves_ordinary_memory():
    device = VirtualDevice()
    driver = VirtualDriver(device, refuses="out of memory")
    pool = SlotPool(limit_bytes=4 * SIZE, page_locks=PageLocks(driver))
    with pytest.warns(FastDataWarning, match=r"out of memory \(RLIMIT_MEMLOCK is") as told:
        slots = [pool.take(SIZE) for _ in range(3)]
    assert len(told) == driver.asked == 1
    for slot in slots:
        pool.give_back(slot)
    assert pool.free_count == 3


def test_a_forked_process_leaves_the_locks_of_its_parent_alone():
    driver = VirtualDriver(VirtualDevice())
    pool = SlotPool(limit_bytes=4 * SIZE, page_locks=PageLocks(driver))
    pool.take(SIZE)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            pool.close()
            del pool
            gc.collect()
            code = 0 if len(driver.locked) == 1 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pool.close()
    gc.collect()
    assert not driver.locked


class Rows(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        return torch.full((16, 1024), float(i))


@pytest.mark.cases(1)
@pytest.mark.parametrize("executor", ["workers", "gather"])
def test_batches_come_through_locked_memory_unchanged(executor):
    data = torch.arange(24.0).view(24, 1, 1).expand(24, 16, 1024).contiguous()
    device = VirtualDevice(3)
    driver = VirtualDriver(device)
    plan = FetchPlan(
        dataset=data if executor == "gather" else Rows(),
        collate_fn=torch.utils.data.default_collate,
        default_collation=True,
    )
    running = open_executor(executor, plan, workers=1, page_locks=PageLocks(driver))
    for epoch in range(2):
        running.start_epoch([[i, i + 1] for i in range(0, 24, 2)], epoch)
        got = []
        for batch in running:
            got.append(batch[:, 0, 0].tolist())
            device.launch(lambda: None)
        assert got == [[i, i + 1.0] for i in range(0, 24, 2)]
    assert driver.locked
    running.close()
    del running, batch
    gc.collect()
    assert not driver.locked


class Runtime:
    """The three functions of the CUDA runtime, as ``torch.cuda.cudart()`` has them."""

    def __init__(self, result):
        self.result = result
        self.calls = []

    def cudaHostRegister(self, address, size, flags):
        self.calls.append((address, size, flags))
        return self.result

    def cudaGetErrorString(self, result):
        return f"error {result}"


def test_cuda_is_asked_for_portable_locks_and_its_errors_are_told():
    # On the CPU, the kernel that takes the error out of CUDA's hands is one of the CPU.
    works, fails = Runtime(0), Runtime(2)
    assert CudaLockDriver(torch.device("cpu"), works).lock(4096, 100) is None
    assert works.calls == [(4096, 100, 1)]
    assert CudaLockDriver(torch.device("cpu"), fails).lock(4096, 100) == "error 2"


def test_only_cuda_devices_lock():
    assert cuda_page_locks(None) is None
    assert cuda_page_locks("cpu") is None

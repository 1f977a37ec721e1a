"""Locked slots are written again only when the device is done with them, and unlocked in time."""

from __future__ import annotations

import gc
import os
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rig.late_cuda import late_cuda
from thoroughness import max_examples
from torch.utils.data import Dataset

from lightning_fastdata.batches.slots import SlotPool
from lightning_fastdata.batches.streams import (
    CudaLockDriver,
    DeviceStreams,
    PageLocks,
    cuda_page_locks,
)
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.kinds import open_executor

torch.set_num_threads(1)
CUDA = torch.device("cuda", 0)
SIZE = 64 * 1024


@pytest.fixture
def cuda():
    """A device that does nothing before somebody waits for it."""
    with late_cuda("late") as cuda:
        yield cuda


def new_locks():
    return PageLocks(CudaLockDriver(CUDA))


def copies_through(pool, locks, count, seed):
    """Send ``count`` patterns through slots of a pool; return what the device makes of each."""
    streams, choose = DeviceStreams(CUDA), random.Random(seed)
    copies = []
    for number in range(count):
        slot = pool.take(SIZE)
        if slot is None:  # the bound is reached: memory of its own
            tensor = torch.full((8,), number, dtype=torch.uint8).pin_memory()
        else:
            np.frombuffer(slot.mapping, np.uint8)[:8] = number
            tensor = torch.from_numpy(pool.lease(slot)[:8])
        locks.driver.note_consumer()
        with streams.aside() if choose.random() < 0.5 else nullcontext():
            copies.append(tensor.to("cuda", non_blocking=True))
        del tensor  # the copy is still under way
    return copies


@max_examples(40)
@given(seed=st.integers(0, 2**32), slots=st.integers(2, 5))
def test_a_slot_is_not_written_before_the_copies_from_it_are_done(seed, slots):
    with late_cuda("late" if seed % 4 == 0 else "random", seed) as cuda:
        locks = new_locks()
        pool = SlotPool(limit_bytes=slots * SIZE, page_locks=locks)
        copies = copies_through(pool, locks, 20, seed)
        assert len(pool) <= slots
        assert [copy.read().tolist() for copy in copies] == [[n] * 8 for n in range(20)]
        assert not cuda.torn


def test_a_slot_comes_back_once_every_stream_has_passed(cuda):
    locks = new_locks()
    pool = SlotPool(limit_bytes=4 * SIZE, page_locks=locks)
    slot = pool.take(SIZE)
    owner = pool.lease(slot)
    locks.driver.note_consumer()
    torch.from_numpy(owner).to("cuda", non_blocking=True)
    assert pool.free_count == 0
    del owner
    assert pool.free_count == 0
    torch.cuda.synchronize()
    assert pool.free_count == 1
    assert pool.take(SIZE) is slot


@pytest.mark.cases(1)
@pytest.mark.parametrize("shared", [True, False])
def test_memory_is_unlocked_when_its_last_tensor_is_gone_and_not_before(cuda, shared):
    pool = SlotPool(limit_bytes=4 * SIZE, shared=shared, page_locks=new_locks())
    first, second = pool.take(SIZE), pool.take(SIZE)
    pool.give_back(second)
    kept = torch.from_numpy(pool.lease(first))[4:8]
    assert len(cuda.locked) == 2
    kept.fill_(9)
    copy = kept.to("cuda", non_blocking=True)
    pool.close()
    del first, second, pool
    gc.collect()
    assert len(cuda.locked) == 1
    assert kept.tolist() == [9] * 4
    del kept
    gc.collect()
    assert not cuda.locked
    assert not cuda.torn  # what was under way was waited for
    assert copy.read().tolist() == [9] * 4


def test_locked_memory_that_a_forked_process_may_view_is_never_written_again(cuda):
    pool = SlotPool(limit_bytes=4 * SIZE, page_locks=new_locks())
    slot = pool.take(SIZE)
    view = pool.lease(slot)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    del view, slot
    torch.cuda.synchronize()
    assert pool.free_count == len(pool) == 0
    gc.collect()
    assert not cuda.locked


def test_a_refusal_is_told_once_and_leaves_ordinary_memory(cuda):
    cuda.refusal = 2
    pool = SlotPool(limit_bytes=4 * SIZE, page_locks=new_locks())
    with pytest.warns(FastDataWarning, match=r"error 2 \(RLIMIT_MEMLOCK is") as told:
        slots = [pool.take(SIZE) for _ in range(3)]
    assert len(told) == cuda.calls["cudaHostRegister"] == 1
    for slot in slots:
        pool.give_back(slot)
    assert pool.free_count == 3


def test_a_forked_process_leaves_the_locks_of_its_parent_alone(cuda):
    pool = SlotPool(limit_bytes=4 * SIZE, page_locks=new_locks())
    pool.take(SIZE)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            pool.close()
            del pool
            gc.collect()
            code = 0 if len(cuda.locked) == 1 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pool.close()
    gc.collect()
    assert not cuda.locked


class Rows(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        return torch.full((16, 1024), float(i))


@pytest.mark.cases(1)
@pytest.mark.parametrize("executor", ["workers", "gather"])
def test_batches_come_through_locked_memory_unchanged(cuda, executor):
    data = torch.arange(24.0).view(24, 1, 1).expand(24, 16, 1024).contiguous()
    locks = new_locks()
    plan = FetchPlan(
        dataset=data if executor == "gather" else Rows(),
        collate_fn=torch.utils.data.default_collate,
        default_collation=True,
    )
    running = open_executor(executor, plan, workers=1, page_locks=locks)
    for epoch in range(2):
        running.start_epoch([[i, i + 1] for i in range(0, 24, 2)], epoch)
        copies = []
        for batch in running:
            locks.driver.note_consumer()
            copies.append(batch.to("cuda", non_blocking=True))
            del batch
        got = [copy.read()[:, 0, 0].tolist() for copy in copies]
        assert got == [[i, i + 1.0] for i in range(0, 24, 2)]
    assert cuda.copies["locked"] == 24
    assert cuda.locked
    running.close()
    del running
    gc.collect()
    assert not cuda.locked


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

"""The pretended CUDA is as late as CUDA may be, no later, and leaves nothing behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from rig.late_cuda import SCHEDULES, late_cuda

CUDA = torch.device("cuda", 0)
POISONED = [-0x5A5A5A5A5A5A5A5B] * 4
"""Four numbers (int64) of memory that nobody has written, or that was let go of."""


def pinned(number, count=4):
    return torch.full((count,), number).pin_memory()


def computed(x, device):
    """Return what a few operations of all kinds give on a device."""
    y = torch.arange(4, device=device) * x + torch.tensor([1, 2, 3, 4]).to(device)
    y[1:3] += 10
    z = torch.stack([y, y.flip(0)]).float().mean(0)
    return y, z, y.cpu(), z.sum() * float(y[2]), y[y > 14], torch.where(z > 8, z, 0.5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_program_that_orders_its_streams_computes_what_a_cpu_does(schedule):
    expected = [each.tolist() for each in computed(torch.full((4,), 3), "cpu")]
    for seed in range(4):
        with late_cuda(schedule, seed) as cuda:
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                x = pinned(3).to("cuda", non_blocking=True)
            torch.cuda.current_stream().wait_stream(side)
            x.record_stream(torch.cuda.current_stream())
            numbers = computed(x, "cuda")
            del x
            assert [each.tolist() for each in numbers] == expected
            assert not cuda.torn


def thread_names():
    return [
        Path(f"/proc/self/task/{each}/comm").read_text() for each in os.listdir("/proc/self/task")
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's names of threads are Linux's")
@pytest.mark.skipif(torch.cuda.is_available(), reason="autograd has threads for a real device")
def test_autograd_gets_no_threads_for_devices_that_are_pretended():
    with late_cuda("late"):
        torch.ones(1, device="cuda")
    torch.ones((), requires_grad=True).backward()
    assert not any("autograd" in name for name in thread_names())


def test_nothing_is_left_of_it_even_after_an_error():
    def surface():
        return {
            (owner.__name__, name): getattr(owner, name)
            for owner in (torch.cuda, torch.accelerator, torch.Tensor)
            for name in dir(owner)
            if name not in ("grad", "__abstractmethods__")
        }

    before, environment, drawn = surface(), dict(os.environ), torch.get_rng_state()

    def fails():
        with late_cuda("late"):
            torch.rand(3, device="cuda")
            os.environ["CUDA_VISIBLE_DEVICES"] = "0"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    after = surface()
    assert all(after[name] is before[name] or after[name] == before[name] for name in before)
    assert after.keys() == before.keys()
    assert dict(os.environ) == environment
    assert torch.equal(torch.get_rng_state(), drawn)
    with late_cuda("late"), pytest.raises(AssertionError, match="at a time"), late_cuda("late"):
        pass


@pytest.mark.parametrize(("schedule", "held"), [("late-side", "side"), ("late-main", "main")])
def test_a_schedule_holds_back_one_kind_of_stream(schedule, held):
    with late_cuda(schedule):
        streams = {"side": torch.cuda.Stream(), "main": torch.cuda.current_stream()}
        events = {}
        for name, stream in streams.items():
            with torch.cuda.stream(stream):
                pinned(1).to("cuda", non_blocking=True)
                events[name] = stream.record_event()
        assert {name: event.query() for name, event in events.items()} == {
            name: name != held for name in streams
        }
        events[held].synchronize()
        assert events[held].query()


def test_memory_that_is_let_go_is_overwritten_in_the_order_of_its_stream():
    with late_cuda("late") as cuda:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x = pinned(7).to("cuda", non_blocking=True)
        memory = x.memory
        torch.cuda.current_stream().wait_stream(side)
        right = x + 0
        before_reuse = right.read().tolist()
        late = x + 0  # queued on the consumer's stream, of which the allocator knows nothing
        del x
        side.synchronize()
        assert memory.tolist() == POISONED
        assert before_reuse == [7] * 4
        assert late.read().tolist() == POISONED
        assert cuda.live_bytes == right.nbytes + late.nbytes


def test_locked_memory_is_read_when_the_copy_is_carried_out():
    with late_cuda("late") as cuda:
        memory = cuda.lock_memory(4)
        memory[:] = 1
        tensor = torch.from_numpy(memory)
        assert tensor.is_pinned()
        assert tensor.pin_memory() is tensor
        locked = tensor.to("cuda", non_blocking=True)
        of_torch = pinned(1)
        copy = of_torch.to("cuda", non_blocking=True)
        memory[:] = 2
        of_torch[:] = 3
        assert locked.read().tolist() == [2] * 4
        assert copy.read().tolist() == [3] * 4
        assert [text.split()[0] for text in cuda.torn] == ["locked", "pinned"]


def test_ordinary_memory_is_read_at_once_and_has_the_host_wait():
    with late_cuda("late") as cuda:
        cuda.note(CUDA)
        memory = torch.full((4,), 1)
        copy = memory.to("cuda", non_blocking=True)
        memory.fill_(2)
        assert cuda.notes == 1
        assert copy.read().tolist() == [1] * 4
        assert [wait.call for wait in cuda.waits] == ["copy from ordinary memory"]
        with pytest.raises(RuntimeError, match="same device"):
            memory + copy

"""The pretended CUDA is as late as CUDA may be, no later, and leaves nothing behind."""

from __future__ import annotations

import ctypes
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


def test_a_schedule_holds_back_other_devices():
    with late_cuda("late-other-device"):
        events = []
        for index in range(2):
            with torch.cuda.device(index):
                pinned(1).to(f"cuda:{index}", non_blocking=True)
                events.append(torch.cuda.current_stream().record_event())
        assert [event.query() for event in events] == [True, False]


def test_a_wait_carries_out_what_it_needs_and_nothing_else():
    with late_cuda("late") as cuda:
        side, other = torch.cuda.Stream(), torch.cuda.Stream()
        cuda.note(CUDA)
        first = torch.cuda.current_stream().record_event()
        cuda.note(CUDA)
        side.wait_event(first)
        other.wait_stream(torch.cuda.current_stream())
        side.synchronize()
        assert cuda.notes == 1
        assert [(wait.call, wait.notes) for wait in cuda.waits] == [("Stream.synchronize", 1)]
        side.synchronize()  # nothing is left to be waited for
        assert len(cuda.waits) == 1
        other.synchronize()
        assert cuda.notes == 2


def test_one_seed_gives_one_order_and_another_gives_another():
    def order(seed):
        with late_cuda("random", seed) as cuda:
            side = torch.cuda.Stream()
            for _ in range(10):
                x = pinned(1).to("cuda", non_blocking=True)
                with torch.cuda.stream(side):
                    pinned(2).to("cuda", non_blocking=True)
                x += 1
        return cuda.order

    assert order(3) == order(3)
    assert len({tuple(order(seed)) for seed in range(5)}) == 5


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


def test_record_stream_keeps_memory_until_that_stream_is_done_too():
    with late_cuda("late"):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            x = pinned(7).to("cuda", non_blocking=True)
        memory = x.memory
        torch.cuda.current_stream().wait_stream(side)
        x.record_stream(torch.cuda.current_stream())
        late = x + 0
        del x
        with torch.cuda.stream(side):
            pinned(1).to("cuda", non_blocking=True)
        side.synchronize()  # which is held up by nobody
        assert memory.tolist() == [7] * 4
        torch.cuda.synchronize()
        assert memory.tolist() == POISONED
        assert late.read().tolist() == [7] * 4


def test_memory_that_nobody_has_written_is_poison():
    with late_cuda("late"):
        assert torch.empty(4, dtype=torch.int64, device="cuda").read().tolist() == POISONED
        assert torch.zeros(4, dtype=torch.int64, device="cuda").tolist() == [0] * 4


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


def test_memory_that_torch_has_pinned_lives_until_its_copy_is_done_and_then_is_forgotten():
    with late_cuda("late") as cuda:
        tensor = pinned(4)
        address = tensor[1:].data_ptr()
        part = tensor[1:]
        del tensor
        assert part.is_pinned()
        copy = part.to("cuda", non_blocking=True)
        del part
        assert copy.read().tolist() == [4] * 3
        del copy
        assert not torch.frombuffer(
            (ctypes.c_char * 8).from_address(address), dtype=torch.int64
        ).is_pinned()
        assert not cuda.torn


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


def test_draws_depend_on_the_seed_of_the_device_and_on_no_schedule():
    def drawn(schedule):
        with late_cuda(schedule, 1):
            torch.cuda.manual_seed_all(3)
            values = [torch.rand(3, device="cuda"), torch.zeros(3, device="cuda").normal_()]
            values.append(torch.randn_like(values[0]))
            return [value.tolist() for value in values]

    torch.manual_seed(0)
    of_host = torch.rand(1)
    torch.manual_seed(0)
    expected = drawn("eager")
    assert all(drawn(schedule) == expected for schedule in SCHEDULES)
    assert torch.equal(torch.rand(1), of_host)


def test_timed_events_tell_how_much_work_lay_between_them():
    with late_cuda("late"):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(3):
            torch.zeros(1, device="cuda")
        end.record()
        with pytest.raises(RuntimeError, match="not ready"):
            begin.elapsed_time(end)
        end.synchronize()
        assert begin.elapsed_time(end) > 3
        with pytest.raises(ValueError, match="enable_timing"):
            begin.elapsed_time(torch.cuda.current_stream().record_event())

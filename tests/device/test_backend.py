"""What is asked of a device has the same answer on every type of device, or none.

CUDA is pretended with its tensors (:mod:`rig.late_cuda`), XPU without them, as torch lets nobody
have tensors of a type that it was not built for; of Apple's MPS its generator is.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rig.late_cuda import SCHEDULES, late_cuda
from rig.late_trainings import consume, read, reused_batches
from thoroughness import max_examples

from lightning_fastdata import prefetch
from lightning_fastdata.device import backend
from lightning_fastdata.device.prefetch import drawn_under
from lightning_fastdata.insight.steps import EventClock
from lightning_fastdata.randomness.global_generators import snapshot_random_states

STREAMED = ("cuda", "xpu")
"""Types of devices with streams."""
each_streamed = pytest.mark.parametrize("kind", STREAMED)
CUDA = torch.device("cuda", 0)


# Random numbers


def with_generators(patch, kind, generators):
    patch.setattr(getattr(torch, kind), "default_generators", generators)
    patch.setattr(getattr(torch, kind), "current_device", lambda: 0)
    patch.setattr(getattr(torch, kind), "is_initialized", lambda: True)


def with_functions(patch, kind, generators):
    module = getattr(torch, kind)
    patch.setattr(module, "get_rng_state", lambda device: generators[0].get_state())
    patch.setattr(module, "set_rng_state", lambda state, device: generators[0].set_state(state))
    patch.setattr(module, "manual_seed", generators[0].manual_seed)


def pretended(patch, kind, count):
    """Pretend devices of a type that draw, and return their generators."""
    generators = tuple(torch.Generator().manual_seed(number) for number in range(count))
    (with_functions if kind == "mps" else with_generators)(patch, kind, generators)
    patch.setattr(torch.accelerator, "is_available", lambda: True)
    patch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    patch.setattr(torch.accelerator, "device_count", lambda: count)
    return generators


def states(generators):
    return [generator.get_state() for generator in generators]


def test_draws_under_a_key_are_the_same_on_devices_of_every_type_and_leave_the_trainings_alone():
    seen = {}
    for kind, count, at in (("cuda", 2, 0), ("cuda", 2, 1), ("xpu", 2, 1), ("mps", 1, 0)):
        with pytest.MonkeyPatch.context() as patch:
            generators = pretended(patch, kind, count)
            before, drawn = states(generators), seen.setdefault((kind, at), [])
            for number in (5, 5, 6):
                with drawn_under(0, 0, number, torch.device(kind, at)):
                    drawn.append(float(torch.rand(1, generator=generators[at])))
                assert all(map(torch.equal, states(generators), before))
    first, *others = seen.values()
    assert first[0] == first[1] != first[2]
    assert all(each == first for each in others)


@pytest.mark.parametrize(("kind", "count"), [("cuda", 2), ("xpu", 2), ("mps", 1)])
def test_the_random_states_of_all_devices_come_back(monkeypatch, kind, count):
    generators = pretended(monkeypatch, kind, count)
    before, undo = states(generators), snapshot_random_states()
    for generator in generators:
        torch.rand(1, generator=generator)
    undo()
    assert all(map(torch.equal, states(generators), before))


def noisy(batch):
    return [tensor + torch.rand(tensor.shape, device=tensor.device) for tensor in batch]


def test_what_is_drawn_on_a_device_does_not_rest_on_its_order_of_work():
    seen = []
    for schedule in SCHEDULES:
        with late_cuda(schedule, 3) as cuda:
            seen.append(read(consume(prefetch(reused_batches(cuda, 5), CUDA, noisy))))
            assert not cuda.torn
    assert all(each == seen[0] for each in seen)


# Streams, events and memory


@max_examples(30)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(STREAMED))
def test_marks_are_passed_in_order_and_none_is_read_early(seed, kind):
    device = torch.device(kind, 1)  # while the first one is the current one
    with late_cuda("random", seed, kind=kind) as machine:
        clock, marks, done = EventClock(device=device), [], []
        for number in range(20):
            machine.push(machine.current_stream(device), partial(done.append, number))
            marks.append(clock.mark())
            passed = [clock.ready(mark) for mark in marks]
            assert passed == sorted(passed, reverse=True)
            assert len(done) >= sum(passed)
            if any(passed):
                assert clock.elapsed_ms(marks[0], marks[sum(passed) - 1]) >= 0
        backend.synchronize(device)
        assert done == list(range(20))
        assert all(map(clock.ready, marks))


@max_examples(30)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(STREAMED))
def test_who_waits_for_another_stream_finds_its_work_done(seed, kind):
    device = torch.device(kind, 1)
    with late_cuda("random", seed, kind=kind) as machine:
        streams, written, seen = backend.device_streams(device), set(), []

        def work(do):
            machine.push(machine.current_stream(device), do)

        for number in range(20):
            work(partial(written.add, (number, "here")))
            here = streams.mark()
            with streams.aside():
                streams.wait(here)
                work(lambda number=number: seen.append((number, "here") in written))
                work(partial(written.add, number))
                done = streams.mark()
            streams.wait(done)
            work(lambda number=number: seen.append(number in written))
        backend.synchronize(device)
        assert seen == [True] * 40
        assert machine.side_streams == [streams.side]


@each_streamed
def test_the_memory_of_a_device_is_told(kind):
    with late_cuda("eager", kind=kind) as machine:
        device, gib = torch.device(kind, 1), 2**30
        held = torch.empty(2**20, dtype=torch.uint8)
        block = machine.allocate(held, machine.current_stream(device))
        assert backend.devices() == [torch.device(kind, 0), device]
        assert backend.name_of(device) == "late"
        reader = backend.memory_reader(device)
        assert machine.live_bytes == held.nbytes
        assert reader.total_bytes() == 80 * gib
        assert reader.free_bytes() == 60 * gib + held.nbytes
        assert reader.peak_bytes() == held.nbytes
        del block


@pytest.mark.parametrize("kind", ["cpu", "mps", "meta"])
def test_what_a_type_of_device_does_not_tell_is_none(kind):
    device = torch.device(kind)
    assert backend.memory_reader(device) is None
    assert backend.device_streams(device) is None
    assert not backend.has_streams(device)
    assert backend.name_of(device) == kind
    backend.synchronize(device)
    with backend.current(device):
        pass


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device")
def test_without_a_device_there_is_the_cpu():
    assert backend.default_type() == "cpu"
    assert backend.devices() == backend.generators_in_use() == []
    backend.free_memory()

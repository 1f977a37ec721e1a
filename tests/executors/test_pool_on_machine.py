"""The pool on a virtual machine: deaths, resizes, broken epochs, deadlines and stamps, exactly."""

from __future__ import annotations

import random
import signal
from collections import deque
from dataclasses import dataclass

import pytest
import torch
from insight.cut_waits import Cutter, total
from misses import each
from rig.machine import Machine, VirtualBarrier, VirtualLock, die, sleep, work
from rig.virtual_crew import Costs, VirtualExecutor
from samples import Costly
from thoroughness import LONG
from torch.utils.data import default_collate

from lightning_fastdata.errors import FastDataWarning, WorkerError
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.pool.watches import CrewTrial

SOME = Costs(start_s=0.02, send_s=lambda _: 0.0001, way_s=0.0001, take_s=lambda _: 0.0001)


def fetch_plan(dataset, **how):
    how = {"collate_fn": default_collate, "default_collation": True, "timeout_s": 0, **how}
    return FetchPlan(dataset=dataset, **how)


def batches_of(steps, size):
    return [list(range(at, at + size)) for at in range(0, steps * size, size)]


def recorded(
    cost,
    *,
    workers=2,
    steps=120,
    size=8,
    step=lambda: sleep(0.003),
    costs=SOME,
    **how,
):
    """Return the stamps of an epoch, whose batches were used one after the other."""
    machine, records = Machine(2), deque()
    with machine.installed():
        plan = fetch_plan(Costly(steps * size, cost), **how)
        pool = VirtualExecutor(machine, plan, costs=costs, processes=workers)
        pool.record(records)
        pool.start_epoch(iter(batches_of(steps, size)), 0)
        for _ in pool:
            step()
        pool.close()
    return list(records)


def waits(index):
    sleep(0.002)


def test_half_of_the_workers_that_there_are_by_then_are_compared_with_all_also_in_a_later_epoch():
    machine, records, trial = Machine(8), deque(), CrewTrial(2)
    with machine.installed():
        plan = fetch_plan(Costly(9600, waits))
        for processes in (2, 6):  # workers that are not kept: each epoch has others
            pool = VirtualExecutor(machine, plan, costs=SOME, processes=processes, trial=trial)
            if processes == 2:
                pool.resize(6)
            else:
                pool.record(records)
            pool.start_epoch(iter(batches_of(400, 24)), 0)
            for _ in pool:
                sleep(0.0001)
            pool.close()
    found = [stamps.rates for stamps in records if stamps.rates is not None]
    assert [(rates.few, rates.many) for rates in found] == [(3, 6)]


def computes(index):
    work(0.001 if index % 7 else 0.004)


def collates(samples):
    work(0.01)
    return default_collate(samples)


RUNS = {
    "waits": {"cost": waits},
    "computes": {"cost": computes, "workers": 4},
    "collates": {"cost": waits, "collate_fn": collates, "default_collation": False},
    "a step that computes": {"cost": computes, "workers": 3, "step": lambda: work(0.002)},
}


@pytest.mark.parametrize("how", RUNS.values(), ids=RUNS)
def test_two_runs_have_the_same_stamps_to_the_nanosecond(how):
    assert recorded(**how) == recorded(**how)


@pytest.mark.parametrize("how", RUNS.values(), ids=RUNS)
def test_the_kernels_figures_of_a_task_are_those_of_the_machine(how):
    for stamps in recorded(**how):
        for task in stamps.tasks:
            length_ns = task.ended_ns - task.began_ns
            assert task.read_ns + task.collate_ns == length_ns
            if task.cpu_ns is not None and how["cost"] is computes:
                assert task.cpu_ns + task.runqueue_ns == length_ns


@dataclass
class Chaos:
    """What has happened so far to pools that are disturbed."""

    batches: int = 0
    deaths: int = 0
    resizes: int = 0
    broken: int = 0


def disturb(seed, chaos):
    """Read some epochs in which workers die, come and go; some are broken off."""
    chance, machine = random.Random(seed), Machine(2)
    size, steps = chance.randint(1, 9), chance.randint(20, 90)

    def cost(index):
        work(0.0005)
        if chance.random() < 0.1:
            sleep(0.03)

    def kills():
        while True:
            sleep(chance.uniform(0.02, 0.3))
            living = [each for each in pool.crew.children.values() if each.exitcode is None]
            if living:
                chance.choice(living).kill(chance.choice((signal.SIGKILL, signal.SIGSEGV)))

    with machine.installed():
        whole = {"collate_fn": list, "default_collation": False} if seed % 3 == 0 else {}
        dataset = Costly(steps * size, cost)
        plan = fetch_plan(dataset, look_ahead=chance.randint(2, 12), **whole)
        pool = VirtualExecutor(machine, plan, costs=SOME, processes=chance.randint(1, 5))
        machine.start(machine.process(), kills)
        for epoch in range(3):
            pool.start_epoch(iter(batches_of(steps, size)), epoch)
            got, stops = [], chance.choice((None, None, steps // 2))
            for batch in pool:
                got += [int(number) for number in batch]
                chaos.batches += 1
                sleep(chance.uniform(0, 0.009))
                if chance.random() < 0.02:
                    pool.resize(chance.randint(1, 6))
                    chaos.resizes += 1
                if stops and len(got) >= stops * size:
                    chaos.broken += 1
                    break
            assert got == list(range(len(got))), (seed, epoch)
            assert stops or len(got) == steps * size, (seed, epoch)
        chaos.deaths += pool.plan.faults.deaths
        pool.close()


def test_each_sample_comes_once_and_in_order_however_workers_die_come_and_go():
    chaos, runs = Chaos(), 40 if LONG else 12
    for seed in range(runs):
        disturb(seed, chaos)
    assert chaos.batches > 75 * runs
    assert min(chaos.deaths, chaos.resizes) > 2.5 * runs
    assert chaos.broken > runs / 4


def test_a_sample_that_kills_whoever_reads_it_is_named_after_four_deaths():
    machine = Machine(2)

    def cost(index):
        sleep(0.001)
        if index == 37:
            die(signal.SIGKILL)

    with machine.installed():
        plan = fetch_plan(Costly(64, cost))
        pool = VirtualExecutor(machine, plan, processes=2)
        pool.start_epoch(iter(batches_of(8, 8)), 0)
        got = torch.cat([next(pool) for _ in range(4)])
        with pytest.raises(WorkerError, match="Sample 37 of the dataset was being read each of"):
            next(pool)
        assert got.tolist() == list(range(32))
        assert next(pool).tolist() == list(range(40, 48))
        assert pool.plan.faults.deaths == 4
        pool.close()


# Deadlines


def test_a_worker_that_is_stuck_is_replaced_at_the_deadline_and_its_sample_named_at_the_next():
    """It is looked at eight times in that time: in the first look that it is late in."""
    limit_s, machine, told_s = 2.0, Machine(2), []

    def wait_for_an_answer():
        told_s.append(machine.now_ns / 1e9)
        sleep(600)

    def cost(index):
        if index == 37:
            wait_for_an_answer()

    with machine.installed():
        plan = fetch_plan(Costly(64, cost), timeout_s=limit_s)
        pool = VirtualExecutor(machine, plan, processes=2)
        pool.start_epoch(iter(batches_of(8, 8)), 0)
        for _ in range(4):
            next(pool)
        began_s = machine.now_ns / 1e9
        with (
            pytest.warns(FastDataWarning, match=r"for 2 s with a sample, and[\s\S]*wait_for_an_a"),
            pytest.raises(WorkerError, match=r"^Sample 37 [\s\S]*wait_for_an_answer"),
        ):
            next(pool)
        assert len(told_s) == 2  # it was read twice
        for stuck_s, noticed_s in zip(told_s, [told_s[1], machine.now_ns / 1e9], strict=True):
            assert noticed_s - stuck_s == pytest.approx(limit_s + limit_s / 8, abs=1e-9)
        assert began_s == told_s[0]
        pool.close()


def test_a_single_sample_that_is_stuck_is_named_by_its_index():
    machine = Machine(2)
    with machine.installed():
        dataset = Costly(9, lambda index: sleep(600) if index == 7 else None)
        single = {"collate_fn": lambda sample: sample, "default_collation": False, "batched": False}
        pool = VirtualExecutor(machine, fetch_plan(dataset, timeout_s=2.0, **single), processes=2)
        pool.start_epoch(iter(range(9)), 0)
        with (
            pytest.warns(FastDataWarning, match="reading sample 7:"),
            pytest.raises(WorkerError, match=r"^Sample 7 "),
        ):
            list(pool)
        pool.close()


@pytest.mark.parametrize(
    "cost",
    [lambda index: sleep(0.9), lambda index: work(7.0 if index == 0 else 0.0)],
    ids=["batches take longer than the deadline", "a sample computes for longer"],
)
def test_who_is_slow_is_not_stuck(cost):
    machine = Machine(2)
    with machine.installed():
        pool = VirtualExecutor(machine, fetch_plan(Costly(16, cost), timeout_s=1.0), processes=1)
        pool.start_epoch(iter(batches_of(2, 8)), 0)
        assert torch.cat(list(pool)).tolist() == list(range(16))
        assert pool.plan.faults.deaths == 0
        pool.close()


@each("size", [1, 2, 8])
@each("workers", [2, 3])
def test_workers_that_wait_for_each_other_in_their_first_sample_all_have_one(workers, size):
    machine = Machine(2)
    with machine.installed():
        met, door = set(), VirtualBarrier(workers)

        def cost(index):
            if machine.current.process not in met:
                met.add(machine.current.process)
                door.wait()

        pool = VirtualExecutor(machine, fetch_plan(Costly(24, cost)), processes=workers)
        pool.start_epoch(iter(batches_of(24 // size, size)), 0)
        assert torch.cat(list(pool)).tolist() == list(range(24))
        pool.close()


# Half of the workers for a moment


def waits_unlike(index):
    """2 ms on average; of one length, their workers would always end together."""
    sleep(0.0014 + 0.0001 * (index * 5 % 13))


@pytest.mark.parametrize("shared", [False, True])
def test_a_trial_with_half_of_the_workers_shows_whether_they_share_what_they_wait_for(shared):
    lock = VirtualLock()

    def waits_for_all(index):
        with lock:
            sleep(0.002)

    cost = waits_for_all if shared else waits_unlike
    records = recorded(cost, workers=4, steps=600, step=lambda: sleep(0.001))
    (rates,) = [stamps.rates for stamps in records if stamps.rates is not None]
    assert (rates.few, rates.many) == (2, 4)
    assert rates.few_per_s == pytest.approx(500 if shared else 1000, rel=0.05)
    assert rates.many_per_s == pytest.approx(500 if shared else 2000, rel=0.1)
    assert [stamps.number for stamps in records] == list(range(1, 601))


@each(
    "how",
    [{"step": lambda: sleep(0.02)}, {"cost": lambda _: work(0.002), "workers": 2}, {"workers": 1}],
)
def test_no_trial_is_made_where_it_would_show_nothing(how):
    how = {"cost": waits_unlike, "workers": 4, "step": lambda: sleep(0.001), **how}
    assert not any(stamps.rates for stamps in recorded(steps=600, **how))


@each("again", [True, False])
def test_a_trial_ends_with_its_epoch_which_makes_another_and_with_stamps_that_nobody_takes(again):
    machine, records = Machine(2), deque()
    with machine.installed():
        plan = fetch_plan(Costly(4800, waits_unlike))
        pool = VirtualExecutor(machine, plan, costs=SOME, processes=2)
        pool.record(records)
        pool.start_epoch(iter(batches_of(600, 8)), 0)
        while pool._trial.limit is None:
            next(pool)
        if again:
            pool.start_epoch(iter(batches_of(600, 8)), 1)
        else:
            pool.record(None)
        assert pool._trial.limit is None
        assert len(list(pool)) > 300
        assert sum(stamps.rates is not None for stamps in records) == again
        pool.close()


# Waits, and what they are for


def shares(**how):
    """Return the parts of all waits of an epoch in which nothing costs but what is said."""
    cutter = Cutter()
    waits = [cutter.cut(stamps) for stamps in recorded(**{"workers": 1, "costs": Costs(), **how})]
    return total(waits).shares(), [wait.slow_task for wait in waits if wait.slow_task]


@each(
    ("part", "how"),
    [
        ("read_blocked", {"cost": waits}),
        ("read_cpu", {"cost": lambda index: work(0.003)}),
        ("collate", {"cost": lambda _: None, "collate_fn": collates, "default_collation": False}),
    ],
)
def test_the_planted_cause_takes_all_of_the_waits(part, how):
    assert shares(**how)[0][part] == pytest.approx(1.0)


def test_a_slow_sample_is_named_with_what_it_takes_more_than_others():
    parts, slow = shares(cost=lambda index: sleep(0.4 if index == 133 else 0.001))
    assert [(task.slowest_index, task.slowest_ns) for task in slow] == [(133, 400_000_000)]
    assert parts["slow_sample"] > 0.3

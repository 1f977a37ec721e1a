"""Workers that share their CPUs with the training, on a virtual machine of two CPUs."""

from __future__ import annotations

import pytest
from rig.machine import Machine, sleep, work
from rig.virtual_crew import USUAL, VirtualExecutor, on_machine
from samples import Costly
from torch.utils.data import default_collate

from lightning_fastdata import FastDataLoader
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.pool.sharing import TrainingLoad

STEPS, SIZE, STEP_S = 40, 64, 0.075


def samples(cost=lambda index: work(0.0013)):
    """Samples that take 1.3 ms of a CPU each, if nothing else is said."""
    return Costly(STEPS * SIZE, cost)


def epoch(step, dataset=None, *, workers=2, cpus=2.0, steps=STEPS, known=True, **how):
    """Return the seconds of an epoch, and the batches under way in each of its steps.

    ``known``: whether the number of its batches is known beforehand.
    """
    machine, ahead = Machine(2), []
    with machine.installed():
        plan = FetchPlan(
            dataset=dataset or samples(),
            collate_fn=default_collate,
            default_collation=True,
            timeout_s=0,
            cpus=cpus,
            **how,
        )
        pool = VirtualExecutor(machine, plan, costs=USUAL, processes=workers)
        batches = [list(range(at, at + SIZE)) for at in range(0, steps * SIZE, SIZE)]
        began_ns = machine.now_ns
        pool.start_epoch(iter(batches) if known else (each for each in batches), 0)
        for number, batch in enumerate(pool):
            assert batch.tolist() == batches[number]
            ahead.append(len(pool.under_way()[1]))
            step(number)
        took_s = (machine.now_ns - began_ns) / 1e9
        pool.close()
    return took_s, ahead


def computes(number):
    work(STEP_S)


def waits(number):
    sleep(STEP_S)


def test_a_training_that_computes_leaves_hardly_a_cpu_idle():
    took_s, _ = epoch(computes, look_ahead=9)
    wanted_s = STEPS * (STEP_S + SIZE * 0.0013)
    assert took_s <= 1.07 * wanted_s / 2  # 1.12 where workers read as beside a device


def test_fewer_batches_are_ahead_as_an_epoch_ends_where_the_training_computes():
    ahead = epoch(computes, look_ahead=9)[1]
    assert ahead[10:37] == [3] * 27  # four were under way, and one was handed over
    long = epoch(computes, look_ahead=9, steps=120)[1]
    assert long[:48] == [8] * 48
    assert long[48:] == sorted(long[48:], reverse=True)
    assert epoch(computes, look_ahead=9, prefetch=3)[1][10:35] == [5] * 25
    assert epoch(computes, look_ahead=3, prefetch=3)[1][:38] == [2] * 38


def test_a_loader_knows_how_long_its_epochs_are():
    with on_machine() as machine:
        loader = FastDataLoader(samples(), SIZE, shuffle=True, executor="workers", num_workers=2)
        began_ns = machine.now_ns
        for _ in loader:
            work(STEP_S)
        took_s = (machine.now_ns - began_ns) / 1e9
        loader.close()
    assert took_s <= 1.09 * STEPS * (STEP_S + SIZE * 0.0013) / 2


@pytest.mark.parametrize(
    ("step", "how"),
    [
        (waits, {}),
        (computes, {"cpus": float("inf")}),
        (computes, {"workers": 1}),  # two CPUs are enough for two processes
        (computes, {"known": False}),
    ],
)
def test_as_many_batches_are_ahead_as_planned_else(step, how):
    assert epoch(step, look_ahead=9, **how)[1][12:32] == [8] * 20


def test_a_pause_between_two_steps_does_not_count_as_a_step():
    def validates(number):
        sleep(30 * (number == 29))
        computes(number)

    assert epoch(validates, look_ahead=9)[1][31:37] == [3] * 6


def test_a_training_that_stops_computing_has_as_many_batches_ahead_as_planned():
    def stops(number):
        (computes if number < 10 else waits)(number)

    assert epoch(stops, look_ahead=9)[1][20:32] == [8] * 12


@pytest.mark.parametrize(
    ("workers", "wait_s"), [(2, 0.004), (2, 0.05), (4, 0.004), (4, 0.016), (16, 0.016)]
)
def test_samples_that_wait_come_as_soon_as_when_workers_share_them_out(workers, wait_s):
    waiting = samples(lambda index: sleep(wait_s))
    how = {"workers": workers, "look_ahead": max(9, 2 * workers)}
    shared = epoch(computes, waiting, cpus=float("inf"), **how)[0]
    assert epoch(computes, waiting, **how)[0] <= 1.03 * shared


@pytest.mark.parametrize("workers", [2, 4])
def test_rare_samples_that_wait_hold_up_no_more_than_where_workers_share_them_out(workers):
    def cost(index):
        work(0.0008)
        sleep(0.5 * (index % 500 == 250))

    how = {"dataset": samples(cost), "look_ahead": 9, "workers": workers, "steps": 80}
    assert epoch(computes, **how)[0] <= 1.01 * epoch(computes, cpus=float("inf"), **how)[0]


def test_nothing_is_known_of_a_training_before_it_made_steps():
    load = TrainingLoad(2.0)
    assert not load.competes(100)
    with Machine(2).installed():
        for _ in range(10):  # steps that take no time at all
            load.delivered()
        assert not load.competes(100)

"""Workers that share their CPUs with the training, on a virtual machine of two CPUs."""

from __future__ import annotations

import pytest
import torch
from rig.machine import Machine, sleep, work
from rig.virtual_crew import USUAL, VirtualExecutor
from torch.utils.data import Dataset, default_collate

from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.pool.sharing import TrainingLoad

STEPS, SIZE, STEP_S = 40, 64, 0.075


class Samples(Dataset):
    """Each sample is its number, and takes 1.3 ms of a CPU; ``used_s`` is what all have taken."""

    def __init__(self, cost=lambda index: work(0.0013)):
        self.cost = cost

    def __len__(self):
        return STEPS * SIZE

    def __getitem__(self, index):
        self.cost(index)
        return torch.tensor(index)


def epoch(step, dataset=None, *, workers=2, cpus=2.0, **how):
    """Return the seconds of an epoch, and how many batches were under way in each step."""
    machine, ahead, began_ns = Machine(2), [], 0
    with machine.installed():
        plan = FetchPlan(
            dataset=dataset or Samples(),
            collate_fn=default_collate,
            default_collation=True,
            timeout_s=0,
            cpus=cpus,
            **how,
        )
        pool = VirtualExecutor(machine, plan, costs=USUAL, processes=workers)
        batches = [list(range(at, at + SIZE)) for at in range(0, STEPS * SIZE, SIZE)]
        began_ns = machine.now_ns
        pool.start_epoch(iter(batches), 0)
        for number, batch in enumerate(pool):
            assert batch.tolist() == batches[number]
            ahead.append(len(pool.under_way()[1]))
            step(number)
        took_s = (machine.now_ns - began_ns) / 1e9
        pool.close()
    return took_s, ahead


def computes(number):
    work(STEP_S)


def test_a_training_that_computes_leaves_hardly_a_cpu_idle():
    took_s, _ = epoch(computes, look_ahead=9)
    wanted_s = STEPS * (STEP_S + SIZE * 0.0013)
    assert took_s <= 1.07 * wanted_s / 2  # 1.12 where workers read as beside a device


def test_a_training_that_computes_has_as_many_batches_ahead_as_torch_and_another_as_planned():
    shared = epoch(computes, look_ahead=9)[1]
    assert shared[10:30] == [3] * 20  # one of four was handed over
    assert epoch(computes, look_ahead=9, prefetch=3)[1][10:30] == [5] * 20
    assert epoch(computes, look_ahead=3, prefetch=3)[1][10:30] == [2] * 20
    for others in (
        epoch(lambda number: sleep(STEP_S), look_ahead=9),
        epoch(computes, look_ahead=9, cpus=float("inf")),
        epoch(computes, look_ahead=9, workers=1),  # two CPUs are enough for two processes
    ):
        assert others[1][:31] == [8] * 31


def test_a_pause_between_two_steps_does_not_count_as_a_step():
    def validates(number):
        sleep(30 * (number == 15))
        computes(number)

    assert epoch(validates, look_ahead=9)[1][10:30] == [3] * 20


def test_a_training_that_stops_computing_has_as_many_batches_ahead_as_planned():
    def other(number):
        (computes if number < 15 else lambda _: sleep(STEP_S))(number)

    ahead = epoch(other, look_ahead=9)[1]
    assert (ahead[12], ahead[30]) == (3, 8)


@pytest.mark.parametrize("workers", [2, 4, 16])
@pytest.mark.parametrize("wait_s", [0.001, 0.004, 0.016, 0.05])
def test_samples_that_wait_come_as_soon_as_when_workers_share_them_out(workers, wait_s):
    waiting = Samples(lambda index: sleep(wait_s))
    how = {"workers": workers, "look_ahead": max(9, 2 * workers)}
    shared = epoch(computes, waiting, cpus=float("inf"), **how)[0]
    assert epoch(computes, waiting, **how)[0] <= 1.02 * shared


def test_nothing_is_known_of_a_training_before_it_made_steps():
    load = TrainingLoad(2.0)
    assert not load.competes(100)
    with Machine(2).installed():
        load.delivered()
        load.requested()
        load.delivered()
        assert not load.competes(100)

"""What laws on the virtual machine are there for: pool, stamps, verdicts and tuner."""

from __future__ import annotations

from functools import partial

from executors import test_pool_on_machine as pool
from loading import test_tuned_loader as tuned
from rig.machine import DeadlockError
from verdicts import test_planted as planted

from lightning_fastdata.executors.pool.scheduler import PoolExecutor
from lightning_fastdata.executors.pool.watches import CrewTrial, StallWatch
from lightning_fastdata.insight import late_batches
from lightning_fastdata.loading import tuner
from lightning_fastdata.stamps.batch_stamps import TaskWatch
from mutants.mutant import Mutant


def disturbed():
    for seed in range(6):
        pool.disturb(seed, pool.Chaos())


def plant(code):
    (found,) = (each for each in planted.PLANTS if each.code == code)
    return partial(planted.check_findings, found)


def any_that_is_ready(right):
    def wrong(executor):
        for batch in executor._batches:
            if executor._is_current(batch) and batch.is_ready:
                return batch
        return None

    return wrong


def dropped(right):
    def wrong(executor, loss):
        for task in loss.tasks:
            task.batch.open_tasks -= 1

    return wrong


MUTANTS = (
    Mutant(
        "a batch that is ready earlier overtakes",
        disturbed, PoolExecutor, "_first_ready", any_that_is_ready,
    ),
    Mutant(
        "what a worker died with is not done again",
        disturbed, PoolExecutor, "_redo", dropped,
        failures=(AssertionError, AttributeError, DeadlockError),
    ),
    Mutant(
        "who waits is taken to compute",
        pool.test_a_worker_that_is_stuck_is_replaced_at_the_deadline_and_its_sample_named_at_the_next,
        StallWatch, "_computes", lambda right: lambda *_: True,
    ),
    Mutant(
        "collation is not timed",
        partial(
            pool.test_the_kernels_figures_of_a_task_are_those_of_the_machine, pool.RUNS["collates"]
        ),
        TaskWatch, "collated", lambda right: lambda *_: None,
    ),
    Mutant(
        "half of the workers are never tried",
        plant("FD304"), CrewTrial, "_is_worth_it", lambda right: lambda *_: False,
    ),
    Mutant(
        "what workers share is not asked for",
        plant("FD304"), late_batches, "_shares", lambda right: lambda _: False,
    ),
    Mutant(
        "a move that did not pay is kept",
        tuned.test_workers_that_wait_for_each_other_are_taken_back,
        tuner, "paid", lambda right: lambda *_: True,
    ),
)  # fmt: skip

"""Workers are started only as far as an epoch is over sooner for it."""

from __future__ import annotations

import heapq
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from thoroughness import max_examples

from lightning_fastdata.planning.facts import DatasetFacts, SampleCost
from lightning_fastdata.planning.options import LoaderOptions
from lightning_fastdata.planning.plan_for import LoaderSpec, plan_for, soonest_workers

costs = st.builds(
    lambda cpu, wait: SampleCost(wall_ms=cpu + wait, cpu_ms=cpu, size_bytes=8, samples=9),
    st.floats(0.01, 2),
    st.floats(5, 200),
)
epochs = st.integers(1, 2000)
starts = st.floats(1, 2000)


def simulated_ms(cost: SampleCost, batches: int, workers: int, start_ms: float) -> float:
    """When an epoch is over whose workers are started one by one, each taking what is next."""
    free = [(number + 1) * start_ms for number in range(workers)]
    for _ in range(batches):
        heapq.heapreplace(free, free[0] + cost.wall_ms)
    return max(free)


@max_examples(100)
@given(cost=costs, batches=epochs, start_ms=starts)
def test_no_number_of_workers_is_sooner_by_much(cost, batches, start_ms) -> None:
    most = min(64, batches)
    chosen, _ = soonest_workers(cost, 1, cpus=10**6, most=most, batches=batches, start_ms=start_ms)
    took = simulated_ms(cost, batches, chosen, start_ms)
    best = min(simulated_ms(cost, batches, n, start_ms) for n in range(1, most + 1))
    assert took < 2 * best


@max_examples(50)
@given(cost=costs, batches=epochs, start_ms=starts, more=st.floats(1, 9))
def test_a_dearer_start_or_a_shorter_epoch_takes_no_more_workers(
    cost, batches, start_ms, more
) -> None:
    def count(batches: int, start_ms: float) -> int:
        how = {"cpus": 4, "most": 64, "batches": batches, "start_ms": start_ms}
        return soonest_workers(cost, 4, **how)[0]

    few = count(batches, start_ms)
    assert 1 <= count(batches, start_ms * more) <= few <= count(int(batches * more), start_ms) <= 64
    assert count(batches, 0) == 64  # who starts for nothing, and when the length is not known
    assert soonest_workers(cost, 4, cpus=4, most=64, batches=None, start_ms=start_ms)[0] == 64


def workers(
    samples: int, *, wait_ms: float = 10, keeps: bool = False, crowded: float = 1.0, **options: Any
) -> int:
    spec = LoaderSpec(
        dataset=range(samples),
        name="rows",
        options=LoaderOptions(**options),
        batch_size=4,
        keeps=keeps,
    )
    cost = SampleCost(wall_ms=wait_ms + 0.02, cpu_ms=0.02, size_bytes=8, samples=9, crowded=crowded)
    plan = plan_for(spec, DatasetFacts(cost=cost, split=True), accelerator="cuda")
    assert (plan.num_workers > 0) == (plan.executor == "workers")
    return plan.num_workers


def test_a_short_epoch_is_read_by_few_workers_or_none() -> None:
    assert 1 <= workers(48) <= 6
    assert workers(48) <= workers(48, keeps=True) <= workers(10**6)
    assert workers(48) < workers(10**6)
    assert workers(48) == workers(48, keeps=True, persistent_workers=False)
    assert workers(4) == 0
    assert workers(48, multiprocessing_context="spawn") == 0
    assert workers(48, num_workers=40) == 40


def test_where_others_have_the_cpus_fewer_are_started_and_some_still() -> None:
    alone, crowded = (workers(400, keeps=True, crowded=times) for times in (1.0, 15.0))
    assert 1 <= crowded < alone / 2

"""Half of the workers for a moment: when that is tried, and what it shows."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from rig.machine import sleep
from rig.virtual_crew import on_machine
from torch.utils.data import Dataset, default_collate
from virtual_time import VirtualClock

from lightning_fastdata.executors.crew_trial import CrewTrial
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.kinds import Resources, open_executor
from lightning_fastdata.host import clock
from lightning_fastdata.stamps.batch_stamps import TaskStamps

MS = 1_000_000


class Crew:
    """Workers whose tasks take so long, by a clock that nobody has to wait for.

    Args:
        task_ms: Return what a task takes with so many at work.
        cpu: Part of that on a CPU.
    """

    def __init__(self, task_ms, *, workers=4, cpu=0.0, late=True):
        self.clock = VirtualClock(0)
        self.trial = CrewTrial(workers)
        self.task_ms, self.cpu, self.late = task_ms, cpu, late
        self.under_way: list[tuple[int, int]] = []
        self.limits: list[int | None] = []

    def run(self, tasks=400):
        with clock.installed(self.clock):
            return self._run(tasks)

    def _run(self, tasks):
        found = []
        for _ in range(tasks):
            limit = self.trial.limit or self.trial.workers
            while len(self.under_way) < limit:
                took = self.task_ms(limit) * MS
                now_ns = clock.monotonic_ns()
                self.under_way.append((now_ns + int(took), now_ns))
            self.under_way.sort()
            ended, began = self.under_way.pop(0)
            self.clock.advance_to(ended)
            self.limits.append(self.trial.limit)
            busy = int((ended - began) * self.cpu)
            stamps = TaskStamps(0, began, ended, busy, 0, 8, ended - began, 0, 0, None)
            found.append(self.trial.answered(stamps, len(self.under_way)))
            self.trial.delivered(late=self.late)
        return [rates for rates in found if rates is not None]


def test_it_is_tried_once_and_all_work_on_afterwards():
    crew = Crew(lambda _: 20)
    assert len(crew.run(800)) == 1
    tried = [at for at, limit in enumerate(crew.limits) if limit is not None]
    assert tried == list(range(tried[0], tried[-1] + 1))
    assert crew.trial.limit is None


@pytest.mark.parametrize(
    "crew",
    [
        Crew(lambda _: 20, late=False),
        Crew(lambda _: 20, cpu=0.9),
        Crew(lambda _: 20, workers=1),
    ],
    ids=["in time", "computing", "one worker"],
)
def test_it_is_not_tried_where_it_would_show_nothing(crew):
    assert crew.run() == []
    assert set(crew.limits) == {None}


def test_another_epoch_gives_it_up():
    crew = Crew(lambda _: 20)
    while crew.trial.limit is None:
        crew.run(1)
    crew.trial.given_up()
    assert crew.trial.limit is None
    assert len(crew.run()) == 1  # and it is tried again


class Waits(Dataset[torch.Tensor]):
    """Samples that wait."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        sleep(0.0014 + 0.0001 * (index * 5 % 13))
        return torch.tensor(index)


def test_all_workers_read_on_when_nobody_takes_stamps_any_more():
    plan = FetchPlan(dataset=Waits(), collate_fn=default_collate, default_collation=True)
    with on_machine():
        pool = open_executor(plan, Resources(executor="workers", workers=2))
        pool.record(deque())
        pool.start_epoch([list(range(at, at + 8)) for at in range(0, 4000, 8)], 0)
        while pool._trial.limit is None:
            next(pool)
        pool.record(None)
        next(pool)
        assert pool._trial.limit is None
        pool.close()

"""The executor ``"ray"``: batches made by actors, in the order, with the content, of any other.

It is the executor of side processes with another crew: which batch is under way, in which order
they leave, what is done again and what is given up is decided by the same code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_fastdata.executors.pool.scheduler import PoolExecutor
from lightning_fastdata.executors.ray.crew import RayCrew

if TYPE_CHECKING:
    from lightning_fastdata.batches.streams import PageLocks
    from lightning_fastdata.executors.crew_trial import CrewTrial
    from lightning_fastdata.executors.fetch import FetchPlan
    from lightning_fastdata.executors.pool.process import TaskCrew


class RayExecutor(PoolExecutor):
    """Fetches batches in so many ``actors`` of a Ray cluster.

    ``options``: Of the actors, as ``ray.remote`` takes them, in place of our own.

    Raises:
        OptionsError: Ray is not installed.
        WorkerError: No cluster can be reached, or the dataset cannot be sent to it.
    """

    def __init__(
        self,
        plan: FetchPlan,
        *,
        actors: int,
        options: Mapping[str, Any],
        page_locks: PageLocks | None = None,
        trial: CrewTrial | None = None,
    ) -> None:
        self._whole, self._options = plan, options
        # Memory of this machine can only be written here: samples travel as whole batches. Actors
        # that get nowhere are the crew's to find.
        plan = replace(plan, default_collation=False, stall_timeout_s=0)
        super().__init__(plan, processes=actors, page_locks=page_locks, trial=trial)

    def _start_crew(self, processes: int, threads: int) -> TaskCrew:  # noqa: ARG002
        return RayCrew(self._whole, actors=processes, options=self._options)

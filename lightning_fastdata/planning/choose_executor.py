"""Which executor suits a dataset, in words: a pure decision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from lightning_fastdata.executors.kinds import KINDS, ExecutorName
from lightning_fastdata.planning.worker_count import (
    WORTH_IT,
    alone_ms,
    by_workers_ms,
    over_epochs,
    waits,
)

if TYPE_CHECKING:
    from lightning_fastdata.planning.facts.inspection import DatasetFacts
    from lightning_fastdata.planning.loader_plan import LoaderSpec


class ExecutorChoice(NamedTuple):
    """The executor that suits a dataset."""

    executor: ExecutorName
    """Its name."""
    why: str
    """The reason."""
    alone: bool = False
    """The training process had better read for itself, where the number of workers is open."""


TORCH: Final = ExecutorChoice("torch", KINDS["torch"].what)
"""Where nothing asks for another one."""


def choose_executor(
    spec: LoaderSpec, facts: DatasetFacts, *, cpus: int = 2, shared_memory: bool = True
) -> ExecutorChoice:
    """Return the executor that suits a dataset, and why.

    Threads are never chosen: whether a dataset may be read by several at once cannot be seen from
    outside, and processes decode this package's own images at least as fast.

    Args:
        spec: The loader. ``num_workers=0`` is a wish to fetch in the training process, a higher
            number one for workers, also where the samples that were read are cheap: others may not
            be.
        facts: What was found out about its dataset.
        cpus: That this rank may use.
        shared_memory: The system has the memory that side processes need (Linux).
    """
    workers, batch_size = spec.options.num_workers, spec.batch_size or 1
    keyed = facts.draws or bool(spec.pipelines)
    aside: ExecutorName = "workers" if shared_memory else "torch"
    if spec.is_stream and workers != 0:
        return ExecutorChoice(aside, "each process reads its own stream")
    if facts.rows:
        return ExecutorChoice(
            "gather", "its batches are rows of numbers, copied with one call per column"
        )
    # Keys for draws that are not made would cost each step of the training some 50 us.
    here: ExecutorName = "inline" if keyed or spec.transformed else "torch"
    if workers == 0:
        return ExecutorChoice(here, "num_workers=0 asks for the training process", alone=True)
    lacks = "" if shared_memory else "; this system has no memory files for side processes"
    if isinstance(workers, int):
        return ExecutorChoice(aside, f"num_workers={workers} asks for them" + lacks)
    if facts.cost is None:
        return ExecutorChoice(aside, "what a sample costs is not known" + lacks)
    if spec.transformed:  # which is not part of what was measured
        return ExecutorChoice(aside, "an Albumentations pipeline runs on each sample" + lacks)
    alone = alone_ms(over_epochs(facts.cost, 1), batch_size, keyed=keyed)
    shared = by_workers_ms(over_epochs(facts.cost, cpus), batch_size, keyed=keyed, cpus=cpus)
    said = f"a batch takes {alone:.2g} ms here and some {shared:.2g} ms by side processes"
    if facts.cost.again_ms is not None:
        said += (
            f", on the mean of ten epochs: a sample takes {facts.cost.cpu_ms:.2g} ms at first and "
            f"{facts.cost.again_ms:.2g} when it is read again, as the dataset keeps it"
        )
    if waits(facts.cost):
        said += f"; a sample waits {facts.cost.wait_ms:.2g} of its {facts.cost.wall_ms:.2g} ms"
    if shared < WORTH_IT * alone:
        return ExecutorChoice(aside, said + lacks)
    return ExecutorChoice(here, said, alone=True)

"""How many workers fetch, and how far they are ahead: pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from lightning_fastdata.host.memory import size_text

if TYPE_CHECKING:
    from lightning_fastdata.executors.kinds import ExecutorKind
    from lightning_fastdata.host.cpu import CpuLimit
    from lightning_fastdata.host.memory import HostMemory
    from lightning_fastdata.planning.facts.probe import SampleCost
    from lightning_fastdata.planning.options import LoaderOptions
    from lightning_fastdata.planning.plan_for import Situation
    from lightning_fastdata.planning.stream_split import StreamSplit
    from lightning_fastdata.types import Stage

SET: Final = "set by you"
MOST_WAITING: Final = 64
_FIRST_ACTORS: Final = 8  # each takes seconds to start, and a CPU that others may want
_SHORTEST_WAIT_MS: Final = 0.2  # a sample that is handed out and taken back waits for about as long
_HANDOVER_MS: Final = 0.1  # CPU time for the messages of a sample, its key, its copy into the batch
_LOOK_AHEAD_BATCHES: Final = 8  # under way together; enough to cover one slow batch
# CPU time measured by benchmarks/handing_over.py where ``SampleCost.pace`` is 1: the training
# process gives out a batch and takes it in, a side process handles it besides reading and
# collating, a generator is seeded for a sample that draws from one.
_GIVE_MS, _GIVE_ROW_MS = 0.17, 0.0006
_TAKE_MS, _TAKE_ROW_MS = 0.16, 0.0016
_KEY_MS: Final = 0.006
EPOCHS: Final = 10  # of a training, where workers are kept
_FORK_MS: Final = 60  # to start a process and to end it; measured as those above
_FRESH_MS: Final = 2500  # the same of one that imports torch anew
_SURELY_LESS: Final = 0.9  # of the time of an epoch, by fewer workers
_FEWEST_OF_STREAM: Final = 4
_OF_MEMORY: Final = 0.8
"""Of what is left, what workers may take."""
_FORKED_BYTES: Final = 48 * 2**20  # a forked process shares its parent's pages
_FRESH_BYTES: Final = 400 * 2**20  # a process that imports torch anew
_ONE_STREAM: Final = (
    "num_workers is 1 of {count} possible, because several workers may each read the whole stream, "
    "so that samples would come several times: {why}. If the dataset divides itself among them "
    "(torch.utils.data.get_worker_info), set num_workers={count}, or split=True; otherwise set "
    "split=False, and this message goes away."
)


def waits(cost: SampleCost | None) -> bool:
    """Return whether a sample waits for most of its time, so that CPUs would stand idle."""
    return cost is not None and cost.wait_ms >= _SHORTEST_WAIT_MS and cost.wait_ms >= cost.cpu_ms


def alone_ms(cost: SampleCost, batch_size: int, *, keyed: bool = False) -> float:
    """Return the milliseconds in which the training process makes one batch itself.

    ``keyed``: the samples draw, so that generators are seeded for each.
    """
    return batch_size * (cost.wall_ms + cost.collate_ms + cost.pace * keyed * _KEY_MS)


def by_workers_ms(
    cost: SampleCost, batch_size: int, *, cpus: int, keyed: bool = False, workers: int | None = None
) -> float:
    """Return the milliseconds from batch to batch if side processes make them.

    The slowest decides: the training process, which gives and takes batches one by one, the
    ``cpus``, which all processes share, or the ``workers``. None: as many as there would be.
    """
    gives = _gives_ms(cost, batch_size)
    each = cost.cpu_ms + cost.collate_ms + cost.pace * (keyed * _KEY_MS + _TAKE_ROW_MS)
    makes = cost.pace * _TAKE_MS + batch_size * each
    waits_ms = batch_size * cost.wait_ms
    if workers is None:
        workers = MOST_WAITING if waits(cost) else cpus
    return max(gives, (gives + makes) / cpus, (makes + waits_ms) / workers)


def starting_ms(cost: SampleCost | None, *, forked: bool, kept: bool) -> float:
    """Return the milliseconds of each epoch that go into starting one worker.

    One that is ``kept`` is started once in a training. It computes, so that it takes as many times
    as long as others let it wait for a CPU.
    """
    once_ms = (_FORK_MS if forked else _FRESH_MS) * (
        1.0 if cost is None else cost.pace * cost.crowded
    )
    return once_ms / EPOCHS if kept else once_ms


def soonest_workers(
    cost: SampleCost,
    batch_size: int,
    *,
    cpus: int,
    most: int,
    batches: int | None,
    start_ms: float,
    keyed: bool = False,
) -> tuple[int, float]:
    """Return by how many workers, ``most`` at most, an epoch is over soonest, starting included.

    And the milliseconds that this takes for each batch. ``start_ms`` is of each worker in each
    epoch, which has so many ``batches``; None: not known, and starting is not counted.
    """

    def batch_ms(workers: int) -> float:
        made = by_workers_ms(cost, batch_size, cpus=cpus, keyed=keyed, workers=workers)
        return made + workers * start_ms / (batches or math.inf)

    fewest = min(range(1, most + 1), key=batch_ms)
    # Figures of few samples are rough, and what waits now and then is helped by more.
    count = fewest if batch_ms(fewest) < _SURELY_LESS * batch_ms(most) else most
    return count, batch_ms(count)


def enough_workers(cost: SampleCost, batch_size: int) -> int:
    """Return how many workers make batches as fast as the training process can take them."""
    return max(1, math.ceil(alone_ms(cost, batch_size) / _gives_ms(cost, batch_size)))


def _gives_ms(cost: SampleCost, batch_size: int) -> float:
    return cost.pace * (_GIVE_MS + batch_size * _GIVE_ROW_MS)


def workers_for(cpu: CpuLimit, *, on_cpu: bool, batches: int | None) -> tuple[int, str]:
    """Return how many workers keep the CPUs of this rank busy with samples that compute, and why.

    Those of training that stay alive during validation sleep when they are ahead, so that
    validation has as many. ``on_cpu``: the model computes on the CPUs, too.
    """
    count, why = cpu.usable_cpus, "the training process mostly waits for the device"
    if on_cpu:
        # A worker that is ahead sleeps, and one that is late has the CPU that the model waits on.
        why = "one for each CPU, which the model takes back as long as batches are ready"
    elif count > 2:
        count, why = count - 1, "one CPU is left for the training process"
    if batches is not None and batches < count:
        return batches, f"no more than there are batches ({batches})"
    return count, f"{why} ({cpu.reason})"


def actors_for(stage: Stage, room: int, *, batches: int | None) -> tuple[int, str]:
    """Return with how many actors a loader begins, and why; those of training are tuned then.

    ``room``: For so many the cluster has free CPUs, without one for the training process.
    """
    count, why = min(room, _FIRST_ACTORS), f"the cluster has CPUs for {room}"
    count = max(1, count // 2) if stage == "val" else count
    if batches is not None and batches < count:
        return max(1, batches), f"no more than there are batches ({batches})"
    return count, why


def workers_of_stream(
    computing: int, why: str, stream: StreamSplit | None
) -> tuple[int, str, list[str]]:
    """Return how many workers read a stream, why, and what to report where it is not known.

    There would be ``computing`` of them, more than one, if it had an index. Here they are four at
    least: streams often wait, and none can be tried beforehand without losing samples.
    """
    if stream is None or not stream.splits:
        unseen = "it was not looked at" if stream is None else stream.why
        limit = _ONE_STREAM.format(count=computing, why=unseen)
        return 1, f"several might each read the whole stream: {unseen}", [limit]
    count, most = max(computing, _FEWEST_OF_STREAM), stream.most_workers
    if most is not None and most < count:
        return max(1, most), f"no more than it has shards: {stream.why}", []
    why = why if count == computing else f"{count} at least, as streams often wait"
    return count, f"{why}; {stream.why}", []


def workers_that_wait(
    computing: int,
    cost: SampleCost,
    *,
    tasks: int | None,
    memory: HostMemory,
    ranks: int,
    forked: bool,
) -> tuple[int, str]:
    """Return how many workers keep the CPUs busy although each of them waits, and why.

    A worker that computes for c and waits for w keeps a CPU busy for c / (c + w) of the time, so
    that 1 + w / c of them fill it; c is the sample's ``cpu_ms`` and 0.1 ms for handing it over.
    ``tasks`` are the samples or batches of an epoch, whichever is handed to a worker.
    """
    wanted = math.ceil(computing * (1 + cost.wait_ms / (cost.cpu_ms + _HANDOVER_MS)))
    why = f"a sample waits {cost.wait_ms:.3g} of its {cost.wall_ms:.3g} ms"
    bound, bound_why = most_workers(memory, ranks=ranks, forked=forked, tasks=tasks)
    if wanted > bound:
        return bound, f"{why}; {bound_why}"
    return wanted, f"{why}, so that {computing} CPUs feed {wanted}"


def most_workers(
    memory: HostMemory, *, ranks: int, forked: bool, tasks: int | None
) -> tuple[int, str]:
    """Return how many workers there may be at most, at least 1, and why no more.

    ``tasks`` are the samples or batches of an epoch, whichever is handed to a worker; None: not
    known. ``ranks`` share the host.
    """
    each = _FORKED_BYTES if forked else _FRESH_BYTES
    bounds = [
        (MOST_WAITING, f"no more than {MOST_WAITING}"),
        (memory.available_bytes // (4 * ranks * each), "bounded by RAM"),
    ]
    if memory.open_files_soft is not None:
        bounds.append((memory.open_files_soft // (8 * ranks), "bounded by the open-file limit"))
    if tasks is not None:
        bounds.append((tasks, f"no more than there are to fetch ({tasks})"))
    bound, why = min(bounds)
    return max(1, bound), why


def count_workers(
    options: LoaderOptions, kind: ExecutorKind, situation: Situation, *, ours: bool
) -> tuple[int, str, list[str]]:
    """Return how many workers there are, why, and what bounds them; torch's own if not ours."""
    chosen, cpu = situation.choice, situation.cpu
    if options.num_workers != "auto":
        return options.num_workers, SET, []
    if situation.stream is not None and situation.stream.here:
        return 0, situation.stream.why, []
    if kind.workers is not None and not situation.iterable:
        return *kind.workers, []
    if situation.actors is not None:
        return *actors_for(situation.stage, situation.actors, batches=situation.batches), []
    alone = chosen.alone or (situation.batched_fetch and situation.in_memory and not ours)
    if (alone or chosen.few) and (options.executor == "auto" or kind.is_torch):
        cheap = "fetching a batch costs less than handing it over"
        # One that is aside reads things as they were when the epoch began.
        return (1, f"{cheap}: more have no use", []) if chosen.few else (0, cheap, [])
    on_cpu = situation.accelerator == "cpu"
    count, why = workers_for(cpu, on_cpu=on_cpu, batches=situation.batches)
    if situation.iterable and count > 1 and options.split is False:
        return 1, "several would each read the whole stream (split=False)", []
    if situation.iterable and count > 1:
        return workers_of_stream(count, why, situation.stream)
    cost = situation.cost if ours else None
    if cost is not None and count and waits(cost):
        method: str | None = options.multiprocessing_context
        if method == "auto":
            method = situation.start_method
        count, why = workers_that_wait(
            count,
            cost,
            tasks=situation.dataset_length if situation.split else situation.batches,
            memory=situation.memory,
            ranks=cpu.ranks_on_host,
            forked=(method or ("fork" if situation.platform == "linux" else "spawn")) == "fork",
        )
    elif cost is not None and enough_workers(cost, situation.batch_size) < count:
        why = "the training process could not take the batches of more"
        count = enough_workers(cost, situation.batch_size)
    if cost is not None and count > 1:
        soonest, _ = soonest_workers(
            cost,
            situation.batch_size,
            cpus=cpu.usable_cpus,
            most=count,
            batches=situation.batches,
            start_ms=situation.start_ms,
        )
        if soonest < count:
            why += f"; to start more takes longer than they save in {situation.batches} batches"
            count = soonest
    return within_memory(count, why, situation)


def within_memory(count: int, why: str, situation: Situation) -> tuple[int, str, list[str]]:
    """Return how many of so many workers memory has room for, why, and what bounds them.

    One takes what a process took that tried the dataset. Beyond what is left the kernel kills.
    """
    each, left = situation.worker_bytes, situation.memory.available_bytes
    room = int(_OF_MEMORY * left) // situation.cpu.ranks_on_host
    if not each or count * each <= room:
        return count, why, []
    fewer = max(1, room // each)
    why = f"a worker comes to take {size_text(each)}, and {size_text(left)} are left"
    if fewer == count:
        return count, why, []
    limit = (
        f"num_workers is {fewer} instead of {count}, as {why}: the kernel kills workers where "
        "memory runs out. If they copy a list of the dataset, share(dataset) has it held once."
    )
    return fewer, why, [limit]


def look_ahead_batches(workers: int, *, prefetch: int | None, batch_size: int, split: bool) -> int:
    """Return how many batches are under way at once.

    ``prefetch`` batches for each worker if the user set that. ``split``: the samples of one batch
    are given to several workers.
    """
    if prefetch is not None:
        return max(_LOOK_AHEAD_BATCHES, workers * prefetch)
    if split:
        return _LOOK_AHEAD_BATCHES + math.ceil(workers / batch_size)
    return max(_LOOK_AHEAD_BATCHES, workers * 2)


def torch_prefetch(workers: int, options: LoaderOptions) -> tuple[int, str]:
    """Return how many batches each worker of torch's loader is ahead, and why."""
    if options.prefetch_factor != "auto":
        return options.prefetch_factor, SET
    prefetch = max(2, min(4, math.ceil(_LOOK_AHEAD_BATCHES / max(1, workers))))
    return prefetch, f"{workers * prefetch} batches ahead in all, to cover a slow one"

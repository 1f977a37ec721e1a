"""What a pipeline costs workers and device, measured on real samples before the training."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import torch
from torch.utils.data import IterableDataset

from lightning_fastdata.augment import (
    DatasetRecording,
    leaves_to_device,
    redrawn_of,
    redrawn_on_device,
)
from lightning_fastdata.batches.collate import (
    FirstOfPairs,
    RecordedCollate,
    StagingCollate,
    collate_samples,
)
from lightning_fastdata.batches.keyed import keyed
from lightning_fastdata.batches.moving import move
from lightning_fastdata.host.usage import queued_s
from lightning_fastdata.insight.measure.timeline import CudaClock, HostClock
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.order.repeats import spreading
from lightning_fastdata.planning.facts.probe import spread_indices
from lightning_fastdata.planning.facts.probe_process import Tell, try_apart
from lightning_fastdata.plugin.placing.decision import PlaceCosts, SampleCosts
from lightning_fastdata.randomness.shared_epoch import EpochCell
from lightning_fastdata.types import SampleKey

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from lightning_fastdata.augment import StageTransform
    from lightning_fastdata.batches.staged import StagedBatch
    from lightning_fastdata.insight.measure.timeline import DeviceClock
    from lightning_fastdata.planning.facts.pipeline_trial import Trial
    from lightning_fastdata.types import Stage

_Made = TypeVar("_Made")
_BUDGET_S: Final = 0.3
_MOST_SAMPLES: Final = 16
_WARM_UP, _ROUNDS = 2, 5
_MARKS: Final = 16
_TOO_MUCH: Final = (RuntimeError, TypeError)
"""What torch raises where a device has no memory, no such operation, or no such dtype."""


class ReadingProcesses(NamedTuple):
    """How samples may be read before a loader is opened: in a process like its workers, or not."""

    start_method: str | None = None
    """How its workers are started; None: the default of Python."""
    probe: bool = True
    """Whether samples may be read at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceTask:
    """A loader's work, as far as the place of its pixels rests on it."""

    dataset: Dataset[Any]
    """What is read."""
    transform: StageTransform | None
    """The pipeline; None: those that the dataset calls itself."""
    own: Trial | None = None
    """Of the dataset's own pipelines, if they were tried."""
    stage: Stage
    """What the loader is for."""
    device: torch.device
    """Where the trainer computes."""
    batch_size: int
    """Samples in a batch of this rank."""
    workers: int
    """Side processes of its loader."""
    cpus: float
    """CPUs that this rank may use."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """Of the user; None: the default collation."""
    seed: int = 0
    """Of the draws."""
    processes: ReadingProcesses = field(default_factory=ReadingProcesses)
    """How samples may be read before the loader is opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTimes:
    """Where the times of the calling process are read."""

    clock_s: Callable[[], float] = time.perf_counter
    """Seconds from any start."""
    cpu_s: Callable[[], float] = time.process_time
    """Seconds of CPU time of all threads: workers have one, where OpenCV may use many here."""
    queue_s: Callable[[], float] = queued_s
    """Seconds in which the calling thread waited for a CPU."""

    def of(self, work: Callable[[], _Made]) -> tuple[_Made, float, float]:
        """Return what ``work`` returns, the milliseconds it takes one thread, and those of CPU."""
        queued, cpu, wall = self.queue_s(), self.cpu_s(), self.clock_s()
        made = work()
        wall, cpu = self.clock_s() - wall, self.cpu_s() - cpu
        return made, 1000 * max(cpu, wall - (self.queue_s() - queued)), 1000 * cpu


def read_place_costs(
    task: PlaceTask,
    *,
    accelerator: bool,
    times: ProcessTimes | None = None,
    device_ms: Callable[[Callable[[], object], torch.device], float] | None = None,
    budget_s: float = _BUDGET_S,
) -> PlaceCosts:
    """Measure what a pipeline costs the workers, and the device; the random state stays.

    That reads up to 16 samples, or for 0.3 s, and runs the device's part of one batch 7 times.
    Nothing is measured where nothing can be chosen.

    Args:
        task: The loader's work.
        accelerator: Whether the training runs on something else than a CPU.
        times: Of the process.
        device_ms: Returns the milliseconds that some work takes a device; default:
            :func:`time_on_device`.
        budget_s: Seconds after which no further sample is begun.
    """
    defers = task.transform is None or leaves_to_device(task.transform)
    known: dict[str, Any] = {
        "accelerator": accelerator,
        "defers": defers,
        "batch_size": task.batch_size,
        "workers": task.workers,
        "cpus": task.cpus,
        "redrawn": _redrawn(task),
    }
    reads = task.processes.probe and not isinstance(task.dataset, IterableDataset)
    if not (accelerator and defers and reads):
        return PlaceCosts(**known)
    times = ProcessTimes() if times is None else times
    method = task.processes.start_method or multiprocessing.get_start_method()
    found = try_apart(_measure, task, times, budget_s, start_method=method).values
    if "costs" not in found or "batch" not in found:
        return PlaceCosts(**known)
    costs: SampleCosts = found["costs"]
    try:
        took_ms = _device_ms(task, found["batch"], device_ms or time_on_device)
    except _TOO_MUCH as error:
        first = (str(error).splitlines() or [""])[0]
        why = f"a trial of its part on {task.device} raised {type(error).__name__}: {first}"
        return PlaceCosts(**known, sample=costs, refusal=why)
    return PlaceCosts(**known, sample=costs, device_ms=took_ms)


class _Measured(NamedTuple):
    """Samples that were measured, and what is left of them to the device."""

    costs: SampleCosts
    collate: Callable[[list[Any]], StagedBatch]
    rows: list[Any]
    """As the workers leave them to the device."""


def _measure(task: PlaceTask, times: ProcessTimes, budget_s: float, tell: Tell) -> None:
    """Measure where nothing else uses the dataset, and send a batch as the workers leave it."""
    measure = _measure_own if task.transform is None else _measure_samples
    measured = measure(task, times, budget_s)
    if measured is not None:
        tell("costs", measured.costs)
        rows = [measured.rows[number % len(measured.rows)] for number in range(task.batch_size)]
        tell("batch", measured.collate(rows))


def _redrawn(task: PlaceTask) -> tuple[str, ...]:
    if task.transform is not None:
        return redrawn_on_device(task.transform)
    return () if task.own is None else redrawn_of(task.own.places)


def _measure_samples(task: PlaceTask, times: ProcessTimes, budget_s: float) -> _Measured | None:
    """Measure both ways on the same samples, so that one read more slowly counts for both."""
    transform = task.transform
    if transform is None:
        return None
    whole = transform.in_worker(on_device=False)
    deferred = transform.in_worker(on_device=True)
    indices = spread_indices(dataset_length(task.dataset) or 0, _MOST_SAMPLES)
    if whole is None or deferred is None or not indices:
        return None
    dataset: Any = task.dataset
    made: dict[str, list[tuple[Any, Any]]] = {"whole": [], "deferred": []}
    took: dict[str, list[float]] = {"read": [], "waits": [], "whole": [], "deferred": []}
    began_s = times.clock_s()
    for index in indices:
        key = SampleKey(task.seed, 0, index)
        try:
            sample, read_ms, cpu_ms = times.of(lambda index=index: dataset[index])  # type: ignore[misc]
        except Exception:  # whatever a dataset raises; it is told when training reads the sample
            return None
        took["read"].append(read_ms)
        took["waits"].append(max(0.0, read_ms - cpu_ms))
        for name, part in (("whole", whole), ("deferred", deferred)):
            pair, ms, _ = times.of(lambda part=part, key=key, sample=sample: part(sample, key))  # type: ignore[misc]
            made[name].append(pair)
            took[name].append(ms)
        if len(made["whole"]) > 1 and times.clock_s() - began_s >= budget_s:
            break
    collate_fn = task.collate_fn or collate_samples
    staging = StagingCollate(spreading(collate_fn, deferred), deferred, task.stage)
    finishing = FirstOfPairs(spreading(collate_fn, whole), whole, single=False)
    ways: dict[str, Callable[[list[Any]], Any]] = {"whole": finishing, "deferred": staging}
    costs = _costs(took, made, ways, times)
    return _Measured(costs, staging, made["deferred"])


def _measure_own(task: PlaceTask, times: ProcessTimes, budget_s: float) -> _Measured | None:
    """Measure a dataset whose own pipelines run whole, and leave over what they can."""
    indices = spread_indices(dataset_length(task.dataset) or 0, _MOST_SAMPLES)
    recording = DatasetRecording() if task.own is None else task.own.recording()
    datasets = {
        name: keyed(
            task.dataset,
            seed=task.seed,
            epoch=EpochCell(),
            transform=None,
            recording=recorder,
        )
        for name, recorder in (("whole", None), ("deferred", recording))
    }
    made: dict[str, list[Any]] = {"whole": [], "deferred": []}
    took: dict[str, list[float]] = {"waits": [], "whole": [], "deferred": []}
    began_s = times.clock_s()
    for index in indices:
        waited_ms = []
        for name, dataset in datasets.items():
            try:
                sample, ms, cpu_ms = times.of(lambda d=dataset, i=index: d[i])  # type: ignore[misc]
            except Exception:  # whatever a dataset raises; it is told when training reads it
                return None
            made[name].append(sample)
            took[name].append(cpu_ms)
            waited_ms.append(max(0.0, ms - cpu_ms))
        # The second reading finds in memory what the first one waited for; it counts for both.
        took["waits"].append(waited_ms[0])
        if len(took["waits"]) > 1 and times.clock_s() - began_s >= budget_s:
            break
    if not took["waits"]:
        return None
    collate_fn = task.collate_fn or collate_samples
    staging = RecordedCollate(collate_fn, recording, task.stage)
    costs = _costs(took, made, {"whole": collate_fn, "deferred": staging}, times)
    return _Measured(costs, staging, made["deferred"])


def _costs(
    took_ms: Mapping[str, Sequence[float]],
    made: Mapping[str, list[Any]],
    ways: Mapping[str, Callable[[list[Any]], Any]],
    times: ProcessTimes,
) -> SampleCosts:
    """Return the medians of what samples took both ways, with their share of the collation.

    Args:
        took_ms: Milliseconds of each sample: ``whole`` and ``deferred``, and what counts for both:
            ``read``, or where that is not told apart ``waits``, which is a part of it.
        made: What came of the samples, both ways.
        ways: What collates them.
        times: Of the process.
    """
    # The first sample opens files and fills caches.
    skip = 1 if len(took_ms["waits"]) > 1 else 0
    middle = {name: median(values[skip:]) for name, values in took_ms.items()}
    both_ms = middle.get("read", middle["waits"])
    each = {name: middle[name] + _collation_ms(ways[name], made[name], times) for name in ways}
    return SampleCosts(
        whole_ms=both_ms + each["whole"],
        deferred_ms=both_ms + each["deferred"],
        read_ms=middle.get("read"),
        waits_ms=middle["waits"],
        samples=len(took_ms["waits"]) - skip,
    )


def _collation_ms(
    collate: Callable[[list[Any]], Any], pairs: Sequence[Any], times: ProcessTimes
) -> float:
    collate(list(pairs))  # the first one imports
    _, ms, _ = times.of(lambda: collate(list(pairs)))
    return ms / len(pairs)


def _device_ms(
    task: PlaceTask,
    batch: StagedBatch,
    device_ms: Callable[[Callable[[], object], torch.device], float],
) -> float:
    here: Any = move(batch, task.device)
    if task.transform is None:
        work = partial(here.draws.apply, here.batch)
    else:
        work = partial(task.transform.apply, here.batch, here.draws)
    with torch.no_grad():
        return device_ms(work, task.device)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu" and torch.accelerator.is_available():
        torch.accelerator.synchronize()


def time_on_device(
    work: Callable[[], object],
    device: torch.device,
    *,
    clock: DeviceClock | None = None,
    wait: Callable[[torch.device], None] = _wait_for,
) -> float:
    """Return the milliseconds in which a device does some work: the median of 5, after 2 others.

    Args:
        work: What is given to the device.
        device: The device.
        clock: Marks points of the device's time. Default: CUDA's events, or the host's clock.
        wait: Returns when a device has done what it was given.
    """
    on_cuda = device.type == "cuda"
    took_ms = []
    with torch.cuda.device(device) if on_cuda else nullcontext():
        if clock is None:
            clock = CudaClock(_MARKS) if on_cuda else HostClock()
        for _ in range(_WARM_UP):
            work()
        wait(device)
        for _ in range(_ROUNDS):
            began = clock.mark()
            work()
            if isinstance(clock, HostClock):  # which does not know what the device has done
                wait(device)
            ended = clock.mark()
            wait(device)
            if began is not None and ended is not None:
                took_ms.append(clock.elapsed_ms(began, ended))
                clock.forget_before(ended)
    return median(took_ms)

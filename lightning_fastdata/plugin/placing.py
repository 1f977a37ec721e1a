"""Where a data module has the pixels of its pipelines computed: asked for, or measured and kept.

``augment_on="auto"`` decides for each stage when its first loader is made, before the training.
The first rule that fits decides:

==  =====================================================================  ========================
 1  there is no accelerator                                                workers
 2  the pipeline leaves nothing to a device                                workers
 3  a collate_fn of the user's makes the batches: it gets finished images  workers
 4  the device failed at its part when that was tried                      workers
 5  nothing could be measured beforehand                                   device
 6  the workers save more time per batch than the device needs for it      device
 7  otherwise                                                              workers
==  =====================================================================  ========================

A batch takes the workers ``batch * max(sample / workers, computing part of sample / CPUs)``, where
``sample`` is measured before the training, in one process; without workers, ``batch * sample``.
"""

from __future__ import annotations

import logging
import multiprocessing
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import torch

from lightning_fastdata.batches.collate import collate_samples, only_stacks
from lightning_fastdata.batches.staged import FirstOfPairs, StagingCollate, move
from lightning_fastdata.device.backend import current, default_type, synchronize
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.host import clock
from lightning_fastdata.host.clock import Clocks
from lightning_fastdata.host.cpu import read_cpu_limit
from lightning_fastdata.loading.facts import Tell, reads_one, spread_indices, try_apart
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.types import PixelPlace, SampleKey, Stage

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_fastdata.augment import StageTransform
    from lightning_fastdata.loading.plan_for import LoaderPlan, LoaderSpec
    from lightning_fastdata.plugin.transforms import StageTransforms

AugmentOn: TypeAlias = Literal["auto", "gpu", "cpu"]
"""Where a user wants the pixels of pipelines to be computed."""

_LOG = logging.getLogger("lightning_fastdata.plugin.placing.trial")  # which the documentation names
_ON_CPU: Final = (
    "the trainer has no accelerator, so that torch computes these pixels on the CPU in the "
    "training process, which takes many times as long as in the workers"
)
_FINISHED: Final = (
    "a collate_fn of yours gets finished images, which the workers make. Leave it out where "
    "samples can be stacked, or say collate_fn=ListsOf('boxes', 'labels') for fields that stay "
    "lists (of lightning_fastdata.data), and a device may compute them"
)
_SINGLE: Final = "batch_size=None makes no batches, which a device computes as a whole"
_BUDGET_S: Final = 0.3
_MOST_SAMPLES: Final = 16
_WARM_UP, _ROUNDS = 2, 5
# What torch raises where a device has no memory, no such operation, or no such dtype.
_TOO_MUCH: Final = (RuntimeError, TypeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCosts:
    """What a worker spends on one sample: medians, without waiting for a CPU."""

    whole_ms: float
    """Milliseconds with the whole pipeline: reading, pixels, and its share of the collation."""
    deferred_ms: float
    """Milliseconds if the device does what it can: reading, drawing, the pixels that stay, and its
    share of the collation."""
    read_ms: float
    """Milliseconds of reading, which are part of both times above."""
    waits_ms: float = 0.0
    """Milliseconds of ``read_ms`` without computing: waits for a disk or a network."""
    samples: int = 1
    """Number of samples that were measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceCosts:
    """What is known of both places before the first step."""

    accelerator: bool
    """Whether the training runs on something else than a CPU."""
    defers: bool = True
    """Whether anything of the pipeline can run on a device."""
    batch_size: int
    """Number of samples in a batch of this rank."""
    workers: int
    """Number of side processes that make batches; 0: the training process makes them."""
    cpus: float
    """Number of CPUs that this rank may use."""
    sample: SampleCosts | None = None
    """What a worker spends on one sample; None: no sample could be measured."""
    device_ms: float | None = None
    """Milliseconds that the device takes for its part of one batch; None: not measured."""
    refusal: str | None = None
    """Why the device cannot do its part; None: nothing is known that says so."""
    library: str = "Albumentations"
    """Name of the library that computes the pixels in the workers."""

    def loader_ms(self, place: PixelPlace) -> float:
        """Return the milliseconds in which the workers make one batch; 0 if unknown."""
        sample = self.sample
        if sample is None:
            return 0.0
        each = sample.whole_ms if place == "workers" else sample.deferred_ms
        if not self.workers:
            return self.batch_size * each
        computes = max(0.0, each - sample.waits_ms)
        return self.batch_size * max(each / self.workers, computes / max(self.cpus, 1e-3))


class PlaceChoice(NamedTuple):
    """Where the pixels are computed, and why."""

    place: PixelPlace
    reason: str
    """Why this place was chosen, with the numbers."""


def choose_place(costs: PlaceCosts) -> PlaceChoice:
    """Decide where the pixels of a pipeline are computed; the rules are those of this module."""
    sample, device_ms = costs.sample, costs.device_ms
    if not costs.accelerator:
        return PlaceChoice(
            "workers",
            "there is no accelerator, and on a CPU torch takes many times as long for these pixels "
            f"in batches as {costs.library} for samples in the workers",
        )
    if not costs.defers:
        return PlaceChoice("workers", "the pipeline leaves nothing to a device")
    if costs.refusal is not None:
        return PlaceChoice("workers", costs.refusal)
    if sample is None or device_ms is None:
        why = "no sample could be measured; the device takes off the workers what it can"
        return PlaceChoice("device", why)
    whole_ms, deferred_ms = costs.loader_ms("workers"), costs.loader_ms("device")
    workers = f"{costs.workers} worker{'s' if costs.workers > 1 else ''}"
    makers = workers if costs.workers else "the training process"
    why = (
        f"a batch of {costs.batch_size} takes {makers} {whole_ms:.4g} ms with the whole "
        f"pipeline and {deferred_ms:.4g} ms without what the device can do, for which that needs "
        f"{device_ms:.4g} ms (a sample: {sample.whole_ms:.3g} or {sample.deferred_ms:.3g} ms, "
        f"{sample.read_ms:.3g} of them reading; {sample.samples} measured)"
    )
    return PlaceChoice("device" if device_ms < whole_ms - deferred_ms else "workers", why)


def read_place_costs(
    costs: PlaceCosts,
    spec: LoaderSpec,
    transform: StageTransform,
    *,
    seed: int,
    device: torch.device,
    start_method: str | None = None,
    clocks: Clocks | None = None,
    device_ms: Callable[[Callable[[], object], torch.device], float] | None = None,
    budget_s: float = _BUDGET_S,
) -> PlaceCosts:
    """Return costs with the times of workers and device for a pipeline; random states stay.

    This reads up to 16 samples, or for 0.3 s, and runs the device's part of one batch 7 times,
    timed by ``device_ms``. Nothing is measured where nothing can be chosen, as without an
    accelerator. The default clocks count CPU time of all threads: workers have one, where OpenCV
    may use many here.

    ``transform`` starts in the workers, and draws by ``seed``; ``device`` is where the trainer
    computes. ``start_method`` is that of the workers; None: Python's default.
    """
    open_ = costs.accelerator and costs.defers and costs.refusal is None
    if not (open_ and spec.options.probe) or spec.is_stream:
        return costs
    clocks = clocks or Clocks(cpu_s=clock.process_time)
    method = start_method or multiprocessing.get_start_method()
    # What the measuring does not need is left out, as it may not be picklable.
    spec = replace(spec, sampler=None, batch_sampler=None, worker_init_fn=None)
    work = spec, transform, seed, clocks, budget_s
    found = try_apart(_measure, *work, start_method=method).values
    if "costs" not in found or "batch" not in found:
        return costs
    costs = replace(costs, sample=found["costs"])
    try:
        batch = move(found["batch"], device)
        part = partial(transform.apply, batch.batch, batch.draws)
        with torch.no_grad():
            took_ms = (device_ms or time_on_device)(part, device)
        return replace(costs, device_ms=took_ms)
    except _TOO_MUCH as error:
        first = (str(error).splitlines() or [""])[0]
        why = f"a trial of its part on {device} raised {type(error).__name__}: {first}"
        return replace(costs, refusal=why)


def _measure(
    spec: LoaderSpec,
    transform: StageTransform,
    seed: int,
    clocks: Clocks,
    budget_s: float,
    tell: Tell,
) -> None:
    """Measure in a process that alone uses the dataset; send a batch as the workers leave it."""
    whole, deferred = transform.in_worker(on_device=False), transform.in_worker(on_device=True)
    indices = spread_indices(dataset_length(spec.dataset) or 0, _MOST_SAMPLES)
    if whole is None or deferred is None or not indices:
        return
    ways = {"whole": whole, "deferred": deferred}
    collate = spec.collate_fn or collate_samples
    collates = {
        "whole": FirstOfPairs(collate, whole, single=False),
        "deferred": StagingCollate(collate, deferred, spec.stage),
    }
    made: dict[str, list[object]] = {name: [] for name in ways}
    took_ms: dict[str, list[float]] = {"waits": [], "read": [], **{name: [] for name in ways}}
    began_s = clocks.clock_s()
    read = reads_one(spec, spec.dataset)
    for index in indices:
        sample, ms, cpu_ms = clocks.of(partial(read, index))
        took_ms["read"].append(ms)
        took_ms["waits"].append(max(0.0, ms - cpu_ms))
        for name, make in ways.items():
            row, ms, _ = clocks.of(partial(make, sample, SampleKey(seed, 0, index)))
            made[name].append(row)
            took_ms[name].append(ms)
        if len(took_ms["read"]) > 1 and clocks.clock_s() - began_s >= budget_s:
            break
    # The first sample opens files, fills caches, and imports.
    skip = 1 if len(took_ms["read"]) > 1 else 0
    middle = {name: median(values[skip:]) for name, values in took_ms.items()}
    each = {}
    for name, collated in collates.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is a trial
            collated(list(made[name]))  # the first one imports
        _, ms, _ = clocks.of(partial(collated, list(made[name])))
        each[f"{name}_ms"] = middle["read"] + middle[name] + ms / len(made[name])
    costs = SampleCosts(
        **each,
        read_ms=middle["read"],
        waits_ms=middle["waits"],
        samples=len(took_ms["read"]) - skip,
    )
    tell("costs", costs)
    tell("batch", collates["deferred"](list(islice(cycle(made["deferred"]), spec.batch_size or 1))))


def time_on_device(work: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds in which a device does some work: the median of 5, after 2 others."""
    took_ms = []
    with current(device):
        for _ in range(_WARM_UP + _ROUNDS):
            synchronize(device)
            began_s = clock.monotonic()
            work()
            synchronize(device)
            took_ms.append(1000 * (clock.monotonic() - began_s))
    return median(took_ms[_WARM_UP:])


def _why_finished(spec: LoaderSpec) -> str | None:
    """Return why a loader leaves nothing of a pipeline to a device; None: it may."""
    if spec.batch_size is None and spec.batch_sampler is None:
        return _SINGLE
    return None if only_stacks(spec.collate_fn) else _FINISHED


def device_type(trainer: Trainer | None) -> str:
    """Return ``"cpu"``, ``"cuda"`` or another type; without a trainer, the best there is."""
    if trainer is not None:
        return str(trainer.strategy.root_device.type)
    return default_type()


class Placing:
    """Decides where pixels are computed, for one data module, as the user ``asked``.

    ``accelerator`` returns the device type of a trainer, ``costs`` measures what a pipeline costs.
    """

    def __init__(
        self,
        asked: AugmentOn,
        *,
        accelerator: Callable[[Trainer | None], str] = device_type,
        costs: Callable[..., PlaceCosts] = read_place_costs,
    ) -> None:
        self.asked: AugmentOn = asked
        self._accelerator = accelerator
        self._read_costs = costs
        self._held: dict[Stage, tuple[int, PlaceChoice]] = {}
        """Stage -> the batch size of a decision in this run, and the decision."""

    def __getstate__(self) -> dict[str, Any]:
        # Decisions belong to one run in one process.
        return {**vars(self), "_held": {}}

    def attached(self) -> None:
        """Forget the decisions of the last run, as a trainer begins another one."""
        self._held = {}

    def choice(self, stage: Stage) -> PlaceChoice | None:
        """Return what was decided for a stage in this run, and why; None: nothing yet."""
        held = self._held.get(stage)
        return None if held is None else held[1]

    def may_use_device(self, stage: Stage, trainer: Trainer | None) -> bool:
        """Return whether the device may have to finish batches of a stage."""
        if trainer is None:
            return False
        return self.asked == "gpu" or self.where(stage, trainer).place == "device"

    def settings(
        self,
        spec: LoaderSpec,
        plan: LoaderPlan,
        transform: StageTransform | None,
        transforms: StageTransforms,
        *,
        seed: int,
        trainer: Trainer | None,
    ) -> dict[str, Any]:
        """Decide for a loader that is to be made, and return the arguments that follow for it.

        ``transform`` is the part that starts in its workers, as it suits the dataset, and draws by
        ``seed``. Without a trainer all of it is left to the workers.
        """
        stage, finished = spec.stage, _why_finished(spec)
        if transform is None or trainer is None or self.asked != "auto":
            asked = transform is not None and self.may_use_device(stage, trainer)
            on_device = asked and finished is None
            if asked and finished is not None and transform is not None and transform.defers:
                self._held[stage] = spec.batch_size or 1, PlaceChoice("workers", finished)
                text = f'augment_on="gpu" does nothing for {spec.name}: {finished}.'
                warnings.warn(text, FastDataWarning, stacklevel=2)
        else:
            choice = self._decided(spec, plan, transform, seed, trainer)
            on_device = choice.place == "device"
        # Without a trainer there is no hook to finish the batches, so they come finished.
        later = transforms.run_on_device(stage, pipeline=on_device)
        staged = stage if trainer is not None and later else None
        return {"transform": transform, "on_device": on_device, "staged": staged}

    def _decided(
        self,
        spec: LoaderSpec,
        plan: LoaderPlan,
        transform: StageTransform,
        seed: int,
        trainer: Trainer,
    ) -> PlaceChoice:
        """Return what was decided for a stage; decide if nothing was, or for another batch size."""
        stage, batch_size = spec.stage, spec.batch_size or 1
        held = self._held.get(stage)
        if held is not None and held[0] == batch_size:
            return held[1]
        known = PlaceCosts(
            accelerator=self._accelerator(trainer) != "cpu",
            defers=transform.defers,
            batch_size=batch_size,
            workers=plan.num_workers,
            cpus=read_cpu_limit(local_ranks=trainer.num_devices).usable_cpus,
            library=transform.library,
            refusal=_why_finished(spec),
        )
        device, method = trainer.strategy.root_device, plan.start_method
        costs = self._read_costs(
            known, spec, transform, seed=seed, device=device, start_method=method
        )
        choice = choose_place(costs)
        self._held[stage] = batch_size, choice
        rank = f"rank {trainer.global_rank}, " if trainer.world_size > 1 else ""
        where = "on the device" if choice.place == "device" else "all in the workers"
        _LOG.info('augment_on="auto", %s%s: %s: %s.', rank, stage, where, choice.reason)
        return choice

    def where(self, stage: Stage, trainer: Trainer | None) -> PlaceChoice:
        """Return where the pixels of a stage are, or will be, computed, and why."""
        if self.asked == "cpu":
            return PlaceChoice("workers", 'augment_on="cpu"')
        choice = self.choice(stage)
        if self.asked == "gpu" and choice is None:
            on_cpu = trainer is not None and self._accelerator(trainer) == "cpu"
            return PlaceChoice("device", 'augment_on="gpu"' + (f"; {_ON_CPU}" if on_cpu else ""))
        if choice is not None:
            return choice
        if self._accelerator(trainer) == "cpu":
            return PlaceChoice("workers", "there is no accelerator to run on")
        why = "unless a trial before the training finds the workers to be faster"
        return PlaceChoice("device", why)

"""Where the pixels of a pipeline are computed: a decision from measurements, and its reason.

The first rule that fits decides:

==  =====================================================================  ========================
 1  there is no accelerator                                                workers
 2  the pipeline leaves nothing to a device                                workers
 3  the device failed at its part when that was tried                      workers
 4  nothing could be measured beforehand                                   device
 5  the workers save more time per batch than the device needs for it      device
 6  otherwise                                                              workers
==  =====================================================================  ========================

A batch takes the workers ``batch * max(sample / workers, computing part of sample / CPUs)``, where
``sample`` is measured before the training, in one process; without workers, ``batch * sample``.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fastdata.types import PixelPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCosts:
    """What a worker spends on one sample: medians, without waiting for a CPU."""

    whole_ms: float
    """Milliseconds with the whole pipeline: reading, pixels, and its share of the collation."""
    deferred_ms: float
    """Milliseconds if the device does what it can: reading, drawing, the pixels that stay, and its
    share of the collation."""
    read_ms: float
    """Of both, the milliseconds of reading."""
    waits_ms: float = 0.0
    """Of those, the milliseconds without computing: for a disk or a network."""
    samples: int = 1
    """How many were measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceCosts:
    """What is known before the first step."""

    accelerator: bool
    """Whether the training runs on something else than a CPU."""
    defers: bool = True
    """Whether anything of the pipeline can run on a device."""
    batch_size: int
    """Samples in a batch of this rank."""
    workers: int
    """Side processes that make batches; 0: the training process makes them."""
    cpus: float
    """CPUs that this rank may use."""
    sample: SampleCosts | None = None
    """None: no sample could be measured."""
    device_ms: float | None = None
    """Milliseconds of the device for its part of one batch; None: not measured."""
    refusal: str | None = None
    """Why the device cannot do its part; None if it can."""
    library: str = "Albumentations"
    """Who makes the pixels in the workers."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceChoice:
    """Where the pixels are computed, and why."""

    place: PixelPlace
    reason: str
    """With its numbers."""
    saved_ms: float | None = None
    """Milliseconds per batch by which the device's part makes the workers faster; None: unknown."""
    device_ms: float | None = None
    """Milliseconds per batch that this part takes the device; None: not known."""


def choose_place(costs: PlaceCosts) -> PlaceChoice:
    """Decide where the pixels of a pipeline are computed; the rules are those of this module."""
    return _without_weighing(costs) or _weighed(costs)


def _without_weighing(costs: PlaceCosts) -> PlaceChoice | None:
    if not costs.accelerator:
        return PlaceChoice(
            place="workers",
            reason="there is no accelerator, and on a CPU torch takes many times as long for these "
            f"pixels in batches as {costs.library} for samples in the workers",
        )
    if not costs.defers:
        return PlaceChoice(place="workers", reason="the pipeline leaves nothing to a device")
    if costs.refusal is not None:
        return PlaceChoice(place="workers", reason=costs.refusal)
    if costs.sample is None or costs.device_ms is None:
        why = "no sample could be measured; the device takes off the workers what it can"
        return PlaceChoice(place="device", reason=why)
    return None


def _weighed(costs: PlaceCosts) -> PlaceChoice:
    whole_ms, deferred_ms = costs.loader_ms("workers"), costs.loader_ms("device")
    saved_ms, device_ms = whole_ms - deferred_ms, costs.device_ms or 0.0
    workers = f"{costs.workers} worker{'s' if costs.workers > 1 else ''}"
    makers = workers if costs.workers else "the training process"
    place: PixelPlace = "device" if device_ms < saved_ms else "workers"
    why = (
        f"a batch of {costs.batch_size} takes {makers} {whole_ms:.4g} ms with the whole "
        f"pipeline and {deferred_ms:.4g} ms without what the device can do, for which that needs "
        f"{device_ms:.4g} ms{_each(costs.sample)}"
    )
    return PlaceChoice(place=place, reason=why, saved_ms=saved_ms, device_ms=device_ms)


def _each(sample: SampleCosts | None) -> str:
    if sample is None:
        return ""
    reading = f", {sample.read_ms:.3g} of them reading"
    return (
        f" (a sample: {sample.whole_ms:.3g} or {sample.deferred_ms:.3g} ms{reading}; "
        f"{sample.samples} measured)"
    )

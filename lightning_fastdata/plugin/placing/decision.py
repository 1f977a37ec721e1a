"""Where the pixels of a pipeline are computed: a decision from measurements, and its reason.

The first rule that fits decides:

==  =====================================================================  ========================
 1  there is no accelerator                                                workers
 2  the pipeline leaves nothing to a device                                workers
 3  the device failed at its part when that was tried                      workers
 4  nothing could be measured beforehand                                   device
 5  no step is known: the workers save more time per batch than the        device
    device needs for it, or the device needs less than 2 % of what a
    step took in an earlier run and the workers save anything
 6  no step is known, otherwise                                            workers
 7  steps were measured: the other place makes the step at least 3 %       the other place
    shorter, and fewer than two changes were made in this run
 8  steps were measured, otherwise                                         where it is
==  =====================================================================  ========================

A step takes as long as the slower of two that work side by side: the workers, who make a batch, and
the device, which computes with one ::

    step = max(loader, compute + augment)       loader + compute + augment without workers
    loader = batch * max(sample / workers, computing part of sample / CPUs)

``sample`` is measured before the training, in one process. Measured steps correct it: if the device
waits, a batch takes the workers just one step; if it does not, at most that. The same factor then
holds for the other place. What the device computes besides is what is left of the measured step
without waiting and without the augmentation. Waits of less than 5 % of the step count as chance,
and as part of it. Where steps were measured in the other place before, in the same run, they count
unless the prediction is worse.

With ``prefetch="stream"`` and ``"lookahead"`` the device augments beside the steps, on a stream of
its own. How much longer they get by that cannot be seen in them: by nothing where the device had
time to spare, and by all of it where it had none. All of it is taken, as measured before the
training, so that the workers are tried where they might be faster. If they are not, the steps that
were measured on the device count, whatever is predicted.

So steps that do not wait with everything in the workers are never changed, and what the device adds
to steps that would not wait without it is taken away when it is 3 % of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from lightning_fastdata.types import PixelPlace

KNOWN_STEPS: Final = 50
"""So many steps, or a whole epoch, say how long a step takes."""
FEWEST_STEPS: Final = 4
"""An epoch with fewer measured steps says nothing."""
MOST_CHANGES: Final = 2  # in one run
_GAIN: Final = 0.03
_UNSEEN: Final = 0.02
_CHANCE: Final = 0.05


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
    redrawn: tuple[str, ...] = ()
    """Operations of which the device makes other pixels of the same distribution."""

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
class StepSeen:
    """Steps that were measured, all with the pixels in one place."""

    place: PixelPlace
    steps: int
    """How many; without the first ones of epochs."""
    epochs: int
    """Whole epochs among them."""
    step_ms: float
    """Milliseconds of a step, median."""
    wait_ms: float
    """Milliseconds in which it waited for its batch, median."""
    augment_ms: float | None = None
    """Milliseconds of the device for its part, median; None: not measured, or it had none. With
    pixels on the device: it did its part beside the steps."""

    @property
    def beside(self) -> bool:
        """Whether the device augments beside these steps, which do not tell how long."""
        return self.place == "device" and self.augment_ms is None

    @property
    def enough(self) -> bool:
        """Whether they say how long a step takes."""
        return self.steps >= KNOWN_STEPS or (self.epochs > 0 and self.steps >= FEWEST_STEPS)


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
    workers_step_ms: float | None = None
    """Milliseconds of a step with all of it in the workers: measured, or else predicted; None
    before steps were measured."""
    device_step_ms: float | None = None
    """The same with what the device can do there."""


def choose_place(
    costs: PlaceCosts,
    step: StepSeen | None = None,
    *,
    elsewhere: StepSeen | None = None,
    changes: int = 0,
    known_step_ms: float | None = None,
) -> PlaceChoice:
    """Decide where the pixels of a pipeline are computed; the rules are those of this module.

    Too few steps count as none. ``elsewhere`` are steps of this run with the pixels in the other
    place, ``changes`` how often it changed, and ``known_step_ms`` is of an earlier run.
    """
    settled = _without_weighing(costs)
    if settled is not None:
        return settled
    if step is not None and step.enough:
        return _after_steps(costs, step, elsewhere, changes)
    return _before_any_step(costs, known_step_ms)


def _without_weighing(costs: PlaceCosts) -> PlaceChoice | None:
    if not costs.accelerator:
        return PlaceChoice(
            place="workers",
            reason="there is no accelerator, and on a CPU torch takes many times as long for these "
            "pixels as Albumentations",
        )
    if not costs.defers:
        return PlaceChoice(place="workers", reason="the pipeline leaves nothing to a device")
    if costs.refusal is not None:
        return PlaceChoice(place="workers", reason=costs.refusal)
    if costs.sample is None or costs.device_ms is None:
        why = "no sample could be measured; the device takes off the workers what it can"
        return PlaceChoice(place="device", reason=why + _redrawn(costs))
    return None


def _before_any_step(costs: PlaceCosts, known_step_ms: float | None) -> PlaceChoice:
    whole_ms, deferred_ms = costs.loader_ms("workers"), costs.loader_ms("device")
    saved_ms, device_ms = whole_ms - deferred_ms, costs.device_ms or 0.0
    unseen = known_step_ms is not None and device_ms < _UNSEEN * known_step_ms
    workers = f"{costs.workers} worker{'s' if costs.workers > 1 else ''}"
    makers = workers if costs.workers else "the training process"
    place: PixelPlace = "device" if saved_ms > 0 and (device_ms < saved_ms or unseen) else "workers"
    why = (
        f"a batch of {costs.batch_size} takes {makers} {whole_ms:.4g} ms with the whole "
        f"pipeline and {deferred_ms:.4g} ms without what the device can do, for which that needs "
        f"{device_ms:.4g} ms{_each(costs.sample)}"
    )
    if unseen and place == "device":
        why += f"; a step took {known_step_ms:.4g} ms"
    why += _redrawn(costs) if place == "device" else ""
    return PlaceChoice(place=place, reason=why, saved_ms=saved_ms, device_ms=device_ms)


def _after_steps(
    costs: PlaceCosts, step: StepSeen, elsewhere: StepSeen | None, changes: int
) -> PlaceChoice:
    now: PixelPlace = step.place
    other: PixelPlace = "workers" if now == "device" else "device"
    other_ms, known = predicted_step_ms(costs, step, other), "are predicted to take"
    if elsewhere is not None and (elsewhere.beside or elsewhere.step_ms > other_ms):
        other_ms, known = elsewhere.step_ms, "took"
    gain = (step.step_ms - other_ms) / step.step_ms if step.step_ms > 0 else 0.0
    moves = gain >= _GAIN and changes < MOST_CHANGES
    why = (
        f"{step.steps} steps took {step.step_ms:.4g} ms each {_WHERE[now]}, of which they waited "
        f"{step.wait_ms:.4g} ms; {_WHERE[other]} they {known} {other_ms:.4g} ms"
    )
    if not moves and gain >= _GAIN:
        why += f", but this was changed {changes} times already"
    elif not moves:
        why += f", which is not {100 * _GAIN:.0f} % less"
    if step.beside:
        why += (
            f" (the device did its part beside the steps, so that these do not tell what it took; "
            f"{costs.device_ms:.4g} ms are taken for it, as measured before the training)"
        )
    place = other if moves else now
    ms = {now: step.step_ms, other: other_ms}
    return PlaceChoice(
        place=place,
        reason=why + (_redrawn(costs) if place == "device" else ""),
        saved_ms=costs.loader_ms("workers") - costs.loader_ms("device"),
        device_ms=costs.device_ms if step.augment_ms is None else step.augment_ms,
        workers_step_ms=ms["workers"],
        device_step_ms=ms["device"],
    )


def predicted_step_ms(costs: PlaceCosts, step: StepSeen, place: PixelPlace) -> float:
    """Return the milliseconds of a step with the pixels in ``place``, after ``step`` was measured.

    The costs are those of a measured sample and device.
    """
    waits = not costs.workers or step.wait_ms >= _CHANCE * step.step_ms
    augment_ms = costs.device_ms or 0.0
    compute_ms = step.step_ms - (step.wait_ms if waits else 0.0)
    if step.place == "device":
        augment_ms = augment_ms if step.augment_ms is None else step.augment_ms
        compute_ms = max(0.0, compute_ms - augment_ms)
    expected_ms = max(costs.loader_ms(step.place), 1e-6)
    took_ms = step.step_ms if costs.workers else step.wait_ms
    factor = took_ms / expected_ms
    if costs.workers and not waits:
        factor = min(1.0, factor)
    loader_ms = factor * costs.loader_ms(place)
    device_ms = compute_ms + (augment_ms if place == "device" else 0.0)
    return max(loader_ms, device_ms) if costs.workers else loader_ms + device_ms


_WHERE: Final = {"device": "with pixels on the device", "workers": "with all of it in the workers"}


def _each(sample: SampleCosts | None) -> str:
    if sample is None:
        return ""
    reading = f", {sample.read_ms:.3g} of them reading"
    return (
        f" (a sample: {sample.whole_ms:.3g} or {sample.deferred_ms:.3g} ms{reading}; "
        f"{sample.samples} measured)"
    )


def _redrawn(costs: PlaceCosts) -> str:
    if not costs.redrawn:
        return ""
    names = ", ".join(costs.redrawn)
    return f"; there {names} makes other pixels of the same distribution than in the workers"

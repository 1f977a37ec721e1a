"""How long the steps of a training take, as its data module sees them without a callback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lightning_fastdata.insight.measure.metrics import measured, warm_steps
from lightning_fastdata.insight.measure.timeline import CudaClock, HostClock, StepTimeline
from lightning_fastdata.plugin.placing.decision import StepSeen

if TYPE_CHECKING:
    import torch

    from lightning_fastdata.insight.measure.timeline import DeviceClock
    from lightning_fastdata.types import Batch, PixelPlace

_STEPS: Final = 256  # more steps of one epoch show nothing new
_MARKS: Final = 512  # events that the device has not reached yet: about 80 steps


class StepWatch:
    """Measures steps from one request for a batch to the next; on CUDA by events, read late.

    ``device_clock`` makes the clock of the device; None: CUDA's events, or the host's clock where
    that shows what the device does.
    """

    def __init__(
        self,
        device: torch.device,
        clock: HostClock | None = None,
        device_clock: Callable[[], DeviceClock] | None = None,
    ) -> None:
        if device_clock is None and device.type == "cuda":
            device_clock = partial(CudaClock, _MARKS)
        self._device_clock = device_clock
        self._clock = HostClock() if clock is None else clock
        self._most = _STEPS
        self.timeline: StepTimeline
        self.restart()

    def __getstate__(self) -> dict[str, object]:
        # A copy belongs to no training; events of a device cannot be copied.
        none = {"timeline": StepTimeline(), "_device_clock": None}
        return {**vars(self), **none, "_most": 0, "left": 0}

    def restart(self) -> None:
        """Forget what was measured."""
        device = None if self._device_clock is None else self._device_clock()
        self.timeline = StepTimeline(host=self._clock, device=device, window=_STEPS)
        self.left = 0  # steps of this epoch that are still to be measured
        self._epochs = 0

    def stop(self) -> None:
        """Measure nothing any more."""
        self._most = self.left = 0

    def batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return the batches of an epoch, whose requests are marked."""
        if not self._most:
            return batches
        self.timeline.drop_open_step()
        self.timeline.epoch_began()
        self._epochs += 1
        self.left = self._most
        return WatchedBatches(batches, self)

    def seen(self, place: PixelPlace) -> StepSeen | None:
        """Return what was measured, all of it with the pixels in ``place``; None if nothing was."""
        rows = warm_steps(self.timeline.history.newest())
        step, stall, augment = (
            measured(rows[name]) for name in ("step_ms", "stall_ms", "augment_ms")
        )
        if not len(step) or not len(stall):
            return None
        on_device = place == "device" and len(augment) > 0
        return StepSeen(
            place=place,
            steps=len(step),
            epochs=self._epochs,
            step_ms=float(np.median(step)),
            wait_ms=float(np.median(stall)),
            augment_ms=float(np.median(augment)) if on_device else None,
        )


class WatchedBatches:
    """An iterator of batches that marks its requests in the timeline of a watch."""

    def __init__(self, batches: Iterator[Batch], watch: StepWatch) -> None:
        self._batches = batches
        self._watch = watch
        self._first = True

    def __iter__(self) -> WatchedBatches:
        return self

    def __next__(self) -> Batch:
        watch = self._watch
        if watch.left <= 0:
            return next(self._batches)
        watch.left -= 1
        if not self._first:  # the request ends the step of the batch before
            watch.timeline.compute_ended(1)
        self._first = False
        watch.timeline.wait_began()
        try:
            batch = next(self._batches)
        except StopIteration:
            watch.timeline.drop_open_step()
            raise
        # It is on its way to the device until the pixels are begun with.
        watch.timeline.wait_ended()
        watch.timeline.transfer_began()
        return batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __reduce__(self) -> tuple[object, ...]:
        # Lightning copies its trainer with the iterators in it; processes cannot be copied.
        return iter, ((),)

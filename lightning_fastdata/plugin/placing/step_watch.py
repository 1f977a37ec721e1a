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

    from lightning_fastdata.augment import Place
    from lightning_fastdata.insight.measure.timeline import DeviceClock
    from lightning_fastdata.types import Batch

_STEPS: Final = 256
"""More steps of one epoch tell nothing new."""
_MARKS: Final = 512
"""Events of a device that has not reached them yet: about 80 steps."""


class StepWatch:
    """Measures steps from one request for a batch to the next; on CUDA by events, read late.

    Args:
        device: Where the trainer computes.
        clock: Of the host.
        device_clock: Makes the clock of the device; None where the host's tells what it does.
            Default: CUDA's events on a CUDA device.
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
        self._left = 0
        self._epochs = 0
        self._most = _STEPS
        self.timeline: StepTimeline
        self.restart()

    def __getstate__(self) -> dict[str, Any]:
        # A copy belongs to no training; events of a device cannot be copied.
        none = {"timeline": StepTimeline(), "_device_clock": None}
        return {**vars(self), **none, "_most": 0, "_left": 0}

    def restart(self) -> None:
        """Forget what was measured."""
        device = None if self._device_clock is None else self._device_clock()
        self.timeline = StepTimeline(host=self._clock, device=device, window=_STEPS)
        self._left = self._epochs = 0

    def stop(self) -> None:
        """Measure nothing any more."""
        self._most = self._left = 0

    @property
    def watching(self) -> bool:
        """Whether this epoch's steps are still measured."""
        return self._left > 0

    def batches(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return the batches of an epoch, whose requests are marked."""
        if not self._most:
            return batches
        self.timeline.drop_open_step()
        self.timeline.epoch_began()
        self._epochs += 1
        self._left = self._most
        return WatchedBatches(batches, self)

    def requested(self, *, first: bool) -> None:
        """A batch is asked for, which ends the step of the one before."""
        self._left -= 1
        if not first:
            self.timeline.compute_ended(1)
        self.timeline.wait_began()

    def delivered(self) -> None:
        """It is there, and on its way to the device until the pixels are begun with."""
        self.timeline.wait_ended()
        self.timeline.transfer_began()

    def ended(self) -> None:
        """There is no other batch."""
        self.timeline.drop_open_step()

    def seen(self, place: Place) -> StepSeen | None:
        """Return what was measured, all of it with the pixels in ``place``; None if nothing was."""
        rows = warm_steps(self.timeline.history.newest())
        step, stall, augment = (
            measured(rows[name]) for name in ("step_ms", "stall_ms", "augment_ms")
        )
        if not len(step) or not len(stall):
            return None
        left = place == "device" and len(augment) > 0
        return StepSeen(
            place=place,
            steps=len(step),
            epochs=self._epochs,
            step_ms=float(np.median(step)),
            wait_ms=float(np.median(stall)),
            augment_ms=float(np.median(augment)) if left else None,
        )


class WatchedBatches:
    """An iterator of batches that tells a watch of its requests."""

    def __init__(self, batches: Iterator[Batch], watch: StepWatch) -> None:
        self._batches = batches
        self._watch = watch
        self._first = True

    def __iter__(self) -> WatchedBatches:
        return self

    def __next__(self) -> Batch:
        watch = self._watch
        if not watch.watching:
            return next(self._batches)
        watch.requested(first=self._first)
        self._first = False
        try:
            batch = next(self._batches)
        except StopIteration:
            watch.ended()
            raise
        watch.delivered()
        return batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __reduce__(self) -> tuple[Any, ...]:
        # Lightning copies its trainer with the iterators in it; processes cannot be copied.
        return iter, ((),)

"""The first thing that runs in a worker process of torch."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class WorkerStart:
    """Makes a worker a good neighbour, then runs the user's own ``worker_init_fn``.

    It lets the training process go first, computes on one thread (torch sees to its own threads,
    not to OpenCV's), and takes the sharing strategy of its parent, which only a forked one has.
    """

    def __init__(self, strategy: str, nice: int, then: Callable[[int], None] | None) -> None:
        self.strategy = strategy
        self.nice = nice
        self.then = then

    def __call__(self, worker_id: int) -> None:
        """Prepare the worker process of this number."""
        torch.multiprocessing.set_sharing_strategy(self.strategy)  # type: ignore[no-untyped-call]
        if self.nice and hasattr(os, "nice"):
            os.nice(self.nice)
        if "cv2" in sys.modules:
            sys.modules["cv2"].setNumThreads(0)
        if self.then is not None:
            self.then(worker_id)

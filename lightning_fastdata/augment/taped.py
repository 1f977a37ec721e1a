"""Workers that leave a tape of operations for each sample, whatever recorded it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from lightning_fastdata.augment.replay.program import Draws, compile_tapes
from lightning_fastdata.augment.replay.torch import are_rows
from lightning_fastdata.augment.stage_transform import WorkerTransform, plain_tensors

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import numpy as np
    from torch import Tensor

    from lightning_fastdata.augment.ops.operation import Tape
    from lightning_fastdata.augment.replay.program import Fuse
    from lightning_fastdata.types import Batch


class TapedWorker(WorkerTransform):
    """The part of a pipeline that runs on each sample, and notes what a device does; picklable.

    What a thread keeps for itself, in ``_local``, does not travel with it.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_local"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, _local=threading.local())

    @property
    def fuse(self) -> Fuse | None:
        """What finds operations that kernels carry out together; None: there are no kernels."""
        return None

    def waiting(
        self, item: Batch, names: Collection[Any], *, batched: bool = False
    ) -> Mapping[Any, Tensor]:
        """Return the tensors of a sample or batch that tapes know by these names.

        Raises:
            BatchError: a batch has no image.
        """
        raise NotImplementedError

    def finished(self, sample: Batch, tape: Tape) -> Batch:
        """Return a sample after what its tape says."""
        raise NotImplementedError

    def collate(
        self, tapes: Sequence[Tape | None], beside: Mapping[str, np.ndarray] | None = None
    ) -> Draws:
        """Return the tapes of a batch, packed in the order of its samples, and what goes beside."""
        return compile_tapes([tape or {} for tape in tapes], beside, self.fuse)

    def stacks(
        self, samples: Sequence[Batch], tapes: Sequence[Tape | None], batch: Batch = None
    ) -> bool:
        """Return whether the tensors that wait for the device can be stacked; in a batch, are so.

        They cannot if some samples lack one, or have it in another shape or dtype. A
        ``collate_fn`` may keep them in lists, pad, sort or convert them, or leave them out.

        Raises:
            BatchError: the batch has no image.
        """
        names = {name for tape in tapes for name in tape or ()}
        if not names:
            return True
        each = [self.waiting(sample, names) for sample in samples]
        if not all(names <= one.keys() for one in each):
            return False
        rows = {name: [one[name] for one in each] for name in names}
        if batch is None:
            return all(len({(one.shape, one.dtype) for one in row}) == 1 for row in rows.values())
        stacked = self.waiting(batch, names, batched=True)
        return all(are_rows(stacked.get(name), row) for name, row in rows.items())

    def finish_each(
        self, samples: Sequence[Batch], tapes: Sequence[Tape | None]
    ) -> tuple[list[Batch], list[Tape]]:
        """Return samples of which nothing waits for the device, for their batch is no tensor."""
        with plain_tensors():
            done = [
                self.finished(sample, tape or {})
                for sample, tape in zip(samples, tapes, strict=True)
            ]
        return done, [{} for _ in done]

"""The epoch that data is drawn for, as datasets in several processes know it."""

from __future__ import annotations

import torch

_alone = False


class EpochCell:
    """The current epoch, which worker processes that outlive it read from shared memory."""

    def __init__(self) -> None:
        value = torch.zeros(1, dtype=torch.int64)
        self._value: torch.Tensor = value.share_memory_()  # type: ignore[no-untyped-call]

    def set(self, epoch: int) -> None:
        """Write the epoch; call it before the first index of that epoch is handed out."""
        self._own()[0] = epoch

    def get(self) -> int:
        """Return the epoch last written."""
        return int(self._own()[0])

    def _own(self) -> torch.Tensor:
        if _alone and self._value.is_shared():  # type: ignore[no-untyped-call]
            self._value = self._value.clone()
        return self._value


def keep_own_epochs() -> None:
    """Share no epoch with other processes from now on.

    A side process is told the epoch of each task, and may be one ahead of the training process.
    """
    global _alone  # noqa: PLW0603 - a fact of the whole process
    _alone = True

"""The epoch that data is drawn for, as datasets in several processes know it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_alone = False


class EpochAskedTwice:
    """The batches of an epoch whose number is asked for again when the first of them is.

    Lightning makes an iterator before it has read from a checkpoint which epoch comes next, or
    before it has counted the one that the checkpoint ends.

    Args:
        begin: Begins an epoch and returns its batches.
        epoch: Returns the number of the epoch; asked now, and once more later.
    """

    def __init__(self, begin: Callable[[int], Iterator[Any]], epoch: Callable[[], int]) -> None:
        self._epoch = epoch()
        self._batches = begin(self._epoch)
        self._ask: tuple[Callable[[int], Iterator[Any]], Callable[[], int]] | None = begin, epoch

    def __iter__(self) -> EpochAskedTwice:
        return self

    def __next__(self) -> Any:
        if self._ask is not None:
            (begin, epoch), self._ask = self._ask, None
            number = epoch()
            if number != self._epoch:
                self._batches = iter(())  # its workers end before others begin
                self._batches = begin(number)
        return next(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __reduce__(self) -> tuple[Any, ...]:
        # Lightning copies its trainer with the iterators in it; processes cannot be copied.
        return iter, ((),)


class EpochCell:
    """The current epoch, which worker processes that outlive it read from shared memory."""

    def __init__(self) -> None:
        value = torch.zeros(1, dtype=torch.int64)
        self._shared: torch.Tensor = value.share_memory_()  # type: ignore[no-untyped-call]
        self._number: NDArray[np.int64] | None = None
        self._is_own = False

    def set(self, epoch: int) -> None:
        """Write the epoch; call it before the first index of that epoch is handed out."""
        self._here()[0] = epoch

    def get(self) -> int:
        """Return the epoch last written."""
        return int(self._here()[0])

    def __getstate__(self) -> dict[str, Any]:
        # torch hands over the memory itself, NumPy what is in it.
        return {"_shared": self._shared, "_number": None, "_is_own": False}

    def _here(self) -> NDArray[np.int64]:
        # Asked for with each sample: a view of NumPy answers in a tenth of a tensor's time.
        if self._number is None or self._is_own is not _alone:
            number: NDArray[np.int64] = self._shared.numpy()
            self._number, self._is_own = number.copy() if _alone else number, _alone
        return self._number


def keep_own_epochs() -> None:
    """Share no epoch with other processes from now on.

    A side process is told the epoch of each task, and may be one ahead of the training process.
    """
    global _alone  # noqa: PLW0603 - a fact of the whole process
    _alone = True

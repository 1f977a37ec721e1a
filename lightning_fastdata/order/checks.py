"""Checks of what orders are made of: whole numbers, and lengths of samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from lightning_fastdata.errors import DatasetError, OptionsError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from lightning_fastdata.order.epoch_order import Ints

Lengths: TypeAlias = "Sequence[int] | NDArray[Any] | torch.Tensor"
"""Of samples, whole numbers [samples]."""


def check_whole(**values: int | None) -> None:
    """Raise an :class:`OptionsError` unless each value is None or a whole number from 1 on."""
    for name, value in values.items():
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if value is not None and not (whole and value >= 1):
            raise OptionsError(f"{name} is {value!r}; give a whole number, at least 1.")


def checked_lengths(lengths: Lengths, tokens: int | None, remedy: str) -> Ints:
    """Return lengths as int64 [samples].

    Raises:
        DatasetError: They are no whole numbers from 0 on, or not one for each sample; or some are
            above ``tokens``, if that is given: the message names the first, and ends with
            ``remedy``.
    """
    found = np.asarray(lengths)
    if found.ndim != 1 or (found.dtype.kind not in "iu" and len(found)):
        raise DatasetError(
            f"lengths has the shape {found.shape} and numbers of type {found.dtype}; give a whole "
            "number for each sample, such as len(sample), or the frames of a recording."
        )
    for at in np.flatnonzero(found < 0)[:1]:
        raise DatasetError(f"lengths[{at}] is {found[at]}; a length is a whole number from 0 on.")
    above = np.flatnonzero(found > (math.inf if tokens is None else tokens))
    if len(above):
        more = f", and so are {len(above) - 1} others" if len(above) > 1 else ""
        raise DatasetError(
            f"Sample {above[0]} has the length {found[above[0]]}, above tokens={tokens}{more}. "
            f"{remedy}"
        )
    return found.astype(np.int64)

"""What a batch is made of for those that mix its samples, and how samples find each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from lightning_fastdata.errors import OptionsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The fields of a batch of ``n`` samples that mixing changes."""

    image: torch.Tensor
    """Images ``[n, C, H, W]``, uint8 or floating point."""
    labels: torch.Tensor | None = None
    """Shares of the classes ``[n, classes]``, float32; None if there are no labels."""
    mask: torch.Tensor | None = None
    """Classes of pixels ``[n, H, W]`` of any integer dtype, or ``[n, C, H, W]``; or None."""
    boxes: tuple[torch.Tensor, ...] | None = None
    """Per sample ``[k, 4]`` of left, top, right, bottom in pixels; or None."""
    classes: tuple[torch.Tensor, ...] | None = None
    """Per sample one entry ``[k, ...]`` for each box; or None."""

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images in pixels."""
        return int(self.image.shape[2]), int(self.image.shape[3])


class MixStep(Protocol):
    """One way to change a batch whose samples may see each other."""

    @property
    def sees_others(self) -> bool:
        """Whether samples see each other; if not, only images are changed."""

    def count(self) -> int:
        """Return how many numbers it draws for each sample."""

    def draw(self, generator: np.random.Generator) -> list[float]:
        """Return the numbers of one sample, always as many and in the same order."""

    def mix(self, parts: Parts, numbers: torch.Tensor, order: torch.Tensor) -> Parts:
        """Return the batch after it.

        Args:
            parts: the batch; never written to.
            numbers: what was drawn, float64 ``[n, count]``.
            order: a random number of each sample, int64 ``[n]``, which decides who meets whom.
        """


def check_share(name: str, value: float) -> None:
    """Raise OptionsError unless a probability is one."""
    if not 0 <= value <= 1:
        raise OptionsError(f"{name} is {value}; give a probability from 0 to 1.")


def check_positive(name: str, value: float) -> None:
    """Raise OptionsError unless a number is positive and finite."""
    if not 0 < value < float("inf"):
        raise OptionsError(f"{name} is {value}; give a positive number.")


def partners(order: torch.Tensor, distance: int = 1) -> torch.Tensor:
    """Return for each sample the position of the sample it is mixed with.

    The samples stand in a ring, sorted by their random numbers; everybody's partner is the one
    ``distance`` places before. Nobody is their own partner in a batch of more than ``distance``,
    everybody is somebody's partner once, and who meets whom depends on which samples the batch
    holds, not on their order in it.

    Args:
        order: int64 ``[n]``.
        distance: places between the two.

    Returns:
        int64 ``[n]``.
    """
    ring = order.argsort(stable=True)
    return torch.empty_like(ring).scatter_(0, ring, ring.roll(distance))


def per_sample(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return values ``[n]`` in a shape that broadcasts with ``like`` ``[n, ...]``."""
    return values.view(-1, *[1] * (like.ndim - 1))


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return entries ``[k, ...]`` of several samples in one tensor.

    A sample without boxes may have a tensor of another dtype, as ``torch.tensor([])`` has, which
    says nothing of the others.
    """
    filled = [one for one in tensors if len(one)]
    return torch.cat(filled or list(tensors[:1]))


def mixed_labels(
    parts: Parts, shares: torch.Tensor, others: tuple[torch.Tensor, ...]
) -> torch.Tensor | None:
    """Return the shares of the classes, or None if there are no labels.

    Args:
        parts: the batch.
        shares: part of each source in each sample, float64 ``[n, 1 + len(others)]``: its own, then
            that of each partner.
        others: positions of the partners, int64 ``[n]`` each.
    """
    if parts.labels is None:
        return None
    weights = shares.to(parts.labels.dtype)
    out = parts.labels * weights[:, :1]
    for number, other in enumerate(others, 1):
        out = out + parts.labels[other] * weights[:, number : number + 1]
    return out


def with_pixels(parts: Parts, choose: torch.Tensor, other: torch.Tensor) -> Parts:
    """Return the batch with the pixels of a partner where ``choose`` says so.

    Args:
        parts: the batch.
        choose: bool ``[n, H, W]``.
        other: positions of the partners, int64 ``[n]``.
    """
    image = torch.where(choose[:, None], parts.image[other], parts.image)
    mask = parts.mask
    if mask is not None:
        wide = choose if mask.ndim == 3 else choose[:, None]
        mask = torch.where(wide, mask[other], mask)
    return replace(parts, image=image, mask=mask)

"""A step of mixing: what it takes and returns, who meets whom, and a choice of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor

from lightning_fastdata.errors import OptionsError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The fields of a batch of ``n`` samples that mixing changes."""

    image: Tensor
    """Images ``[n, C, H, W]``, uint8 or floating point."""
    labels: Tensor | None = None
    """Shares of the classes ``[n, classes]``, float32; None if there are no labels."""
    mask: Tensor | None = None
    """Classes of pixels ``[n, H, W]`` of any integer dtype, or ``[n, C, H, W]``; or None."""
    boxes: tuple[Tensor, ...] | None = None
    """Per sample ``[k, 4]`` of left, top, right, bottom in pixels; or None."""
    classes: tuple[Tensor, ...] | None = None
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

    def mix(self, parts: Parts, numbers: Tensor, order: Tensor) -> Parts:
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


def partners(order: Tensor, distance: int = 1) -> Tensor:
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


def per_sample(values: Tensor, like: Tensor) -> Tensor:
    """Return values ``[n]`` in a shape that broadcasts with ``like`` ``[n, ...]``."""
    return values.view(-1, *[1] * (like.ndim - 1))


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return entries ``[k, ...]`` of several samples in one tensor.

    A sample without boxes may have a tensor of another dtype, as ``torch.tensor([])`` has, which
    says nothing of the others.
    """
    filled = [one for one in tensors if len(one)]
    return torch.cat(filled or list(tensors[:1]))


def mixed_labels(parts: Parts, shares: Tensor, others: tuple[Tensor, ...]) -> Tensor | None:
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


def with_pixels(parts: Parts, choose: Tensor, other: Tensor) -> Parts:
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


class OneOfMixes:
    """Use one of several ways for each sample, chosen by chance.

    Args:
        steps: ways to mix, such as ``MixUp(0.8), CutMix()``.
        weights: how often each is chosen, in any unit; equally often by default.
        p: probability that a sample is mixed at all.

    Raises:
        OptionsError: there are not as many weights as ways, or they are not positive.
    """

    def __init__(
        self, *steps: MixStep, weights: Sequence[float] | None = None, p: float = 1.0
    ) -> None:
        given = [1.0] * len(steps) if weights is None else [float(weight) for weight in weights]
        if not steps or len(given) != len(steps):
            raise OptionsError(
                f"OneOfMixes got {len(steps)} ways to mix and {len(given)} weights; give one or "
                "more ways, and a weight for each."
            )
        for weight in given:
            check_positive("a weight", weight)
        check_share("p", p)
        self.steps, self.p = steps, p
        self._bounds = [p * sum(given[: end + 1]) / sum(given) for end in range(len(given))]

    sees_others: ClassVar[bool] = True
    """Samples see each other."""

    def __repr__(self) -> str:
        return f"OneOfMixes({', '.join(map(repr, self.steps))}, p={self.p})"

    def count(self) -> int:
        """Return the numbers of all ways, and one to choose between them."""
        return 1 + sum(step.count() for step in self.steps)

    def draw(self, generator: np.random.Generator) -> list[float]:
        """Return the number that chooses, and those of all ways."""
        numbers = [generator.random()]
        for step in self.steps:
            numbers += step.draw(generator)
        return numbers

    def mix(self, parts: Parts, numbers: Tensor, order: Tensor) -> Parts:
        """Return the batch with each sample mixed in its way; see :class:`MixStep`.

        Raises:
            BatchError: the batch has boxes or masks, and a way does not take them.
        """
        out, start, low = parts, 1, 0.0
        for step, high in zip(self.steps, self._bounds, strict=True):
            own = numbers[:, start : start + step.count()]
            chosen = (numbers[:, 0] >= low) & (numbers[:, 0] < high)
            # Every way starts from the batch as it came, so partners are whole.
            out = _where(chosen, step.mix(parts, own, order), out)
            start, low = start + step.count(), high
        return out


def _where(chosen: Tensor, new: Parts, old: Parts) -> Parts:
    def pick(one: Tensor | None, other: Tensor | None) -> Tensor | None:
        if one is None or other is None:
            return None
        return torch.where(per_sample(chosen, one), one, other)

    def pick_each(
        one: tuple[Tensor, ...] | None, other: tuple[Tensor, ...] | None
    ) -> tuple[Tensor, ...] | None:
        if one is None or other is None:
            return None
        return tuple(a if yes else b for yes, a, b in zip(rows, one, other, strict=True))

    # Boxes differ in number, so the host has to know whose they are.
    rows = [] if old.boxes is None else chosen.tolist()
    return replace(
        old,
        image=torch.where(per_sample(chosen, new.image), new.image, old.image),
        labels=pick(new.labels, old.labels),
        mask=pick(new.mask, old.mask),
        boxes=pick_each(new.boxes, old.boxes),
        classes=pick_each(new.classes, old.classes),
    )

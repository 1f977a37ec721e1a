"""The middle value of a neighbourhood."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from lightning_fastdata.augment.ops.operation import (
    Arrays,
    DeviceOp,
    DType,
    Encoded,
    Shape,
    Transform,
    Values,
    channels,
)
from lightning_fastdata.augment.ops.positions.index import REPLICATE, fold
from lightning_fastdata.augment.ops.table import through_bytes
from lightning_fastdata.augment.replay import instructions

_LARGEST_MEDIAN: Final = 7
"""A median of 7x7 takes 400 comparisons of whole images, one of 9x9 twice as many."""
_VALUES_AT_ONCE: Final = 1 << 23
"""Values of a batch whose medians are looked for at a time: some fifty copies of them are held."""


class _Step(NamedTuple):
    """The smaller or the larger of two earlier values; numbers name them, the inputs first."""

    made: int
    larger: bool
    first: int
    second: int


class _Network:
    """A comparison network: how sorted values come about from others."""

    def __init__(self, inputs: int) -> None:
        self.made = inputs
        self.steps: list[_Step] = []

    def exchange(self, first: int, second: int) -> list[int]:
        at, self.made = self.made, self.made + 2
        self.steps += [_Step(at + larger, larger, first, second) for larger in (False, True)]
        return [at, at + 1]

    def merge(self, one: list[int], other: list[int]) -> list[int]:
        """Merge two sorted lists by Batcher's odd-even merge."""
        if not one or not other:
            return one + other
        if len(one) == len(other) == 1:
            return self.exchange(one[0], other[0])
        even = self.merge(one[::2], other[::2])
        odd = self.merge(one[1::2], other[1::2])
        merged, paired = even[:1], min(len(odd), len(even) - 1)
        for low, high in zip(odd[:paired], even[1 : paired + 1], strict=True):
            merged += self.exchange(low, high)
        return merged + odd[paired:] + even[paired + 1 :]

    def sort(self, values: list[int]) -> list[int]:
        half = len(values) // 2
        if not half:
            return values
        return self.merge(self.sort(values[:half]), self.sort(values[half:]))


class _Program(NamedTuple):
    steps: list[tuple[_Step, set[int]]]
    """The steps, with the numbers of the values that are not needed after each."""
    results: list[int]


def _program(network: _Network, results: list[int]) -> _Program:
    """Return the steps that the results depend on."""
    needed = set(results)
    steps = []
    for step in reversed(network.steps):
        if step.made in needed:
            last = {step.first, step.second} - needed
            needed |= last
            steps.append((step, last))
    return _Program(steps[::-1], results)


def _run(program: _Program, inputs: list[Tensor]) -> list[Tensor]:
    values = dict(enumerate(inputs))
    for step, last in program.steps:
        choose = torch.maximum if step.larger else torch.minimum
        values[step.made] = choose(values[step.first], values[step.second])
        for number in last:
            del values[number]
    return [values[number] for number in program.results]


@cache
def _sorting(size: int) -> _Program:
    network = _Network(size)
    return _program(network, network.sort(list(range(size))))


@cache
def _median_of_columns(size: int) -> _Program:
    """Return how to find the median of ``size`` sorted columns of ``size`` values.

    The values of one rank in all columns are sorted, too. Then a value is known to be at least as
    large as those above and left of it, and at most as large as those below and right of it, so
    most can no longer be the median.
    """
    network = _Network(size * size)
    middle = size * size // 2
    too_small, runs = 0, []
    for rank in range(size):
        row = network.sort([rank * size + column for column in range(size)])
        small = [(size - rank) * (size - column) > middle + 1 for column in range(size)]
        large = [(rank + 1) * (column + 1) > middle + 1 for column in range(size)]
        too_small += sum(small)
        runs.append([row[at] for at in range(size) if not small[at] and not large[at]])
    while len(runs) > 1:
        runs.sort(key=len)
        runs = [network.merge(runs[0], runs[1]), *runs[2:]]
    return _program(network, [runs[0][middle - too_small]])


def _median(images: Tensor, size: int) -> Tensor:
    _, height, width, _ = images.shape
    radius = size // 2
    for axis, length in ((1, height), (2, width)):
        at = torch.arange(-radius, length + radius, device=images.device)
        images = images.index_select(axis, fold(at, length, REPLICATE))
    # Neighbours share their columns: each is sorted once.
    rows = [images[:, shift : shift + height] for shift in range(size)]
    ranks = _run(_sorting(size), rows)
    taps = [rank[:, :, shift : shift + width] for rank in ranks for shift in range(size)]
    return _run(_median_of_columns(size), taps)[0]


def _encode_median(
    transform: Transform, params: Values, shape: Shape, dtype: DType
) -> Encoded | None:
    size = int(params["kernel"])
    # OpenCV refuses more than 5x5 of two channels.
    refused = size > 5 and channels(shape) == 2
    if size % 2 == 0 or size > _LARGEST_MEDIAN or refused:
        return None
    return Encoded((("size", size),), {})


@through_bytes
def _median_blur(images: Tensor, static: Values, arrays: Arrays) -> Tensor:
    some = max(1, _VALUES_AT_ONCE // max(1, images[0].numel()))
    return torch.cat([_median(part, static["size"]) for part in torch.split(images, some)])


OPS = (DeviceOp("MedianBlur", _encode_median, _median_blur, fused=instructions.median),)
"""Exact. On float32 it goes through uint8, as in Albumentations."""

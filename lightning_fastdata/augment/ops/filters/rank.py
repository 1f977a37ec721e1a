"""The smallest, the middle and the largest value of a neighbourhood."""

# ruff: noqa: ARG001 - all operations share one signature

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_fastdata.augment.ops.operation import (
    Arrays,
    DeviceOp,
    DType,
    Encoded,
    Params,
    Shape,
    Static,
    Transform,
    as_channels_last,
    channels,
)
from lightning_fastdata.augment.ops.positions.index import REPLICATE, fold
from lightning_fastdata.augment.ops.table import via_bytes
from lightning_fastdata.augment.replay import instructions

_LARGEST_MEDIAN: Final = 7
"""A median of 7x7 takes 400 comparisons of whole images, one of 9x9 twice as many."""
_VALUES_AT_ONCE: Final = 1 << 23
"""Values of a batch whose medians are looked for at a time: some fifty copies of them are held."""


class _Compare(NamedTuple):
    """One step of a comparison network: the smaller or the larger of two earlier values."""

    larger: bool
    first: int
    second: int


class _Network:
    """Values that are named by numbers, the inputs first, and how they come about."""

    def __init__(self, inputs: int) -> None:
        self.inputs = inputs
        self.steps: list[_Compare] = []

    def exchange(self, first: int, second: int) -> list[int]:
        at = self.inputs + len(self.steps)
        self.steps += [_Compare(larger, first, second) for larger in (False, True)]
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

    def needed_for(self, results: Sequence[int]) -> list[tuple[int, _Compare]]:
        """Return the steps that the results depend on, with the number each one makes."""
        needed = set(results)
        steps = []
        for at in range(self.inputs + len(self.steps) - 1, self.inputs - 1, -1):
            if at in needed:
                step = self.steps[at - self.inputs]
                needed |= {step.first, step.second}
                steps.append((at, step))
        return steps[::-1]


class _Program(NamedTuple):
    steps: tuple[tuple[int, _Compare, tuple[int, ...]], ...]
    """The number a step makes, the step, and the numbers that are not needed after it."""
    results: tuple[int, ...]
    """The numbers to return."""


def _program(network: _Network, results: Sequence[int]) -> _Program:
    done = set(results)
    steps = []
    for at, step in reversed(network.needed_for(results)):
        last = {step.first, step.second} - done
        done |= last
        steps.append((at, step, tuple(last)))
    return _Program(tuple(reversed(steps)), tuple(results))


def _run(program: _Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    values = dict(enumerate(inputs))
    for at, step, last in program.steps:
        choose = torch.maximum if step.larger else torch.minimum
        values[at] = choose(values[step.first], values[step.second])
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
        run = []
        for column, value in enumerate(row):
            if (size - rank) * (size - column) > middle + 1:
                too_small += 1
            elif (rank + 1) * (column + 1) <= middle + 1:
                run.append(value)
        runs.append(run)
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
    transform: Transform, params: Params, shape: Shape, dtype: DType
) -> Encoded | None:
    size = int(params["kernel"])
    # OpenCV refuses more than 5x5 of two channels.
    refused = size > 5 and channels(shape) == 2
    if size % 2 == 0 or size > _LARGEST_MEDIAN or refused:
        return None
    return Encoded((("size", size),), {})


def _median_blur(images: Tensor, static: Static, arrays: Arrays) -> Tensor:
    def change(as_bytes: Tensor) -> Tensor:
        some = max(1, _VALUES_AT_ONCE // max(1, as_bytes[0].numel()))
        return torch.cat([_median(part, static["size"]) for part in torch.split(as_bytes, some)])

    return via_bytes(images, change)


def _encode_morphology(
    transform: Transform, params: Params, shape: Shape, dtype: DType
) -> Encoded | None:
    kernel = np.asarray(params["kernel"])
    rows, columns = np.nonzero(kernel)
    if not len(rows):
        return None
    static = (
        ("operation", transform.operation),
        ("size", kernel.shape),
        ("taps", tuple(zip(rows.tolist(), columns.tolist(), strict=True))),
    )
    return Encoded(static, {})


def _never_chosen(dtype: torch.dtype, *, grows: bool) -> float:
    """Return what lies outside of an image: the least value, or the largest."""
    if dtype == torch.bool:
        return not grows
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return info.min if grows else info.max


def _morphology(batch: Tensor, static: Static, arrays: Arrays) -> Tensor:
    images = as_channels_last(batch)
    n, height, width, count = images.shape
    tall, wide = static["size"]
    top, left = tall // 2, wide // 2
    grows = static["operation"] == "dilation"
    choose = torch.maximum if grows else torch.minimum
    # By hand: `pad` takes no number as large as those of int64, and no bool.
    padded = images.new_full(
        (n, height + tall - 1, width + wide - 1, count), _never_chosen(images.dtype, grows=grows)
    )
    padded[:, top : top + height, left : left + width] = images
    first, *others = (padded[:, y : y + height, x : x + width] for y, x in static["taps"])
    out = first.contiguous()
    for tap in others:
        out = choose(out, tap)
    return out.view(batch.shape)


OPS = (
    DeviceOp("MedianBlur", _encode_median, _median_blur, fused=instructions.median),
    DeviceOp("Morphological", _encode_morphology, _morphology, mask=_morphology),
)
"""Exact. MedianBlur on float32 goes through uint8, as in Albumentations."""

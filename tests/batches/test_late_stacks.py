"""Stacks made where a batch is written are torch's, and nobody meets them before."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from alike import alike, written
from misses import each
from torch.utils.data import default_collate

from lightning_fastdata.batches.collate import collate_samples, for_writing
from lightning_fastdata.batches.memory import LateStack
from lightning_fastdata.errors import BatchError

Pair = namedtuple("Pair", "image label")
same = partial(alike, strides=True)


def turned(shape: tuple[int, ...], number: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Its first dimension comes last, as the channels of an image that was permuted."""
    tensor = torch.full(shape, number, dtype=dtype)
    return tensor.permute(*range(1, len(shape)), 0)


SAMPLES: dict[str, Any] = {
    "numbers": lambda n: n / 2,
    "text": lambda n: [f"sample {n}", b"bytes"],
    "no axes": torch.tensor,
    "empty": lambda n: (torch.zeros(0, 3), turned((0, 2, 3), n)),
    "dense": lambda n: {"a": torch.full((3, 4), n), "b": [torch.full((2,), n % 2 == 0), str(n)]},
    "image": lambda n: {"image": turned((8, 8, 3), n), "label": n},
    "floats": lambda n: (turned((4, 4, 3), n, torch.float16), turned((2, 3), n, torch.float32)),
    "frames": lambda n: (turned((2, 3, 2, 3), n), torch.full((3, 2, 2, 2), n)),
    "pair": lambda n: Pair(
        turned((2, 2, 3), n), Pair(np.full((2, 0), n), np.full(3, n, np.float32))
    ),
    "strided": lambda n: [torch.arange(12).reshape(3, 4)[:, ::2] + n, torch.ones(1).expand(4)],
}


@each("count", [1, 3])
@each("kind", SAMPLES)
def test_what_is_written_is_what_torch_collates(kind: str, count: int) -> None:
    samples = [SAMPLES[kind](number) for number in range(count)]
    expected = default_collate(samples)
    assert same(written(for_writing(default_collate)(samples)), expected)
    assert same(written(for_writing(collate_samples)(samples)), expected)


def test_images_are_not_stacked_before_they_are_written() -> None:
    batch = for_writing(collate_samples)([SAMPLES["image"](number) for number in (1, 2)])
    assert isinstance(batch["image"], LateStack)


class Seen(dict):
    """A user's container that looks at what it is given."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        assert all(type(value) is torch.Tensor for value in self.values())


@dataclass
class Looked:
    image: torch.Tensor

    def __post_init__(self) -> None:
        self.image = self.image + 1


def test_a_users_class_gets_tensors() -> None:
    late = for_writing(collate_samples)
    assert type(late([Seen(image=torch.ones(3))] * 2)["image"]) is torch.Tensor
    assert late([[Looked(torch.zeros(3))]] * 2)[0].image.tolist() == [[2.0] * 3] * 2
    assert type(late([Pair(torch.ones(3), 1)] * 2).image) is torch.Tensor


def test_a_users_collation_is_left_alone() -> None:
    def mine(samples: list[Any]) -> Any:
        return torch.stack(samples).sum()

    assert for_writing(mine) is mine


@pytest.mark.parametrize(
    "odd", [torch.zeros(4), torch.zeros(3, dtype=torch.int64), torch.zeros(3).to_sparse()]
)
def test_what_torch_refuses_is_refused_alike(odd: torch.Tensor) -> None:
    samples = [torch.zeros(3), odd]
    try:
        expected = default_collate(samples)
    except (RuntimeError, TypeError):
        with pytest.raises(BatchError, match="cannot be made into one batch"):
            for_writing(collate_samples)(samples)
    else:
        assert same(written(for_writing(collate_samples)(samples)), expected)


def test_gradients_are_kept() -> None:
    samples = [torch.ones(3, requires_grad=True) for _ in range(2)]
    assert for_writing(collate_samples)(samples).requires_grad

"""Stacks made where a batch is written are torch's, and nobody meets them before."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from lightning_fastdata.batches.collate import collate_samples, for_writing
from lightning_fastdata.batches.packed import LateStack, pack, unpack, write_leaves
from lightning_fastdata.errors import BatchError

Pair = namedtuple("Pair", "image label")


def written(batch: Any) -> Any:
    """Return a batch as it comes out of a slot."""
    packed, leaves = pack(batch)
    memory = np.full(max(1, packed.size_bytes), 0xAA, np.uint8)
    write_leaves(packed, leaves, memory)
    return unpack(packed, memory)


def same(ours: Any, theirs: Any) -> bool:
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        return (
            ours.dtype == theirs.dtype
            and ours.shape == theirs.shape
            and ours.stride() == theirs.stride()
            and ours.requires_grad == theirs.requires_grad
            and torch.equal(ours, theirs)
        )
    if isinstance(ours, Mapping):
        return list(ours) == list(theirs) and all(same(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


def image(shape: tuple[int, ...], dtype: torch.dtype, turned: bool, fill: int) -> torch.Tensor:
    tensor = torch.full(shape, fill % 2 if dtype is torch.bool else fill, dtype=dtype)
    return tensor.permute(*range(1, len(shape)), 0) if turned and len(shape) > 1 else tensor


leaf = st.one_of(
    st.tuples(
        st.just("tensor"),
        st.lists(st.integers(0, 3), max_size=4).map(tuple),
        st.sampled_from([torch.uint8, torch.float32, torch.float16, torch.int64, torch.bool]),
        st.booleans(),
    ),
    st.tuples(st.just("array"), st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)),
    st.sampled_from(["text", "number"]),
)
structure = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.tuples(st.just("list"), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("dict"), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("Pair"), inner, inner),
    ),
    max_leaves=5,
)


def sample_of(plan: Any, number: int) -> Any:
    if plan == "text":
        return f"sample {number}"
    if plan == "number":
        return number / 2
    kind = plan[0]
    if kind == "tensor":
        return image(*plan[1:], number)
    if kind == "array":
        return np.full(plan[1], number, np.float32)
    if kind == "list":
        return [sample_of(part, number) for part in plan[1]]
    if kind == "dict":
        return {f"field {at}": sample_of(part, number) for at, part in enumerate(plan[1])}
    return Pair(*(sample_of(part, number) for part in plan[1:]))


@given(structure, st.integers(1, 4))
def test_what_is_written_is_what_torch_collates(plan: Any, count: int) -> None:
    samples = [sample_of(plan, number) for number in range(count)]
    expected = default_collate(samples)
    assert same(written(for_writing(default_collate)(samples)), expected)
    assert same(written(for_writing(collate_samples)(samples)), expected)


@pytest.mark.parametrize("kind", ["dict", "list"])
def test_images_are_not_stacked_before_they_are_written(kind: str) -> None:
    samples = [
        sample_of((kind, [("tensor", (3, 8, 8), torch.uint8, True), "text"]), n) for n in (1, 2)
    ]
    batch = for_writing(collate_samples)(samples)
    assert isinstance(batch["field 0"] if kind == "dict" else batch[0], LateStack)


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

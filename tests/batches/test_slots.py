"""Slots are written again only when nobody can see it."""

from __future__ import annotations

import copy
import gc
import os
from collections import defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from open_files import open_files
from thoroughness import max_examples

from lightning_fastdata.batches import memory
from lightning_fastdata.batches.memory import (
    SlotPool,
    create_shared_memory,
    pack,
    unpack,
    write_leaves,
)
from lightning_fastdata.errors import WorkerError

MIB = 2**20
DTYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.uint16, torch.uint32, torch.float8_e4m3fn),
]
Pair = namedtuple("Pair", "left right")


def through_a_slot(batch: Any, pool: SlotPool | None = None, *, copy: bool = False) -> Any:
    if pool is None:
        pool = SlotPool(limit_bytes=64 * MIB)
    packed, leaves = pack(batch)
    slot = pool.take(max(1, packed.size_bytes))
    write_leaves(packed, leaves, slot.mapping)
    return unpack(packed, pool.lease(slot), copy=copy)


def free_count(pool: SlotPool) -> int:
    """Return how many slots are neither written nor viewed."""
    pool._collect()
    return len(pool._free)


def bits(tensor: torch.Tensor) -> bytes:
    # A tensor of one element may keep a stride that no view of bytes accepts.
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return fresh.reshape(-1).view(torch.uint8).numpy().tobytes()


@max_examples(60)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 5), max_size=4),
    form=st.sampled_from(["plain", "transposed", "expanded", "strided"]),
    private=st.booleans(),
)
def test_every_tensor_comes_through_unchanged(dtype, shape, form, private) -> None:
    tensor = (torch.rand(shape) * 2).to(dtype)
    if form == "transposed" and tensor.dim() > 1:
        tensor = tensor.transpose(0, 1)
    if form == "expanded":
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    if form == "strided" and tensor.dim() and dtype is not torch.bool:
        tensor = tensor[::2]
    got = through_a_slot([tensor], copy=private)[0]
    assert got.dtype == tensor.dtype
    assert got.shape == tensor.shape
    assert bits(got) == bits(tensor)


def test_every_structure_comes_through_unchanged() -> None:
    shared = torch.arange(10_000.0)
    words = defaultdict(list, a=["x", "y"])
    batch = Pair({"b": (shared, shared[5:]), "a": words}, [np.arange(5000), None, {1, 2}, 3.5])
    got = through_a_slot(batch)
    assert type(got) is Pair
    assert list(got.left) == ["b", "a"]
    assert torch.equal(got.left["b"][0], shared)
    assert torch.equal(got.left["b"][1], shared[5:])
    assert got.left["a"] == words
    assert type(got.left["a"]) is defaultdict
    np.testing.assert_array_equal(got.right[0], batch.right[0])
    assert got.right[1:] == batch.right[1:]


def test_one_tensor_in_two_places_stays_one() -> None:
    tensor = torch.zeros(10_000)
    one, other = through_a_slot([tensor, tensor])
    assert one is other


def test_channels_last_and_gradients_are_kept() -> None:
    image = torch.rand(2, 3, 40, 40).to(memory_format=torch.channels_last)
    weight = torch.rand(5000, requires_grad=True)
    got, got_weight = through_a_slot([image, weight])
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(got, image)
    assert got_weight.requires_grad
    assert got_weight.is_leaf


def test_other_tensors_travel_whole() -> None:
    sparse = torch.eye(4).to_sparse()
    assert torch.equal(through_a_slot([sparse])[0].to_dense(), torch.eye(4))


VIEWS = {
    "itself": lambda t: t,
    "slice": lambda t: t[3:4],
    "view": lambda t: t.view(-1),
    "array": lambda t: t.numpy(),
    "storage": lambda t: t.untyped_storage(),
    "detached": lambda t: t.detach(),
    "graph": lambda t: (t * torch.ones(1, requires_grad=True)).grad_fn,
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("view", VIEWS)
def test_a_slot_is_free_when_the_last_view_is_gone(view: str) -> None:
    pool = SlotPool(limit_bytes=64 * MIB)
    kept = VIEWS[view](through_a_slot(torch.rand(10_000), pool))
    size_bytes = pool.size_bytes
    gc.collect()
    assert free_count(pool) == 0
    del kept
    gc.collect()
    assert free_count(pool) == 1
    assert pool.take(40_000) is not None
    assert (free_count(pool), pool.size_bytes) == (0, size_bytes)


def test_a_small_leaf_that_is_kept_does_not_hold_the_slot() -> None:
    pool = SlotPool(limit_bytes=64 * MIB)
    images, labels = through_a_slot((torch.rand(100_000), torch.arange(64)), pool)
    del images
    assert free_count(pool) == 1
    assert torch.equal(labels, torch.arange(64))


def test_the_pool_stays_within_its_bound_and_grants_two() -> None:
    pool = SlotPool(limit_bytes=3 * MIB)
    slots = [pool.take(MIB) for _ in range(5)]
    assert [slot is not None for slot in slots] == [True, True, True, False, False]
    tight = SlotPool(limit_bytes=1)
    assert tight.take(MIB)
    assert tight.take(MIB)
    assert tight.take(MIB) is None


def test_slots_that_are_too_small_make_room() -> None:
    pool = SlotPool(limit_bytes=4 * MIB)
    for slot in [pool.take(MIB) for _ in range(4)]:
        pool.give_back(slot)
    assert pool.take(3 * MIB) is not None
    assert pool.size_bytes <= 4 * MIB


@pytest.mark.parametrize("closed", [True, False])
def test_tensors_outlive_their_pool_which_closes_its_files(closed: bool) -> None:
    before = open_files()
    pool = SlotPool(limit_bytes=64 * MIB)
    unused = [pool.take(4096) for _ in range(2)]
    tensor = through_a_slot(torch.full((10_000,), 7.0), pool)
    opened = open_files() - before
    assert len(opened) >= 3
    if closed:
        pool.close()
    del pool, unused
    gc.collect()
    assert tensor.eq(7).all()
    assert copy.deepcopy(tensor).eq(7).all()
    del tensor
    assert not opened & open_files()


def test_memory_that_is_not_there_is_refused_with_the_size() -> None:
    with pytest.raises(WorkerError, match=r"batch of .* MiB"):
        create_shared_memory(2**40, available_bytes=lambda: 2**39)


def test_memory_that_cannot_be_mapped_leaves_no_file_open(monkeypatch) -> None:
    def refuse(descriptor: int) -> None:
        raise WorkerError("No more mappings")

    monkeypatch.setattr(memory, "map_shared_memory", refuse)
    pool = SlotPool(limit_bytes=64 * MIB)
    before = open_files()
    with pytest.raises(WorkerError):
        pool.take(MIB)
    assert not open_files() - before


def fork() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def test_what_a_forked_process_may_view_is_never_written_again() -> None:
    pool = SlotPool(limit_bytes=64 * MIB)
    ended, viewed, written, idle = (pool.take(MIB) for _ in range(4))
    pool.give_back(idle)
    pool.lease(ended)
    view = pool.lease(viewed)
    fork()
    pool.give_back(written)
    assert pool.size_bytes == 4 * MIB
    del view
    assert free_count(pool) == 3
    assert pool.size_bytes == 3 * MIB
    assert list(pool.dropped) == [viewed.number]
    assert {id(pool.take(MIB)) for _ in range(3)} == {id(ended), id(written), id(idle)}
    pool.lease(ended)
    assert pool.take(MIB) is ended


def test_memory_that_a_fork_copies_is_written_again() -> None:
    pool = SlotPool(limit_bytes=64 * MIB, shared=False)
    slot = pool.take(MIB)
    view = pool.lease(slot)
    fork()
    del view
    assert pool.take(MIB) is slot

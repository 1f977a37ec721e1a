"""Batches that cross beside the computing: whole, in time, and without the host waiting."""

from __future__ import annotations

import albumentations as A
import pytest
import torch
from gpu.device import CUDA, DeviceWork, PictureDicts, needs_cuda, no_waiting
from torch.utils.data import DataLoader, Dataset

from lightning_fastdata import FastDataLoader, FastDataModule, LoaderOptions, prefetch
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.batches.staged import move
from lightning_fastdata.device import DeviceStreams
from lightning_fastdata.loading.prefetch import SideLane

pytestmark = [*needs_cuda, pytest.mark.filterwarnings("ignore::UserWarning:lightning")]
NUMBERS = 2**20


class Filled(Dataset):
    """Sample ``i`` is four MiB of ``i``, so that every byte of a batch can be checked."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return torch.full((NUMBERS,), i, dtype=torch.int32)


def consumed(batches):
    """Read each batch at the start and the end of a step that uses and frees much memory."""
    readings = []
    for batch in batches:
        early = torch.stack([batch.amin(), batch.amax()])
        left = torch.randn(1024, 1024, device=CUDA)
        for _ in range(8):
            scratch = torch.full_like(batch, -1)
            left = left @ left * 1e-3
            del scratch
        readings.append((early, torch.stack([batch.amin(), batch.amax()])))
        del batch
    torch.cuda.synchronize()
    return [(early.tolist(), late.tolist()) for early, late in readings]


def page_locked(count):
    for number in range(count):
        yield torch.full((NUMBERS,), number, dtype=torch.int32).pin_memory()


def doubled(batch):
    scratch = batch * 4
    return scratch // 2


@pytest.mark.parametrize("transform", [None, doubled])
def test_batches_arrive_whole_while_the_allocator_is_under_stress(transform):
    factor = 1 if transform is None else 2
    found = consumed(prefetch(page_locked(60), CUDA, transform))
    assert found == [([factor * n] * 2, [factor * n] * 2) for n in range(60)]


def test_batches_that_do_not_wait_for_the_consumer_arrive_whole_too():
    lane = SideLane(DeviceStreams(CUDA))
    sent = (
        lane.send(b, lambda b: move(b, CUDA, non_blocking=True)).land() for b in page_locked(60)
    )
    assert consumed(sent) == [([n] * 2, [n] * 2) for n in range(60)]


def test_the_host_waits_neither_for_the_copy_nor_for_the_computing():
    source = list(page_locked(4))
    list(prefetch(source, CUDA, doubled))  # loads kernels, and takes memory
    torch.cuda.synchronize()
    work = DeviceWork()
    torch.cuda.synchronize()
    batches = iter(prefetch(source, CUDA, doubled))
    with no_waiting():
        busy = work(500)
        first = next(batches)
        assert not busy.query()
    assert first.amax().item() == 0
    # Further ahead it waits, so that batches do not fill the memory.
    assert [batch.amax().item() for batch in batches] == [2, 4, 6]


def test_the_next_batch_crosses_while_a_step_computes():
    work = DeviceWork()
    batches = iter(prefetch(page_locked(6), CUDA))
    next(batches), next(batches)
    torch.cuda.synchronize()
    busy = work(1000)
    next(batches)
    batches._next[0].done.synchronize()
    assert not busy.query()


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_equal_those_that_are_moved_at_their_turn(workers):
    def loader():
        return FastDataLoader(
            PictureDicts(24, 48, 64),
            8,
            seed=4,
            num_workers=workers,
            multiprocessing_context="forkserver" if workers else None,
            pin_memory=True,
            transform=as_batch_transform(
                A.Compose([A.HorizontalFlip(), A.RandomGamma(), A.Normalize(), A.ToTensorV2()])
            ),
            on_device=True,
            staged="train",
        )

    ours = list(prefetch(loader(), CUDA))
    straight = prefetch(loader(), CUDA, streams=lambda _: None)
    for one, other in zip(ours, straight, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_draws_of_a_callable_are_keyed_and_leave_the_trainings_alone():
    def noisy(batch):
        return batch + torch.rand(batch.shape, device=batch.device)

    loader = DataLoader(torch.arange(12.0), 3, pin_memory=True)
    found = []
    for how in ({}, {"streams": lambda _: None}):
        torch.cuda.manual_seed(1)
        found.append(
            [(b, torch.rand(1, device=CUDA)) for b in prefetch(loader, CUDA, noisy, **how)]
        )
    for (ours, our_draw), (theirs, their_draw) in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(our_draw, their_draw)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_a_thread_has_pinned_arrive_whole_under_stress(workers):
    loader = FastDataLoader(
        Filled(48),
        1,
        num_workers=workers,
        multiprocessing_context="forkserver" if workers else None,
        pin_memory=True,
    )
    for batches in (prefetch(loader, CUDA), (b.to(CUDA, non_blocking=True) for b in loader)):
        assert consumed(batches) == [([n] * 2, [n] * 2) for n in range(48)]
    assert next(iter(loader)).is_pinned()


# In Lightning


@pytest.mark.parametrize("executor", ["torch", "workers"])
def test_a_training_is_the_same_whatever_the_prefetching(tmp_path, executor):
    from gpu.test_training import recipe, train

    seen = []
    for way in ("off", "auto"):
        datamodule = FastDataModule.from_datasets(
            PictureDicts(48, 48, 48),
            batch_size=8,
            augment=recipe(),
            augment_on="gpu",
            options=LoaderOptions(num_workers=2, executor=executor),
            prefetch=way,
            guard="off",
            seed=5,
        )
        datamodule.register_transform(lambda batch: (batch["image"], batch["label"] % 4))
        seen.append(train(tmp_path, datamodule, max_epochs=2).seen)
        assert ("ahead" in datamodule.explain()) == (way == "auto")
    for other in seen[1:]:
        assert all(map(torch.equal, seen[0], other))

from __future__ import annotations

import albumentations as A
import pytest
import torch
from gpu.device import CUDA, DeviceWork, PictureDicts, largest_gap, needs_cuda, no_waiting

from lightning_fastdata import FastDataLoader
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.batches.staged import StagedBatch
from lightning_fastdata.plugin.transforms import transfer

pytestmark = needs_cuda


def recipe():
    return A.Compose([A.HorizontalFlip(), A.RandomGamma(p=0.5), A.Normalize(), A.ToTensorV2()])


def loader(*, on_device, workers, pin_memory):
    return FastDataLoader(
        PictureDicts(24, 48, 64),
        batch_size=8,
        num_workers=workers,
        # A process in which CUDA is in use must not be forked.
        multiprocessing_context="forkserver" if workers else None,
        pin_memory=pin_memory,
        transform=as_batch_transform(recipe()),
        on_device=on_device,
        staged="train" if on_device else None,
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_the_pin_thread_pins_the_batch_and_its_draws(workers):
    batches = list(loader(on_device=True, workers=workers, pin_memory=True))
    assert len(batches) == 3
    for batch in batches:
        assert isinstance(batch, StagedBatch)
        assert batch.stage == "train"
        assert all(tensor.is_pinned() for tensor in batch.batch.values())
        assert batch.draws.blob.is_pinned()
        assert batch.draws.samples == 8


def test_pinned_batches_reach_the_device_without_waiting_and_equal_albumentations():
    transform = as_batch_transform(recipe())
    staged = list(loader(on_device=True, workers=2, pin_memory=True))
    whole = list(loader(on_device=False, workers=0, pin_memory=False))

    def move(batch):
        return {name: tensor.to(CUDA, non_blocking=True) for name, tensor in batch.items()}

    def finished(batch):
        arrived = transfer(batch, move, CUDA)
        return transform.apply(arrived.batch, arrived.draws)

    finished(staged[0])  # loads kernels
    work = DeviceWork()
    torch.cuda.synchronize()
    with no_waiting():
        before = work(2000)
        done = [finished(batch) for batch in staged]
        assert not before.query()
    torch.cuda.synchronize()
    for ours, oracle in zip(done, whole, strict=True):
        assert largest_gap(ours["image"], oracle["image"]) == 0
        assert torch.equal(ours["mask"].cpu(), oracle["mask"])
        assert torch.equal(ours["label"].cpu(), oracle["label"])


def test_page_locked_buffers_are_not_reused_before_their_copy_is_done():
    """Many batches in flight at once, each through memory that the next one would like to have."""
    source = [torch.full((2**20,), number, dtype=torch.int32) for number in range(24)]
    work = DeviceWork()
    torch.cuda.synchronize()
    work(500)
    arrived = []
    for tensor in source:
        staged = StagedBatch(tensor, None, "train").pin_memory()
        arrived.append(transfer(staged, lambda b: b.to(CUDA, non_blocking=True), CUDA).batch)
        del staged
    for number, tensor in enumerate(arrived):
        assert (tensor == number).all()

"""A dataset on the device gives the batches that it would give from the host."""

from __future__ import annotations

import os

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import albumentations as A
import numpy as np
import pytest
import torch
from conformance.pieces import Linear, make_trainer
from device.host_streams import HostStreams
from hypothesis import example, given
from hypothesis import strategies as st
from thoroughness import max_examples
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_fastdata import FastDataLoader, FastDataModule, LoaderOptions, prefetch
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.batches.staged import StagedBatch
from lightning_fastdata.device.resident import ResidentBatches, device_of, free_bytes_on
from lightning_fastdata.errors import OptionsError

torch.set_num_threads(1)
CPU = torch.device("cpu")


def tensors(rows):
    generator = torch.Generator().manual_seed(rows)
    images = torch.randint(0, 256, (rows, 5, 4, 3), dtype=torch.uint8, generator=generator)
    return TensorDataset(images, torch.arange(rows), torch.rand(rows, generator=generator) > 0.5)


def same(ours, theirs):
    assert type(ours) is type(theirs)
    for one, other in zip(ours, theirs, strict=True):
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        else:
            same(one, other)


@max_examples(30)
@given(
    rows=st.integers(1, 40),
    size=st.integers(1, 9),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
@example(rows=1, size=2, shuffle=True, drop_last=True)  # no batch, and torch draws an order
def test_batches_and_the_generators_are_those_of_torch(rows, size, shuffle, drop_last):
    found = []
    for loader in (
        FastDataLoader(tensors(rows), size, shuffle, drop_last=drop_last, device_resident="cpu"),
        DataLoader(tensors(rows), size, shuffle, drop_last=drop_last),
    ):
        torch.manual_seed(rows)
        epochs = [list(loader) for _ in range(2)]
        found.append((epochs, torch.rand(2)))
    (ours, our_draw), (theirs, their_draw) = found
    for one, other in zip(ours, theirs, strict=True):
        same(one, other)
    assert torch.equal(our_draw, their_draw)


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.bool, torch.uint16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64],
)
def test_every_type_of_numbers_is_kept(dtype):
    data = torch.randint(0, 2, (10, 3)).to(dtype)
    loader = FastDataLoader(TensorDataset(data), 4, device_resident=CPU)
    batches = [batch[0] for batch in loader]
    assert {batch.dtype for batch in batches} == {dtype}
    rows = torch.cat([batch.view(torch.uint8) for batch in batches])
    assert torch.equal(rows, data.view(torch.uint8))


def test_a_memory_map_is_read_once_and_in_full(tmp_path):
    path = tmp_path / "rows.npy"
    array = np.random.default_rng(0).integers(0, 255, (50, 7, 3), np.uint8)
    np.save(path, array)
    loader = FastDataLoader(np.load(path, mmap_mode="r"), 8, device_resident=True)
    expected = torch.from_numpy(array).split(8)
    assert all(map(torch.equal, loader, expected))
    assert loader._inner.size_bytes == array.nbytes
    path.unlink()
    assert all(map(torch.equal, loader, expected))


def test_indices_of_a_sampler_may_count_from_the_end_and_not_beyond():
    loader = FastDataLoader(tensors(6), batch_sampler=[[0, -1], [5]], device_resident=True)
    assert [batch[1].tolist() for batch in loader] == [[0, 5], [5]]
    with pytest.raises(IndexError, match="6 samples"):
        list(FastDataLoader(tensors(6), batch_sampler=[[6]], device_resident=True))


@pytest.mark.parametrize(("free_mib", "fits"), [(1.99, False), (2.01, True), (None, True)])
def test_a_dataset_that_leaves_no_room_is_refused_in_numbers(free_mib, fits):
    free = None if free_mib is None else int(free_mib * 2**20)
    batches = ResidentBatches(
        torch.zeros(1024, 1024, dtype=torch.uint8),
        CPU,
        default_collation=True,
        batches=lambda: [[0]],
        free_bytes=lambda _: free,
    )
    if fits:
        assert next(iter(batches)).shape == (1, 1024)
        assert batches.size_bytes == 2**20
        batches.close()
        assert batches.size_bytes == 0
    else:
        with pytest.raises(OptionsError, match=r"takes 1\.0 MiB, and of the 2\.0 MiB free on cpu"):
            iter(batches)


class Items(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return i


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize(
    ("dataset", "about"),
    [
        (Items(), {}),
        (Stream(), {}),
        (tensors(4), {"collate_fn": list}),
        (tensors(4), {"batch_size": None}),
        (tensors(4), {"transform": as_batch_transform(A.Compose([A.HorizontalFlip()]))}),
    ],
)
def test_what_cannot_be_kept_is_refused(dataset, about):
    with pytest.raises(OptionsError, match="device_resident=False"):
        list(FastDataLoader(dataset, **{"batch_size": 2, "device_resident": True, **about}))


def test_batches_are_staged_for_the_stages_transforms():
    loader = FastDataLoader(tensors(4), 2, staged="val", device_resident=True)
    batch = next(iter(loader))
    assert isinstance(batch, StagedBatch)
    assert (batch.stage, batch.draws) == ("val", None)
    assert len(batch.batch) == 3


def test_an_epoch_goes_on_after_another_began_and_batches_are_the_users():
    loader = FastDataLoader(tensors(6), 2, device_resident=True)
    first = iter(loader)
    batch = next(first)
    batch[1].fill_(99)
    assert [b[1].tolist() for b in loader] == [[0, 1], [2, 3], [4, 5]]
    assert next(first)[1].tolist() == [2, 3]
    loader.close()
    assert [b[1].tolist() for b in loader] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("way", ["off", "stream", "lookahead"])
def test_a_training_is_the_same_as_from_the_host(tmp_path, way):
    class Data(FastDataModule):
        resident = True

        def device_streams(self, device):
            return HostStreams()

        def train_dataset(self):
            return TensorDataset(torch.rand(20, 4, generator=torch.Generator().manual_seed(1)))

        def train_dataloader(self):
            about = {"device_resident": True} if self.resident else {}
            return self.make_loader(self.train_dataset(), stage="train", **about)

    seen = []
    for resident in (True, False):
        module = Data(4, options=LoaderOptions(num_workers=0), prefetch=way, seed=3)
        module.resident = resident
        module.register_transform(lambda batch: [batch[0] + 1])
        model = Linear()
        make_trainer(tmp_path, max_epochs=2, limit_val_batches=0).fit(model, datamodule=module)
        seen.append([batch[0] for batch in model.seen["train"]])
    assert len(seen[0]) == 10
    assert all(map(torch.equal, *seen))


def test_prefetch_leaves_them_where_they_are():
    loader = FastDataLoader(tensors(6), 2, device_resident=True)
    for streams in (None, HostStreams()):
        batches = prefetch(loader, "cpu", lambda b: b[1] * 2, streams=lambda _, s=streams: s)
        assert [batch.tolist() for batch in batches] == [[0, 2], [4, 6], [8, 10]]


def test_the_device_that_is_meant():
    assert device_of("cuda:1") == torch.device("cuda", 1)
    if not torch.accelerator.is_available():
        assert device_of(True) == CPU
    assert free_bytes_on(CPU) > 0
    assert free_bytes_on(torch.device("meta")) is None

"""Mixed batches are the same ones when they are moved and mixed one batch ahead."""

from __future__ import annotations

import numpy as np
import torch
from augment.mixed_samples import CLASSES, PIPELINE, Photos
from device.host_streams import HostStreams
from misses import each
from torch.utils.data import DataLoader
from trainers import Keeps, quiet_trainer

from lightning_fastdata import FastDataModule, LoaderOptions, prefetch
from lightning_fastdata.augment.mixing import CutMix, MixUp, mixed
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.types import SampleKey

torch.set_num_threads(1)

CPU = torch.device("cpu")


def recipe():
    return mixed(PIPELINE, CutMix(), MixUp(p=0.5), num_classes=CLASSES)


def ahead(loader, transform=None, **more):
    return prefetch(loader, CPU, transform, streams=lambda _: HostStreams(), **more)


def equal(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@each("workers", [0, 2])
def test_what_the_workers_drew_is_mixed_one_batch_ahead(workers):
    def loader(*, staged, on_device):
        return FastDataLoader(
            Photos(),
            4,
            transform=recipe(),
            on_device=on_device,
            staged=staged,
            seed=2,
            num_workers=workers,
        )

    expected = list(loader(staged=None, on_device=False))
    found = list(ahead(loader(staged="train", on_device=True)))
    assert len(found) == 3
    for (image, label), (want, wanted_label) in zip(found, expected, strict=True):
        assert image.shape == (4, 3, 32, 40)
        assert (image - want).abs().max() < 1e-5
        assert torch.equal(label, wanted_label)


def test_batches_of_any_loader_draw_by_epoch_and_place():
    transform = mixed(MixUp(1.0), CutMix(), num_classes=CLASSES)

    def collate(samples):
        image = torch.from_numpy(np.stack([np.resize(one, (32, 40, 3)) for one, _ in samples]))
        return image, torch.tensor([label for _, label in samples])

    loader = DataLoader(Photos(), batch_size=5, collate_fn=collate)
    batches = ahead(loader, transform, seed=7)
    for epoch in range(2):
        firsts = (0, 5, 10)
        for first, raw, batch in zip(firsts, loader, batches, strict=True):
            want = transform.apply_unprepared(raw, SampleKey(7, epoch, first))
            assert len(batch[0]) == len(raw[0])
            assert equal(batch, want)


class OnStreams(FastDataModule):
    def train_dataset(self):
        return Photos()

    def device_streams(self, device):
        return HostStreams()


def test_training_gets_the_same_mixed_batches_however_they_are_moved(tmp_path):
    def trained(prefetching):
        module = Keeps()
        data = OnStreams(
            4,
            augment=recipe(),
            augment_on="gpu",
            prefetch=prefetching,
            options=LoaderOptions(num_workers=0),
            seed=1,
        )
        quiet_trainer(tmp_path, max_epochs=2).fit(module, datamodule=data)
        return module.seen

    found, expected = trained("auto"), trained("off")
    assert len(found) == 6
    assert all(equal(one, other) for one, other in zip(found, expected, strict=True))

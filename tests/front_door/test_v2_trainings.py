"""A training with a torchvision v2 pipeline as ``augment=``: each sample is v2's own, in each mode."""

from __future__ import annotations

import pytest
import torch
from augment.v2_pipelines import assert_same, eager, images, sample
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from trainers import Keeps, quiet_trainer

from lightning_fastdata import (
    DataThroughputCallback,
    FastDataModule,
    LoaderOptions,
    SampleKey,
    prefetch,
)
from lightning_fastdata.batches.collate import collate_samples

SAMPLES = [sample(image, number) for number, image in enumerate(images(8, 36, 40))]
BATCH, SEED = 2, 11
PIPELINE = v2.Compose(
    [
        v2.RandomResizedCrop(24),
        v2.RandomHorizontalFlip(),
        v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.7),
        v2.RandAugment(),
        v2.RandomRotation(20),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.5] * 3, [0.25] * 3),
    ]
)


class Photos(Dataset):
    """Photographs of several sizes, or of one."""

    def __init__(self, cut=False):
        self.samples = [(s[0][:, :, :40].contiguous(), s[1]) for s in SAMPLES] if cut else SAMPLES

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def wanted(dataset, epoch=0, indices=range(8)):
    """Return the batches that v2 makes of a dataset, drawn by the keys of its samples."""
    samples = [dataset[index] for index in indices]
    made = eager(PIPELINE, samples, [SampleKey(SEED, epoch, index) for index in indices])
    return [collate_samples(made[at : at + BATCH]) for at in range(0, len(made), BATCH)]


def module(workers, augment_on="auto", **arguments):
    return FastDataModule.from_datasets(
        Photos(),
        batch_size=BATCH,
        seed=SEED,
        shuffle=False,
        augment=PIPELINE,
        augment_on=augment_on,
        options=LoaderOptions(num_workers=workers),
        **arguments,
    )


def fit(folder, data=None, loader=None, **options):
    model = Keeps()
    ckpt_path = options.pop("ckpt_path", None)
    trainer = quiet_trainer(folder, **options)
    trainer.fit(model, loader, datamodule=data, ckpt_path=ckpt_path)
    return model.seen, trainer


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("augment_on", ["cpu", "gpu"])
def test_batches_are_v2s_own_in_each_epoch(tmp_path, workers, augment_on):
    seen, _ = fit(tmp_path, module(workers, augment_on), max_epochs=2)
    assert_same(seen, [*wanted(Photos()), *wanted(Photos(), epoch=1)], types=False)


def test_a_training_that_goes_on_draws_as_one_that_did_not_stop(tmp_path):
    _, trainer = fit(tmp_path, module(0), max_steps=2)
    saved = tmp_path / "half.ckpt"
    trainer.save_checkpoint(saved)
    rest, _ = fit(tmp_path, module(2, "gpu"), ckpt_path=saved)
    assert_same(rest, wanted(Photos())[2:], types=False)


def test_all_modes_give_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", str(SEED))  # the callback's
    loader = DataLoader(Photos(cut=True), batch_size=BATCH)
    callback = DataThroughputCallback(PIPELINE, report=False, summary=False)
    by_callback, _ = fit(tmp_path, loader=loader, callbacks=[callback])
    prefetched = list(prefetch(loader, "cpu", PIPELINE, seed=SEED))
    by_module, _ = fit(
        tmp_path,
        FastDataModule.from_datasets(
            Photos(cut=True),
            batch_size=BATCH,
            seed=SEED,
            shuffle=False,
            augment=PIPELINE,
            num_workers=0,
        ),
    )
    for seen in (by_callback, prefetched, by_module):
        assert_same(seen, wanted(Photos(cut=True)), types=False)


def test_each_stage_has_its_own_pipeline(tmp_path):
    scaled = v2.Compose([v2.CenterCrop(24), v2.ToDtype(torch.float32, scale=True)])
    data = FastDataModule.from_datasets(
        Photos(),
        Photos(),
        batch_size=BATCH,
        seed=SEED,
        shuffle=False,
        num_workers=0,
        augment={"train": PIPELINE, "val": scaled},
    )
    seen = []

    class Both(Keeps):
        def validation_step(self, batch, batch_idx):
            seen.append(batch)

    quiet_trainer(tmp_path, num_sanity_val_steps=0).fit(Both(), datamodule=data)
    made = [scaled(one) for one in SAMPLES]
    assert_same(
        seen, [collate_samples(made[at : at + BATCH]) for at in range(0, 8, BATCH)], types=False
    )
    text = data.explain()
    assert "all of it in the workers, by torchvision itself" in text

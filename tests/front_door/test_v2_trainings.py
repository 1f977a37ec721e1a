"""A training with a torchvision v2 pipeline as ``augment=``: each sample is v2's own."""

from __future__ import annotations

import pytest
import torch
from augment.v2_pipelines import assert_same, copied, eager, images, sample
from samples import Samples
from torch.utils.data import DataLoader
from torchvision.transforms import v2
from trainers import Learner, quiet_trainer

from lightning_fastdata import (
    DataThroughputCallback,
    FastDataLoader,
    FastDataModule,
    SampleKey,
    as_batch_transform,
    prefetch,
)
from lightning_fastdata.batches.collate import collate_samples
from lightning_fastdata.randomness.seeds import derived_seed

ONE_SIZE = [sample(image, number) for number, image in enumerate(images(8, 36, 40))]
SIZES = [sample(image, n) for n, image in enumerate([*images(4, 36, 40), *images(4, 44, 32)])]
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


_PROBE = torch.arange(48, dtype=torch.uint8).square_().reshape(1, 3, 4, 4)
RESIZES_AS_TORCH = torch.equal(
    v2.functional.resize(_PROBE, [3, 3]),
    torch.nn.functional.interpolate(_PROBE, (3, 3), mode="bilinear", antialias=True),
)
"""Whether torchvision leaves the resizing of uint8 images to torch, as a device does it. Older ones
compute in float32 on CPUs with AVX-512."""


def photos(one_size=False):
    """Photographs of several sizes, or of one."""
    return Samples((ONE_SIZE if one_size else SIZES).__getitem__, 8)


def wanted(dataset, epoch=0, indices=range(8), seed=SEED):
    """Return the batches that v2 makes of a dataset, drawn by the keys of its samples."""
    samples = [dataset[index] for index in indices]
    made = eager(PIPELINE, samples, [SampleKey(seed, epoch, index) for index in indices])
    return [collate_samples(made[at : at + BATCH]) for at in range(0, len(made), BATCH)]


def module(workers, augment_on="auto", one_size=False, **given):
    """Return a data module of photographs; what is given wins."""
    own = {"train_dataset": photos(one_size), "batch_size": BATCH, "seed": SEED, "shuffle": False}
    own |= {"augment": PIPELINE, "augment_on": augment_on, "num_workers": workers}
    return FastDataModule.from_datasets(**own | given)


def fit(folder, data=None, loader=None, **options):
    model = Learner()
    ckpt_path = options.pop("ckpt_path", None)
    trainer = quiet_trainer(folder, **options)
    trainer.fit(model, loader, datamodule=data, ckpt_path=ckpt_path)
    return model.seen, trainer


@pytest.mark.parametrize(
    ("workers", "augment_on", "one_size"),
    [(0, "cpu", True), (0, "gpu", False), (2, "cpu", False), (2, "gpu", True)],
)
def test_batches_are_v2s_own_in_each_epoch(tmp_path, workers, augment_on, one_size):
    seen, _ = fit(tmp_path, module(workers, augment_on, one_size), max_epochs=2)
    own = photos(one_size)
    if augment_on == "gpu" and one_size and not RESIZES_AS_TORCH:
        pytest.skip("a resized pixel is a level apart, which posterizing makes more")
    assert_same(seen, [*wanted(own), *wanted(own, epoch=1)], types=False)


@pytest.mark.parametrize("executor", ["inline", "workers", "torch"])
def test_every_executor_draws_by_sample(executor):
    how = {"executor": executor, "num_workers": 0 if executor == "inline" else 2}
    transform = as_batch_transform(PIPELINE)
    loader = FastDataLoader(photos(), BATCH, seed=SEED, transform=transform, **how)
    assert_same(list(loader), wanted(photos()), types=False)


def test_a_training_that_goes_on_draws_as_one_that_did_not_stop(tmp_path):
    _, trainer = fit(tmp_path, module(0), max_steps=2)
    saved = tmp_path / "half.ckpt"
    trainer.save_checkpoint(saved)
    rest, _ = fit(tmp_path, module(2, "gpu"), ckpt_path=saved)
    assert_same(rest, wanted(photos())[2:], types=False)


def test_all_modes_give_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", str(SEED))  # the callback's
    loader = DataLoader(photos(one_size=True), batch_size=BATCH)
    callback = DataThroughputCallback(PIPELINE, report=False, summary=False)
    by_callback, _ = fit(tmp_path, loader=loader, callbacks=[callback])
    prefetched = list(prefetch(loader, "cpu", PIPELINE, seed=SEED))
    by_module, _ = fit(tmp_path, module(0, one_size=True))
    for seen, seed in ((prefetched, derived_seed(SEED, "prefetch", 0)), (by_module, SEED)):
        assert_same(seen, wanted(photos(one_size=True), seed=seed), types=False)
    for number, batch in enumerate(by_callback):
        keys = [SampleKey(derived_seed(SEED, "callback", 0, 0, number), 0, n) for n in range(BATCH)]
        samples = [photos(one_size=True)[BATCH * number + n] for n in range(BATCH)]
        assert_same(batch, collate_samples(eager(PIPELINE, samples, keys)), types=False)


@pytest.mark.filterwarnings("ignore:.*gets finished images")
def test_detection_in_lists_is_finished_in_the_worker(tmp_path):
    """Boxes of each image are as many as they are, so that no tensor is made of the images."""
    steps = [v2.RandomZoomOut(), v2.RandomIoUCrop(), v2.Resize((24, 24)), v2.RandomHorizontalFlip()]
    pipeline = v2.Compose([*steps, v2.SanitizeBoundingBoxes(), v2.RandomErasing()])
    samples = [sample(image, n, "boxes") for n, (image, _) in enumerate(SIZES)]
    for _, target in samples:
        target.pop("masks")
        target.pop("points", None)

    boxes = Samples(lambda index: copied(samples[index]), 8)
    wanted_each = eager(pipeline, samples, [SampleKey(SEED, 0, index) for index in range(8)])
    for augment_on in ("cpu", "gpu"):
        model = Learner()
        data = module(0, augment_on, train_dataset=boxes, augment=pipeline, collate_fn=in_lists)
        quiet_trainer(tmp_path).fit(model, datamodule=data)
        made = [one for batch in model.seen for one in zip(*batch, strict=True)]
        assert_same(made, wanted_each, types=False)


def in_lists(samples):
    return tuple(zip(*samples, strict=True))

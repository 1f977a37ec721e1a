"""Mixing behind a pipeline: in workers, in the training, in batches of other loaders."""

from __future__ import annotations

import albumentations as A
import lightning as L
import numpy as np
import pytest
import torch
from augment.batches import in_worker, keys
from augment.mixed_samples import CLASSES, IMAGES, PIPELINE, Photos, carried_out
from misses import each
from trainers import quiet_trainer

from lightning_fastdata import BatchTransform, FastDataModule
from lightning_fastdata.augment.mixing import CutMix, MixUp, mixed
from lightning_fastdata.augment.stage_transform import StageTransform
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.errors import BatchError, OptionsError, TransformError
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.types import SampleKey

torch.set_num_threads(1)


def test_a_mixed_transform_is_a_batch_transform():
    transform = mixed(PIPELINE, CutMix(), num_classes=CLASSES)
    assert isinstance(transform, StageTransform)
    assert as_batch_transform(transform) is transform
    lines = transform.explain().splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["RandomResizedCrop", "worker"],
        ["HorizontalFlip", "device"],
        ["Normalize", "device"],
        ["ToTensorV2", "device"],
        ["CutMix", "batch"],
    ]


@each("given", [False, True])
def test_same_pixels_of_calls_written_before_changes_nothing(given):
    for make in (
        as_batch_transform,
        BatchTransform.from_albumentations,
        lambda compose, **options: mixed(compose, CutMix(), num_classes=CLASSES, **options),
    ):
        assert make(PIPELINE, same_pixels=given).explain() == make(PIPELINE).explain()


def test_the_pipeline_draws_what_it_would_draw_alone():
    samples = [{"image": image} for image in IMAGES]
    alone = in_worker(as_batch_transform(PIPELINE), samples)
    part = mixed(PIPELINE, CutMix(p=0)).in_worker(on_device=False)
    for sample, key, want in zip(samples, keys(6), alone, strict=True):
        assert torch.equal(part(sample, key)[0]["image"], want["image"])


def test_who_meets_whom_depends_on_who_is_there_and_not_on_the_order():
    transform = mixed(PIPELINE, CutMix(), num_classes=CLASSES)
    samples = [Photos()[index] for index in range(6)]
    image, labels = carried_out(transform, samples)
    turned = [4, 2, 0, 5, 1, 3]
    other, others = carried_out(transform, samples, turned)
    assert torch.equal(other, image[turned])
    assert torch.equal(others, labels[turned])


@each("form", ["tuple", "dict"])
@each(("executor", "workers"), [("inline", 0), ("workers", 2), ("torch", 2)])
def test_any_loader_gives_the_same_mixed_batches(form, executor, workers):
    def batches(**how):
        loader = FastDataLoader(
            Photos(form=form),
            4,
            seed=3,
            transform=mixed(PIPELINE, MixUp(), num_classes=CLASSES),
            **how,
        )
        return [
            (one[0], one[1]) if form == "tuple" else (one["image"], one["label"]) for one in loader
        ]

    wanted = batches(num_workers=0)
    found = batches(num_workers=workers, executor=executor)
    assert len(found) == 3
    for (image, label), (want, wanted_label) in zip(found, wanted, strict=True):
        assert label.shape == (4, CLASSES)
        assert torch.equal(image, want)
        assert torch.equal(label, wanted_label)


@each(("executor", "workers"), [("workers", 2), ("torch", 1)])
def test_what_is_drawn_for_mixing_crosses_processes_with_the_batch(executor, workers):
    transform = mixed(PIPELINE, CutMix(), num_classes=CLASSES)

    def batches(**how):
        loader = FastDataLoader(
            Photos(), 4, transform=transform, on_device=True, staged="train", seed=1, **how
        )
        return [transform.apply(one.batch, one.draws) for one in loader]

    wanted, found = batches(num_workers=0), batches(num_workers=workers, executor=executor)
    assert len(found) == 3
    for (image, label), (want, wanted_label) in zip(found, wanted, strict=True):
        assert image.shape == (4, 3, 32, 40)
        assert torch.equal(image, want)
        assert torch.equal(label, wanted_label)


def test_mixing_needs_batches():
    loader = FastDataLoader(Photos(), None, transform=mixed(PIPELINE, MixUp(), num_classes=CLASSES))
    with pytest.raises(OptionsError, match="batch_size"):
        next(iter(loader))


class Watching(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch)
        return self.scale * batch[0].mean()

    def validation_step(self, batch, batch_idx):
        assert batch[1].ndim == 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


class Module(FastDataModule):
    def train_dataset(self):
        return Photos()

    def val_dataset(self):
        return Photos()


@each("augment_on", ["cpu", "gpu"])
def test_the_training_gets_mixed_batches_and_the_validation_does_not(augment_on, tmp_path):
    data = Module(
        4,
        augment={
            "train": mixed(PIPELINE, CutMix(), num_classes=CLASSES),
            "val": A.Compose([A.Resize(32, 40), A.Normalize(), A.ToTensorV2()]),
        },
        augment_on=augment_on,
    )
    module = Watching()
    quiet_trainer(tmp_path).fit(module, datamodule=data)
    assert len(module.seen) == 3
    for image, labels in module.seen:
        assert image.shape == (4, 3, 32, 40)
        assert labels.shape == (4, CLASSES)
        assert torch.allclose(labels.sum(1), torch.ones(4))
    assert any((labels.amax(1) < 1).any() for _, labels in module.seen)


def test_batches_of_other_loaders_draw_by_their_place():
    transform = mixed(CutMix(), MixUp(1.0), num_classes=CLASSES)
    image = torch.rand(6, 3, 20, 24)
    batch = (image, torch.arange(6) % CLASSES)
    mixed_image, labels = transform.apply_unprepared(batch, SampleKey(0, 0, 12))
    assert labels.shape == (6, CLASSES)
    again, _ = transform.apply_unprepared(batch, SampleKey(0, 0, 12))
    other, _ = transform.apply_unprepared(batch, SampleKey(0, 0, 18))
    assert torch.equal(mixed_image, again)
    assert not torch.equal(mixed_image, other)


def test_a_pipeline_before_runs_on_batches_of_other_loaders_too():
    transform = mixed(A.Compose([A.Normalize(), A.ToTensorV2()]), CutMix(), num_classes=CLASSES)
    image = torch.from_numpy(np.stack(IMAGES[:3]))
    out, labels = transform.apply_unprepared((image, torch.arange(3)), SampleKey(0, 0, 0))
    assert out.shape == (3, 3, 60, 70)
    assert out.dtype == torch.float32
    assert labels.shape == (3, CLASSES)


@each("shape", [(5, 3, 20, 24), (5, 20, 24, 3), (5, 20, 24)])
def test_any_layout_of_images_is_kept(shape):
    image = torch.rand(shape)
    batch = {"image": image, "target": torch.eye(5), "name": list("abcde")}
    out = mixed(CutMix()).apply_unprepared(batch, SampleKey(0, 0, 0))
    assert out["image"].shape == shape
    assert out["name"] == list("abcde")
    assert out["target"].shape == (5, 5)
    assert image.ndim == 3 or not torch.equal(out["image"], image)


@each(
    ("steps", "said"),
    [
        ((), "There is nothing that mixes"),
        ((PIPELINE,), "There is nothing that mixes"),
        ((CutMix(), PIPELINE), "does not mix"),
        ((torch.nn.Identity(), CutMix()), "Register a callable by itself"),
    ],
)
def test_what_cannot_be_put_together_is_refused(steps, said):
    with pytest.raises(TransformError, match=said):
        mixed(*steps)


@each(
    ("batch", "options", "said"),
    [
        ((torch.rand(2, 3, 8, 8), torch.arange(2)), {}, "num_classes"),
        ((torch.rand(2, 3, 8, 8), torch.rand(2)), {"num_classes": 2}, "float32"),
        ((torch.rand(2, 3, 8, 8), ["a", "b"]), {}, "label="),
        ({"image": torch.rand(2, 3, 8, 8)}, {"label": "y"}, "no field 'y'"),
        (
            {"image": torch.rand(2, 3, 8, 8), "mask": torch.rand(2, 8, 8)},
            {},
            "'mask', which mixing",
        ),
    ],
)
def test_a_batch_that_cannot_be_mixed_says_what_it_holds(batch, options, said):
    with pytest.raises(BatchError, match=said):
        mixed(CutMix(), **options).apply_unprepared(batch, SampleKey(0, 0, 0))


def test_a_collate_that_loses_samples_is_noticed():
    transform = mixed(CutMix())
    part = transform.in_worker(on_device=True)
    drawn = [part({"image": IMAGES[0]}, key)[1] for key in keys(3)]
    with pytest.raises(BatchError, match="drawn for 3"):
        transform.apply({"image": torch.rand(2, 3, 8, 8)}, part.collate(drawn))

from __future__ import annotations

import albumentations as A
import pytest
import torch
from gpu.device import CUDA, PicturePairs, largest_gap, needs_cuda, pictures
from lightning.pytorch import LightningModule, seed_everything
from torch import nn
from torch.utils.data import DataLoader
from trainers import quiet_trainer

from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions

pytestmark = [
    *needs_cuda,
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::lightning_fastdata.errors.FastDataWarning"),
]
BATCH = 8


class Classifier(LightningModule):
    """A small convolutional network that remembers the images it was trained on."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 4),
        )
        self.seen, self.losses = [], []

    def training_step(self, batch, batch_idx):
        images, labels = batch
        assert images.device == self.device
        self.seen.append(images.detach().clone())
        loss = nn.functional.cross_entropy(self.network(images).float(), labels)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, batch_idx):
        self.network(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def recipe():
    return A.Compose(
        [
            A.RandomCrop(40, 40),
            A.HorizontalFlip(),
            A.CoarseDropout(),
            A.RandomGamma(),
            A.Normalize(),
            A.ToTensorV2(),
        ]
    )


def to_tensor():
    return A.Compose([A.CenterCrop(40, 40), A.Normalize(), A.ToTensorV2()])


def data(**arguments):
    given = {
        "options": LoaderOptions(num_workers=0),
        "augment_on": "gpu",
        "seed": 5,
        "guard": "off",
    }
    return FastDataModule.from_datasets(
        PicturePairs(48, 48, 48),
        PicturePairs(16, 48, 48),
        batch_size=BATCH,
        augment={"train": recipe(), "val": to_tensor()},
        **{**given, **arguments},
    )


def train(tmp_path, datamodule, *, model=None, **arguments):
    seed_everything(3, verbose=False)
    model = Classifier() if model is None else model
    loaders = {"datamodule": datamodule}
    if isinstance(datamodule, DataLoader):
        loaders = {"train_dataloaders": datamodule}
    trainer = quiet_trainer(tmp_path, accelerator="gpu", devices=[CUDA.index], **arguments)
    trainer.fit(model, **loaders)
    return model


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("32-true", torch.float32),
        ("16-mixed", torch.float32),
        ("bf16-mixed", torch.float32),
        ("16-true", torch.float16),
        ("bf16-true", torch.bfloat16),
        ("64-true", torch.float64),
    ],
)
def test_augmented_bytes_reach_the_model_in_the_precisions_dtype(tmp_path, precision, dtype):
    model = train(tmp_path, data(), precision=precision)
    assert len(model.seen) == 6
    assert {images.dtype for images in model.seen} == {dtype}
    assert {tuple(images.shape) for images in model.seen} == {(BATCH, 3, 40, 40)}
    assert all(images.is_cuda and images.isfinite().all() for images in model.seen)
    assert torch.stack(model.losses).isfinite().all()


@pytest.mark.parametrize("workers", [0, 2])
def test_training_on_the_device_sees_what_training_on_cpu_augmentation_sees(tmp_path, workers):
    options = LoaderOptions(num_workers=workers)
    models = [
        train(tmp_path, data(options=options, augment_on=where), max_epochs=2)
        for where in ("gpu", "cpu")
    ]
    assert len(models[0].seen) == len(models[1].seen) == 12
    for ours, oracle in zip(models[0].seen, models[1].seen, strict=True):
        assert largest_gap(ours, oracle) == 0
    assert largest_gap(models[0].seen[0], models[0].seen[6]) > 0  # epochs differ


def test_the_automatic_place_for_pixels_is_measured_on_the_device_and_changes_no_batch(tmp_path):
    options = LoaderOptions(num_workers=2)
    datamodule = data(options=options, augment_on="auto")
    ours = train(tmp_path, datamodule, max_epochs=4)
    oracle = train(tmp_path, data(options=options, augment_on="cpu"), max_epochs=4)
    for stage in ("train", "val"):
        choice = datamodule.placing.choice(stage)
        assert "for which that needs" in choice.reason
        assert choice.reason in datamodule.explain()
    assert len(ours.seen) == len(oracle.seen) == 24
    for one, other in zip(ours.seen, oracle.seen, strict=True):
        assert largest_gap(one, other) == 0


def test_deterministic_training_is_possible_and_repeats(tmp_path):
    try:
        models = [train(tmp_path, data(), deterministic=True) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(torch.stack(models[0].losses), torch.stack(models[1].losses))


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_the_callback_reports_the_devices_phases(tmp_path, precision):
    callback = DataThroughputCallback(summary=False, report=tmp_path / "report.json")
    train(tmp_path, data(), callbacks=[callback], max_epochs=3, precision=precision)
    stage = callback.report.stages[0]
    assert stage.device == "cuda"
    assert stage.steps == 18
    for phase in ("wait", "stall", "transfer", "augment", "compute", "step"):
        assert getattr(stage, phase).mean_ms >= 0
    shares = [getattr(stage, name).share for name in ("stall", "transfer", "augment", "compute")]
    assert sum(shares) == pytest.approx(1)
    assert callback.report.stages[1].stage == "val"


def test_a_foreign_loaders_batches_are_augmented_on_the_device(tmp_path):
    pairs = [(torch.from_numpy(image).permute(2, 0, 1), 0) for image in pictures(32, 48, 48)]
    callback = DataThroughputCallback(augment=recipe(), summary=False, report=False)
    model = train(tmp_path, DataLoader(pairs, BATCH, pin_memory=True), callbacks=[callback])
    assert {tuple(images.shape) for images in model.seen} == {(BATCH, 3, 40, 40)}
    assert all(images.is_cuda and images.dtype == torch.float32 for images in model.seen)

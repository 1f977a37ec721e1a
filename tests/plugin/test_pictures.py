"""The picture on the board is the batch that the training step saw."""

from __future__ import annotations

import inspect
import io
from pathlib import Path

import albumentations as A
import numpy as np
import pytest
import torch
from conformance.forked_ranks import launched
from conformance.pieces import Images, Pixels, make_trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.transforms import v2

from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions
from lightning_fastdata.augment.batch_images import BatchImages
from lightning_fastdata.augment.mixing import CutMix, mixed
from lightning_fastdata.errors import FastDataWarning, OptionsError
from lightning_fastdata.plugin.loggers.pictures import (
    TAG,
    BatchPicture,
)

torch.set_num_threads(1)

GAP = 2
TENSOR = [A.HorizontalFlip(p=0.5), A.ToTensorV2()]
NORMALIZED = [A.HorizontalFlip(p=0.5), A.Normalize(), A.ToTensorV2()]
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


class Keeps(Pixels):
    """Remembers whole training batches."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.batches = []

    def _step(self, stage, batch):
        if stage == "train":
            self.batches.append(batch)
        x = next(iter(batch.values())) if isinstance(batch, dict) else batch
        x = x[0] if isinstance(x, list | tuple) else x
        return self.layer(x.float().mean().reshape(1, 1).to(self.layer.weight.dtype)).sum()


def shown(folder):
    """Return the pictures on a board by their steps: uint8 ``[H, W, 3]``."""
    if not folder.exists():
        return {}
    events = EventAccumulator(str(folder), size_guidance={"images": 0}).Reload()
    if TAG not in events.Tags()["images"]:
        return {}
    return {
        event.step: np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))
        for event in events.Images(TAG)
    }


def tiles(page, count, height, width):
    """Return the images of a picture, read from its lower left corner; and its caption's part."""
    across = min(count, max(1, int(np.ceil(np.sqrt(count * height / width)))))
    down = -(-count // across)
    tall, wide = down * (height + GAP) - GAP, across * (width + GAP) - GAP
    scale = min(8, max(1, 400 // max(tall, wide)))
    grid = page[-tall * scale :, : wide * scale][::scale, ::scale]
    assert np.array_equal(
        grid.repeat(scale, 0).repeat(scale, 1), page[-tall * scale :, : wide * scale]
    )
    corners = [(n // across * (height + GAP), n % across * (width + GAP)) for n in range(count)]
    found = [grid[y : y + height, x : x + width] for y, x in corners]
    return found, page[: -tall * scale]


def fit(tmp_path, callback, data=None, *, model=None, loaders=None, logger=True, **trainer):
    """Train, and return what the steps saw and what the board shows."""
    logger = TensorBoardLogger(tmp_path, name="run", version=0) if logger is True else logger
    model = model if model is not None else Keeps()
    made = make_trainer(tmp_path, callbacks=[callback], logger=logger, **trainer)
    made.fit(model, loaders, datamodule=data)
    return model.batches, shown(tmp_path / "run" / "version_0")


def module(augment, *, dataset=None, batch_size=6, **arguments):
    return FastDataModule.from_datasets(
        dataset if dataset is not None else Images(12),
        batch_size=batch_size,
        augment=augment,
        augment_on="auto" if augment is None else "gpu",
        options=LoaderOptions(num_workers=0),
        **arguments,
    )


def quiet(**arguments):
    return DataThroughputCallback(report=False, summary=False, figures=False, **arguments)


def test_the_board_shows_the_first_batch_as_the_step_saw_it(tmp_path):
    batches, pictures = fit(tmp_path, quiet(log_images=True), module(A.Compose(TENSOR)))
    assert len(batches) == 2
    assert list(pictures) == [0]
    found, caption = tiles(pictures[0], 6, 12, 10)
    for tile, image in zip(found, batches[0][0], strict=True):
        np.testing.assert_array_equal(tile, image.permute(1, 2, 0).numpy())
    # Something is written there, in black on white.
    assert caption.min() < 60
    assert caption.max() == 255


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("mixes", [False, True])
def test_normalize_is_undone(tmp_path, precision, mixes):
    augment = A.Compose(NORMALIZED)
    augment = mixed(augment, CutMix(), num_classes=12) if mixes else augment
    batches, pictures = fit(tmp_path, quiet(log_images=4), module(augment), precision=precision)
    found, _ = tiles(pictures[0], 4, 12, 10)
    images = batches[0][0].float().permute(0, 2, 3, 1)
    wanted = ((images * STD + MEAN) * 255).round().clamp(0, 255).numpy().astype(int)
    for tile, image in zip(found, wanted, strict=False):
        assert np.abs(tile - image).max() <= 1
    if not mixes and precision == "32-true":
        raw = {Images(12)[i][0].tobytes() for i in range(12)}
        raw |= {np.ascontiguousarray(Images(12)[i][0][:, ::-1]).tobytes() for i in range(12)}
        assert all(tile.tobytes() in raw for tile in found)


@pytest.mark.parametrize("form", ["tuple", "named"])
def test_batches_of_other_loaders_are_shown_behind_the_callbacks_pipeline(tmp_path, form):
    class Named(Images):
        def __getitem__(self, i):
            image, label = super().__getitem__(i)
            return {"noise": np.zeros((4, 4, 3), np.uint8), "photo": image, "label": label}

    class Photo(Keeps):
        def _step(self, stage, batch):
            self.batches.append(batch)
            x = batch["photo"] if isinstance(batch, dict) else batch[0]
            return self.layer(x.mean().reshape(1, 1)).sum()

    dataset, image = (Named(8), "photo") if form == "named" else (Images(8), None)
    callback = quiet(augment=A.Compose(NORMALIZED), image=image, log_images=True)
    loaders = DataLoader(dataset, batch_size=8)
    batches, pictures = fit(tmp_path, callback, model=Photo(), loaders=loaders)
    found, _ = tiles(pictures[0], 8, 12, 10)
    for i, tile in enumerate(found):
        raw = dataset[i]["photo"] if form == "named" else dataset[i][0]
        assert any(np.array_equal(tile, one) for one in (raw, raw[:, ::-1]))
    assert len(batches) == 1


def test_loaders_without_any_transform_are_shown_too(tmp_path):
    class Floats(Images):
        def __getitem__(self, i):
            image, label = super().__getitem__(i)
            return torch.from_numpy(image).permute(2, 0, 1) / 255, label

    loaders = DataLoader(Floats(4), batch_size=4)
    _, pictures = fit(tmp_path, quiet(log_images=True), loaders=loaders)
    found, _ = tiles(pictures[0], 4, 12, 10)
    for i, tile in enumerate(found):
        np.testing.assert_array_equal(tile, Images(4)[i][0])


class InDataset(Images):
    """Normalises in the dataset, by Albumentations or torchvision, with numbers of its own."""

    def __init__(self, kind):
        super().__init__(4)
        mean, std = (0.3, 0.5, 0.7), (0.2, 0.3, 0.4)
        if kind == "albumentations":
            self.transform = A.Compose([A.Normalize(mean, std), A.ToTensorV2()])
        else:
            library = {"v1": transforms, "v2": v2}[kind]
            to_floats = v2.ToDtype(torch.float32, scale=True)
            self.steps = library.Compose([v2.ToImage(), to_floats, library.Normalize(mean, std)])

    def __getitem__(self, i):
        image, label = super().__getitem__(i)
        if hasattr(self, "transform"):
            return self.transform(image=image)["image"], label
        return torch.as_tensor(self.steps(image)), label


@pytest.mark.parametrize("kind", ["albumentations", "v1", "v2"])
@pytest.mark.parametrize("ours", [True, False])
def test_what_the_dataset_normalised_is_undone(tmp_path, kind, ours):
    dataset = InDataset(kind)
    how = {"loaders": DataLoader(dataset, batch_size=4)}
    if ours:
        how = {"data": module(None, dataset=dataset, batch_size=4)}
    batches, pictures = fit(tmp_path, quiet(log_images=True), **how)
    found, _ = tiles(pictures[0], 4, 12, 10)
    for label, tile in zip(batches[0][1].tolist(), found, strict=True):
        np.testing.assert_array_equal(tile, Images(4)[label][0])


def test_a_step_that_fetches_its_batches_itself_is_told(tmp_path):
    class Fetches(Keeps):
        def training_step(self, dataloader_iter):
            batch, *_ = next(dataloader_iter)
            return self._step("fit", batch)

    loaders = DataLoader(Images(4), batch_size=4)
    with pytest.warns(FastDataWarning, match=r"Fetches.training_step\(dataloader_iter\)"):
        _, pictures = fit(tmp_path, quiet(log_images=True), model=Fetches(), loaders=loaders)
    assert pictures == {}


def test_of_combined_loaders_the_first_with_images_is_shown(tmp_path):
    class Numbers(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return torch.full((3,), float(i)), i

    loaders = {
        "numbers": DataLoader(Numbers(), batch_size=4),
        "photos": DataLoader(Images(4), batch_size=4),
    }
    _, pictures = fit(tmp_path, quiet(log_images=True), loaders=loaders)
    found, _ = tiles(pictures[0], 4, 12, 10)
    for i, tile in enumerate(found):
        np.testing.assert_array_equal(tile, Images(4)[i][0])


def test_a_step_that_overwrites_its_batch_does_not_change_the_picture(tmp_path):
    class Overwrites(Keeps):
        def training_step(self, batch, batch_idx):
            self.batches.append(batch[0].clone())
            batch[0].zero_()
            return super()._step("fit", batch)

    batches, pictures = fit(
        tmp_path, quiet(log_images=True), module(A.Compose(TENSOR)), model=Overwrites()
    )
    found, _ = tiles(pictures[0], 6, 12, 10)
    np.testing.assert_array_equal(found[0], batches[0][0].permute(1, 2, 0).numpy())


@pytest.mark.parametrize(
    ("logger", "said"),
    [("csv", "CSVLogger takes no images"), ("none", "the trainer has no logger")],
)
def test_a_logger_that_takes_no_images_is_named_once(tmp_path, logger, said):
    logger = CSVLogger(tmp_path) if logger == "csv" else False
    callback = quiet(log_images=True)
    with pytest.warns(FastDataWarning, match=said) as told:
        fit(tmp_path, callback, module(A.Compose(TENSOR)), logger=logger, max_epochs=3)
    assert sum("log_images" in str(one.message) for one in told) == 1


def test_batches_without_images_are_said_to_have_none_and_train_on(tmp_path):
    loaders = DataLoader([torch.rand(3) for _ in range(4)], batch_size=4)
    with pytest.warns(FastDataWarning, match="log_images shows nothing: No image was found"):
        batches, pictures = fit(tmp_path, quiet(log_images=True), loaders=loaders, max_epochs=2)
    assert len(batches) == 2
    assert pictures == {}


@pytest.mark.parametrize(
    "arguments",
    [
        {"log_images": -1},
    ],
)
def test_impossible_numbers_are_refused_where_they_are_written(arguments):
    with pytest.raises(OptionsError, match="log_images"):
        quiet(**arguments)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_of_several_ranks_the_first_shows_its_batches(tmp_path):
    program = Path(__file__).with_name("show_on_ranks.py")
    launched(program, str(tmp_path), str(tmp_path))
    pictures = shown(tmp_path / "run" / "version_0")
    batches = torch.load(tmp_path / "0.pt")
    assert list(pictures) == [0]
    for step, picture in pictures.items():
        found, _ = tiles(picture, 4, 12, 10)
        for tile, image in zip(found, batches[step], strict=True):
            wanted = (image.permute(1, 2, 0) * 255).round().numpy()
            np.testing.assert_array_equal(tile, wanted)
    assert not torch.equal(batches[0], torch.load(tmp_path / "1.pt")[0])


class Wandb:
    """The methods of a logger as W&B has them, by their signatures."""

    group_separator = "/"

    def __init__(self):
        self.logged = []

    def log_image(self, key, images, step=None, **kwargs):
        self.logged.append((key, images, step, kwargs))


def test_loggers_with_captions_get_the_caption_beside_the_picture():
    logger = Wandb()
    pictures = BatchPicture(2, BatchImages())
    batch = torch.zeros(5, 3, 8, 8, dtype=torch.uint8)
    pictures.batch_began([logger], batch, epoch=3, step=7)
    pictures.batch_began([logger], batch, epoch=4, step=8)
    ((key, (picture,), step, more),) = logger.logged
    assert (key, step) == (TAG, 7)
    assert picture.dtype == np.uint8
    inspect.signature(WandbLogger.log_image).bind(logger, key, [picture], step, **more)
    (caption,) = more["caption"]
    assert "2 of 5 images, 8 x 8, uint8" in caption
    assert caption.endswith("Epoch 3, step 7.")

"""Real Albumentations pipelines through real trainers: same draws wherever the pixels are made."""

from __future__ import annotations

import albumentations as A
import numpy as np
import pytest
import torch
from albumentations.pytorch import ToTensorV2
from conformance.pieces import Images, Pixels, make_trainer, quiet
from lightning.pytorch import Callback
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_fastdata import FastDataLoader, FastDataModule, LoaderOptions
from lightning_fastdata.data import ListsOf

torch.set_num_threads(1)


def flips():
    return A.Compose([A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5), ToTensorV2()])


class Keeps(Pixels):
    """Learns on images of any size and dtype, and remembers images and whole training batches."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.batches = []

    def _step(self, stage, batch):
        x = batch["image"] if isinstance(batch, dict) else batch[0]
        self.seen[stage].append(x.clone())
        return self.layer(x.float().mean().reshape(1, 1).to(self.layer.weight.dtype)).sum()

    def training_step(self, batch, batch_idx):
        self.batches.append(batch)
        return self._step("train", batch)


def fit(tmp_path, train, *, workers=0, model=None, trainer=None, callbacks=(), val=None, **module):
    """Train on the CPU and return what the steps saw."""
    model = model if model is not None else Keeps()
    data = FastDataModule.from_datasets(
        train,
        val,
        batch_size=module.pop("batch_size", 4),
        options=LoaderOptions(num_workers=workers, timeout=60 if workers else 0),
        **module,
    )
    arguments = {"max_epochs": 1, "num_sanity_val_steps": 0, **(trainer or {})}
    make_trainer(tmp_path, callbacks=list(callbacks), **arguments).fit(model, datamodule=data)
    return model.seen


def equal(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


class Pictures(Dataset):
    """PIL images of different sizes."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        row = np.linspace(0, 255, 40 + 3 * i).astype(np.uint8)
        pixels = np.stack([np.tile(row, (30 + 5 * i, 1))] * 3, -1)
        return Image.fromarray(pixels), i


class Boxed(Dataset):
    """Images in which a white rectangle fills each box; the number of boxes differs."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        image = np.zeros((32, 32, 3), np.uint8)
        boxes = [(2 + 8 * k, 3 + i, 8 + 8 * k, 9 + i) for k in range(1 + i % 3)]
        for x0, y0, x1, y1 in boxes:
            image[y0:y1, x0:x1] = 255
        return {"image": image, "bboxes": np.float32(boxes), "labels": list(range(len(boxes)))}


def test_pictures_of_different_sizes_become_one_batch(tmp_path):
    def augment():
        return A.Compose(
            [A.RandomResizedCrop((16, 16)), A.HorizontalFlip(), A.Normalize(), ToTensorV2()]
        )

    ours, theirs = (
        fit(tmp_path, Pictures(), augment=augment(), augment_on=place)["train"]
        for place in ("gpu", "cpu")
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape == (4, 3, 16, 16)
        # one level of uint8 is 1 / 255 / 0.225 behind Normalize
        assert (one - other).abs().max() <= 2.01 / 255 / 0.224


def test_boxes_move_with_their_images(tmp_path):
    batches = {}
    for place in ("gpu", "cpu"):
        augment = A.Compose(
            [A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5), ToTensorV2()],
            bbox_params=A.BboxParams(format="pascal_voc", label_fields=["labels"]),
        )
        model = Keeps()
        fit(
            tmp_path,
            Boxed(),
            model=model,
            augment=augment,
            augment_on=place,
            collate_fn=ListsOf("bboxes", "labels"),
        )
        batches[place] = model.batches
    drawn = set()
    for ours, theirs in zip(batches["gpu"], batches["cpu"], strict=True):
        assert torch.equal(ours["image"], theirs["image"])
        for image, boxes, same in zip(ours["image"], ours["bboxes"], theirs["bboxes"], strict=True):
            assert np.array_equal(boxes, same)
            painted = torch.zeros(32, 32, dtype=torch.bool)
            for x0, y0, x1, y1 in np.asarray(boxes).round().astype(int).tolist():
                painted[y0:y1, x0:x1] = True
                drawn.add((x0, y0))
            assert torch.equal(painted, image[0] == 255)
    assert len(drawn) > 3


def test_each_stage_has_its_own_pipeline(tmp_path):
    data = FastDataModule.from_datasets(
        Images(4),
        Images(4),
        Images(4),
        batch_size=4,
        options=LoaderOptions(num_workers=0),
        augment={"train": A.InvertImg(p=1), "val": A.Compose([A.CenterCrop(8, 8)])},
        augment_on="gpu",
    )
    raw = torch.stack([torch.as_tensor(Images(4)[i][0]) for i in range(4)])

    class Labelled(Keeps):
        def _step(self, stage, batch):
            loss = super()._step(stage, batch)
            self.seen[stage][-1] = (batch[0].clone(), batch[1])
            return loss

    model = Labelled()
    trainer = make_trainer(tmp_path, num_sanity_val_steps=1)
    trainer.fit(model, datamodule=data)
    trainer.test(model, datamodule=data, verbose=False)
    ((x, i),) = model.seen["train"]
    assert torch.equal(x, 255 - raw[i])
    assert len(model.seen["val"]) == 2  # the sanity check is validation
    for x, i in model.seen["val"]:
        assert torch.equal(x, raw[i][:, 2:10, 1:9])
    ((x, i),) = model.seen["test"]
    assert torch.equal(x, raw[i])


def test_validation_draws_the_same_each_time(tmp_path):
    seen = fit(
        tmp_path,
        Images(4),
        val=Images(4),
        augment={"train": flips(), "val": flips()},
        augment_on="gpu",
        trainer={"max_epochs": 3},
    )
    assert equal(seen["val"][:1] * 3, seen["val"])


def test_the_callbacks_pipeline_is_the_modules(tmp_path):
    callbacks = [quiet(augment=flips())]
    by_callback = fit(tmp_path, Images(), callbacks=callbacks, augment_on="gpu")
    by_module = fit(tmp_path, Images(), augment=flips(), augment_on="gpu")
    assert equal(by_callback["train"], by_module["train"])


def test_the_callback_augments_plain_loaders_with_the_pipelines_own_pixels(tmp_path):
    def run(epochs=2, saved=None):
        model = Keeps()
        callback = quiet(augment=flips())
        trainer = make_trainer(tmp_path, callbacks=[callback], max_epochs=epochs)
        trainer.fit(model, DataLoader(Images(8), batch_size=4), ckpt_path=saved)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return model.batches

    batches = run()
    resumed = [*run(1), *run(saved=tmp_path / "last.ckpt")]
    assert equal([x for x, _ in batches], [x for x, _ in resumed])
    assert not equal([x for x, _ in batches[:2]], [x for x, _ in batches[2:]])
    for x, indices in batches:
        for image, i in zip(x, indices, strict=True):
            raw = torch.as_tensor(Images()[int(i)][0]).permute(2, 0, 1)
            forms = [raw, raw.flip(1), raw.flip(2), raw.flip(1, 2)]
            assert any(torch.equal(image, form) for form in forms)


class SavesBehindTheFirst(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 0:
            trainer.save_checkpoint(self.path)


def noisy(batch):
    return [batch[0] + torch.rand(len(batch[0]), 1, 1, 1), batch[1]]


@pytest.mark.parametrize("augment", [flips, lambda: noisy])
def test_what_the_callback_draws_is_the_same_after_a_resume_within_the_epoch(tmp_path, augment):
    saved = tmp_path / "within.ckpt"

    def run(*more, ckpt_path=None):
        model, loader = Keeps(), FastDataLoader(Images(12), 3, shuffle=False)
        trainer = make_trainer(tmp_path, callbacks=[quiet(augment=augment()), *more], max_epochs=1)
        trainer.fit(model, loader, ckpt_path=ckpt_path)
        return model.batches

    whole, rest = run(SavesBehindTheFirst(saved)), run(ckpt_path=saved)
    assert [numbers.tolist() for _, numbers in rest] == [[3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert equal([images for images, _ in whole[1:]], [images for images, _ in rest])


@pytest.mark.parametrize("place", ["gpu", "cpu"])
def test_half_precision_gets_its_dtype_after_the_pipeline(tmp_path, place):
    augment = A.Compose([A.HorizontalFlip(), A.Normalize(), ToTensorV2()])
    seen = fit(
        tmp_path,
        Images(4),
        augment=augment,
        augment_on=place,
        trainer={"precision": "bf16-true"},
    )
    full = fit(tmp_path, Images(4), augment=augment, augment_on="cpu")
    assert [x.dtype for x in seen["train"]] == [torch.bfloat16]
    torch.testing.assert_close(seen["train"][0].float(), full["train"][0], rtol=0.01, atol=0.01)


class FlipSome(nn.Module):
    """As Kornia's modules: floats ``[n, C, H, W]`` in and out, of which each draws for itself."""

    def forward(self, images):
        flipped = torch.rand(len(images)) < 0.5
        return torch.where(flipped[:, None, None, None], images.flip(-1), images)


class FlipsItself(Keeps):
    flip = FlipSome()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [self.flip(batch[0]), batch[1]]


@pytest.mark.parametrize("by", ["augment", "the model"])
def test_a_module_of_kornia_is_a_callable_on_batches(tmp_path, by):
    images = torch.rand(16, 3, 8, 8)
    seen = []
    for _ in range(2):
        ours = {"augment": FlipSome(), "image": 0} if by == "augment" else {}
        model = Keeps() if by == "augment" else FlipsItself()
        fit(tmp_path, TensorDataset(images, torch.arange(16)), model=model, **ours)
        seen.append(model.batches)
    flipped = set()
    for batch, numbers in seen[0]:
        for image, number in zip(batch, numbers.tolist(), strict=True):
            forms = torch.equal(image, images[number]), torch.equal(image, images[number].flip(-1))
            assert any(forms)
            flipped.add(forms[1])
    assert flipped == {True, False}
    if by == "augment":  # seeded by the number of the batch
        assert equal([batch for batch, _ in seen[0]], [batch for batch, _ in seen[1]])


class Brighten(nn.Module):
    """Floating-point images in and out, with a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("gain", torch.tensor([0.5, 1.0, 2.0]))
        self.moves = []

    def _apply(self, fn, recurse=True):
        self.moves.append(fn(torch.zeros(1)).device.type)
        return super()._apply(fn, recurse)

    def forward(self, image):
        return image.float() * self.gain


def test_a_module_transforms_the_image_field_behind_the_pipeline(tmp_path):
    class Both(FastDataModule):
        def train_dataset(self):
            return Images(4)

    data = Both(
        4,
        augment=A.Compose([A.InvertImg(p=1)]),
        augment_on="gpu",
        image=0,
        options=LoaderOptions(num_workers=0),
    )
    brighten = Brighten()
    data.register_transform(brighten)
    model = Keeps()
    make_trainer(tmp_path).fit(model, datamodule=data)
    ((x, i),) = model.batches
    raw = torch.stack([torch.as_tensor(Images()[int(k)][0]) for k in i])
    assert torch.equal(x, (255 - raw).float() * torch.tensor([0.5, 1.0, 2.0]))
    assert brighten.moves == []  # it was on the device already


def test_a_module_follows_the_batch_to_its_device_once():
    from lightning_fastdata.augment.transform import as_batch_transform

    brighten = Brighten()
    transform = as_batch_transform(brighten, image=0)
    for _ in range(3):
        image, label = transform.apply([torch.zeros(2, 4, 4, 3, device="meta"), 1], None)
        assert image.device.type == "meta"
        assert label == 1
    assert brighten.moves == ["meta"]
    assert not brighten.gain.is_inference()

"""The batch of any step is made again to the byte."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import albumentations as A
import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from programs import run_program
from torch.utils.data import Dataset, Subset
from trainers import quiet_trainer

from lightning_fastdata import (
    DataThroughputCallback,
    FastDataModule,
    FastImageFolder,
    LoaderOptions,
)
from lightning_fastdata.augment.mixing import MixUp, mixed
from lightning_fastdata.cli import main
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.order.run_record import RunRecord, RunSpan

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
LENGTH = 22


class Photos(Dataset):
    """Images of noise that are drawn on by the global generators as well, with their index."""

    def __init__(self, pipeline=None):
        self.pipeline = pipeline

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        image = np.random.default_rng(index).integers(0, 256, (24, 20, 3)).astype(np.uint8)
        image[0, 0] = np.random.randint(256), random.randrange(256), 0
        if self.pipeline is not None:
            image = self.pipeline(image=image)["image"]
        return {"image": image, "label": index % 3, "index": index}


class Data(FastDataModule):
    pipeline = None

    def train_dataset(self):
        return Photos(self.pipeline)


class Model(LightningModule):
    """Keeps every batch that its steps saw, with the trainer's count of it and its step."""

    def __init__(self, look=None):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen, self.look, self.looked = [], look, []

    def training_step(self, batch, batch_idx):
        kept = {name: value.clone() for name, value in batch.items()}
        number = self.trainer.fit_loop.total_batch_idx
        self.seen.append((number, self.global_step, kept))
        if self.look is not None:
            self.looked.append(self.trainer.datamodule.batch_at(self.look(number)))
        return self.layer(torch.ones(1)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def augmentation(*ends):
    ends = ends or (A.Normalize(), A.ToTensorV2())
    changes = A.OneOf([A.RandomBrightnessContrast(p=1), A.HueSaturationValue(p=1)], p=0.7)
    return A.Compose([A.HorizontalFlip(p=0.5), A.RandomCrop(16, 16), changes, *ends])


def options(executor, workers=2):
    return LoaderOptions(executor=executor, num_workers=0 if executor == "inline" else workers)


def fit(data, model=None, folder=None, callbacks=(), resume=None, **arguments):
    model = Model() if model is None else model
    trainer = quiet_trainer(
        folder,
        **{"max_epochs": 2, **arguments},
        enable_checkpointing=bool(callbacks),
        callbacks=list(callbacks),
    )
    trainer.fit(model, datamodule=data, ckpt_path=resume)
    return model.seen


def same(one, other):
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def check(data, seen, run=None):
    for number, _, batch in seen:
        again = data.batch_at(number, run=run)
        assert again.indices == tuple(batch["index"].tolist())
        assert same(again.batch, batch), number


@pytest.mark.cases(1)
@pytest.mark.parametrize("augment_on", ["cpu", "gpu"])
@pytest.mark.parametrize("executor", ["inline", "workers"])
def test_every_batch_is_made_again(executor, augment_on) -> None:
    data = Data(4, options=options(executor), augment=augmentation(), augment_on=augment_on, seed=7)
    seen = fit(data)
    assert len(seen) == 12
    check(data, seen if executor == "inline" else seen[::3])
    # And by another process's data module, which knows the record alone.
    fresh = Data(4, augment=augmentation())
    check(fresh, seen[::5], RunRecord.from_dict(data.run_record().as_dict()))


@pytest.mark.parametrize("executor", ["inline", "workers"])
def test_a_pipeline_that_the_dataset_calls_is_drawn_again(executor) -> None:
    data = Data(5, options=options(executor), seed=1, drop_last=True)
    data.pipeline = augmentation()
    seen = fit(data, limit_train_batches=3)
    assert len(seen) == 6
    check(data, seen)


def test_what_mixes_the_samples_of_a_batch_is_done_again() -> None:
    mix = mixed(augmentation(), MixUp(0.4), num_classes=3, label="label")
    data = Data(4, options=options("workers"), augment=mix, augment_on="gpu", seed=2)
    seen = fit(data)
    assert seen[0][2]["label"].is_floating_point()
    check(data, seen[::3])


def test_what_a_callable_draws_on_a_batch_is_drawn_again() -> None:
    def noisy(batch):
        return {**batch, "image": batch["image"] + torch.randn(len(batch["image"]), 1, 1, 1)}

    data = Data(4, options=options("inline"), augment=augmentation(), seed=2)
    data.register_transform(noisy)
    check(data, fit(data))


@pytest.mark.slow
def test_a_look_back_disturbs_no_training() -> None:
    for executor in ("inline", "workers"):
        made = []
        for look in (None, lambda number: (7 * number + 5) % 12):
            seed_everything(3)
            data = Data(4, options=options(executor), augment=augmentation(), augment_on="gpu")
            model = Model(look)
            seen = fit(data, model)
            made.append((seen, torch.rand(1), np.random.rand(), random.random()))
        (plain, *numbers), (looked, *others) = made
        assert [n for n, _, _ in plain] == [n for n, _, _ in looked]
        assert all(same(a, b) for (_, _, a), (_, _, b) in zip(plain, looked, strict=True))
        assert numbers == others
        batches = {number: batch for number, _, batch in plain}
        assert all(same(one.batch, batches[one.step]) for one in model.looked)


def test_a_step_knows_the_batches_that_it_accumulated() -> None:
    data = Data(4, options=options("inline"), seed=5, drop_last=True)
    seen = fit(data, max_epochs=4, limit_train_batches=4, accumulate_grad_batches=3)
    record = data.run_record()
    for number, step, _ in seen:
        assert number in record.batches_of_step(step)


def test_a_changed_batch_size_begins_a_span(tmp_path) -> None:
    save = ModelCheckpoint(tmp_path, save_last=True)
    first = Data(4, options=options("inline"), seed=5)
    before = fit(first, folder=tmp_path, callbacks=[save])
    second = Data(6, options=options("inline"), seed=5)
    model = Model()
    fit(
        second,
        model,
        tmp_path,
        [ModelCheckpoint(tmp_path)],
        max_epochs=4,
        resume=tmp_path / "last.ckpt",
    )
    record = second.run_record()
    assert [(span.batch_size, span.epoch, span.batch) for span in record.spans] == [
        (4, 0, 0),
        (6, 2, 12),
    ]
    check(second, [*before, *model.seen], record)
    assert [step for _, step, _ in model.seen] == [
        next(n for n in range(30) if number in record.batches_of_step(n))
        for number, _, _ in model.seen
    ]


@pytest.mark.parametrize("size", [4, 2])
def test_a_run_that_was_stopped_amid_an_epoch_goes_on_in_its_record(tmp_path, size) -> None:
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    first = Data(4, options=options("inline"), seed=5, augment=augmentation())
    before = fit(first, folder=tmp_path, callbacks=[save])[:8]
    second = Data(size, options=options("inline"), seed=5, augment=augmentation())
    model = Model()
    fit(
        second,
        model,
        tmp_path,
        [ModelCheckpoint(tmp_path)],
        max_epochs=4,
        resume=tmp_path / "step=8.ckpt",
    )
    record, seen = second.run_record(), [*before, *model.seen]
    if size == 4:
        assert len(record.spans) == 1
        check(second, seen, record)
        return
    # The epoch that was cut anew is left out; all others are known.
    assert [(span.epoch, span.batch, span.partly) for span in record.spans] == [
        (0, 0, False),
        (1, 6, True),
        (2, 15, False),
    ]
    for number in (6, 14):
        with pytest.raises(OptionsError, match="batches of another size"):
            second.batch_at(number, run=record)
    check(second, [one for one in seen if not 6 <= one[0] < 15], record)


def test_batches_that_cannot_be_found_again_are_refused() -> None:
    data = Data(4, options=options("inline"), seed=5)
    seen = fit(data)
    with pytest.raises(OptionsError, match="batch is -1"):
        data.batch_at(-1)
    with pytest.raises(OptionsError, match="rank is 1"):
        data.batch_at(0, rank=1)
    record = data.run_record()
    data.train_dataset = lambda: Subset(Photos(), range(9))
    data.trainer = None
    with pytest.raises(OptionsError, match="9 samples, and that of the run had 22"):
        data.batch_at(0, run=record)
    assert seen


class Weighted(Data):
    def train_dataloader(self):
        sampler = torch.utils.data.WeightedRandomSampler([1.0] * LENGTH, LENGTH)
        return self.make_loader(Photos(), stage="train", sampler=sampler)


def test_an_order_of_ones_own_is_named() -> None:
    data = Weighted(4, options=options("inline"))
    fit(data)
    with pytest.raises(OptionsError, match="WeightedRandomSampler"):
        data.batch_at(0)


SPAN = RunSpan(batch_size=4, batches_per_epoch=6)
RECORD = RunRecord(
    datamodule="Data",
    seed=-3,
    length=22,
    order="ShuffleSampler",
    drop_last=False,
    batches=12,
    spans=(SPAN,),
)


def test_a_record_comes_back_from_plain_data() -> None:
    assert RunRecord.from_dict(json.loads(json.dumps(RECORD.as_dict()))) == RECORD


@pytest.mark.parametrize(
    "change",
    [
        {"seed": "1"},
        {"length": 0},
        {"length": True},
        {"spans": []},
        {"spans": [{}]},
        {"spans": [{**RECORD.as_dict()["spans"][0], "batch_size": 0}]},
        {"spans": [{**RECORD.as_dict()["spans"][0], "place": "moon"}]},
        {"spans": RECORD.as_dict()["spans"] * 2},
        {"more": 1},
        {"version": 2},
        {"order": "x" * 5000},
        {"batches": -1},
    ],
)
def test_a_damaged_record_is_named(change) -> None:
    with pytest.raises(OptionsError):
        RunRecord.from_dict({**RECORD.as_dict(), **change})


# -- the command line ------------------------------------------------------------------------------

SCRIPT = """
import albumentations as A
from lightning_fastdata import FastDataModule, FastImageFolder

class Folder(FastDataModule):
    def __init__(self, root, batch_size=4):
        super().__init__(batch_size, augment=A.Compose(
            [A.HorizontalFlip(p=0.5), A.RandomBrightnessContrast(p=0.5), A.Normalize(),
             A.ToTensorV2()]))
        self.save_hyperparameters()

    def train_dataset(self):
        return FastImageFolder(self.hparams.root, size=32)

data = Folder
"""


def fastdata(folder, *arguments):
    """Run the command in a process of its own, and return its exit code and what it printed."""
    done = run_program("-m", "lightning_fastdata", *arguments, cwd=folder)
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.fixture
def here(monkeypatch, capsys):
    """Run the command in this process, which is many times as fast."""

    def run(folder, *arguments):
        monkeypatch.chdir(folder)
        main([*map(str, arguments)])
        return capsys.readouterr().out

    return run


class FolderModel(Model):
    def training_step(self, batch, batch_idx):
        return super().training_step(dict(zip(("image", "label"), batch, strict=True)), batch_idx)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on a folder of images, its files, and what its steps saw."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("run")
    for number in range(LENGTH):
        (folder / "images" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (40, 50, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "images" / "ab"[number % 2] / f"{number}.png")
    (folder / "train.py").write_text(SCRIPT)
    space: dict = {}
    exec(SCRIPT, space)
    seed_everything(11)
    data = space["Folder"](str(folder / "images"))
    report = DataThroughputCallback(report=folder / "report.json")
    save = ModelCheckpoint(folder, save_last=True)
    model = FolderModel()
    seen = fit(data, model, folder=folder, callbacks=[save, report], accumulate_grad_batches=2)
    del os.environ["PL_GLOBAL_SEED"]
    return folder, seen


@pytest.mark.cases(1)
@pytest.mark.parametrize("file", ["last.ckpt", "report.json"])
def test_the_command_makes_the_batches_of_a_step_again(run, file, here) -> None:
    folder, seen = run
    command = fastdata if file == "last.ckpt" else here
    named = "train.py:Folder"
    if file == "report.json":  # which knows no hyperparameters
        (folder / "made.py").write_text(
            "from train import Folder\ndef make(): return Folder('images')"
        )
        named = "made:make"
    printed = command(
        folder, "replay", file, "--step", 4, "--datamodule", named,
        "--save", "batch.pt", "--out", "seen.png",
    )  # fmt: skip
    saved = torch.load(folder / "batch.pt", weights_only=True)
    expected = [(number, batch) for number, step, batch in seen if step == 4]
    assert [one["step"] for one in saved["batches"]] == [number for number, _ in expected] == [8, 9]
    files = [str(path) for path, _ in FastImageFolder(folder / "images", size=32).samples]
    for one, (number, batch) in zip(saved["batches"], expected, strict=True):
        assert torch.equal(one["batch"][0], batch["image"])
        assert torch.equal(one["batch"][1], batch["label"])
        names = [Path(path).name for path in one["files"]]
        assert names == [Path(files[index]).name for index in one["indices"]]
        assert f"epoch 1, batch {number - 6} ({number} of the run)" in printed
        assert all(name in printed for name in names)
        assert (folder / f"seen-{number}.png").stat().st_size > 1000
    assert "0 NaN, 0 inf" in printed


def test_a_file_that_names_code_is_not_run(run, tmp_path, here) -> None:
    folder, _ = run

    class Touch:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    torch.save({"state": Touch()}, tmp_path / "bad.ckpt")
    (tmp_path / "bad.json").write_text("[" * 100_000)
    torch.save({"state": {}}, tmp_path / "other.ckpt")
    for file, said in (
        ("bad.ckpt", "without running code"),
        ("bad.json", "neither a checkpoint"),
        ("other.ckpt", "no record of a run"),
        ("none.ckpt", "cannot be read"),
    ):
        with pytest.raises(SystemExit, match=said):
            here(folder, "replay", tmp_path / file, "--step", 0, "--datamodule", "train.py:Folder")
    assert not (tmp_path / "ran").exists()

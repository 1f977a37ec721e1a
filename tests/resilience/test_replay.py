"""Any batch of a training is made again to the byte, from its epoch and its number."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import albumentations as A
import numpy as np
import pytest
import torch
from programs import refused
from torch.utils.data import Dataset, IterableDataset
from trainers import Learner, quiet_trainer

from lightning_fastdata import FastDataModule, FastImageFolder, LoaderOptions
from lightning_fastdata.augment.mixing import MixUp, mixed
from lightning_fastdata.cli import main
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.order.samplers import RankBatchSampler, SharedSampler, ShuffleSampler
from lightning_fastdata.plugin.module import KEY
from lightning_fastdata.plugin.replay import replayed

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
LENGTH = 22


class Photos(Dataset):
    """Images of noise that are drawn on by the global generators as well, with their index."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        image = np.random.default_rng(index).integers(0, 256, (24, 20, 3)).astype(np.uint8)
        image[0, 0] = np.random.randint(256), random.randrange(256), 0
        return {"image": image, "label": index % 3, "index": index}


class Data(FastDataModule):
    def train_dataset(self):
        return Photos()


class Model(Learner):
    """Keeps every batch that its steps saw, with its epoch and its number in that."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def training_step(self, batch, batch_idx):
        kept = {name: value.clone() for name, value in batch.items()}
        self.seen[self.current_epoch, batch_idx] = kept
        return self.weight * 1.0


def augmentation():
    changes = A.OneOf([A.RandomBrightnessContrast(p=1), A.HueSaturationValue(p=1)], p=0.7)
    return A.Compose(
        [A.HorizontalFlip(p=0.5), A.RandomCrop(16, 16), changes, A.Normalize(), A.ToTensorV2()]
    )


def options(executor, workers=2):
    return LoaderOptions(executor=executor, num_workers=0 if executor == "inline" else workers)


def fit(data, **arguments):
    model = Model()
    quiet_trainer(**{"max_epochs": 2, **arguments}).fit(model, datamodule=data)
    return model.seen


def check(data, seen, every=1, **how):
    for epoch, number in sorted(seen)[::every]:
        batch, again = seen[epoch, number], replayed(data, epoch, number, **how)
        assert again.indices == tuple(batch["index"].tolist())
        assert again.batch.keys() == batch.keys()
        for name, value in batch.items():
            assert again.batch[name].dtype == value.dtype
            assert torch.equal(again.batch[name], value), (epoch, number, name)


@pytest.mark.cases(1)
@pytest.mark.parametrize("augment_on", ["cpu", "gpu"])
@pytest.mark.parametrize("executor", ["inline", "workers"])
def test_every_batch_is_made_again_also_by_another_data_module(executor, augment_on) -> None:
    how = {"augment": augmentation(), "augment_on": augment_on}
    data = Data(4, options=options(executor), seed=7, **how)
    seen = fit(data)
    assert len(seen) == 12
    check(data, seen, every=3)
    check(Data(4, **how), seen, every=5, seed=7)


def test_what_mixes_the_samples_of_a_batch_is_done_again() -> None:
    mix = mixed(augmentation(), MixUp(0.4), num_classes=3, label="label")
    data = Data(4, options=options("workers"), augment=mix, augment_on="gpu", seed=2)
    seen = fit(data)
    assert seen[0, 0]["label"].is_floating_point()
    check(data, seen, every=4)


def test_what_a_callable_draws_on_a_batch_is_drawn_again() -> None:
    def noisy(batch):
        return {**batch, "image": batch["image"] + torch.randn(len(batch["image"]), 1, 1, 1)}

    data = Data(4, options=options("inline"), augment=augmentation(), seed=2)
    data.register_transform(noisy)
    check(data, fit(data), every=3)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_batch_of_a_rank_has_the_samples_that_its_sampler_gave_it(rank) -> None:
    order = ShuffleSampler(range(LENGTH), seed=5)
    sampler = SharedSampler(order, batch_size=4, num_replicas=2, rank=rank)
    sampler.set_epoch(1)
    batches = list(RankBatchSampler(sampler, 4, drop_last=False))
    for number in (0, len(batches) - 1):
        found = replayed(Data(4, seed=5), 1, number, rank=rank, ranks=2)
        assert list(found.indices) == batches[number]


def test_a_look_back_leaves_the_data_module_and_the_generators_alone() -> None:
    data = Data(4, options=options("workers"), augment=augmentation(), seed=3)
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    before = dict(vars(data))
    replayed(data, 1, 2)
    assert torch.rand(1) == expected
    assert dict(vars(data)) == before
    assert len(fit(data)) == 12


class Scaled(Data):
    """Has a hook of its own, whose batches are larger than ``batch_size``."""

    def of(self, batch_size):
        return self.make_loader(Photos(), stage="train", batch_size=batch_size)

    def train_dataloader(self):
        return self.of(2 * self.batch_size * self.trainer.world_size)


class Shared(Scaled):
    def train_dataloader(self):
        return self.of(max(1, self.batch_size // self.trainer.world_size))


class Fixed(Scaled):
    def train_dataloader(self):
        return self.of(6)


class Uneven(Scaled):
    def train_dataloader(self):
        return self.of(self.batch_size + 1)


def saved_by(data):
    (loader,) = data.state_dict()["lightning_fastdata"]["loaders"].values()
    return loader


@pytest.mark.parametrize("kind", [Scaled, Shared, Fixed, Uneven])
def test_a_hook_that_makes_the_batch_size_gives_the_batches_of_the_checkpoint(kind) -> None:
    data = kind(4, options=options("inline"), seed=2)
    seen = fit(data)
    check(kind(4, seed=2), seen, every=3, saved=saved_by(data))


@pytest.mark.parametrize(("data", "size"), [(Scaled(1, seed=2), 4), (Shared(4, seed=2), 2)])
def test_a_hook_that_reckons_with_two_ranks_gives_their_batches_on_one(data, size) -> None:
    saved = {"batch_size": size, "length": LENGTH}
    found = replayed(data, 0, 1, rank=1, ranks=2, saved=saved)
    assert found.indices == replayed(Data(size, seed=2), 0, 1, rank=1, ranks=2).indices


def test_a_loader_that_cannot_have_the_batches_of_the_checkpoint_says_both_sizes() -> None:
    said = "had batches of 9 samples, and the loader of Uneven has 8 where .* batch_size=7 "
    with pytest.raises(OptionsError, match=said):
        replayed(Uneven(4), 0, 0, saved={"batch_size": 9, "length": LENGTH})


class Weighted(Data):
    def train_dataloader(self):
        sampler = torch.utils.data.WeightedRandomSampler([1.0] * LENGTH, LENGTH)
        return self.make_loader(Photos(), stage="train", sampler=sampler)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(9))


@pytest.mark.parametrize(
    ("data", "how", "said"),
    [
        (Data(4), {"number": 6}, "no batch 6 in epoch 0, which has 6"),
        (Data(4), {"number": -1}, "no batch -1"),
        (Data(4), {"number": "3"}, "batch is '3'"),
        (Data(4), {"number": 1.5}, "batch is 1.5"),
        (Data(4), {"number": 0, "ranks": 0}, "ranks is 0"),
        (Data(4), {"number": 0, "rank": 1}, "rank is 1"),
        (Data("auto"), {"number": 0}, 'batch_size="auto"'),
        (Weighted(4), {"number": 0}, "WeightedRandomSampler"),
        (FastDataModule.from_datasets(Stream()), {"number": 0}, "over Stream"),
        (FastDataModule.from_datasets([Photos(), Photos()]), {"number": 0}, "has 2 loaders"),
    ],
)
def test_batches_that_cannot_be_found_again_are_refused(data, how, said) -> None:
    with pytest.raises(OptionsError, match=re.escape(said)):
        replayed(data, 0, **how)


# -- the command line ------------------------------------------------------------------------------

SCRIPT = """
import albumentations as A
from lightning_fastdata import FastDataModule, FastImageFolder

class Folder(FastDataModule):
    def __init__(self, batch_size=4):
        super().__init__(batch_size, seed=11, augment=A.Compose(
            [A.HorizontalFlip(p=0.5), A.RandomBrightnessContrast(p=0.5), A.Normalize(),
             A.ToTensorV2()]))

    def train_dataset(self):
        return FastImageFolder("images", size=32)

class Other:
    def __init__(self, needed):
        pass

def nothing():
    return None
"""


class FolderModel(Model):
    def training_step(self, batch, batch_idx):
        named = dict(zip(("image", "label"), batch, strict=True))
        return super().training_step(named, batch_idx)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    from PIL import Image

    for number in range(LENGTH):
        (tmp_path / "images" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (40, 50, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / "ab"[number % 2] / f"{number}.png")
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_prints_and_saves_the_batch_of_a_step(folder, capsys) -> None:
    space: dict = {}
    exec(SCRIPT, space)
    model = FolderModel()
    quiet_trainer(max_epochs=2).fit(model, datamodule=space["Folder"]())
    step = ["--epoch", "1", "--batch", "2", "--save", "batch.pt"]
    main(["replay", "train.py:Folder", *step])
    printed = capsys.readouterr().out
    saved = torch.load("batch.pt", weights_only=True)
    seen = model.seen[1, 2]
    assert torch.equal(saved["batch"][0], seen["image"])
    assert torch.equal(saved["batch"][1], seen["label"])
    files = [str(path) for path, _ in FastImageFolder(folder / "images", size=32).samples]
    names = [Path(files[index]).name for index in saved["indices"]]
    assert [Path(path).name for path in saved["files"]] == names
    assert "epoch 1, batch 2, rank 0: 4 samples" in printed
    assert all(name in printed for name in names)
    assert "0 NaN, 0 inf" in printed


def test_a_checkpoint_tells_seed_and_batch_size_and_a_step_counts_batches_of_all_epochs(
    folder, capsys
) -> None:
    space: dict = {}
    exec(SCRIPT, space)
    model, module, other = FolderModel(), space["Folder"](5), space["Folder"](5)
    module.seed = 12  # others than the script's
    trainer = quiet_trainer(max_epochs=2, limit_train_batches=3)
    trainer.fit(model, datamodule=module)
    trainer.save_checkpoint("trained.ckpt")
    for step, (epoch, batch) in enumerate(sorted(model.seen)):
        named = ["trained.ckpt", "--datamodule", "train.py:Folder", "--step", str(step)]
        main(["replay", *named, "--save", "batch.pt"])
        saved = torch.load("batch.pt", weights_only=True)
        assert torch.equal(saved["batch"][0], model.seen[epoch, batch]["image"])
        assert f"epoch {epoch}, batch {batch}, " in capsys.readouterr().out
        assert torch.equal(module.batch_at(step).batch[0], saved["batch"][0])
    told = other.batch_at(step, batches_per_epoch=3)
    assert (told.epoch, told.number) == (epoch, batch)
    whole = other.batch_at(step)
    assert (whole.epoch, whole.number) == divmod(step, LENGTH // 5 + 1)
    main(["replay", "train.py:Folder", "--step", str(step), "--batches-per-epoch", "3"])
    assert f"epoch {epoch}, batch {batch}, " in capsys.readouterr().out
    with pytest.raises(OptionsError, match="batches_per_epoch is 0"):
        other.batch_at(step, batches_per_epoch=0)
    next((folder / "images" / "a").iterdir()).unlink()
    with refused("length [0-9]+.* has [0-9]+"):
        main(["replay", "trained.ckpt", "--datamodule", "train.py:Folder", "--step", "1"])


def test_batches_of_a_training_that_was_not_shuffled_as_the_data_module_would_are_refused(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data, saved = Data(4, options=options("inline"), seed=7), "trained.ckpt"
    trainer = quiet_trainer(max_epochs=1, overfit_batches=2)
    trainer.fit(Model(), datamodule=data)
    trainer.save_checkpoint(saved)
    state = torch.load(saved, weights_only=False)["Data"][KEY]["loaders"]
    for module, how in ((data, {}), (Data(4, seed=7), {"saved": next(iter(state.values()))})):
        with pytest.raises(OptionsError, match="SequentialSampler, as overfit_batches has it"):
            replayed(module, 0, 0, **how)


def test_a_module_finds_its_neighbours_by_its_name_and_by_its_file(folder, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (folder / "beside_train.py").write_text("SIZE = 32")
    (folder / "train.py").write_text(f"from beside_train import SIZE\n{SCRIPT}")
    for name in ("train.py:Folder", f"{folder}/train.py:Folder", "train:Folder"):
        for module in ("train", "beside_train"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        main(["replay", name, "--step", "0"])


PARSES = """
import argparse

def parse(required):
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", required=required)
    parser.add_argument("--epoch", default="the script's")
    assert parser.parse_args().epoch == "the script's"
"""
ASKS = {
    "imported": "parse({required})\nmade = Folder",
    "called": "def made():\n    parse({required})\n    return Folder()",
}


@pytest.mark.parametrize("asks", ASKS.values(), ids=ASKS)
def test_a_script_that_parses_arguments_gets_none_of_ours(folder, monkeypatch, asks) -> None:
    given = ["fastdata", "replay", "train.py:made", "--epoch", "0", "--batch", "0"]
    monkeypatch.setattr(sys, "argv", given)
    (folder / "train.py").write_text(SCRIPT + PARSES + asks.format(required=False))
    main()
    (folder / "train.py").write_text(SCRIPT + PARSES + asks.format(required=True))
    with refused("arguments are required: --lr\nfastdata: train.py ended the program.*__main__"):
        main()
    assert sys.argv == given


REFUSED = {
    "train.py:Folder --epoch 0": "--epoch and --batch, or --step",
    "train.py:Folder --batch 0": "--epoch and --batch, or --step",
    "train.py:Folder --epoch 0 --step 0": "--epoch and --batch, or --step",
    "train.py:Folder --batch 0 --step 0": "--epoch and --batch, or --step",
    "train.py:Folder --step -1": "no batch -1 .*, counted from 0",
    "train.py:Folder --epoch -1 --batch 0": "epoch is -1; allowed are whole numbers from 0",
    "missing.py:Folder --step 0 --save none/batch.pt": r"none/batch.pt cannot be [^.]*\.\n$",
    "missing.py:Folder --step 0 --save new.pt": "missing.py cannot be imported",
    "text.ckpt --datamodule train.py:Folder --step 0": "is of no training",
    "none.ckpt --datamodule train.py:Folder --step 0": "cannot be read",
    "other.ckpt --datamodule train.py:Folder --step 0": "is of no training",
    "train.py --step 0": "does not say where",
    "train.py:Missing --step 0": "has no 'Missing'",
    "train.py:Other --step 0": "cannot be called without arguments",
    "train.py:nothing --step 0": "is no FastDataModule",
}


@pytest.mark.parametrize(("command", "said"), REFUSED.items())
def test_what_says_no_batch_no_checkpoint_or_no_data_module_is_refused(folder, command, said):
    torch.save({"state_dict": {}}, "other.ckpt")
    torch.save("no checkpoint", "text.ckpt")
    with refused(said):
        main(["replay", *command.split()])
    assert not Path("new.pt").exists()

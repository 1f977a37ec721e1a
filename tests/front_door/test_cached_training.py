"""A training with a cache sees what it sees without one, in another run and resumed, too."""

from __future__ import annotations

import os
import re
import shutil
import warnings
import zlib
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.transforms as T
from lightning.pytorch.callbacks import ModelCheckpoint
from misses import each
from PIL import Image
from rig.machine import sleep
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from trainers import Learner, quiet_trainer

import lightning_fastdata as ld
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.randomness.seeds import EpochCell

FIXED = [T.Resize(24), T.CenterCrop(20)]
DRAWN = [T.Resize(24), T.RandomCrop(20), T.RandomHorizontalFlip()]


class Seen(Learner):
    """Notes a checksum of each batch that its steps get."""

    def __init__(self):
        super().__init__(lambda batch: checksum(batch) ^ int(batch[1].sum()))
        self.validated = []

    def validation_step(self, batch, _index):
        self.validated.append(checksum(batch))


def checksum(batch):
    return zlib.crc32(batch[0].numpy().tobytes())


class Counted(ImageFolder):
    """Notes in a file which pictures are decoded."""

    def __init__(self, root, log, steps):
        super().__init__(root, T.Compose([*steps, T.PILToTensor()]), loader=Loads(log))


class Loads:
    def __init__(self, log):
        self.log = str(log)

    def __call__(self, path):
        file = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, f"{path}\n".encode())
        os.close(file)
        with Image.open(path) as image:
            return image.convert("RGB")


@pytest.fixture
def photos(tmp_path):
    order = np.random.default_rng(0)
    for name in "ab":
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(16):
            pixels = order.integers(0, 256, (30, 30 + number, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number:02}.png")
    return tmp_path / "photos"


def of_picture(sample):
    return T.Compose(DRAWN[1:])(sample[0]), sample[1]


def photos_of(photos, log, cache, steps):
    """Return a dataset, whose random steps are the transform of its cache, if it has one."""
    if cache is None or steps is not DRAWN:
        return Counted(photos, log, steps)
    return ld.CachedDataset(Counted(photos, log, DRAWN[:1]), cache, transform=of_picture)


def fit(photos, log, cache, *, steps, workers="auto", resume=None, folder=None):
    data = ld.FastDataModule.from_datasets(
        photos_of(photos, log, cache, steps),
        Counted(photos, log, FIXED),
        batch_size=5,
        seed=3,
        cache=cache,
        options=ld.LoaderOptions(num_workers=workers, probe=workers == "auto"),
    )
    module = Seen()
    saved = [ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1)] if folder else []
    trainer = quiet_trainer(max_epochs=2, callbacks=saved, enable_checkpointing=bool(folder))
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    return module, data


def decoded(log):
    lines = Path(log).read_text().splitlines() if Path(log).exists() else []
    Path(log).unlink(missing_ok=True)
    return len(lines)


@pytest.mark.cases(2)
@pytest.mark.parametrize("steps", [FIXED, DRAWN], ids=["fixed", "drawn"])
@pytest.mark.parametrize("workers", [0, 2, "auto"])
def test_a_training_sees_the_same_with_a_cache(tmp_path, photos, steps, workers):
    log = tmp_path / "log"
    plain, _ = fit(photos, log, None, steps=steps, workers=workers)
    decoded(log)
    first, data = fit(photos, log, tmp_path / "cache", steps=steps, workers=workers)
    assert first.seen == plain.seen
    assert first.validated == plain.validated
    assert "32 of 32" in data.explain()
    decoded(log)
    second, _ = fit(photos, log, tmp_path / "cache", steps=steps, workers=workers)
    assert second.seen == plain.seen
    assert second.validated == plain.validated
    # Of training and validation some are compared; 192 would be decoded.
    assert decoded(log) <= 48


def test_a_training_resumes_with_a_cache_or_without(tmp_path, photos):
    log = tmp_path / "log"
    whole, _ = fit(photos, log, None, steps=DRAWN, folder=tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*step=9.ckpt")
    for cache in (tmp_path / "cache", tmp_path / "cache", None):
        rest, _ = fit(photos, log, cache, steps=DRAWN, resume=file)
        assert rest.seen == whole.seen[9:]


class Computes(Dataset):
    """Takes 4 ms for a sample, and may draw."""

    def __init__(self, draws=False):
        self.draws = draws

    def __len__(self):
        return 40

    def __getitem__(self, index):
        sleep(0.004)
        return torch.full((50,), float(index)) + (torch.rand(1) if self.draws else 0), index


class Ready(Computes):
    """Has its samples at hand."""

    rows = torch.arange(40.0).view(40, 1).expand(40, 50)

    def __getitem__(self, index):
        return self.rows[index], index


def fit_auto(dataset, cache="auto", epochs=3):
    data = ld.FastDataModule.from_datasets(dataset, batch_size=5, seed=1, cache=cache)
    module = Seen()
    quiet_trainer(max_epochs=epochs).fit(module, datamodule=data)
    return module.seen, data.explain()


@pytest.mark.usefixtures("machine")
@pytest.mark.filterwarnings("ignore:.*a sample waits")
def test_auto_keeps_samples_where_it_pays(capfd):
    wanted, _ = fit_auto(Computes(), None)
    seen, said = fit_auto(Computes())
    assert seen == wanted
    assert "samples are kept (cache='auto'): samples as the dataset returns them: " in said
    assert "40 of 40" in said
    assert "samples are kept (cache='auto')" in "".join(capfd.readouterr())
    seen, said = fit_auto(Computes())
    assert seen == wanted
    assert "an earlier run has kept 40 of 40" in said


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("dataset", "epochs", "why"),
    [
        (Ready(), 3, "0 -> 0 ms a sample, which the epochs to come (3) do not pay back"),
        (Computes(), 1, "4 -> 0 ms a sample, which the epochs to come (1) do not pay back"),
        (Computes(draws=True), 3, "Computes draws at random"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*a sample waits")
def test_auto_keeps_nothing_where_it_does_not_pay(dataset, epochs, why, tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_FASTDATA_CACHE", str(tmp_path))
    _, said = fit_auto(dataset, epochs=epochs)
    assert re.search(rf"samples are not kept \(cache='auto'\): .*{re.escape(why)}", said)
    assert not list(tmp_path.rglob("*.bin"))


def no_folder(root, _folder):
    shutil.rmtree(root)
    root.write_text("")


def flipped_manifest(_root, folder):
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"40", b"41"))


def cut_index(_root, folder):
    os.truncate(folder / "index.bin", 100)


@pytest.fixture
def wanted(machine):
    return fit_auto(Computes(), None)[0]


@each("break_it", [no_folder, flipped_manifest, cut_index])
def test_auto_ends_no_training_whatever_has_become_of_the_cache(
    tmp_path, monkeypatch, wanted, break_it
):
    root = tmp_path / "root"
    monkeypatch.setenv("LIGHTNING_FASTDATA_CACHE", str(root))
    ld.CachedDataset(Computes()).fill()
    (manifest,) = root.rglob("manifest.json")
    break_it(root, manifest.parent)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        seen, said = fit_auto(Computes())
    assert seen == wanted
    words = [str(one.message) for one in told if one.category is FastDataWarning]
    assert sum("cache='auto'" in one and str(root) in one for one in words) == 1, (words, said)


class Multiples(Dataset):
    """Samples that a program changes: multiples of ``k``, which the dataset holds."""

    def __init__(self, k=1):
        self.k = k
        self.more = {"k": [0], "drawn": np.random.default_rng(0)}
        self.numbers = range(12)

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        number = self.numbers[index] * self.k + self.more["k"][0]
        return torch.full((3,), number), 0


def by_loader(data, cache, workers, change):
    """Return the samples of three epochs, of which some may not be seen by the first."""
    cached = data if cache is None else ld.CachedDataset(data, cache)
    kind = DataLoader if cache is None else ld.FastDataLoader
    epochs = []
    loader = kind(cached, 4, num_workers=workers)
    for epoch in range(3):
        batches = loader if epoch else islice(loader, 2)
        epochs.append([int(number) for batch, _ in batches for number in batch[:, 0]])
        change(data)
    return epochs


def by_module(data, cache, workers, change):
    class Noted(Seen):
        def training_step(self, batch, index):
            epochs[self.current_epoch] += map(int, batch[0][:, 0])
            return super().training_step(batch, index)

        def on_train_epoch_end(self):
            change(data)

    epochs = [[], [], []]
    options = ld.LoaderOptions(num_workers=workers, probe=False)
    how = {"batch_size": 4, "shuffle": False, "cache": cache, "options": options}
    module = ld.FastDataModule.from_datasets(data, **how)
    how = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": change in (grow, shrink)}
    quiet_trainer(**how).fit(Noted(), datamodule=module)
    return epochs


def attribute(data):
    data.k += 1


def element(data):
    data.more["k"][0] += 1


def grow(data):
    data.numbers = range(data.numbers.stop + 3)


def shrink(data):
    data.numbers = data.numbers[2:]


WAYS = [(0, element), (2, attribute), (0, grow), (2, grow), (0, shrink), (2, shrink)]


@pytest.mark.parametrize(("workers", "change"), WAYS)
@pytest.mark.parametrize("door", [by_loader, by_module])
def test_a_dataset_that_the_program_changes_is_read_as_without_a_cache(
    tmp_path, door, workers, change
):
    wanted = door(Multiples(), None, 0, change)
    with pytest.warns(FastDataWarning, match="has changed Multiples") as said:
        found = door(Multiples(), tmp_path, workers, change)
    assert found == wanted
    assert sum("has changed Multiples" in str(one.message) for one in said) == 1
    for fresh in (Multiples(), Multiples(2)):  # what a later run finds there
        rows = DataLoader(ld.CachedDataset(fresh, tmp_path), None)
        assert [int(row[0]) for row, _ in rows] == [int(fresh[index][0][0]) for index in range(12)]


def test_a_step_that_changes_the_dataset_leaves_no_sample_of_another_state(tmp_path):
    data = Multiples()
    cached = ld.CachedDataset(data, tmp_path)
    cached[0]
    batches = iter(ld.FastDataLoader(cached, 1))
    seen = [next(batches) for _ in range(3)]
    data.k = 5  # behind the third step, which is looked at only if there is time
    with pytest.warns(FastDataWarning, match="has changed Multiples"):
        seen += batches
    assert [int(batch[0, 0]) for batch, _ in seen[4:]] == [5 * index for index in range(4, 12)]
    again = ld.CachedDataset(Multiples(), tmp_path)
    assert [int(again[index][0][0]) for index in range(12)] == list(range(12))


@pytest.mark.parametrize("kind", [DataLoader, ld.FastDataLoader])
def test_forked_workers_see_what_changed_since_their_parent_read_a_sample(tmp_path, kind):
    data = Multiples()
    cached = ld.CachedDataset(data, tmp_path)
    cached[5]
    data.k = 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FastDataWarning)
        found = [int(row[0]) for rows, _ in kind(cached, 4, num_workers=2) for row in rows]
    assert found == [2 * index for index in range(12)]
    again = ld.CachedDataset(Multiples(), tmp_path)
    assert [int(again[index][0][0]) for index in range(12)] == list(range(12))


@pytest.mark.parametrize("reads", [0, 1])
def test_a_dataset_that_changes_behind_a_full_cache_is_read_whoever_was_chosen(tmp_path, reads):
    data = Multiples()
    cached = ld.CachedDataset(data, tmp_path)
    cached.fill()
    loader = ld.FastDataLoader(cached, 4, num_workers="auto")
    assert loader.executor == "gather", "this case is about a choice that no longer fits"
    for _ in range(reads):
        list(loader)
    data.k = 2
    with pytest.warns(FastDataWarning, match="has changed Multiples"):
        found = [int(row[0]) for rows, _ in loader for row in rows]
    assert found == [2 * index for index in range(12)]


@pytest.mark.parametrize("key", [None, "multiples-1"])
def test_what_makes_no_other_samples_changes_nothing_about_a_cache(tmp_path, key):
    data = Multiples()
    data.rows, data.epoch = torch.ones(3), EpochCell()
    cached = ld.CachedDataset(data, tmp_path, key=key)
    loader = ld.FastDataLoader(cached, 4)
    for epoch in range(3):
        list(loader)
        data.more["drawn"].random()  # what its state decides is never kept
        data.epoch.set(epoch)
        data.rows.share_memory_()  # as torch does where it spawns workers
    assert cached.stored == 12


def test_a_key_is_trusted_where_a_dataset_cannot_be_compared(tmp_path):
    data = Multiples()
    data.opened = (number for number in range(3))
    cached = ld.CachedDataset(data, tmp_path, key="multiples-1")
    loader = ld.FastDataLoader(cached, 4)
    for _ in range(2):
        list(loader)
    assert cached.stored == 12
    del data.opened
    list(loader)  # from here on it can
    data.k = 2
    with pytest.warns(FastDataWarning, match="has changed Multiples"):
        assert int(next(iter(loader))[0][1, 0]) == 2

"""What type checkers know of the package: its names, and that others are mistakes."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import lightning_fastdata
import lightning_fastdata.augment
from lightning_fastdata import FastDataModule
from lightning_fastdata.plugin.data.datamodule import ModuleArguments

PACKAGE = Path(lightning_fastdata.__file__).parent


def complaints(statement, tmp_path, *, package):
    """Return what mypy says of a statement, with the package's own declarations alone."""
    snippet = tmp_path / "snippet.py"
    snippet.write_text(f"{statement}\n")
    options = ["--strict", "--follow-imports=skip", "--explicit-package-bases"]
    options += ["--config-file=", f"--cache-dir={tmp_path}", "--no-error-summary"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(snippet), str(package)],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        timeout=280,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith(str(snippet))]


@pytest.mark.parametrize("module", [lightning_fastdata, lightning_fastdata.augment])
def test_every_name_is_known_and_a_misspelt_one_is_seen(tmp_path, module):
    names, at = module.__all__, Path(module.__file__)
    good = f"from {module.__name__} import {', '.join(names)}"
    assert complaints(good, tmp_path, package=at) == []
    wrong = f"from {module.__name__} import {names[0]}s"
    (said,) = complaints(wrong, tmp_path, package=at)
    assert f'has no attribute "{names[0]}s"' in said


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").is_file()


def test_what_loaders_and_datasets_take_is_what_the_constructor_takes():
    taken = inspect.signature(FastDataModule.__init__).parameters
    own = {"self", "batch_size", "num_workers", "shuffle"}
    wanted = {name: each.annotation for name, each in taken.items() if name not in own}
    declared = inspect.get_annotations(ModuleArguments)
    assert {name: each.__forward_arg__ for name, each in declared.items()} == wanted


USER = """
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import assert_type

from lightning_fastdata import (
    CachedDataset,
    DataThroughputCallback,
    FastDataLoader,
    FastDataModule,
    FastImageFolder,
    LoaderOptions,
    RunReport,
    StepTimer,
    prefetch,
)

Pair = tuple[Tensor, Tensor]


class Scans(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(8), index


def collate(samples: list[tuple[Tensor, int]]) -> Pair:
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.tensor(labels)


class Photos(FastDataModule):
    def train_dataset(self) -> Scans:
        return Scans()


def main(model: LightningModule) -> None:
    loader = FastDataLoader(Scans(), 8, shuffle=True, num_workers="auto", collate_fn=collate)
    assert_type(loader, FastDataLoader[Pair])
    timer = StepTimer("cpu")
    for images, labels in timer.batches(loader):
        assert_type(images, Tensor)
        assert_type(labels, Tensor)
    for batch in timer.batches(prefetch(loader, "cpu", seed=1)):
        assert_type(batch, Pair)
    assert_type(timer.report(), RunReport)
    plain: FastDataLoader[Tensor] = FastDataLoader(Scans(), 8)
    assert_type(next(iter(prefetch(plain, "cpu"))), Tensor)
    usual = DataLoader(Scans(), 8, num_workers=2)
    data = FastDataModule.from_loaders(usual, num_workers="auto", augment_on="cpu")
    assert_type(data, FastDataModule)
    assert_type(data.explain(), str)
    photos = Photos.from_datasets(Scans(), Scans(), batch_size=8, options=LoaderOptions(tune="off"))
    assert_type(photos, Photos)
    watch = DataThroughputCallback(log_images=True, scalars="all")
    Trainer(max_epochs=1, callbacks=[watch]).fit(model, datamodule=photos)
    assert_type(watch.report, RunReport | None)
    kept = CachedDataset(FastImageFolder(Path("photos"), size=224), "disk")
    print(len(kept), photos.batch_at(3))
"""
MISSPELT = {
    "from_loaders(usual, num_workers=": "from_loaders(usual, num_worker=",
    "batch_size=8, options=": "batchsize=8, options=",
    'augment_on="cpu"': 'augment_on="tpu"',
    "seed=1": "sead=1",
    "log_images=": "log_image=",
    'tune="off"': 'tuning="off"',
}


@pytest.mark.skipif(find_spec("pyright") is None, reason="needs pyright[nodejs]")
def test_a_users_program_is_known_and_a_misspelt_keyword_is_seen(tmp_path):
    assert len(USER.strip().splitlines()) >= 60
    (tmp_path / "user.py").write_text(USER)
    lines = {}
    for number, (right, wrong) in enumerate(MISSPELT.items()):
        assert USER.count(right) == 1
        (tmp_path / f"wrong_{number}.py").write_text(USER.replace(right, wrong))
        lines[f"wrong_{number}.py"] = USER[: USER.index(right)].count("\n")
    settings = {"strict": ["."], "extraPaths": [str(PACKAGE.parent)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=280,
        check=False,
    )
    found = json.loads(done.stdout)["generalDiagnostics"]
    # What is unknown after a wrong call is no other mistake.
    seen = {(Path(each["file"]).name, each["range"]["start"]["line"]) for each in found}
    assert {name for name, _ in seen} == set(lines), found
    assert set(lines.items()) <= seen, found

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
import lightning_fastdata.data
from lightning_fastdata import FastDataModule
from lightning_fastdata.plugin.module import ModuleArguments

PACKAGE = Path(lightning_fastdata.__file__).parent


def complaints(statements, tmp_path):
    """Return what mypy says of each statement, with the package's own declarations alone."""
    snippets = [tmp_path / f"snippet_{number}.py" for number in range(len(statements))]
    for snippet, statement in zip(snippets, statements, strict=True):
        snippet.write_text(f"{statement}\n")
    options = ["--strict", "--follow-imports=skip", "--explicit-package-bases"]
    options += ["--config-file=", f"--cache-dir={tmp_path}", "--no-error-summary"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *snippets, *(at.__file__ for at in MODULES)],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
        timeout=280,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    lines = done.stdout.splitlines()
    return [[line for line in lines if line.startswith(str(snippet))] for snippet in snippets]


MODULES = (lightning_fastdata, lightning_fastdata.augment, lightning_fastdata.data)


def test_every_name_is_known_and_a_misspelt_one_is_seen(tmp_path):
    right = [f"from {one.__name__} import {', '.join(one.__all__)}" for one in MODULES]
    wrong = [f"from {one.__name__} import {one.__all__[0]}s" for one in MODULES]
    said_of = iter(complaints([*right, *wrong], tmp_path))
    assert [next(said_of) for _ in right] == [[] for _ in right]
    for module, said in zip(MODULES, said_of, strict=True):
        assert len(said) == 1
        assert f'has no attribute "{module.__all__[0]}s"' in said[0]


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
from lightning_fastdata.executors.ray import Ray

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
    elsewhere = LoaderOptions(split=True, executor=Ray(num_cpus=2))
    photos = Photos.from_datasets(Scans(), Scans(), batch_size=8, options=elsewhere)
    assert_type(photos, Photos)
    watch = DataThroughputCallback(every_n_steps=5)
    Trainer(max_epochs=1, callbacks=[watch]).fit(model, datamodule=photos)
    assert_type(watch.report, RunReport | None)
    kept = CachedDataset(FastImageFolder(Path("photos"), size=224), "disk")
    print(len(kept), photos.augment_on)
"""
MISSPELT = {
    "from_loaders(usual, num_workers=": "from_loaders(usual, num_worker=",
    "batch_size=8, options=": "batchsize=8, options=",
    'augment_on="cpu"': 'augment_on="tpu"',
    "seed=1": "sead=1",
    "every_n_steps=": "every_n_step=",
    "split=True": "splits=True",
    "num_cpus=2": "cpus=2",
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

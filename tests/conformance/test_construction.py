"""Construction: by hand, from the command line, from a checkpoint, for either package name."""

from __future__ import annotations

import os

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import contextlib
import copy
import io
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from conformance.pieces import Images, Linear, Rows, RowsModule, make_trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lightning_fastdata import FastDataModule, LoaderOptions
from lightning_fastdata.plugin.hooks import HOOKS

torch.set_num_threads(1)

# -- by hand ---------------------------------------------------------------------------------------


class Reluctant(RowsModule):
    """Notes each call of a dataset method."""

    def __init__(self, *args, **arguments):
        super().__init__(*args, **arguments)
        self.calls = []

    def train_dataset(self):
        self.calls.append("train")
        return super().train_dataset()


def test_row_39_printing_and_copying_calls_no_dataset_method():
    module = Reluctant()
    repr(module)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert (twin.batch_size, twin.calls) == (module.batch_size, [])
    assert module.calls == []
    assert module.trainer is None


def test_row_39_the_text_of_a_module_starts_no_process_and_leaves_the_random_state():
    children, state = psutil.Process().children(), torch.get_rng_state()
    module = RowsModule(options=LoaderOptions(num_workers=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of more workers than CPUs
        assert "Train dataloader" in str(module)
    assert psutil.Process().children() == children
    assert torch.equal(torch.get_rng_state(), state)


def test_row_39_loaders_work_without_a_trainer():
    module = RowsModule(8, options=LoaderOptions(num_workers=0))
    ids = [int(i) for _, batch in module.train_dataloader() for i in batch]
    assert sorted(ids) == list(range(32))
    assert ids != list(range(32))
    assert [int(i) for _, batch in module.val_dataloader() for i in batch] == list(range(16))
    assert module.trainer is None


def test_row_39_from_datasets_keeps_the_datasets_and_the_subclass():
    train, val = Rows(8), Rows(4)
    module = RowsModule.from_datasets(train, val, batch_size=2, seed=3)
    assert type(module) is RowsModule
    assert module.train_dataset() is train
    assert module.val_dataset() is val
    assert len(module.test_dataset()) == 16  # of the subclass
    assert (module.batch_size, module.seed) == (2, 3)


def test_the_sharing_strategy_that_was_planned_is_set(tmp_path):
    before = torch.multiprocessing.get_sharing_strategy()
    try:
        torch.multiprocessing.set_sharing_strategy("file_descriptor")
        RowsModule().train_dataloader()
        assert torch.multiprocessing.get_sharing_strategy() == "file_descriptor"
        RowsModule(options=LoaderOptions(sharing_strategy="file_system")).train_dataloader()
        assert torch.multiprocessing.get_sharing_strategy() == "file_system"
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


class Strategy(Rows):
    def __getitem__(self, i):
        return float(torch.multiprocessing.get_sharing_strategy() == "file_system")


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_share_as_their_parent_does_however_they_are_started(start):
    before = torch.multiprocessing.get_sharing_strategy()
    options = LoaderOptions(
        num_workers=1, multiprocessing_context=start, sharing_strategy="file_system"
    )
    try:
        module = FastDataModule.from_datasets(Strategy(2), batch_size=2, options=options)
        (batch,) = list(module.train_dataloader())
        assert batch.tolist() == [1, 1]
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


class Hooked(Linear):
    """Has all three transfer hooks."""

    def __init__(self):
        super().__init__()
        self.ran = set()

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.ran.add("on_before_batch_transfer")
        return batch

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.ran.add("transfer_batch_to_device")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.ran.add("on_after_batch_transfer")
        return batch


def shared_hook_warnings(tmp_path, module):
    from lightning.pytorch.trainer.connectors.data_connector import warning_cache

    warning_cache.clear()  # Lightning warns once per process
    model = Hooked()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(tmp_path, limit_val_batches=0).fit(model, datamodule=module)
    assert model.ran >= {"transfer_batch_to_device"}
    return {
        name
        for name in HOOKS
        for warning in caught
        if str(warning.message).startswith(f"You have overridden `{name}` in both")
    }


def test_lightning_does_not_warn_of_hooks_that_run_nevertheless(tmp_path):
    assert shared_hook_warnings(tmp_path, RowsModule()) == set()


def test_lightning_warns_of_hooks_that_a_subclass_may_have_silenced(tmp_path):
    class Own(RowsModule):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch

    assert shared_hook_warnings(tmp_path, Own()) == {"on_after_batch_transfer"}


# -- the command line ------------------------------------------------------------------------------


class FromCommandLine(FastDataModule):
    """Images by number.

    Args:
        length: Number of images.
        **arguments: As FastDataModule.
    """

    def __init__(self, length: int = 8, **arguments):
        super().__init__(**arguments)
        self.length = length

    def train_dataset(self):
        return Images(self.length)


class Sized(Linear):
    def __init__(self, width: int = 4, rows: int = 1):
        super().__init__()
        self.layer = nn.Linear(width, 1)
        self.rows = rows

    def _step(self, stage, batch):
        self.seen[stage].append(batch[0].clone())
        return self.layer.weight.sum()


def invert(batch):
    """A user's own transform, which a configuration may name."""
    return [255 - batch[0], batch[1]]


class Invert:
    """The same as a class."""

    def __init__(self, top: int = 255):
        self.top = top

    def __call__(self, batch):
        return [self.top - batch[0], batch[1]]


QUIET = [
    "--trainer.accelerator=cpu",
    "--trainer.max_epochs=1",
    "--trainer.limit_val_batches=0",
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
]


def run_cli(*args, data=FromCommandLine, model=Sized, run=False, cli=LightningCLI, **arguments):
    subcommand = ["fit"] if run else []
    return cli(
        model,
        data,
        run=run,
        seed_everything_default=False,
        args=[*subcommand, *QUIET, *args],
        **{"save_config_callback": None, **arguments},
    )


@pytest.fixture(autouse=True)
def _kept_global_seed():
    yield
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)


def test_row_40_flags_reach_the_module_and_fit_trains():
    cli = run_cli(
        "--data.batch_size=4",
        "--data.length=8",
        "--data.options.num_workers=0",
        "--data.guard=accumulate",
        "--data.drop_last=true",
        "--data.seed=7",
        run=True,
    )
    data = cli.datamodule
    assert data.options == LoaderOptions(num_workers=0)
    assert (data.batch_size, data.guard, data.drop_last, data.seed) == (4, "accumulate", True, 7)
    assert [len(x) for x in cli.model.seen["train"]] == [4, 4]


PIPELINE = """
data:
  batch_size: 8
  augment_on: gpu
  augment:
    class_path: albumentations.Compose
    init_args:
      transforms:
        - class_path: albumentations.InvertImg
          init_args: {p: 1.0}
        - class_path: albumentations.CenterCrop
          init_args: {height: 8, width: 8}
  options:
    num_workers: 0
    prefetch_factor: auto
"""


def test_row_40_yaml_describes_a_whole_pipeline_and_a_saved_config_repeats_it(tmp_path):
    first = tmp_path / "first.yaml"
    first.write_text(PIPELINE)
    from lightning.pytorch.cli import SaveConfigCallback

    seen = []
    for config in (first, tmp_path / "lightning_logs" / "version_0" / "config.yaml"):
        cli = run_cli(
            f"--config={config}",
            "--trainer.logger=true",
            f"--trainer.default_root_dir={tmp_path}",
            run=True,
            save_config_callback=SaveConfigCallback,
        )
        seen.append(cli.model.seen["train"])
    assert all(map(torch.equal, *seen))
    ((batch,), _) = seen
    raw = torch.stack([torch.as_tensor(Images()[i][0]) for i in range(8)])
    expected = 255 - raw[:, 2:10, 1:9]
    assert sorted(batch.sum((1, 2, 3)).tolist()) == sorted(expected.sum((1, 2, 3)).tolist())
    saved = yaml.safe_load((tmp_path / "lightning_logs/version_0/config.yaml").read_text())
    assert saved["data"]["options"]["num_workers"] == 0
    assert saved["data"]["augment"]["class_path"] == "albumentations.Compose"


@pytest.mark.parametrize(
    "value",
    [f"{__name__}.invert", f'{{"class_path": "{__name__}.Invert", "init_args": {{"top": 255}}}}'],
    ids=["function", "class"],
)
def test_row_40_a_users_own_transform_by_its_path(monkeypatch, value):
    monkeypatch.setitem(sys.modules, __name__, sys.modules[invert.__module__])
    cli = run_cli(
        f"--data.augment={value}", "--data.batch_size=8", "--data.options.num_workers=0", run=True
    )
    (batch,) = cli.model.seen["train"]
    raw = sum(int(Images()[i][0].astype(int).sum()) for i in range(8))
    assert int((255 - batch.int()).sum()) == raw


def test_row_40_the_module_is_chosen_by_its_class_path(monkeypatch):
    monkeypatch.setitem(sys.modules, __name__, sys.modules[invert.__module__])
    cli = run_cli(
        f"--data={__name__}.FromCommandLine",
        "--data.length=6",
        "--data.options.num_workers=0",
        "--data.batch_size=3",
        data=FastDataModule,
        subclass_mode_data=True,
    )
    assert type(cli.datamodule).__name__ == "FromCommandLine"
    assert (cli.datamodule.length, cli.datamodule.batch_size) == (6, 3)
    assert cli.datamodule.options.num_workers == 0


def test_row_40_arguments_can_be_linked():
    class Linked(LightningCLI):
        def add_arguments_to_parser(self, parser):
            parser.link_arguments("data.batch_size", "model.rows")

    cli = run_cli("--data.batch_size=5", cli=Linked)
    assert cli.model.rows == cli.datamodule.batch_size == 5


def printed(*args):
    text = io.StringIO()
    with pytest.raises(SystemExit), contextlib.redirect_stdout(text):
        run_cli(*args)
    return " ".join(text.getvalue().split())


def test_row_40_every_argument_has_a_help_text():
    text = printed("--help")
    for said in (
        "Number of images.",
        "Samples per batch and rank",
        'How to load; every ``"auto"`` is chosen for this machine.',
        "What runs on the batches",
        "Where the pixels of an Albumentations pipeline are computed",
        "Where the image is in a sample",
        "Where the mask is",
        "What to do if the batch is predicted not to fit",
        "Samples to batch.",
        "Leave out the last training batch",
        "Seed of order and augmentation",
    ):
        assert said in text
    options = printed("--data.options.help")
    for name in LoaderOptions.__dataclass_fields__:
        assert f"--data.options.{name}" in options
    for said in ("Processes that read samples", "Seconds to wait", "by open file or by file name"):
        assert said in options


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--data.options.num_worker=2", "num_worker"),
        ("--data.batchsize=2", "batchsize"),
        ("--data.guard=maybe", "maybe"),
        ("--data.options.num_workers=many", "many"),
    ],
)
def test_row_40_unknown_names_and_values_are_refused(argument, said):
    text = io.StringIO()
    with pytest.raises(SystemExit) as info, contextlib.redirect_stderr(text):
        run_cli(argument)
    assert info.value.code == 2
    assert said in text.getvalue()


# -- hyperparameters -------------------------------------------------------------------------------


class Saves(RowsModule):
    def __init__(self, batch_size: int = 8, length: int = 32, seed: int | None = None):
        super().__init__(batch_size, length, seed=seed, options=LoaderOptions(num_workers=0))
        self.save_hyperparameters()


class SavesToo(Linear):
    def __init__(self, batch_size: int = 8):
        super().__init__()
        self.save_hyperparameters()


def test_row_41_a_module_comes_back_from_a_checkpoint(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.fit(Linear(), datamodule=Saves(4, length=16, seed=3))
    path = tmp_path / "last.ckpt"
    trainer.save_checkpoint(path)
    module = Saves.load_from_checkpoint(path)
    assert (module.batch_size, module.length, module.seed) == (4, 16, 3)
    assert dict(module.hparams) == {"batch_size": 4, "length": 16, "seed": 3}
    assert Saves.load_from_checkpoint(path, batch_size=2).batch_size == 2


def test_row_41_equal_hyperparameters_of_model_and_module_are_logged_once(tmp_path):
    trainer = make_trainer(tmp_path, logger=CSVLogger(tmp_path))
    trainer.fit(SavesToo(4), datamodule=Saves(4))
    trainer.logger.save()
    written = yaml.safe_load((Path(trainer.log_dir) / "hparams.yaml").read_text())
    assert written == {"batch_size": 4, "length": 32, "seed": None}


def test_row_41_hyperparameters_that_differ_are_lightnings_clear_error(tmp_path):
    trainer = make_trainer(tmp_path, logger=CSVLogger(tmp_path))
    with pytest.raises(RuntimeError, match="batch_size.*different values"):
        trainer.fit(SavesToo(4), datamodule=Saves(8))


# -- both package names ----------------------------------------------------------------------------

TWIN = """
import os, sys
os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
import albumentations as A
import numpy as np
import torch
{imports}

class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return np.full((4, 4, 3), i, np.uint8), i

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []
    def training_step(self, batch, batch_idx):
        x, i = batch
        assert torch.equal(x[:, 0, 0, 0], (255 - i).to(x.dtype)), (x, i)
        self.seen.append(len(i))
        return self.layer(x.float().mean().reshape(1, 1)).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)

data = FastDataModule.from_datasets(
    Images(), batch_size=4, augment_on="gpu", options=LoaderOptions(num_workers=0)
)
callback = DataThroughputCallback(augment=A.InvertImg(p=1), summary=False, report=False)
trainer = pl.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
    default_root_dir={root!r},
)
model = Model()
trainer.fit(model, datamodule=data)
assert model.seen == [4, 4]
assert callback.report.stages[0].steps == 2
print(sorted({{name.split(".")[0] for name in sys.modules}} & {{"lightning", "pytorch_lightning"}}))
print("lightning_fastdata.pytorch_lightning" in sys.modules)
"""

OURS = """
import lightning.pytorch as pl
from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions
"""
THEIRS = """
import pytorch_lightning as pl
from lightning_fastdata import LoaderOptions
from lightning_fastdata.pytorch_lightning import DataThroughputCallback, FastDataModule
"""


@pytest.mark.parametrize(
    ("imports", "packages", "twin"),
    [(OURS, "['lightning']", "False"), (THEIRS, "['pytorch_lightning']", "True")],
    ids=["lightning", "pytorch_lightning"],
)
def test_either_package_trains_without_the_other(tmp_path, imports, packages, twin):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TWIN.format(imports=imports, root=str(tmp_path))],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-3:-1] == [packages, twin]

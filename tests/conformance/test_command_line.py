"""LightningCLI: flags, files, class paths and help of a FastDataModule."""

from __future__ import annotations

import contextlib
import io
import sys

import pytest
import torch
import yaml
from conformance.pieces import Images, Linear
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from programs import refused
from torch import nn

from lightning_fastdata import FastDataModule, LoaderOptions

torch.set_num_threads(1)


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
        'How to load, in all stages; every ``"auto"`` is chosen',
        "What runs on the batches",
        "Where the pixels of a pipeline in",
        "Where the image is in a sample",
        "Where the mask is",
        "What to do about a training batch that does not fit",
        "Samples to batch.",
        "Leave out the last training batch",
        "Seed of order and augmentation",
    ):
        assert said in text
    options = printed("--data.options.help")
    for name in LoaderOptions.__dataclass_fields__:
        assert f"--data.options.{name}" in options
    for said in ("Processes that read samples", "Seconds after which"):
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
    with refused(said):
        run_cli(argument)

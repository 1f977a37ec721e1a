"""What a data module is given reaches its loaders, or it is said that a subclass keeps it."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.tuner import Tuner
from torch.utils.data import TensorDataset
from trainers import Learner, quiet_trainer

from lightning_fastdata import FastDataModule, FastDataWarning, LoaderOptions
from lightning_fastdata.errors import OptionsError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")

ROWS = 40


class Rows(FastDataModule):
    def train_dataset(self):
        return TensorDataset(torch.arange(float(ROWS)))


class Saved(Rows):
    """Lightning's usual data module."""

    def __init__(self, batch_size: int = 8, drop_last: bool = False, seed: int | None = None):
        super().__init__()
        self.save_hyperparameters()


class Handed(Rows):
    def __init__(self, batch_size: int = 8):
        super().__init__(batch_size)
        self.save_hyperparameters()


class Passed(Rows):
    """Gives its own class another batch size than it was given, on purpose."""

    def __init__(self, batch_size: int = 8):
        super().__init__(batch_size // 2)
        self.save_hyperparameters()


class SetBefore(Rows):
    def __init__(self, batch_size: int = 8):
        self.batch_size = batch_size
        super().__init__()


class SetAfter(Rows):
    def __init__(self, batch_size: int = 8):
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size + 1


class LostOptions(Rows):
    def __init__(self, batch_size: int = 8, options: LoaderOptions | None = None):
        super().__init__(batch_size)
        self.save_hyperparameters()


class Model(Learner):
    def __init__(self):
        super().__init__(lambda batch: batch[0].tolist())


def trainer(folder):
    return quiet_trainer(folder, limit_val_batches=0)


def sizes(folder, data):
    model = Model()
    trainer(folder).fit(model, datamodule=data)
    assert len(model.seen[0]) == data.batch_size
    return [len(batch) for batch in model.seen]


@pytest.mark.parametrize(("data", "size"), [(Passed(16), 8), (SetAfter(16), 17)])
def test_the_batch_size_that_was_given_is_the_one_that_is_used(tmp_path, data, size):
    assert sizes(tmp_path, data)[0] == size


def test_what_is_set_before_the_constructor_would_set_it_is_refused():
    with pytest.raises(OptionsError, match=r"batch_size before .*__init__\(batch_size=batch_size"):
        SetBefore(16)


class Collates(Rows):
    """Has a collation as many data modules have one, and hands it over."""

    def __init__(self):
        super().__init__(8, collate_fn=self.collate_fn)

    def collate_fn(self, samples):
        return torch.stack([row for (row,) in samples]) + 1


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("collate_fn", Collates.collate_fn),
        ("collate_fn", staticmethod(torch.stack)),
        ("batch_size", 16),
        ("drop_last", True),
        ("seed", 3),
    ],
)
def test_what_a_subclass_has_in_its_class_is_not_hidden_in_silence(name, own):
    said = rf"Own has {name} in its class.*super\(\).__init__\({name}=self.{name}\)"
    with pytest.raises(OptionsError, match=said):
        type("Own", (Rows,), {name: own})()


def test_a_collation_of_a_subclass_that_is_handed_over_makes_its_batches():
    batches = torch.cat(list(Collates().train_dataloader()))
    assert sorted(batches.tolist()) == list(range(1, ROWS + 1))


def test_what_was_saved_and_went_no_further_is_warned_of_once(tmp_path):
    data = Saved(16, drop_last=True)
    said = r"batch_size and drop_last.*super\(\).__init__\(batch_size=batch_size, drop_last="
    with pytest.warns(FastDataWarning, match=said):
        assert data.train_dataloader().batch_size == 32
    assert sizes(tmp_path, data) == [32, 8]
    data = LostOptions(16, LoaderOptions(num_workers=1))
    with pytest.warns(FastDataWarning, match=r"options.*super\(\).__init__\(options=options\)"):
        sizes(tmp_path, data)


def test_a_subclass_that_sets_what_it_was_given_is_not_warned_of(tmp_path):
    class Sets(Rows):
        def __init__(self, collate_fn=None, options=None):
            super().__init__(8)
            self.save_hyperparameters(ignore=["collate_fn"])
            self.options = options

    assert sizes(tmp_path, Sets(options=LoaderOptions(num_workers=0)))[0] == 8


class Sets(Rows):
    """Sets what the README of many a project has in its constructor."""

    def __init__(self, **settings):
        super().__init__(8)
        vars(self).update(settings)


class Uses(Sets):
    def train_dataloader(self):
        return self.make_loader(self.train_dataset(), stage="train", num_workers=self.num_workers)


def test_workers_that_are_set_where_nothing_reads_them_are_warned_of(tmp_path):
    said = r"Sets has num_workers and pin_memory .*__init__\(num_workers=num_workers, pin_memory="
    with pytest.warns(FastDataWarning, match=said):
        sizes(tmp_path, Sets(num_workers=0, pin_memory=True))
    saved = Sets(num_workers=0)
    saved.save_hyperparameters({"num_workers": 0})
    with pytest.warns(FastDataWarning, match=r"has num_workers"):
        sizes(tmp_path, saved)
    assert sizes(tmp_path, Sets(num_workers="auto", pin_memory=None))[0] == 8
    assert sizes(tmp_path, Uses(num_workers=0))[0] == 8


def test_what_a_subclass_sets_to_what_is_none_is_named():
    with pytest.raises(OptionsError, match=r"options=\{'lr': 1\} is a dict; pass LoaderOptions"):
        Sets(options={"lr": 1}).train_dataloader()
    with pytest.raises(OptionsError, match=r"batch_size='16' has to be a whole number"):
        Sets(batch_size="16").train_dataloader()


def test_the_tuner_finds_and_sets_a_batch_size(tmp_path):
    data, made = Handed(4), trainer(tmp_path)
    options = {"max_trials": 2, "steps_per_trial": 1, "init_val": 5}
    found = Tuner(made).scale_batch_size(Model(), datamodule=data, **options)
    assert found == data.batch_size == data.hparams.batch_size
    assert sizes(tmp_path, data)[0] == found != 4


def test_a_command_line_and_ready_datasets_set_it(tmp_path):
    cli = LightningCLI(
        Model,
        Handed,
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
        args=["--data.batch_size=16", "--trainer.accelerator=cpu", "--trainer.logger=false"],
    )
    assert cli.datamodule.train_dataloader().batch_size == 16
    data = Handed.from_datasets(TensorDataset(torch.arange(24.0)), batch_size=12)
    assert sizes(tmp_path, data) == [12, 12]

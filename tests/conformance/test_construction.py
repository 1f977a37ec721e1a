"""Construction: by hand, from a checkpoint, for either package name."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import warnings
from pathlib import Path

import lightning.pytorch
import lightning.pytorch.demos
import psutil
import pytest
import pytorch_lightning
import pytorch_lightning.demos
import torch
import yaml
from conformance.pieces import Linear, Rows, RowsModule, make_trainer
from lightning.pytorch.loggers import CSVLogger
from programs import run_program
from torch.utils.data import DataLoader

import lightning_fastdata.pytorch_lightning
from lightning_fastdata import LoaderOptions
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.plugin.seams import HOOKS

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


def test_row_39_the_text_of_a_module_leaves_no_process_and_the_random_state_as_it_was():
    children, state = set(psutil.Process().children()), torch.get_rng_state()
    module = RowsModule(options=LoaderOptions(num_workers=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of more workers than CPUs
        assert "Train dataloader" in str(module)
    for process in multiprocessing.active_children():
        process.join(20)  # a trial's was killed, which takes the kernel a while
    assert not set(psutil.Process().children()) - children
    assert torch.equal(torch.get_rng_state(), state)


def test_row_39_from_datasets_keeps_the_datasets_and_the_subclass():
    train, val = Rows(8), Rows(4)
    module = RowsModule.from_datasets(train, val, batch_size=2, seed=3)
    assert type(module) is RowsModule
    assert module.train_dataset() is train
    assert module.val_dataset() is val
    assert len(module.test_dataset()) == 16  # of the subclass
    assert (module.batch_size, module.seed) == (2, 3)


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


def test_lightning_warns_of_hooks_that_may_be_silenced_and_of_no_others(tmp_path):
    class Own(RowsModule):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch

    class Foreign(lightning.pytorch.LightningDataModule):
        on_after_batch_transfer = Own.on_after_batch_transfer

        def train_dataloader(self):
            return DataLoader(Rows(8), batch_size=4)

    assert shared_hook_warnings(tmp_path, RowsModule()) == set()
    for module in (Own(), Foreign()):  # also where a training of ours came before
        assert shared_hook_warnings(tmp_path, module) == {"on_after_batch_transfer"}
    assert not [one for one in warnings.filters if "overridden" in str(one[1])]


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
    with pytest.raises(RuntimeError, match=r"batch_size.*different values"):
        trainer.fit(SavesToo(4), datamodule=Saves(8))


# -- both package names ----------------------------------------------------------------------------


def test_lightning_is_used_without_the_other_package():
    code = """
import sys
from lightning_fastdata import DataThroughputCallback, FastDataModule
FastDataModule()
DataThroughputCallback()
assert "lightning" in sys.modules
assert not {"pytorch_lightning", "lightning_fastdata.pytorch_lightning"} & set(sys.modules)
"""
    done = run_program("-c", code)
    assert done.returncode == 0, done.stderr


def test_a_data_module_of_the_other_package_names_the_import_to_write(tmp_path):
    for package, ours, place in (
        (pytorch_lightning, lightning_fastdata, "lightning_fastdata.pytorch_lightning"),
        (lightning.pytorch, lightning_fastdata.pytorch_lightning, "lightning_fastdata"),
    ):
        model = package.demos.BoringModel()
        trainer = package.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path)
        data = ours.FastDataModule.from_datasets(torch.ones(8, 32))
        with pytest.raises(OptionsError, match=rf"`from {place} import FastDataModule, .*"):
            trainer.fit(model, datamodule=data)

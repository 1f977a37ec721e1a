"""Loaders: how Lightning takes them apart, combines, limits and shards them."""

from __future__ import annotations

import copy
import os
import pickle

import numpy as np
import psutil
import pytest
import torch
from conformance.evaluate_on_ranks import Writer
from conformance.pieces import Linear, Rows, RowsModule, make_trainer, quiet
from lightning.pytorch import seed_everything
from lightning.pytorch.utilities import CombinedLoader
from misses import each
from open_files import open_files
from torch.utils.data import BatchSampler, Dataset

from lightning_fastdata import (
    FastDataLoader,
    FastDataModule,
    LoaderOptions,
)


def indices(batches):
    """The sample numbers of remembered batches, in order."""
    return [int(i) for _x, batch in batches for i in batch]


@pytest.mark.cases(1)
@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
@pytest.mark.parametrize("kind", [dict, list])
def test_row_11_combined_loaders_get_their_own_transformed_batches(tmp_path, mode, kind):
    class Two(RowsModule):
        def train_dataset(self):
            pair = [Rows(8), Rows(24)]
            return {"a": pair[0], "b": pair[1]} if kind is dict else pair

        def train_dataloader(self):
            return CombinedLoader(super().train_dataloader(), mode)

    class Takes(Linear):
        def training_step(self, batch, batch_idx):
            parts = batch.values() if kind is dict else batch
            self.seen["train"].append(list(parts))
            return self.layer(torch.ones(1, 4)).mean()

    model, module = Takes(), Two(batch_size=8)
    module.register_transform(lambda b: [b[0] + 1, b[1]])
    callback = quiet()
    trainer = make_trainer(tmp_path, callbacks=[callback], limit_val_batches=0)
    trainer.fit(model, datamodule=module)
    assert len(model.seen["train"]) == {"min_size": 1, "max_size": 3, "max_size_cycle": 3}[mode]
    exhausted = 0
    for step in model.seen["train"]:
        for part in step:
            if part is None:
                exhausted += 1
            else:
                assert torch.equal(part[0][:, 0], part[1] + 1.0)
    assert exhausted == (2 if mode == "max_size" else 0)


def test_row_11_sequential_validation_loaders_keep_their_index(tmp_path):
    class Two(RowsModule):
        def val_dataset(self):
            return [Rows(4), Rows(12)]

    class Notes(Linear):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.seen["val"].append((dataloader_idx, len(batch[1])))

    model = Notes()
    make_trainer(tmp_path).validate(model, datamodule=Two(batch_size=4), verbose=False)
    assert model.seen["val"] == [(0, 4), (1, 4), (1, 4), (1, 4)]


def test_row_14_a_users_sampler_is_respected(tmp_path):
    class Sampled(RowsModule):
        def train_dataloader(self):
            return self.make_loader(Rows(32), stage="train", **self.arguments)

    order = [7, 3, 3, 9]
    for arguments in (
        {"sampler": order},
        {"batch_sampler": BatchSampler(order, 2, drop_last=False)},
    ):
        model, module = Linear(), Sampled(batch_size=2)
        module.arguments = arguments
        make_trainer(tmp_path, limit_val_batches=0).fit(model, datamodule=module)
        assert indices(model.seen["train"]) == order


def collate_first(samples):
    return [torch.stack([x for x, _ in samples]), torch.tensor([i for _, i in samples])]


def init_worker(worker_id):
    os.environ["FASTDATA_WORKER"] = str(worker_id)


ARGUMENTS = {
    "batch_size": 4,
    "num_workers": 1,
    "collate_fn": collate_first,
    "drop_last": True,
    "timeout": 30,
    "worker_init_fn": init_worker,
    "multiprocessing_context": "fork",
    "prefetch_factor": 3,
    "persistent_workers": True,
    "in_order": True,
    "seed": 5,
}


@pytest.mark.parametrize("where", ["predict", "overfit", "before the trainer", "fabric"])
def test_row_15_constructor_arguments_survive_lightnings_rebuild(tmp_path, where):
    loader = FastDataLoader(Rows(16), **ARGUMENTS)
    if where == "fabric":
        from lightning.fabric import Fabric

        rebuilt = Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)
        assert indices(list(rebuilt)) == list(range(16))
        loader.close()
        return
    trainer = make_trainer(tmp_path, overfit_batches=2 if where == "overfit" else 0)
    if where == "predict":
        trainer.predict(Linear(), loader)
        rebuilt = trainer.predict_dataloaders
    else:
        trainer.fit(Linear(), loader)
        rebuilt = trainer.train_dataloader
    for name, value in ARGUMENTS.items():
        if where == "predict" and name in ("batch_size", "drop_last"):
            continue  # Lightning replaces both by a batch sampler that keeps the last batch
        found = getattr(rebuilt, name)
        if name == "multiprocessing_context":
            found = found.get_start_method()
        assert found == value, name


def test_row_16_attributes_set_in_the_hook_survive(tmp_path):
    class Marks(RowsModule):
        def predict_dataloader(self):
            loader = super().predict_dataloader()
            loader.mark = "mine"
            return loader

    trainer = make_trainer(tmp_path)
    trainer.predict(Linear(), datamodule=Marks())
    assert trainer.predict_dataloaders.mark == "mine"
    assert isinstance(trainer.predict_dataloaders, FastDataLoader)


EXECUTORS = {
    "inline": LoaderOptions(num_workers=0, executor="inline"),
    "workers": LoaderOptions(num_workers=2, executor="workers", probe=False),
}


@each(("overfit", "executor"), [(2, "inline"), (0.5, "workers")])
def test_row_17_overfitting_repeats_the_first_batches_in_order(tmp_path, overfit, executor):
    model = Linear()
    trainer = make_trainer(tmp_path, overfit_batches=overfit, max_epochs=2, limit_val_batches=0)
    trainer.fit(model, RowsModule(batch_size=8, length=32, options=EXECUTORS[executor]))
    assert indices(model.seen["train"]) == 2 * list(range(16))


@each("executor", EXECUTORS)
def test_row_18_prediction_writers_get_the_right_indices(tmp_path, executor):
    writer = Writer()
    trainer = make_trainer(tmp_path, callbacks=[writer])
    module = RowsModule(batch_size=6, length=32, options=EXECUTORS[executor])
    predicted = trainer.predict(Linear(), datamodule=module)
    expected = [list(range(6)), list(range(6, 12)), list(range(12, 16))]
    assert writer.batches == [batch.tolist() for batch in predicted] == expected
    assert writer.epoch in (expected, [expected])


COPIES = []


class Copies(Linear):
    """Copies its loader in the middle of an epoch."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            loader = self.trainer.train_dataloader
            COPIES[:] = [copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))]
        return super().training_step(batch, batch_idx)


def test_row_37_a_loader_with_running_workers_can_be_copied(tmp_path):
    model = Copies()
    module = RowsModule(batch_size=4, length=16, options=EXECUTORS["workers"])
    make_trainer(tmp_path, limit_val_batches=0).fit(model, datamodule=module)
    assert sorted(indices(model.seen["train"])) == list(range(16))
    for loader in COPIES:
        assert sorted(indices(loader)) == list(range(16))
        loader.close()


class Draws(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.full((4,), float(np.random.rand())), i


def test_row_19_seeded_workers_draw_distinct_numpy_numbers(tmp_path):
    model = Linear()
    seed_everything(3, workers=True)
    module = FastDataModule.from_datasets(
        Draws(), batch_size=1, options=LoaderOptions(num_workers=2)
    )
    trainer = make_trainer(tmp_path, limit_val_batches=0)
    trainer.fit(model, datamodule=module)
    assert trainer.train_dataloader.worker_init_fn is not None
    drawn = [float(x[0, 0]) for x, _ in model.seen["train"]]
    assert len(set(drawn)) == 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning_fastdata.errors.FastDataWarning")
def test_row_20_reloading_loaders_leaks_no_process_and_no_file(tmp_path):
    children, files, counts = set(psutil.Process().children()), open_files(), []

    class Counts(Linear):
        def on_train_epoch_end(self):
            self.seen["train"].clear()  # a kept batch keeps its shared memory open
            left = set(psutil.Process().children()) - children
            counts.append((len(left), len(open_files() - files)))

    module = RowsModule(
        batch_size=8,
        length=16,
        options=LoaderOptions(num_workers=1, persistent_workers=True),
    )
    callback = quiet()
    trainer = make_trainer(
        tmp_path,
        max_epochs=20,
        reload_dataloaders_every_n_epochs=1,
        callbacks=[callback],
        limit_val_batches=0,
    )
    trainer.fit(Counts(), datamodule=module)
    settled = counts[5:]
    assert max(children for children, _ in settled) <= settled[0][0] + 1
    assert max(files for _, files in settled) <= settled[0][1] + 8
    assert callback.report.stages[0].steps == 40


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"limit_train_batches": 2, "limit_val_batches": 1}, (2, 1)),
        ({"limit_train_batches": 0.5, "limit_val_batches": 0.5}, (2, 1)),
        ({"limit_train_batches": 1.0, "limit_val_batches": 0}, (4, 0)),
        ({"fast_dev_run": 3}, (3, 2)),
    ],
)
def test_row_21_limits_count_batches_as_lightning_does(tmp_path, limits, expected):
    model = Linear()
    trainer = make_trainer(tmp_path, num_sanity_val_steps=0, **limits)
    callback = quiet()
    trainer.callbacks.append(callback)
    trainer.fit(model, datamodule=RowsModule(batch_size=8, length=32))
    assert (len(model.seen["train"]), len(model.seen["val"])) == expected
    assert callback.report.stages[0].steps == expected[0]


def test_row_21_limits_of_test_and_predict(tmp_path):
    model, module = Linear(), RowsModule(batch_size=4, length=32)
    trainer = make_trainer(tmp_path, limit_test_batches=2, limit_predict_batches=3)
    trainer.test(model, datamodule=module, verbose=False)
    trainer.predict(model, datamodule=module)
    assert (len(model.seen["test"]), len(model.seen["predict"])) == (2, 3)


def test_training_is_shuffled_by_seed_and_epoch_and_evaluation_is_not(tmp_path):
    def run(seed):
        model = Linear()
        module = RowsModule(batch_size=8, length=32, seed=seed)
        make_trainer(tmp_path, max_epochs=2, num_sanity_val_steps=0).fit(model, datamodule=module)
        return indices(model.seen["train"]), indices(model.seen["val"])

    train, val = run(0)
    assert (train, val) == run(0)
    assert train != run(1)[0]
    assert train[:32] != train[32:]
    assert sorted(train[:32]) == sorted(train[32:]) == list(range(32))
    assert val == 2 * list(range(16))

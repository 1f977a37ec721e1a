"""The engine's executors under real trainers: what the steps see is what torch's loader gives."""

from __future__ import annotations

import copy
import pickle

import albumentations as A
import pytest
import torch
from albumentations.pytorch import ToTensorV2
from conformance.pieces import Images, Linear, Pixels, Rows, make_trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import nn

from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions

torch.set_num_threads(1)


class Keeps(Pixels):
    """Learns on images of any size and remembers them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def _step(self, stage, batch):
        self.seen[stage].append(batch[0].clone())
        return self.layer(batch[0].float().mean().reshape(1, 1)).sum()


def module_for(executor, *datasets, workers=2, **about):
    return FastDataModule.from_datasets(
        *datasets,
        batch_size=4,
        options=LoaderOptions(
            num_workers=workers, timeout=60, executor=executor, probe="augment" in about
        ),
        **about,
    )


def numbers(batches):
    return [i for _x, indices in batches for i in indices.tolist()]


@pytest.mark.cases(1)
@pytest.mark.parametrize("place", ["gpu", "cpu"])
@pytest.mark.parametrize("persistent", [True, False])
def test_an_augmentation_makes_the_same_pixels_in_each_executor(tmp_path, place, persistent):
    seen = []
    for executor in ("torch", "workers", "inline"):
        augment = A.Compose([A.RandomCrop(8, 8), A.RandomBrightnessContrast(p=0.8), ToTensorV2()])
        model = Keeps()
        module = module_for(executor, Images(), augment=augment, augment_on=place)
        module.options = LoaderOptions(
            num_workers=2, timeout=60, executor=executor, persistent_workers=persistent
        )
        make_trainer(tmp_path, max_epochs=2).fit(model, datamodule=module)
        seen.append(model.seen["train"])
    assert len(seen[0]) == 8
    assert not torch.equal(seen[0][0], seen[0][4])
    for other in seen[1:]:
        assert len(other) == 8
        assert all(map(torch.equal, seen[0], other))


@pytest.mark.cases(1)
@pytest.mark.parametrize("executor", ["workers", "inline"])
def test_row_21_and_the_order_of_each_epoch_are_those_of_torch(tmp_path, executor):
    seen = []
    for name in ("torch", executor):
        model, module = Linear(), module_for(name, Rows(32), Rows(16))
        module.register_transform(lambda batch: [batch[0] + 1, batch[1]])
        callback = DataThroughputCallback(summary=False, report=False)
        trainer = make_trainer(tmp_path, max_epochs=2, limit_train_batches=5, callbacks=[callback])
        trainer.fit(model, datamodule=module)
        assert callback.report.stages[0].steps == 10
        for x, i in model.seen["train"]:
            assert torch.equal(x[:, 0], i + 1.0)
        seen.append((numbers(model.seen["train"]), numbers(model.seen["val"])))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("executor", ["workers", "inline"])
def test_row_17_overfitting_repeats_the_first_batches(tmp_path, executor):
    model = Linear()
    trainer = make_trainer(tmp_path, overfit_batches=2, max_epochs=2, limit_val_batches=0)
    trainer.fit(model, datamodule=module_for(executor, Rows(32)))
    assert numbers(model.seen["train"]) == 2 * list(range(8))


@pytest.mark.parametrize("executor", ["workers", "inline"])
def test_row_18_prediction_writers_get_the_right_indices(tmp_path, executor):
    class Writer(BasePredictionWriter):
        def __init__(self):
            super().__init__("batch")
            self.pairs = []

        def write_on_batch_end(self, trainer, module, prediction, indices, batch, *_):
            self.pairs.append((indices, batch[1].tolist()))

    writer = Writer()
    trainer = make_trainer(tmp_path, callbacks=[writer])
    trainer.predict(Linear(), datamodule=module_for(executor, None, None, None, Rows(10)))
    expected = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert writer.pairs == [(batch, batch) for batch in expected]


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
    make_trainer(tmp_path).fit(model, datamodule=module_for("workers", Rows(16)))
    assert sorted(numbers(model.seen["train"])) == list(range(16))
    for loader in COPIES:
        assert sorted(numbers(loader)) == list(range(16))
        loader.close()

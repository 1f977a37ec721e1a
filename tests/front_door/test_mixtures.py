"""A mixture in a Trainer: its proportions, its loggers, and a training that goes on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from misses import each
from torch.utils.data import StackDataset
from trainers import Learner, quiet_trainer

from lightning_fastdata import FastDataLoader, FastDataModule, LoaderOptions, Mixture
from lightning_fastdata.errors import OptionsError

LENGTH, BATCH = 40, 4
STEPS = LENGTH // BATCH
A, B = np.arange(25.0, dtype=np.float32), np.arange(1000.0, 1008.0, dtype=np.float32)


def mixture(weights=None):
    return Mixture({"a": list(A), "b": list(B)}, weights or {"a": 0.7, "b": 0.3}, length=LENGTH)


def module(dataset, **how):
    options = LoaderOptions(num_workers=0, executor="inline", probe=False)
    return FastDataModule.from_datasets(
        dataset, batch_size=BATCH, options=options, guard="off", seed=3, **how
    )


def fit(folder, data, *, steps=2 * STEPS, resume=None, callbacks=(), logger=False):
    model = Learner(torch.Tensor.tolist)
    how = {"max_epochs": -1, "max_steps": steps, "log_every_n_steps": 5}
    trainer = quiet_trainer(folder, logger=logger, callbacks=list(callbacks), **how)
    trainer.fit(model, datamodule=data, ckpt_path=resume)
    trainer.save_checkpoint(folder / "last.ckpt")
    return model.seen


def test_a_training_reads_the_mixture_in_its_own_order_and_goes_on_within_an_epoch(tmp_path):
    straight = fit(tmp_path, module(mixture()))
    expected = mixture()
    for epoch in range(2):
        expected.set_epoch(epoch)
        mine = [expected[i] for i in range(LENGTH)]
        assert [i for step in straight[epoch * STEPS :][:STEPS] for i in step] == mine
    assert fit(tmp_path, module(mixture()), steps=STEPS + 3) == straight[: STEPS + 3]
    rest = fit(tmp_path, module(mixture()), resume=tmp_path / "last.ckpt")
    assert rest == straight[STEPS + 3 :]


def test_a_mixture_is_shuffled_and_cached_by_nobody():
    with pytest.raises(OptionsError, match="order of its own"):
        module(mixture(), shuffle=True).train_dataloader()
    cached = module(mixture(), cache="ram").train_dataloader()
    assert isinstance(cached.dataset, Mixture)


@each(("executor", "workers"), [("inline", 0), ("workers", 2), ("torch", 0), ("torch", 2)])
def test_a_mixture_in_a_dict_of_another_dataset_goes_on_from_epoch_to_epoch(executor, workers):
    part = Mixture({"a": list(range(24))}, length=8, shuffle=False)
    pairs = StackDataset(number=part, place=list(range(8)))
    loader = FastDataLoader(pairs, 8, executor=executor, num_workers=workers)
    numbers = [number for _ in range(3) for batch in loader for number in batch["number"].tolist()]
    loader.close()
    assert numbers == list(range(24))

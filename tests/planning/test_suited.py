"""Each kind of dataset has its executor, and the one that was asked for is the one that reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from misses import each
from planning.planned import Stream, cpus, machine
from torch.utils.data import Subset, TensorDataset

from lightning_fastdata import FastDataModule, LoaderOptions
from lightning_fastdata.executors.gather.columns import ColumnDataset, TokenWindows
from lightning_fastdata.planning.facts import Questions, inspect_dataset
from lightning_fastdata.planning.plan_for import LoaderSpec, Planner


class WithState(Stream):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


COLUMN = TensorDataset(torch.zeros(4))
SAMPLES = [torch.zeros(3)] * 8


@each(
    ("dataset", "about", "name"),
    [
        (Stream(), {}, "workers"),
        (Stream(), {"workers": 0}, "torch"),
        (WithState(), {"workers": 0}, "inline"),
        (COLUMN, {}, "gather"),
        (COLUMN, {"workers": 0}, "torch"),
        (COLUMN, {"collate_fn": list}, "workers"),
        (COLUMN, {"transformed": True}, "workers"),
        (Subset(ColumnDataset({"x": np.zeros((4, 2))}), [1, 2]), {}, "gather"),
        (TokenWindows(np.arange(9), 3), {}, "gather"),
        (Subset(SAMPLES, [1, 2]), {}, "workers"),
        (SAMPLES, {}, "workers"),
        (SAMPLES, {"workers": 0}, "torch"),
    ],
)
def test_each_kind_of_dataset_has_its_executor(dataset, about, name):
    about = dict(about)
    options = LoaderOptions(num_workers=about.pop("workers", "auto"), probe=False)
    spec = LoaderSpec(dataset=dataset, name="rows", options=options, batch_size=4, **about)
    facts = inspect_dataset(spec, Questions(cost=True))
    assert Planner(spec, facts, machine(cpu=cpus(2))).choose_executor().executor == name


@pytest.mark.parametrize("executor", ["torch", "auto", "inline", "gather", "workers"])
def test_the_executor_of_the_options_reaches_the_loader_and_its_plan(executor):
    data = TensorDataset(torch.arange(8.0), torch.arange(8))
    options = LoaderOptions(num_workers=1, executor=executor)
    module = FastDataModule.from_datasets(data, batch_size=4, options=options)
    loader = module.train_dataloader()
    assert loader.executor == ("workers" if executor == "auto" else executor)
    assert "executor" in module.explain()
    plain = FastDataModule.from_datasets(data, batch_size=4, options=LoaderOptions(num_workers=1))
    for one, two in zip(loader, plain.train_dataloader(), strict=True):
        assert all(map(torch.equal, one, two))

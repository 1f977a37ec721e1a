"""The executor that suits a dataset, with its reason."""

from __future__ import annotations

import random
from dataclasses import replace

import albumentations as A
import numpy as np
import pytest
import torch
from misses import each
from planning.planned import cpus, machine
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from lightning_fastdata import FastDataModule, LoaderOptions
from lightning_fastdata.executors.gather.columns import ColumnDataset, TokenWindows
from lightning_fastdata.host.usage import Clocks
from lightning_fastdata.planning.facts.inspection import Questions, inspect_dataset
from lightning_fastdata.planning.facts.probe import measure_samples
from lightning_fastdata.planning.plan_for import LoaderSpec, choose_executor
from lightning_fastdata.randomness.global_generators import DrawWatch
from lightning_fastdata.randomness.search import find_composes


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.full((3,), float(i)), i


class Drawing(Rows):
    def __init__(self, draw):
        self.draw = draw

    def __getitem__(self, i):
        return self.draw(), i


class Augmenting(Rows):
    def __init__(self):
        self.pipeline = A.Compose([A.HorizontalFlip()])


class Stream(IterableDataset):
    def __iter__(self):
        raise AssertionError("a stream is not to be read")


class Clock:
    """Seconds that advance by a fixed step each time they are asked for."""

    def __init__(self, step_s):
        self.now, self.step_s = 0.0, step_s

    def __call__(self):
        self.now += self.step_s
        return self.now


def spec_of(dataset, *, workers="auto", **about):
    return LoaderSpec(
        dataset=dataset,
        name="rows",
        options=LoaderOptions(num_workers=workers, probe=False),
        pipelines=find_composes(dataset),
        **{"batch_size": 4, **about},
    )


def read(spec, **clocks):
    """What a process that is thrown away finds out, with clocks that say nothing of the machine."""
    facts = inspect_dataset(spec, Questions(cost=True))
    if spec.is_stream or facts.rows:
        return facts
    watch = DrawWatch()
    cost = measure_samples(
        spec.dataset,
        batch_size=spec.batch_size,
        clocks=Clocks(**{"queue_s": lambda: 0.0, **clocks}),
    )
    facts = replace(facts, cost=replace(cost, pace=1.0), draws=watch.drew())
    watch.restore()
    return facts


def suited(dataset, *, step_s=0.01, **about):
    spec = spec_of(dataset, **about)
    return choose_executor(
        spec, read(spec, clock_s=Clock(step_s), cpu_s=Clock(step_s)), machine(cpu=cpus(2))
    )


@each(
    ("dataset", "about", "name"),
    [
        (Stream(), {}, "workers"),
        (Stream(), {"workers": 0}, "torch"),
        (TensorDataset(torch.zeros(4)), {}, "gather"),
        (Subset(ColumnDataset({"x": np.zeros((4, 2))}), [1, 2]), {}, "gather"),
        (TensorDataset(torch.zeros(4)), {"workers": 0}, "torch"),
        (TokenWindows(np.arange(9), 3), {}, "gather"),
        (Subset(Rows(), [1, 2]), {}, "workers"),
        (TensorDataset(torch.zeros(4)), {"collate_fn": list}, "workers"),
        (TensorDataset(torch.zeros(4)), {"transformed": True}, "workers"),
        (Rows(), {}, "workers"),
        (Rows(), {"workers": 0}, "torch"),
        (Drawing(random.random), {"workers": 0}, "inline"),
        (Rows(), {"step_s": 1e-6}, "inline"),
        (Rows(), {"step_s": 1e-6, "workers": 2}, "workers"),
        (Drawing(random.random), {"step_s": 1e-6}, "inline"),
        (Drawing(np.random.rand), {"step_s": 1e-6}, "inline"),
        (Drawing(lambda: torch.rand(2)), {"step_s": 1e-6}, "inline"),
        (Augmenting(), {"step_s": 1e-6}, "inline"),
        (Augmenting(), {}, "workers"),
        (Augmenting(), {"step_s": 1e-6, "workers": 2}, "workers"),
    ],
)
def test_each_kind_of_dataset_has_its_executor(dataset, about, name):
    chosen = suited(dataset, **about)
    assert chosen.executor == name
    assert chosen.why


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

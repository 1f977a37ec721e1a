"""FastDataLoader over each executor is still the DataLoader that tools expect."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_fastdata.loading.loader import FastDataLoader

DATA = TensorDataset(torch.arange(40.0).reshape(20, 2), torch.arange(20))


@pytest.mark.parametrize("executor", ["inline", "gather", "workers", "sidecar"])
@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_are_those_of_torch(executor: str, persistent: bool) -> None:
    how = {"batch_size": 3, "shuffle": True, "num_workers": 2, "persistent_workers": persistent}
    ours = FastDataLoader(
        DATA, **how, executor=executor, generator=torch.Generator().manual_seed(1)
    )
    order = torch.Generator().manual_seed(1)
    theirs = DataLoader(DATA, batch_size=3, shuffle=True, generator=order)
    for _ in range(2):
        for mine, other in zip(ours, list(theirs.batch_sampler), strict=True):
            assert mine[1].tolist() == other
            assert torch.equal(mine[0], DATA.tensors[0][other])
    assert len(ours) == len(theirs)
    ours.close()


def test_a_running_loader_can_be_copied_and_pickled() -> None:
    loader = FastDataLoader(
        DATA, batch_size=4, num_workers=1, persistent_workers=True, executor="workers"
    )
    running = iter(loader)
    next(running)
    assert list(copy.deepcopy(running)) == []
    assert len(list(pickle.loads(pickle.dumps(loader)))) == 5
    assert len(list(running)) == 4
    loader.close()


@pytest.mark.parametrize("executor", ["inline", "workers"])
def test_single_samples_come_as_they_are(executor: str) -> None:
    loader = FastDataLoader(DATA, batch_size=None, num_workers=1, executor=executor)
    assert [int(label) for _, label in loader] == list(range(20))

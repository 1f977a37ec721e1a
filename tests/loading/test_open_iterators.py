"""A loop over a loader within a loop over it: each iterator reads all, as torch's do."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from lightning.pytorch import Callback
from misses import each
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from trainers import trained

from lightning_fastdata import FastDataLoader, FastDataModule, Mixture


class Rows(Dataset):
    """Their own numbers."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


class Stream(IterableDataset):
    """The same, one after the other."""

    def __iter__(self):
        return (torch.tensor([number]) for number in range(24))


COLUMNS = TensorDataset(torch.arange(24)[:, None])
WAYS = {
    "inline": (Rows(), {"executor": "inline"}),
    "auto": (Rows(), {"num_workers": "auto"}),
    "kept": (Rows(), {"num_workers": 2, "persistent_workers": "unchanged"}),
    "new": (Rows(), {"num_workers": 1}),
    "columns": (COLUMNS, {"num_workers": "auto"}),
    "threads": (COLUMNS, {"num_workers": 1, "executor": "gather"}),
    "stream": (Stream(), {"executor": "inline"}),
}


def first(batch) -> int:
    return int(torch.as_tensor(batch[0]).flatten()[0])


def first_and_rest(batch) -> list[int]:
    return (batch if torch.is_tensor(batch) else batch[0]).flatten().tolist()


def whole_passes(loader):
    """As where features of the training set are computed in each step."""
    return [(first(batch), *(len(list(loader)) for _ in range(2))) for batch in loader]


def looks_at_a_batch(loader):
    """As where pictures of some samples are logged."""
    steps = zip(range(20), loader, strict=False)  # an end, where there would be none
    return [(first(batch), first(next(iter(loader)))) for _, batch in steps]


def in_turn(loader):
    """Two passes, with a third one that begins and ends while the first is open."""
    one = iter(loader)
    read = [first(next(one)), len(list(loader))]
    other = iter(loader)
    for _ in range(2):
        read += [first(next(other)), first(next(one))]
    return read, [first(batch) for batch in one], [first(batch) for batch in other]


@each("way", WAYS)
@each("program", [whole_passes, looks_at_a_batch, in_turn])
def test_each_iterator_reads_all(program, way) -> None:
    dataset, how = WAYS[way]
    assert program(FastDataLoader(dataset, 4, **how)) == program(DataLoader(dataset, 4))


@each("executor", ["inline", "torch"])
def test_a_pass_stays_in_its_epoch_while_others_go_on_in_theirs(executor) -> None:
    mixture = Mixture({"a": range(8), "b": range(8, 16)})
    loader = FastDataLoader(mixture, 4, executor=executor)
    other = FastDataLoader(Subset(mixture, range(4)), 4, executor=executor)
    wanted = list(chain.from_iterable(map(first_and_rest, loader)))
    loader, taken = FastDataLoader(mixture, 4, executor=executor), []
    for batch in loader:
        taken += first_and_rest(batch)
        next(iter(loader))
        list(other)
    assert taken == wanted


class Looks(Callback):
    """As what logs pictures of some samples."""

    def on_train_batch_end(self, trainer, *_: object) -> None:
        next(iter(trainer.train_dataloader))


@pytest.mark.parametrize(
    "data",
    [
        FastDataModule.from_datasets(Rows(), batch_size=4),
        FastDataModule.from_datasets(COLUMNS, batch_size=4),
        FastDataLoader(Rows(), 4, shuffle=True, num_workers="auto"),
    ],
)
def test_a_training_takes_each_sample_once_while_a_callback_looks_at_some(data) -> None:
    taken = trained(data, first_and_rest, max_epochs=2, callbacks=[Looks()])
    for epoch in (taken[:6], taken[6:]):
        assert sorted(chain.from_iterable(epoch)) == list(range(24))


def a_look(loader) -> None:
    next(iter(loader))


def a_whole_pass(loader) -> None:
    list(loader)


@pytest.mark.filterwarnings("ignore:.*draws from torch's global generator")
@pytest.mark.filterwarnings("ignore:To go on where:lightning_fastdata.FastDataWarning")
@each("way", WAYS)
@each("meanwhile", [a_look, a_whole_pass])
def test_a_state_is_that_of_the_iterator_whose_batch_came_last(way, meanwhile) -> None:
    dataset, how = WAYS[way]
    how = how if way == "stream" else {**how, "shuffle": True}
    loader = FastDataLoader(dataset, 4, **how)
    taken = []
    for number, batch in enumerate(loader):
        taken += first_and_rest(batch)
        if number in (1, 2):
            meanwhile(loader)
        if number == 3:
            break
    state = loader.state_dict()
    samples = 0 if way == "stream" else 16  # of a stream its batches are counted
    assert [state[name] for name in ("epoch", "batches", "samples")] == [0, 4, samples]
    torch.manual_seed(1)  # another process has other numbers
    other = FastDataLoader(dataset, 4, **how)
    other.load_state_dict(state)
    taken += chain.from_iterable(map(first_and_rest, other))
    assert sorted(taken) == list(range(24))


class Noise(IterableDataset):
    """Drawn by its worker."""

    def __iter__(self):
        return (torch.rand(()) for _ in range(24))


@pytest.mark.filterwarnings("ignore:Noise draws from global generators")
@pytest.mark.filterwarnings("ignore:To go on where:lightning_fastdata.FastDataWarning")
def test_what_a_worker_draws_goes_on_behind_a_look() -> None:
    loader = FastDataLoader(Noise(), 4, num_workers=1, executor="workers")
    batches = iter(loader)
    next(batches)
    a_look(loader)
    next(batches)
    state = loader.state_dict()
    other = FastDataLoader(Noise(), 4, num_workers=1, executor="workers")
    other.load_state_dict(state)
    assert [batch.tolist() for batch in other] == [batch.tolist() for batch in batches]

"""When an epoch begins, and what of the program's state its batches are made of."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Callback
from misses import each
from PIL import Image
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
)
from trainers import Learner, quiet_trainer

from lightning_fastdata import (
    FastDataLoader,
    FastDataModule,
    FastDataWarning,
    FastImageFolder,
    LoaderOptions,
    Mixture,
    pack,
)
from lightning_fastdata.errors import WorkerError

READERS = [("torch", 0), ("inline", 0), ("workers", 1), ("torch", 1)]


class Rows(Dataset):
    def __init__(self) -> None:
        self.number = 0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.tensor([int(index), self.number])


class Kinds(Rows):
    """Samples are the types of their indices."""

    def __getitem__(self, index: Any) -> Any:
        return type(index).__name__, str(getattr(index, "dtype", "")), str(index)


class Together(Kinds):
    """Reads the samples of a batch in one call: each is the type of all their indices."""

    def __getitems__(self, indices: Any) -> list[Any]:
        return [self[indices] for _ in indices]


class Given(Sampler):
    """Counts how often it was begun."""

    def __init__(self, *items: Any) -> None:
        self.items, self.begun = items, 0

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        self.begun += 1
        yield from self.items


class Stream(IterableDataset):
    begun = 0

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        yield from range(6)


@each(("executor", "workers"), READERS)
def test_only_a_base_seed_is_drawn_before_the_first_batch_is_asked_for(executor, workers) -> None:
    sampler, generator = Given(*range(6)), torch.Generator().manual_seed(1)
    as_torch, of_all = torch.Generator().manual_seed(1), torch.get_rng_state()
    how = {"num_workers": workers, "executor": executor, "generator": generator}
    batches = iter(FastDataLoader(Rows(), 2, sampler=sampler, **how))
    stream = Stream()
    others = iter(FastDataLoader(stream, 2, **how))
    assert (sampler.begun, stream.begun) == (0, 0)
    for _ in range(2):
        iter(DataLoader(stream, 2, generator=as_torch))
    assert torch.equal(generator.get_state(), as_torch.get_state())
    assert torch.equal(torch.get_rng_state(), of_all)
    assert len(list(batches)) == len(list(others)) == 3
    assert torch.equal(generator.get_state(), as_torch.get_state())
    assert sampler.begun == 1


@each(("executor", "workers"), READERS)
def test_an_epoch_saved_between_iter_and_its_first_batch_is_resumed(executor, workers) -> None:
    def shuffled(seed: int) -> FastDataLoader[Any]:
        how = {"num_workers": workers, "executor": executor}
        return FastDataLoader(Rows(), 6, True, generator=torch.Generator().manual_seed(seed), **how)

    def in_order(batches: Any) -> list[int]:
        return [int(row[0]) for batch in batches for row in batch]

    loader, other = shuffled(1), shuffled(2)
    before = loader.state_dict()
    batches = iter(loader)
    saved = loader.state_dict()
    straight = in_order(batches), in_order(loader)
    for state in (before, saved):
        other.load_state_dict(state)
        assert (in_order(other), in_order(other)) == straight


class Seeds(Callback):
    """Seeds the generators at the start of each epoch."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def on_train_epoch_start(self, trainer: Any, *args: object) -> None:
        torch.manual_seed(trainer.current_epoch)
        self.generator.manual_seed(trainer.current_epoch)


@each("executor", ["inline", "torch"])
@each("own", [True, False])
def test_seeds_that_a_hook_sets_give_torchs_order_in_every_epoch(executor, own, tmp_path) -> None:
    def orders(loader: type, **how: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(5)
        how |= {"shuffle": True, "generator": generator if own else None}
        model = Learner(torch.Tensor.tolist)
        trainer = quiet_trainer(tmp_path, max_epochs=2, callbacks=[Seeds(generator)])
        for epochs in (2, 4):
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(model, loader(range(24), 6, **how))
        return model.seen

    assert orders(FastDataLoader, executor=executor) == orders(DataLoader)


@each(("executor", "workers"), READERS)
@each("limit", [1.0, 3])
def test_a_loader_that_is_made_anew_gives_the_first_pass_of_its_sampler(
    executor, workers, limit, tmp_path
) -> None:
    def sampler() -> RandomSampler:
        return RandomSampler(Rows(), generator=torch.Generator().manual_seed(4))

    class Module(FastDataModule):
        def train_dataloader(self) -> Any:
            return self.make_loader(Rows(), stage="train", sampler=sampler())

    module = Learner(lambda batch: batch[:, 0].tolist())
    trainer = quiet_trainer(
        tmp_path, max_epochs=2, reload_dataloaders_every_n_epochs=1, limit_train_batches=limit
    )
    options = LoaderOptions(executor=executor, num_workers=workers, probe=False)
    trainer.fit(module, datamodule=Module(4, options=options))
    one = [batch[:, 0].tolist() for batch in DataLoader(Rows(), 4, sampler=sampler())]
    assert module.seen == 2 * one[: len(one) if limit == 1.0 else limit]


ORDERS = (
    {"sampler": Given(*torch.arange(6)), "batch_size": 2},
    {"sampler": Given(*np.arange(6, dtype=np.int32)), "batch_size": 2},
    {"batch_sampler": Given(*torch.arange(6).split(2))},
    {"batch_sampler": Given(*np.arange(6).reshape(3, 2))},
    {"batch_sampler": Given((0, 1), range(2, 4), [4, 5])},
    {"sampler": Given(*torch.arange(3)), "batch_size": None},
    {"sampler": Given([1], [2]), "batch_size": None},
    {"sampler": Given(np.arange(2), np.arange(3)), "batch_size": None},
)


@each("order", ORDERS)
@each("kind", [Kinds, Together])
def test_indices_reach_the_dataset_as_the_sampler_gave_them(kind, order) -> None:
    # As many workers as there are, torch's get the same.
    wanted = [list(map(str, batch)) for batch in DataLoader(kind(), num_workers=1, **order)]
    for executor, workers in (*READERS, ("workers", 2)):
        loader = FastDataLoader(kind(), num_workers=workers, executor=executor, **order)
        assert [list(map(str, batch)) for batch in loader] == wanted, (executor, workers)


class UsesItAgain(Sampler):
    """Gives the same list, array or tensor each time, with other numbers in it."""

    def __init__(self, batch: Any) -> None:
        self.batch, self.asked = batch, 0

    def __len__(self) -> int:
        return 60

    def __iter__(self) -> Iterator[Any]:
        for first in range(0, 240, 4):
            self.asked += 1
            for place in range(4):
                self.batch[place] = first + place
            yield self.batch


@each("ahead", [1, 16])
@each("make", [list, np.array, torch.tensor])
def test_a_batch_sampler_may_use_its_memory_again_and_is_not_asked_long_before(make, ahead) -> None:
    sampler, seen = UsesItAgain(make([0] * 4)), []
    how = {"num_workers": 1, "prefetch_factor": ahead, "executor": "gather"}
    rows = TensorDataset(torch.arange(240))
    for given, (batch,) in enumerate(FastDataLoader(rows, batch_sampler=sampler, **how)):
        assert sampler.asked <= given + 1 + max(ahead, 2)
        seen += batch.tolist()
    assert seen == list(range(240))


class Lowest(Sampler):
    """Gives the sample of the lowest weight, as it is when that is asked for."""

    def __init__(self) -> None:
        self.weights = torch.zeros(24)

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        for _ in range(24):
            yield int(self.weights.argmin())


def chosen_by(kind: Any, then: int | None = None, **how: Any) -> list[list[int]]:
    """Return what two epochs read, each step of which raises the weights of its samples.

    ``then``: ``prefetch_factor`` that a program sets before the second one.
    """
    sampler = Lowest()
    loader, seen = kind(Rows(), 2, sampler=sampler, **how), []
    for epoch in range(2):
        if epoch and then is not None:
            loader.prefetch_factor = then
        for batch in loader:
            seen.append(batch[:, 0].tolist())
            sampler.weights.index_add_(0, batch[:, 0], torch.ones(2))
    return seen


@each(("workers", "prefetch"), [(0, None), (1, None), (1, 3), (3, 1)])
def test_a_sampler_that_looks_at_what_steps_write_gives_torchs_order(workers, prefetch) -> None:
    how = {"num_workers": workers, "prefetch_factor": prefetch}
    assert chosen_by(FastDataLoader, executor="workers", **how) == chosen_by(DataLoader, **how)


def test_a_prefetch_factor_that_is_set_later_gives_torchs_order() -> None:
    how = {"num_workers": 1, "prefetch_factor": 3, "then": 1}
    assert chosen_by(FastDataLoader, executor="workers", **how) == chosen_by(DataLoader, **how)


def test_another_sampler_in_the_batch_sampler_gives_torchs_order() -> None:
    def chosen(loader: Any) -> list[list[int]]:
        seen = [batch[:, 0].tolist() for batch in loader]
        loader.batch_sampler.sampler = sampler = Lowest()
        for batch in loader:
            seen.append(batch[:, 0].tolist())
            sampler.weights.index_add_(0, batch[:, 0], torch.ones(2))
        return seen

    workers = FastDataLoader(Rows(), 2, num_workers=1)
    assert chosen(workers) == chosen(DataLoader(Rows(), 2, num_workers=1))
    with pytest.warns(FastDataWarning, match="changed Rows, or its sampler, while it is read"):
        found = chosen(FastDataLoader(Rows(), 2, num_workers="auto"))
    assert found == chosen(DataLoader(Rows(), 2))


def test_workers_that_are_added_read_what_the_others_read_or_are_refused() -> None:
    data = Rows()
    how = {"num_workers": 1, "executor": "workers", "persistent_workers": "unchanged"}
    loader = FastDataLoader(data, 2, **how)
    batches = iter(loader)
    next(batches)
    loader.set_workers(2)
    data.number = 5
    with pytest.raises(WorkerError, match="would not read what the others do"):
        loader.set_workers(3)
    assert {int(row[1]) for batch in batches for row in batch} == {0}
    assert {int(row[1]) for batch in loader for row in batch} == {5}
    loader.close()


@pytest.mark.parametrize("changes", [False, True])
def test_a_worker_in_the_place_of_a_dead_one_that_reads_something_else_is_told_of(changes) -> None:
    data = Rows()
    loader = FastDataLoader(data, 1, num_workers=1, executor="workers", prefetch_factor=1)
    batches = iter(loader)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        seen = [next(batches)]
        data.number = 5 if changes else 0
        (child,) = batches.executor.children.values()
        child.process.kill()
        for batch in batches:
            seen.append(batch)
            if int(batch[0, 1]) == 5:
                assert told
    assert [int(batch[0, 0]) for batch in seen] == list(range(24))
    assert any("may read other samples" in str(each.message) for each in told) is changes
    assert child.process.exitcode == -signal.SIGKILL
    loader.close()


def test_loaders_without_workers_are_given_none_unless_that_is_asked_for() -> None:
    given = DataLoader(Rows(), 2)
    kept = FastDataModule.from_loaders(given).train_dataloader()
    assert (kept.num_workers, kept.training.chosen) == (0, False)
    options = {"options": LoaderOptions(executor="workers")}
    asked = FastDataModule.from_loaders(given, num_workers="auto", **options).train_dataloader()
    assert asked.num_workers > 0
    sampled = DataLoader(Rows(), 2, sampler=Given(*range(6)), num_workers=2)
    assert FastDataModule.from_loaders(sampled).train_dataloader().num_workers == 2
    assert FastDataLoader(Rows(), 2).num_workers == 0


def test_only_what_steps_change_is_warned_of(recwarn) -> None:
    class Counts(Rows):
        def __getitem__(self, index: Any) -> torch.Tensor:
            self.number += 1
            return super().__getitem__(index)

    list(FastDataLoader(Counts(), 2, num_workers="auto"))
    assert not [each for each in recwarn if each.category is FastDataWarning]


CONFIG: dict[str, Any] = {}


class Cropped(Rows):
    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.tensor([int(index), CONFIG["crop"]])


def test_a_global_that_holds_plain_data_by_now_is_read_as_torch_reads_it() -> None:
    found = []
    for make, how in (DataLoader, {}), (FastDataLoader, {"persistent_workers": "unchanged"}):
        CONFIG.update(net=torch.nn.Identity(), crop=20)
        loader = make(Cropped(), 8, num_workers=1, **how)
        epochs = [torch.cat(list(loader)).tolist()]
        del CONFIG["net"]
        CONFIG["crop"] = 10
        epochs.append(torch.cat(list(loader)).tolist())
        found.append(epochs)
    assert found[0] == found[1]


def hugging_face(_: object) -> Any:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": list(range(16))})
    return rows.to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=4)


DRAWN_BY_EPOCH = {
    "mixture": lambda _: Mixture({"a": range(8), "b": range(8, 16)}),
    "packs": lambda _: pack([[number] * 5 for number in range(8)], tokens=8),
    "pictures": lambda folder: FastImageFolder(folder, size=8),
    "Hugging Face": hugging_face,
}


@each("workers", [0, 1])
@each("name", DRAWN_BY_EPOCH)
def test_an_epoch_that_the_program_sets_on_a_dataset_is_read(name, workers, tmp_path) -> None:
    (tmp_path / "a").mkdir(exist_ok=True)
    pixels = np.arange(3072, dtype=np.uint8).reshape(32, 32, 3)
    Image.fromarray(pixels).save(tmp_path / "a" / "0.png")

    def read(kind: Any, epochs: list[int]) -> list[Any]:
        dataset = DRAWN_BY_EPOCH[name](tmp_path)
        loader = kind(dataset, 4, num_workers=workers, collate_fn=str)
        found = []
        for epoch in epochs:
            dataset.set_epoch(epoch)
            found.append(list(loader))
        return found

    for epochs in [5, 6], [0, 1], [3, 1]:
        assert read(FastDataLoader, epochs) == read(DataLoader, epochs)


def test_epochs_are_counted_on_from_one_that_the_program_has_set() -> None:
    mixture = Mixture({"a": range(8), "b": range(8, 16)})
    loader, epochs = FastDataLoader(mixture, 4), []
    for epoch in (None, 4, None, 0, 0, None):
        if epoch is not None:
            mixture.set_epoch(epoch)
        list(loader)
        epochs.append(mixture.epoch)
    assert epochs == [0, 4, 5, 0, 0, 1]
    list(FastDataLoader(mixture, 4))
    assert mixture.epoch == 0

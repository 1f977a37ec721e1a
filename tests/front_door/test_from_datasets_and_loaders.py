"""Datasets and DataLoaders that a user has become a data module that trains on the same batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from misses import each
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)
from trainers import Learner, quiet_trainer

from lightning_fastdata import (
    DataThroughputCallback,
    FastDataError,
    FastDataLoader,
    FastDataModule,
    LoaderOptions,
)
from lightning_fastdata.errors import DatasetError, OptionsError


class Numbers(Dataset):
    """Its samples are their indices; Python code, so that workers read it."""

    first = 0

    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        info = get_worker_info()
        return {
            "x": torch.tensor(self.first + index),
            "workers": 0 if info is None else info.num_workers,
        }


class Seen(Learner):
    """Notes the batches of each stage."""

    def __init__(self) -> None:
        super().__init__(plain)
        self.batches: dict[str, list[Any]] = {
            "train": self.seen,
            "val": [],
            "test": [],
            "predict": [],
        }

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.batches["val"].append(plain(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.batches["test"].append(plain(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.batches["predict"].append(plain(batch))


def plain(batch: Any) -> Any:
    """Return the numbers of a batch, however it is built."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    if isinstance(batch, dict):
        return {k: plain(v) for k, v in batch.items()} if "x" not in batch else plain(batch["x"])
    return [plain(part) for part in batch] if isinstance(batch, list | tuple) else batch


trainer = partial(quiet_trainer, num_sanity_val_steps=0)


def fitted(data: Any, **arguments: Any) -> dict[str, list[Any]]:
    model = Seen()
    trainer(**arguments).fit(model, datamodule=data)
    return model.batches


# -- from_datasets and the constructor -------------------------------------------------------------


def test_from_datasets_takes_the_arguments_of_lightnings_own() -> None:
    data = FastDataModule.from_datasets(Numbers(), Numbers(6), None, None, 4, 2, pin_memory=False)
    loader = data.train_dataloader()
    assert (loader.batch_size, loader.num_workers, loader.pin_memory) == (4, 2, False)
    seen = fitted(data)
    assert sorted(chain(*seen["train"])) == list(range(20))
    assert seen["val"] == [[0, 1, 2, 3], [4, 5]]
    assert "set by you" in data.explain()


def test_common_loader_arguments_say_the_same_as_options() -> None:
    how = {"persistent_workers": False, "prefetch_factor": 3, "pin_memory": False}
    assert FastDataModule(num_workers=2, **how).options == LoaderOptions(num_workers=2, **how)


@pytest.mark.parametrize(
    ("shuffle", "train_in_order", "val_in_order"),
    [(None, False, True), (False, True, True), (True, False, True), ({"val": True}, False, False)],
)
def test_shuffle_is_for_training_or_by_stage(shuffle, train_in_order, val_in_order) -> None:
    how = {"batch_size": 4, "num_workers": 0, "shuffle": shuffle}
    seen = fitted(FastDataModule.from_datasets(Numbers(), Numbers(), **how))
    for stage, in_order in (("train", train_in_order), ("val", val_in_order)):
        order = list(chain(*seen[stage]))
        assert (order == list(range(20))) is in_order
        assert sorted(order) == list(range(20))


@each(
    ("arguments", "text"),
    [
        ({"num_workers": 2, "options": LoaderOptions(num_workers=3)}, "contradict"),
        ({"options": {"val": LoaderOptions()}}, "is a dict; pass LoaderOptions"),
        ({"shuffle": {"training": True}}, "'training': True.*by stage"),
        ({"shuffle": "yes"}, "shuffle='yes'"),
        ({"num_workers": -1}, "num_workers is -1"),
    ],
)
def test_a_contradiction_or_an_impossible_value_is_named(arguments, text) -> None:
    with pytest.raises(FastDataError, match=text):
        FastDataModule.from_datasets(Numbers(), **arguments)


# -- a dataset in the place of its method ----------------------------------------------------------


class Called:
    """A dataset without torch's base class, and with a ``__call__`` that makes none."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)

    def __call__(self) -> None:
        """Return nothing, as what is called for something else may."""


PLACED: dict[str, Any] = {
    "datasets": lambda: (Numbers(9), Numbers(5)),
    "splits": lambda: random_split(Numbers(9), [6, 3], generator()),
    "tensors": lambda: (torch.arange(9), torch.arange(3)),
    "streams": lambda: (Halves(), Halves()),
    "several": lambda: ({"a": Numbers(4), "b": Numbers(6)}, [Numbers(3), Numbers(5)]),
    "none to validate on": lambda: (Numbers(9), None),
    "functions": lambda: (lambda: Numbers(9), lambda: Numbers(5)),
    "called": lambda: (Called(), Called()),
}


class Placed(FastDataModule):
    kind: str

    def setup(self, stage: str) -> None:
        self.train_dataset, self.val_dataset = PLACED[self.kind]()


@each("kind", PLACED)
def test_a_dataset_that_setup_puts_in_the_place_of_its_method_is_read(kind) -> None:
    placed = Placed(batch_size=4, num_workers=0)
    placed.kind = kind
    train, val = PLACED[kind]()
    if kind == "functions":
        train, val = train(), val()
    same = FastDataModule.from_datasets(train, val, batch_size=4, num_workers=0)
    assert fitted(placed, max_epochs=2) == fitted(same, max_epochs=2)
    if isinstance(train, Dataset) and kind not in ("streams", "functions"):
        assert len(placed.train_dataset) == len(train)


# -- from_loaders ----------------------------------------------------------------------------------


class Buckets:
    """A batch sampler that is no BatchSampler: batches of different sizes."""

    def __init__(self) -> None:
        self.batches = [[0, 1], [7, 8, 9], [19], [4, 4, 4, 4]]

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def joined(samples: list[Any]) -> Any:
    return torch.stack([sample["x"] for sample in samples]) * 10


class Halves(IterableDataset):
    def __iter__(self) -> Any:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, 11, step):
            yield {"x": index}


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


LOADERS: dict[str, Any] = {
    "in order": lambda: DataLoader(Numbers(), 3),
    "drop_last": lambda: DataLoader(Numbers(), 3, drop_last=True),
    "collate_fn": lambda: DataLoader(Numbers(), 3, collate_fn=joined),
    "own order": lambda: DataLoader(Numbers(), 3, sampler=[5, 1, 1, 0]),
    "weighted": lambda: DataLoader(
        Numbers(), 3, sampler=WeightedRandomSampler(np.arange(20), 9, generator=generator())
    ),
    "subset": lambda: DataLoader(
        Numbers(), 3, sampler=SubsetRandomSampler(range(4, 9), generator=generator())
    ),
    "with replacement": lambda: DataLoader(
        Numbers(), 3, sampler=RandomSampler(Numbers(), True, 8, generator())
    ),
    "shuffled by a generator": lambda: DataLoader(
        Numbers(), 3, shuffle=True, generator=generator()
    ),
    "batch sampler": lambda: DataLoader(
        Numbers(), batch_sampler=BatchSampler(SequentialSampler(range(8)), 3, True)
    ),
    "buckets": lambda: DataLoader(Numbers(), batch_sampler=Buckets()),
    "single samples": lambda: DataLoader(Numbers(), batch_size=None),
    "workers": lambda: DataLoader(Numbers(), 3, num_workers=1, timeout=60, in_order=True),
    "stream": lambda: DataLoader(Halves(), 3),
    "stream of two workers": lambda: DataLoader(Halves(), 3, num_workers=2),
}


@pytest.mark.cases(6)
@pytest.mark.parametrize("kind", LOADERS)
def test_training_gets_the_batches_that_the_loader_gives(kind) -> None:
    seed_everything(1, verbose=False)
    model = Seen()
    trainer(max_epochs=2).fit(model, LOADERS[kind]())
    seed_everything(1, verbose=False)
    workers = {"num_workers": 1} if kind == "stream" else {}
    data = FastDataModule.from_loaders(LOADERS[kind](), **workers)
    assert fitted(data, max_epochs=2)["train"] == model.batches["train"]


class Turning(Sampler[int]):
    """Has another order in each epoch that it is told."""

    epoch = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[int]:
        return iter([(self.epoch + i) % 5 for i in range(5)])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.parametrize("batch_size", [2, None])
def test_evaluation_asks_a_sampler_in_the_epoch_that_lightning_tells_it(batch_size) -> None:
    def loaders() -> list[Any]:
        return [DataLoader(Numbers(), batch_size, sampler=Turning()) for _ in range(2)]

    model = Seen()
    trainer(max_epochs=3).fit(model, *loaders())
    seen = fitted(FastDataModule.from_loaders(*loaders()), max_epochs=3)
    assert (seen["train"], seen["val"]) == (model.batches["train"], model.batches["val"])
    assert len({str(batch) for batch in seen["val"][:: len(seen["val"]) // 3]}) == 3


class Columns(Numbers):
    """Reads a batch at once, in a form that its ``collate_fn`` knows."""

    def __init__(self, form: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.form = form

    def __getitems__(self, indices: list[int]) -> Any:
        return self.form(torch.tensor(indices))


def as_it_is(batch: Any) -> Any:
    return batch


@each("form", [lambda x: {"x": x}, lambda x: iter(x.tolist()), lambda x: SimpleNamespace(x=x)])
def test_a_batch_that_a_dataset_reads_at_once_is_of_any_form_that_collate_fn_takes(form) -> None:
    def loader() -> Any:
        collate = list if form(torch.zeros(1)).__class__ is type(iter([])) else as_it_is
        return DataLoader(Columns(form), 4, collate_fn=collate)

    model = Seen()
    trainer().fit(model, loader())
    seen = fitted(FastDataModule.from_loaders(loader(), num_workers="auto"))["train"]
    assert [str(batch) for batch in seen] == [str(batch) for batch in model.seen]
    assert len(seen) == 5


def test_a_plain_shuffle_becomes_the_one_by_seed_and_epoch() -> None:
    loaders = [DataLoader(Numbers(), 4, shuffle=True) for _ in range(2)]
    seen = fitted(FastDataModule.from_loaders(*loaders, seed=5), max_epochs=2)
    same = FastDataModule.from_datasets(Numbers(), batch_size=4, seed=5, num_workers=0)
    assert seen["train"] == fitted(same, max_epochs=2)["train"]
    assert seen["val"][-5:] == seen["val"][-10:-5]
    assert [*chain(*seen["val"][-5:])] != list(range(20))


def test_where_no_batches_are_made_drop_last_leaves_none_out() -> None:
    data = FastDataModule.from_loaders(DataLoader(Numbers(3), batch_size=None), drop_last=True)
    assert fitted(data)["train"] == [0, 1, 2]


def test_each_stage_and_each_loader_keeps_its_own_batches() -> None:
    data = FastDataModule.from_loaders(
        {"few": DataLoader(Numbers(), 2), "many": DataLoader(Numbers(), 4)},
        val=[DataLoader(Numbers(4), 3), DataLoader(Numbers(3), 1)],
        test=DataLoader(Numbers(), sampler=[3, 1]),
        predict=DataLoader(Numbers(5), 2),
    )
    seen = fitted(data)
    assert seen["train"][:2] == [
        {"few": [0, 1], "many": [0, 1, 2, 3]},
        {"few": [2, 3], "many": [4, 5, 6, 7]},
    ]
    assert seen["val"] == [[0, 1, 2], [3], [0], [1], [2]]
    model = Seen()
    trainer().test(model, datamodule=data, verbose=False)
    trainer().predict(model, datamodule=data)
    assert (model.batches["test"], model.batches["predict"]) == ([[3], [1]], [[0, 1], [2, 3], [4]])


@each(
    "given",
    [
        lambda: None,
        list,
        tuple,
        dict,
        lambda: [DataLoader(Numbers(4), 3)],
        lambda: (DataLoader(Numbers(4), 3), DataLoader(Numbers(3), 1)),
        lambda: {"a": DataLoader(Numbers(4), 3), "b": DataLoader(Numbers(3), 1)},
    ],
)
def test_validation_loaders_are_taken_as_a_trainer_takes_them(given) -> None:
    model, train = Seen(), DataLoader(Numbers(4), 2)
    trainer().fit(model, train, given())
    assert fitted(FastDataModule.from_loaders(train, given())) == model.batches


def test_workers_are_chosen_unless_they_are_asked_for() -> None:
    loader = DataLoader(Numbers(), 4, num_workers=2, prefetch_factor=5)
    chosen = FastDataModule.from_loaders(loader)
    assert chosen.options == LoaderOptions()
    assert "set by you" not in chosen.explain()
    asked = FastDataModule.from_loaders(loader, num_workers=1)
    assert asked.train_dataloader().num_workers == 1
    stream = DataLoader(Halves(), 3, num_workers=2, timeout=9)
    asked = FastDataModule.from_loaders(
        stream, num_workers=1, options=LoaderOptions(timeout=7)
    ).train_dataloader()
    assert (asked.num_workers, asked.timeout) == (1, 7)


def test_the_batch_size_finder_scales_all_loaders_in_proportion() -> None:
    data = FastDataModule.from_loaders(
        {"few": DataLoader(Numbers(64), 4), "many": DataLoader(Numbers(64), 8)},
        num_workers=0,
    )
    assert data.batch_size == 4
    tuner = Tuner(trainer(max_steps=1))
    found = tuner.scale_batch_size(Seen(), datamodule=data, max_trials=3, init_val=2)
    # Before 2.6, Lightning answers with the size that it would have tried next.
    assert found == data.batch_size
    assert found in (8, 16)
    assert {k: v.batch_size for k, v in data.train_dataloader().items()} == {
        "few": found,
        "many": 2 * found,
    }
    assert "num_workers" in data.explain()


class Odd(DataLoader):
    def __iter__(self) -> Any:
        yield {"x": torch.tensor([3])}


def test_what_cannot_be_taken_apart_is_named_with_what_to_do() -> None:
    class Data(FastDataModule):
        def train_dataset(self) -> Any:
            return [DataLoader(Numbers()), DataLoader(Numbers())]

    for wrong, text in (
        (lambda: FastDataModule.from_loaders(Numbers()), "from_datasets"),
        (lambda: FastDataModule.from_loaders({"a": [1]}), r"train\['a'\] is of type list"),
        (lambda: FastDataModule.from_loaders(Odd(Numbers())), "in its own way"),
        (lambda: FastDataModule.from_loaders(CombinedLoader({})), "takes torch DataLoaders"),
        (lambda: FastDataModule.from_loaders(DataLoader(Numbers()), batch_size=2), "batch_size"),
        (lambda: fitted(Data()), r"Data.train_dataset\(\) returned a DataLoader.*from_loaders"),
    ):
        with pytest.raises(FastDataError, match=text):
            wrong()


def read(loader):
    return [batch["x"].tolist() for batch in loader]


def three_passes(loader):
    """Return the batches of three passes, each of which has each sample in another order."""
    passes = [read(loader) for _ in range(3)]
    assert [sorted(chain(*each)) for each in passes] == 3 * [list(range(20))]
    assert len({str(each) for each in passes}) == 3
    return passes


@each("workers", [0, 2, "auto"])
@each("made", ["from_datasets", "from_loaders"])
def test_a_plain_loop_over_a_loader_shuffles_each_pass_anew_and_goes_on_within_one(made, workers):
    how = {"seed": 1, "num_workers": workers}

    def loader():
        if made == "from_datasets":
            data = FastDataModule.from_datasets(Numbers(), batch_size=4, **how)
        else:
            data = FastDataModule.from_loaders(DataLoader(Numbers(), 4, shuffle=True), **how)
        return data.train_dataloader()

    passes = three_passes(loader())
    stopped, again = loader(), loader()
    assert read(stopped) == passes[0]
    given = iter(stopped)
    assert [next(given)["x"].tolist() for _ in range(2)] == passes[1][:2]
    again.load_state_dict(stopped.state_dict())
    assert [read(again), read(again)] == [passes[1][2:], passes[2]]


def test_a_plain_loop_behind_a_training_shuffles_each_pass_anew_and_leaves_its_checkpoint_alone():
    data = FastDataModule.from_datasets(Numbers(), batch_size=4, seed=1)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Seen(), datamodule=data)

    def place():
        (saved,) = data.state_dict()["lightning_fastdata"]["loaders"].values()
        return saved["epoch"], saved["batches"], saved["samples"]

    before = place()
    three_passes(trainer.train_dataloader)
    assert place() == before == (1, 0, 0)


class Shifts(Callback):
    """Changes the dataset between two epochs."""

    def __init__(self, data: Numbers) -> None:
        self.data = data

    def on_train_epoch_end(self, *_: object) -> None:
        self.data.first += 100


def test_workers_that_stay_while_nothing_changes_do_not_stay_in_a_training_that_changes_it() -> (
    None
):
    data, model = Numbers(4), Seen()
    own = {"persistent_workers": "unchanged", "generator": torch.Generator()}
    loader = FastDataLoader(data, 4, num_workers=1, **own)
    trainer = quiet_trainer(max_epochs=2, callbacks=[Shifts(data)])
    trainer.fit(model, datamodule=FastDataModule.from_loaders(loader, num_workers=1))
    assert model.batches["train"] == [[0, 1, 2, 3], [100, 101, 102, 103]]


class GoesOn(Halves):
    """A stream without end that goes on in the next epoch where the last one was left."""

    at = 0

    def __iter__(self) -> Any:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        while True:
            self.at += 1
            yield {"x": first + step * self.at}


def test_workers_that_stay_with_a_stream_stay_also_where_their_number_is_chosen() -> None:
    loader = DataLoader(GoesOn(), 3, num_workers=2, persistent_workers=True)
    seen = {}
    for number in ("torch", 2, "auto"):
        data = loader if number == "torch" else FastDataModule.from_loaders(loader)
        if number == "auto":
            data = FastDataModule.from_loaders(loader, num_workers=number)
        model = Seen()
        run = trainer(max_epochs=2, limit_train_batches=4)
        run.fit(model, **{"train_dataloaders" if data is loader else "datamodule": data})
        seen[number] = model.batches["train"]
    assert seen[2] == seen["torch"]
    told = [*chain(*seen["auto"])]
    assert len({*told}) == len(told) == 24  # nothing comes twice


class KeepsIt(FastDataModule):
    """Keeps the batch size to itself, and has a pipeline of its own."""

    def __init__(self, batch_size: int = 2, **arguments: Any) -> None:
        super().__init__(**{"augment": plain, **arguments})


def test_loaders_in_a_class_that_keeps_the_batch_size_to_itself_are_refused() -> None:
    with pytest.raises(
        OptionsError, match=r"batches of 8, and KeepsIt has not passed batch_size on"
    ):
        KeepsIt.from_loaders(DataLoader(Numbers(), 8))
    assert KeepsIt.from_loaders(DataLoader(Numbers(), 32)).batch_size == 32


def test_an_argument_that_is_none_is_given_all_the_same() -> None:
    assert KeepsIt.from_datasets(Numbers()).augment is plain
    assert KeepsIt.from_datasets(Numbers(), augment=None).augment is None
    with pytest.raises(OptionsError, match="guard"):
        FastDataModule.from_datasets(Numbers(), guard=None)


@each("made", [FastDataModule.from_datasets, FastDataModule.from_loaders])
@each("validates", [True, False])
@each("limits", [{}, {"limit_val_batches": 2}, {"limit_val_batches": 0.5}])
def test_training_alone_is_no_validation_of_length_zero(made, validates, limits) -> None:
    given = DataLoader(Numbers(), 4) if made == FastDataModule.from_loaders else Numbers()
    data = made(given, num_workers=0)
    trainer = quiet_trainer(max_epochs=2, **limits)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(Seen() if validates else Learner(), datamodule=data)
    texts = [str(one.message) for one in said]
    assert [text for text in texts if "zero" in text or "val_" in text or "valid" in text] == []
    assert trainer.global_step == 2 * len(data.train_dataloader())
    with pytest.raises(DatasetError, match=r"FastDataModule has no val dataset: val_dataset\(\)"):
        trainer.validate(Seen(), datamodule=data)


@each(
    ("call", "said"),
    [
        (lambda: FastDataModule(batchsize=4), "FastDataModule.*'batchsize'"),
        (lambda: FastDataModule.from_datasets(Numbers(), wrong=1), "FastDataModule.*'wrong'"),
        (lambda: FastDataModule.from_loaders(wrong=1), "FastDataModule.*'wrong'"),
        (lambda: FastDataModule(4, LoaderOptions()), "FastDataModule.* takes"),
        (lambda: DataThroughputCallback(figure=False), "DataThroughputCallback.*'figure'"),
    ],
)
def test_an_argument_too_many_is_told_by_the_public_name(call, said) -> None:
    with pytest.raises(TypeError, match=rf"^{said}"):
        call()


def test_options_of_workers_say_that_there_are_none() -> None:
    data = FastDataModule.from_datasets(Numbers(), num_workers=0, prefetch_factor=4)
    (line,) = [line for line in data.explain().splitlines() if line.startswith("prefetch_factor")]
    assert line.split(maxsplit=3)[1:] == ["4", "you", "not used: no workers"]


class NamedColumns(dict):
    """Rows of columns that have names, of which it returns a batch, as TensorDict does."""

    def __len__(self):
        return len(self["x"])

    def __getitems__(self, indices):
        return NamedColumns({name: column[indices] for name, column in self.items()})


def test_a_mapping_that_reads_rows_is_one_dataset():
    data = FastDataModule.from_datasets(
        NamedColumns(x=torch.arange(8)),
        batch_size=4,
        shuffle=False,
        collate_fn=lambda rows: rows["x"],
    )
    assert [batch.tolist() for batch in data.train_dataloader()] == [[0, 1, 2, 3], [4, 5, 6, 7]]

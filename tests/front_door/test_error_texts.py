"""What is given wrongly is told early, with what was given and what to give instead."""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
from functools import partial

import albumentations as A
import numpy as np
import pytest
import torch
from misses import each
from PIL import Image
from samples import Samples, Stream
from torch.utils.data import DataLoader, Dataset
from trainers import Learner, quiet_trainer

from lightning_fastdata import (
    DataThroughputCallback,
    FastDataError,
    FastDataLoader,
    FastDataModule,
    LoaderOptions,
)
from lightning_fastdata.errors import OptionsError

torch.set_num_threads(1)

FLIP = A.Compose([A.HorizontalFlip()])


def eight(sample):
    """Eight samples: what is given, or what a function returns of the index."""
    return Samples(sample if callable(sample) else lambda _: sample, 8)


EIGHT = eight((torch.zeros(4), 1))


class NoLength(Dataset):
    def __getitem__(self, i):
        return torch.zeros(4)


class OddLength(NoLength):
    def __len__(self):
        return 2.5  # noqa: PLE0303


class NegativeLength(NoLength):
    def __len__(self):
        return -1  # noqa: PLE0303


@dataclasses.dataclass
class Pair:
    x: object


Graph = type("Data", (), {"__module__": "torch_geometric.data.data"})
Scan = type("ScalarImage", (), {"__module__": "torchio.data.image"})


class MadeInSetup(FastDataModule):
    def setup(self, stage):
        self.data = EIGHT

    def train_dataset(self):
        return self.data


def train(module, tmp_path, callbacks=()):
    model = Learner(lambda batch: len(batch["x"] if isinstance(batch, dict) else batch[0]))
    trainer = quiet_trainer(str(tmp_path), devices=1, callbacks=list(callbacks))
    trainer.fit(model, datamodule=module)
    return model


NO_WORKERS = LoaderOptions(num_workers=0)

DATASETS = {
    "a path": ("/data/train", "the path .*Open what is there"),
    "a class": (Samples, r"the class Samples, not a dataset. Make one of it: Samples\(...\)"),
    "a generator": ((i for i in range(3)), "the generator .*not a dataset.*IterableDataset"),
    "no length": (NoLength(), "NoLength, of which no order.*no __len__.*sampler.*IterableDataset"),
    "half a sample": (OddLength(), "__len__.. raised TypeError: 'float'"),
    "less than none": (NegativeLength(), "__len__.. raised ValueError"),
    "None in a list": ([EIGHT, None], r"\(\)\[1\] is None, not a dataset"),
    "None in a dict": ({"a": EIGHT, "b": None}, r"\(\)\['b'\] is None"),
    "lists in a list": ([[EIGHT], [EIGHT]], "list of datasets.*ConcatDataset.*flat"),
    "a list in a dict": ({"a": [EIGHT, EIGHT]}, r"\['a'\] is a list of datasets"),
}


@each(("given", "told"), DATASETS.values())
def test_what_is_no_dataset_is_called_by_its_name(tmp_path, given, told):
    class Photos(FastDataModule):
        def train_dataset(self):
            return given

    with pytest.raises(FastDataError, match=f"Photos.train_dataset.*{told}"):
        train(Photos(4), tmp_path)


SAMPLES = {
    "None": (lambda i: None, "It is None, of which no batch can be made.*collate_fn"),
    "None in a tuple": ((torch.zeros(4), None), r"At \[1\] it holds None"),
    "None in a dict": ({"x": torch.zeros(4), "mask": None}, r"At \['mask'\] it holds None"),
    "None in a dataclass": (Pair(None), r"At \.x it holds None"),
    "an image": ((Image.new("RGB", (4, 4)), 1), r"PIL.Image.Image.*numpy.asarray"),
    "a graph": (Graph(), "torch_geometric.data.data.Data.*Batch.from_data_list"),
    "a scan": ({"t1": Scan()}, r"torchio.data.image.ScalarImage.*name: image.data"),
    "a date": (datetime.datetime(2020, 1, 1), "datetime.datetime, which torch.*collate_fn"),
    "a path": ((torch.zeros(4), pathlib.Path("/x")), r"\[1\] .*Path.*torch's collation"),
    "objects": (np.array([None, 1], object), "array of object"),
    "a set": (({1, 2},), r"\[0\] it holds a builtins.set"),
    "a dataset": (EIGHT, r"It is a dataset itself.* list, a tuple or a dict"),
}


@pytest.mark.parametrize(("sample", "told"), SAMPLES.values(), ids=SAMPLES)
def test_samples_of_which_no_batch_can_be_made_are_told_before_the_workers_start(
    tmp_path, sample, told
):
    dataset = eight(sample)
    module = FastDataModule.from_datasets(dataset, batch_size=4)
    with pytest.raises(FastDataError, match=f"Sample 0 of .*train_dataset.*{told}"):
        train(module, tmp_path)


def test_samples_that_a_collate_fn_sorts_out_are_its_own_affair(tmp_path):
    def without_none(samples):
        return torch.utils.data.default_collate([s for s in samples if s is not None])

    dataset = eight(lambda i: None if i % 4 == 0 else (torch.zeros(4), i))
    module = FastDataModule.from_datasets(
        dataset, batch_size=4, collate_fn=without_none, options=NO_WORKERS
    )
    assert sum(train(module, tmp_path).seen) == 6


LATER = {
    "one None": (
        lambda i: (torch.zeros(4), None if i == 5 else 1),
        r"In sample \d of them: At \[1\] it holds None",
    ),
    "other keys": (lambda i: {"a": 1} if i % 2 else {"a": 1, "b": 2}, "Keys found: .*same keys"),
    "other lengths": (lambda i: [1] * (i + 1), "lists and sequences: padding"),
    "no order of bytes": (np.zeros(2, ">i4"), "byte order.* Sample 0 of them makes no batch alone"),
    "sparse": (torch.eye(2).to_sparse(), "sparse.* Sample 0 of them makes no batch alone"),
    "other sizes": (lambda i: torch.zeros(i + 1), r"Shapes found: \(.*one size"),
}


@pytest.mark.parametrize(("sample", "told"), LATER.values(), ids=LATER)
def test_samples_that_do_not_fit_together_are_told_with_what_differs(tmp_path, sample, told):
    module = FastDataModule.from_datasets(eight(sample), batch_size=8, options=NO_WORKERS)
    with pytest.raises(FastDataError, match=told):
        train(module, tmp_path)


def test_a_stream_that_batches_itself_is_told_how_to_be_taken(tmp_path):
    batches = Stream(lambda: iter([torch.zeros(4, 3), torch.zeros(2, 3)]))
    module = FastDataModule.from_datasets(batches, batch_size=2, options=NO_WORKERS)
    with pytest.raises(FastDataError, match=r"batches already.*batch_size=None"):
        train(module, tmp_path)
    with pytest.raises(FastDataError, match=r"make_loader\(dataset, stage=.train., batch_size=Non"):
        FastDataModule.from_datasets(batches, batch_size=None)


@pytest.mark.parametrize("made", [lambda: [1, 2], lambda: None])
def test_an_epoch_that_cannot_begin_tells_its_own_error_through_lightning(tmp_path, made):
    module = FastDataModule.from_datasets(Stream(made), batch_size=2, options=NO_WORKERS)
    with pytest.raises(TypeError, match="non-iterator"):
        train(module, tmp_path)


@pytest.mark.parametrize(
    "sample",
    [
        (np.zeros((3, 32, 32), np.uint8), 1),
        {"image": np.zeros((1, 28, 28), np.float32)},
        {"image": np.zeros((4, 20, 30), np.uint8)},
    ],
)
def test_channels_that_come_first_are_told_before_albumentations_mixes_them_up(tmp_path, sample):
    module = FastDataModule.from_datasets(eight(sample), batch_size=4, augment=FLIP)
    with pytest.raises(FastDataError, match=r"channels first.*transpose\(1, 2, 0\)"):
        train(module, tmp_path)


loader = partial(FastDataLoader, EIGHT)

ARGUMENTS = [
    (FastDataModule, {"seed": "a"}, "seed is 'a'.*whole numbers"),
    (FastDataModule, {"seed": 1.5}, "seed is 1.5"),
    (FastDataModule, {"seed": True}, "seed is True"),
    (FastDataModule, {"seed": [1]}, r"seed is \[1\]"),
    (FastDataModule, {"collate_fn": 3}, "collate_fn is 3.*function that takes the samples"),
    (FastDataModule, {"collate_fn": "pad"}, "collate_fn is 'pad'"),
    (FastDataModule, {"drop_last": "yes"}, "drop_last is 'yes'.*True and False"),
    (FastDataModule, {"image": 3.5}, "image"),
    (FastDataModule, {"mask": [1]}, "mask"),
    (FastDataModule, {"guard": True}, "guard"),
    (FastDataLoader, {"dataset": Samples}, "the class Samples"),
    (FastDataLoader, {"dataset": None}, "is None, not a dataset"),
    (
        FastDataLoader,
        {"dataset": DataLoader(EIGHT)},
        "a DataLoader, not a dataset.*loader.dataset",
    ),
    (FastDataLoader, {"dataset": NoLength()}, "no __len__"),
    (loader, {"executor": "threads"}, "executor is 'threads'.*'workers'"),
    (loader, {"collate_fn": 3}, "collate_fn is 3"),
    (loader, {"seed": "a"}, "seed is 'a'"),
    (loader, {"batch_size": "4"}, "batch_size is '4'"),
    (loader, {"num_workers": "4"}, "num_workers is '4'"),
    (loader, {"num_workers": 2.5}, "num_workers is 2.5"),
    (loader, {"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor is 0"),
    (loader, {"sampler": 3}, "sampler is 3"),
    (loader, {"transform": FLIP}, "as_batch_transform"),
    (loader, {"worker_init_fn": "f"}, "worker_init_fn is 'f'"),
    (DataThroughputCallback, {"every_n_steps": "a"}, "every_n_steps='a'"),
    (DataThroughputCallback, {"report": 3}, "report is 3"),
]


@each(("made", "arguments", "told"), ARGUMENTS)
def test_impossible_arguments_are_told_by_the_constructor(made, arguments, told):
    with pytest.raises(FastDataError, match=told):
        made(**arguments)


def test_whole_numbers_of_numpy_are_taken_as_pythons():
    module = FastDataModule.from_datasets(EIGHT, batch_size=np.int64(4))
    assert module.train_dataloader().batch_size == 4
    assert type(module.batch_size) is int
    assert DataThroughputCallback(every_n_steps=np.int64(5)).every_n_steps == 5


def test_datasets_that_are_made_in_setup_are_asked_for_after_it():
    for ask in (FastDataModule.explain, FastDataModule.train_dataloader):
        with pytest.raises(FastDataError, match=r"MadeInSetup.train_dataset\(\).*call setup\('fit"):
            ask(MadeInSetup(4))
    module = MadeInSetup(4)
    module.setup("fit")
    assert "MadeInSetup.train_dataset()" in module.explain()


class HuggingFaceLike:
    """Knows torch's protocol and none of its classes, as the datasets of Hugging Face do."""

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return {"x": torch.zeros(4)}

    def __getitems__(self, indices):
        return [self[i] for i in indices]


def test_a_list_of_hugging_face_datasets_is_a_list_of_datasets(tmp_path):
    several = [HuggingFaceLike(), HuggingFaceLike()]
    module = FastDataModule.from_datasets(several, batch_size=3, options=NO_WORKERS)
    loaders = module.train_dataloader()
    assert [len(loader) for loader in loaders] == [2, 2]
    splits = type("DatasetDict", (dict,), {})(train=several[0], test=several[1])
    with pytest.raises(FastDataError, match=r"DatasetDict of all splits \(train, test\)"):
        train(FastDataModule.from_datasets(splits), tmp_path)


def test_a_constructor_without_that_of_the_data_module_is_named(tmp_path):
    class Own(FastDataModule):
        def __init__(self):
            pass

        def train_dataset(self):
            return eight(torch.zeros(2))

    named = r"Own.__init__\(\) does not call super\(\).__init__"
    for use in (Own.explain, Own.train_dataloader, lambda own: train(own, tmp_path)):
        with pytest.raises(FastDataError, match=named):
            use(Own())


def test_a_stage_that_is_none_is_told_which_there_are():
    with pytest.raises(OptionsError, match="stage is 'training'; allowed are 'train', 'val'"):
        FastDataModule().make_loader(eight(torch.zeros(2)), stage="training")


@each("name", ["batch_size", "num_workers", "pin_memory"])
def test_an_array_in_the_place_of_one_value_is_named(name):
    with pytest.raises(OptionsError, match=rf"{name}.*array\(\[1, 2\]\)"):
        FastDataModule(**{name: np.array([1, 2])})


@each("made", ["from_datasets", "from_loaders"])
def test_training_on_what_was_made_without_data_for_it_says_how_to_give_it(made, tmp_path):
    data = eight(torch.zeros(2))
    given = {"val_dataset": data} if made == "from_datasets" else {"val": DataLoader(data, 4)}
    with pytest.raises(FastDataError, match=rf"or give one: .*{made}\(train"):
        train(getattr(FastDataModule, made)(**given), tmp_path)

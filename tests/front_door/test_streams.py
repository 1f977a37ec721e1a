"""Streams that share themselves out are read by several workers, each sample once."""

from __future__ import annotations

import itertools
import os
import warnings
from typing import Any

import albumentations as A
import numpy as np
import pytest
from front_door.other_streams import write_webdataset
from lightning.pytorch import Trainer
from misses import each
from torch.utils.data import (
    ChainDataset,
    DataLoader,
    IterableDataset,
    IterDataPipe,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper
from trainers import trained

from lightning_fastdata import FastDataLoader, FastDataModule, FastDataWarning, LoaderOptions
from lightning_fastdata.errors import OptionsError

COUNT = 23
SEVERAL = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")


class Split(IterableDataset):
    """Splits itself, and refuses to be read in the training process."""

    def __init__(self, begin: int = 0, end: int = COUNT) -> None:
        self.begin, self.end = begin, end
        self.process = os.getpid()

    def __iter__(self) -> Any:
        info = get_worker_info()
        assert os.getpid() != self.process
        assert info is not None
        for number in range(self.begin + info.id, self.end, info.num_workers):
            yield {"x": number}


class Around(IterableDataset):
    """A wrapper that knows nothing of workers."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Any:
        for sample in self.inner:
            yield {"x": sample["x"]}


class Whole(IterableDataset):
    """Does not split itself."""

    def __iter__(self) -> Any:
        for number in range(COUNT):
            yield {"x": number}


class Refuses(Whole):
    def __iter__(self) -> Any:
        info = get_worker_info()
        if info is not None and info.num_workers > 1:
            raise RuntimeError("one worker only")
        return super().__iter__()


class FirstOnly(Around):
    """Gives the first samples of a stream: in each worker so many."""

    def __iter__(self) -> Any:
        return itertools.islice(self.inner, 3)


class Renamed(IterDataPipe):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Any:
        for number in self.inner:
            yield {"x": number}


def fitted(data: Any) -> list[Any]:
    return trained(data, lambda batch: [int(x) for x in batch["x"]])


def hugging_face(shards: int) -> Any:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"x": list(range(COUNT))})
    stream = whole.to_iterable_dataset(num_shards=shards)
    return stream.map(lambda row: {"x": row["x"]}).with_format("torch")


def web_dataset(folder: Any, shards: int = 5, **how: Any) -> Any:
    wds = pytest.importorskip("webdataset")
    write_webdataset(folder, shards)
    urls = sorted(str(path) for path in folder.glob("*.tar"))
    stream = wds.WebDataset(urls, shardshuffle=False, **how)
    few = stream.select(lambda row: int(row["number.cls"]) < COUNT)
    return few.map(lambda row: {"x": int(row["number.cls"])})


SPLITTING = {
    "get_worker_info": lambda _: Split(),
    "a wrapper": lambda _: Around(Around(Split())),
    "Hugging Face": lambda _: hugging_face(4),
    "Hugging Face, few shards": lambda _: hugging_face(2),
    "Hugging Face in a wrapper": lambda _: Around(hugging_face(3)),
    "WebDataset": web_dataset,
}
WHOLE = {
    "nothing asks": lambda _: Whole(),
    "refuses workers": lambda _: Refuses(),
    "a chain": lambda _: ChainDataset([Split(0, 9), Split(9, COUNT)]),
    "a pipe": lambda _: Renamed(IterableWrapper(range(COUNT)).sharding_filter()),
    "first ones of a stream": lambda _: FirstOnly(Around(Split())),
    "WebDataset without a splitter": lambda folder: web_dataset(folder, workersplitter=None),
    "WebDataset with an epoch": lambda folder: web_dataset(folder).with_epoch(4),
}


@pytest.mark.cases(2)
@SEVERAL
@pytest.mark.parametrize("kind", SPLITTING)
def test_each_sample_comes_once_from_several_workers_in_the_order_of_torch(kind, tmp_path) -> None:
    stream = SPLITTING[kind](tmp_path)
    data = FastDataModule.from_datasets(stream, batch_size=4)
    loader = data.train_dataloader()
    workers = loader.num_workers
    assert workers > 1, data.explain()
    given = DataLoader(stream, 4, num_workers=workers)
    theirs = fitted(given)
    assert fitted(data) == theirs
    alone = FastDataLoader(stream, 4, num_workers="auto")
    assert alone.num_workers == workers
    assert [batch["x"].tolist() for batch in alone] == theirs
    assert sorted(itertools.chain(*theirs)) == list(range(COUNT))


@SEVERAL
@pytest.mark.parametrize("kind", WHOLE)
def test_where_it_is_not_sure_one_worker_reads_and_the_message_says_what_to_set(
    kind, tmp_path
) -> None:
    stream = WHOLE[kind](tmp_path)
    data = FastDataModule.from_datasets(stream, batch_size=4)
    with pytest.warns(FastDataWarning, match=r"num_workers is 1 of \d+ possible.*set num_workers"):
        loader = data.train_dataloader()
    assert loader.num_workers == 1
    told = FastDataModule.from_datasets(stream, batch_size=4, num_workers=2)
    assert told.train_dataloader().num_workers == 2


@SEVERAL
def test_one_shard_is_read_by_one_worker_without_a_warning() -> None:
    data = FastDataModule.from_datasets(hugging_face(1), batch_size=4)
    assert data.train_dataloader().num_workers == 1
    assert "its 1 shard" in data.explain()


def take_part(worker: int) -> None:
    info = get_worker_info()
    stream = info.dataset
    stream.numbers = range(worker, COUNT, info.num_workers)


class Configured(IterableDataset):
    """As in torch's documentation: split by a worker_init_fn."""

    numbers = range(COUNT)

    def __iter__(self) -> Any:
        for number in self.numbers:
            yield {"x": number}


@SEVERAL
def test_a_worker_init_fn_may_split_the_stream() -> None:
    given = DataLoader(Configured(), 4, worker_init_fn=take_part)
    data = FastDataModule.from_loaders(given, num_workers="auto")
    assert data.train_dataloader().num_workers > 1
    assert sorted(itertools.chain(*fitted(data))) == list(range(COUNT))


def test_a_pipe_that_is_wrapped_is_not_read_whole_by_each_worker() -> None:
    def pipe() -> Any:
        return Renamed(IterableWrapper(range(COUNT)).sharding_filter())

    loader = FastDataLoader(pipe(), 4, num_workers=2)
    assert sorted(x for batch in loader for x in batch["x"].tolist()) == list(range(COUNT))
    keyed = pipe()
    keyed.pipeline = A.Compose([A.NoOp()])
    with pytest.raises(OptionsError, match="Set num_workers=1"):
        next(iter(FastDataLoader(keyed, 4, num_workers=2)))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"devices": 2, "strategy": "ddp"}, 1),
        ({"devices": 2, "strategy": "ddp", "limit_train_batches": 3}, 0),
        ({"devices": 1}, 0),
    ],
)
def test_ranks_are_told_before_the_first_batch_that_parts_may_be_uneven(arguments, told) -> None:
    data = FastDataModule.from_datasets(Split(), batch_size=4, num_workers=1)
    data.trainer = Trainer(accelerator="cpu", logger=False, **arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data.train_dataloader()
    assert sum("others wait for it for ever" in str(each.message) for each in caught) == told


class KeepsItsPlace(IterableDataset):
    """Goes on where the last pass over it was left; or only opens its data, and draws by a key."""

    def __init__(self, *, keeps: bool = True) -> None:
        self.at, self.keeps, self.data = 0, keeps, None
        self.pipeline = A.Compose([A.RandomBrightnessContrast(p=1)])

    def __iter__(self) -> Any:
        self.data = self.data or np.full((4, 4, 3), 90, np.uint8)
        for at in itertools.count(self.at):
            self.at = at + 1 if self.keeps else 0
            yield self.pipeline(image=self.data)


@each(
    ("stream", "arguments", "warned"),
    [
        ({}, {}, True),
        ({}, {"split": False}, False),  # nothing is tried
        ({"keeps": False}, {}, False),
        ({}, {"persistent_workers": True}, False),
        ({}, {"persistent_workers": False}, False),
        ({}, {"num_workers": 0}, False),
    ],
)
def test_a_stream_that_keeps_its_place_is_warned_of_where_workers_would_begin_anew(
    stream, arguments, warned
) -> None:
    options = LoaderOptions(**arguments)
    data = FastDataModule.from_datasets(KeepsItsPlace(**stream), batch_size=2, options=options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        data.train_dataloader()
    texts = [str(one.message) for one in told if "each sample that is read changes" in str(one)]
    assert len(texts) == warned
    assert all("KeepsItsPlace" in text and "persistent_workers=True" in text for text in texts)

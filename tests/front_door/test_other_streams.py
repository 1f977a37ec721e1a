"""Streams of other libraries, read by ours: each law is one for all of them.

The oracle is torch's ``DataLoader`` with as many workers, kept between epochs, over the same files.
"""

from __future__ import annotations

import gc
import json
import warnings
from functools import partial
from itertools import islice
from pathlib import Path

import albumentations as A
import numpy as np
import pytest
import torch
from conformance.forked_ranks import launched
from front_door.other_streams import (
    BAD,
    COUNT,
    LIBRARIES,
    SIDE,
    as_it_is,
    fails,
    importable,
    pixels,
)
from front_door.test_independent_draws import as_rank
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from trainers import Learner, quiet_trainer

from lightning_fastdata import (
    DataThroughputCallback,
    FastDataLoader,
    FastDataModule,
    FastDataWarning,
)
from lightning_fastdata.errors import BatchError

BATCH, EPOCHS = 4, 2
RANKS = Path(__file__).with_name("streams_on_ranks.py")

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*num_workers=3 is more than the CPUs:lightning_fastdata.FastDataWarning"
)


@pytest.fixture(scope="module", params=LIBRARIES)
def library(request):
    found = LIBRARIES[request.param]
    if not importable(found.module):
        pytest.skip(f"{found.module} is not installed, or not beside what is")
    return found


@pytest.fixture(scope="module")
def files(library, tmp_path_factory):
    """The library's own files, by number of shards."""
    written = {}

    def of(shards):
        if shards not in written:
            written[shards] = tmp_path_factory.mktemp("shards")
            library.write(written[shards], shards)
        return written[shards]

    return of


def webdataset(folder, shards):
    """The library, and its files."""
    library = pytest.importorskip("webdataset")
    LIBRARIES["WebDataset"].write(folder, shards)
    return library, sorted(str(path) for path in folder.glob("*.tar"))


def numbers(batches):
    return [batch["number"].tolist() for batch in batches]


def flat(batches):
    return [number for batch in batches for number in batch]


def trained(data, folder, resume=None, callbacks=(), **arguments):
    """Return epoch and numbers of each step, and the pixels of each number."""
    pixels = {}

    def note(batch):
        found = batch["number"].tolist()
        pixels.update(zip(found, batch["image"].clone(), strict=True))
        return model.current_epoch, *found

    model = Learner(note)
    trainer = quiet_trainer(
        folder,
        enable_checkpointing=bool(callbacks),
        callbacks=list(callbacks),
        **{"max_epochs": EPOCHS, **arguments},
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"lightning\.")
        trainer.fit(model, datamodule=data, ckpt_path=resume)
    return model.seen, pixels


def module_of(stream, workers, **how):
    return FastDataModule.from_datasets(stream, batch_size=BATCH, num_workers=workers, **how)


def theirs(library, stream, workers):
    """What torch's loader gives, told the epoch as the library asks for it."""
    loader = DataLoader(stream, BATCH, num_workers=workers, persistent_workers=workers > 0)
    epochs = []
    for epoch in range(EPOCHS):
        if library.module == "datasets":
            stream.set_epoch(epoch)
        epochs.append(numbers(loader))
    del loader
    gc.collect()  # its workers end with it
    return epochs


@pytest.mark.cases(3)
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
@pytest.mark.parametrize("shards", [6, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_epoch_has_each_sample_once_in_the_order_of_the_library(
    library, files, workers, shards, shuffle
):
    if library.module == "webdataset" and workers > shards:
        pytest.skip("it refuses workers without a shard: see the next test")
    opened = [library.opened(files(shards), shuffle, as_it_is) for _ in range(2)]
    expected = theirs(library, opened[0], workers)
    loader = FastDataLoader(opened[1], BATCH, num_workers=workers, executor="auto")
    got = [numbers(loader) for _ in range(EPOCHS)]
    assert got == expected
    for epoch in got:
        assert sorted(flat(epoch)) == list(range(COUNT))
    # As the libraries have it; Hugging Face shuffles its files in each epoch after the first. Two
    # shards may come in the same order twice.
    if shards > 2 or not shuffle:
        assert (got[0] != got[1]) == (shuffle or (library.module == "datasets" and shards > 2))


def test_fewer_shards_than_workers_are_no_reason_for_more_workers(library, files):
    stream = library.opened(files(2), False, as_it_is)
    data = FastDataModule.from_datasets(stream, batch_size=BATCH)
    loader = data.train_dataloader()
    if library.module in ("webdataset", "datasets"):
        assert loader.num_workers <= 2
        assert "its 2 shards are" in data.explain()
    assert sorted(flat(numbers(loader))) == list(range(COUNT))
    if library.module == "webdataset":
        with pytest.raises(ValueError, match="fewer shards than workers"):
            numbers(FastDataLoader(stream, BATCH, num_workers=3, executor="auto"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read_is_named_and_nothing_hangs(library, files, workers):
    stream = library.opened(files(6), False, fails)
    loader = FastDataLoader(stream, BATCH, num_workers=workers, executor="workers", timeout=100)
    with pytest.raises(ValueError, match=f"sample {BAD} is damaged") as raised:
        numbers(loader)
    notes = "".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert "while reading sample" in notes


def test_pixels_are_augmented_on_the_device_and_steps_are_measured(library, files, tmp_path):
    stream = library.opened(files(6), False, as_it_is)
    augment = A.Compose([A.HorizontalFlip(p=1), A.InvertImg(p=1)])
    data = module_of(stream, 2, augment=augment, augment_on="gpu")  # the trainer's device
    measured = DataThroughputCallback(summary=False, report=False)
    _, found = trained(data, tmp_path, max_epochs=1, callbacks=[measured])
    assert sorted(found) == list(range(COUNT))
    for number, image in found.items():
        expected = torch.from_numpy(255 - pixels(number)[:, ::-1].copy())
        assert torch.equal(image, expected)
    stage = measured.report.as_dict()["stages"]["train"]
    assert stage["steps"] == COUNT // BATCH
    assert "on the device" in data.explain()


@pytest.mark.cases(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("steps", [5, 12, 17])
def test_a_training_goes_on_from_a_checkpoint_behind_any_step(
    library, files, tmp_path, workers, steps
):
    straight, _ = trained(module_of(library.opened(files(6), True, as_it_is), workers), tmp_path)
    assert len(straight) == EPOCHS * COUNT // BATCH
    save = ModelCheckpoint(tmp_path, "last", every_n_train_steps=steps, save_top_k=-1)
    first = module_of(library.opened(files(6), True, as_it_is), workers)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*shuffle buffer", FastDataWarning)
        begun, _ = trained(first, tmp_path, callbacks=[save], max_steps=steps, max_epochs=-1)
    assert begun == straight[:steps]
    again = module_of(library.opened(files(6), True, as_it_is), workers)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        rest, _ = trained(again, tmp_path, resume=tmp_path / "last.ckpt")
    assert rest == straight[steps:]
    told = [str(each.message) for each in told if each.category is FastDataWarning]
    assert all("were read again and dropped" in each or "num_workers" in each for each in told)


def test_what_a_clock_shuffles_does_not_resume_and_says_so(tmp_path):
    webdataset(tmp_path, 6)

    def stream():
        return LIBRARIES["WebDataset"].opened(tmp_path, False, as_it_is).shuffle(40)

    save = ModelCheckpoint(tmp_path, "last", every_n_train_steps=5)
    trained(module_of(stream(), 2), tmp_path, callbacks=[save], max_steps=5)
    with (
        pytest.warns(FastDataWarning, match="gave other samples.*detshuffle"),
        pytest.warns(FastDataWarning, match="were read again and dropped"),
    ):
        trained(module_of(stream(), 2), tmp_path, resume=tmp_path / "last.ckpt", max_epochs=1)


@pytest.mark.parametrize("ready", [False, True])
def test_batches_that_webdataset_makes_come_as_they_are(tmp_path, ready):
    wds, urls = webdataset(tmp_path, 6)
    stream = wds.WebDataset(urls, shardshuffle=False).decode().to_tuple("image.npy", "number.cls")
    stream = stream.batched(BATCH) if ready else stream
    given = DataLoader(stream, batch_size=None if ready else BATCH, num_workers=2)
    data = FastDataModule.from_loaders(given)
    expected, got = (
        [(i.tolist(), list(n)) for i, n in it] for it in (given, data.train_dataloader())
    )
    assert got == expected
    assert sorted(n for _, each in got for n in each) == list(range(COUNT))
    assert np.shape(got[0][0]) == (BATCH, SIDE, SIDE, 3)


def on_two_ranks(files, folder, *names):
    """What each of two ranks read and was told, by the name of the case."""
    launched(RANKS, str(files), str(folder), *names)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.cases(2)
def test_two_ranks_read_each_sample_once(library, files, tmp_path):
    name = next(name for name, each in LIBRARIES.items() if each is library)
    cases = [f"{name}, made in train_dataset", f"{name}, made before"]
    ranks = on_two_ranks(files(6), tmp_path, *cases)
    for case in cases:
        read = [rank[case]["epochs"] for rank in ranks]
        told = [" ".join(rank[case]["told"]) for rank in ranks]
        for epoch in range(EPOCHS):
            if "made before" in case and library.module != "webdataset":
                assert [sorted(flat(each[epoch])) for each in read] == [list(range(COUNT))] * 2
                assert all("each sample comes 2 times" in each for each in told)
                remedy = {
                    "datasets": "split_dataset_by_node",
                    "litdata": "make it in train_dataset",
                }
                assert all(remedy[library.module] in each for each in told)
            else:
                assert len(read[0][epoch]) == len(read[1][epoch])
                assert sorted(flat(read[0][epoch] + read[1][epoch])) == list(range(COUNT))
        if "made before" not in case or library.module == "webdataset":
            # Only LitData shares out as many samples to each rank.
            uneven = library.module != "litdata"
            assert all(("each on its part" in each) is uneven for each in told)
            assert all(len(rank[case]["told"]) == uneven for rank in ranks)


def test_workers_that_are_started_anew_read_the_part_of_their_rank(tmp_path):
    webdataset(tmp_path, 6)
    read = []
    for rank in range(2):
        with as_rank(rank):
            stream = LIBRARIES["WebDataset"].opened(tmp_path, False, as_it_is)
            how = {"persistent_workers": True, "multiprocessing_context": "forkserver"}
            loader = FastDataLoader(stream, BATCH, num_workers=1, **how)
            read.append([flat(numbers(loader)) for _ in range(EPOCHS)])
    for one, other in zip(*read, strict=True):
        assert len(one) == len(other)
        assert sorted(one + other) == list(range(COUNT))


def every(step, urls):
    return islice(urls, 0, None, step)


class EverySecond:
    def __call__(self, urls):
        return every(2, urls)


def test_ranks_that_would_all_read_the_whole_of_a_webdataset_are_warned(tmp_path):
    wds, urls = webdataset(tmp_path, 2)
    own = [(splitter, 0) for splitter in (wds.split_by_node, partial(every, 2), EverySecond())]
    for splitter, told in ((None, 1), *own):
        stream = wds.WebDataset(urls, shardshuffle=False, nodesplitter=splitter).decode()
        loader = FastDataLoader(stream.to_tuple("number.cls"), BATCH, num_workers=0)
        with as_rank(0), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            read = sum(len(batch[0]) for batch in loader)
        texts = [str(each.message) for each in caught if each.category is FastDataWarning]
        assert len(texts) == told
        assert all("each sample comes 2 times" in text for text in texts)
        assert read == COUNT // (2 - told)


def test_pixels_of_ready_batches_are_refused_with_a_reason(tmp_path):
    wds, urls = webdataset(tmp_path, 2)
    stream = wds.WebDataset(urls, shardshuffle=False).decode().to_tuple("image.npy").batched(4)
    given = DataLoader(stream, batch_size=None, num_workers=2)
    data = FastDataModule.from_loaders(given, augment=A.Compose([A.HorizontalFlip()]))
    with pytest.raises(BatchError, match="No image was found in"):
        next(iter(data.train_dataloader()))

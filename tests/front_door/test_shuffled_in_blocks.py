"""Shuffled in blocks, a training reads each stored group once a process, and resumes."""

from __future__ import annotations

import os
from collections import Counter
from functools import lru_cache
from itertools import chain

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset
from trainers import Learner, quiet_trainer

import lightning_fastdata as ld
from lightning_fastdata import sources
from lightning_fastdata.errors import OptionsError

GROUP, GROUPS = 11, 24
COUNT = GROUP * GROUPS


class Chunks(Dataset):
    """A user's own chunk files, of which it keeps eight; it writes down what it reads."""

    def __init__(self, folder):
        self.folder = folder
        for chunk in range(GROUPS):
            np.save(folder / f"{chunk}.npy", np.arange(chunk * GROUP, (chunk + 1) * GROUP))
        self.kept = None

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        if self.kept is None:
            self.kept = lru_cache(8)(self.read)
        return torch.tensor(self.kept(index // GROUP)[index % GROUP])

    def read(self, chunk):
        with open(self.folder / f"reads-{os.getpid()}", "a") as log:
            log.write(f"{chunk}\n")
        return np.load(self.folder / f"{chunk}.npy")

    def block_starts(self):
        return range(0, COUNT, GROUP)

    def reads(self):
        """How often each process read each chunk."""
        logs = self.folder.glob("reads-*")
        return {log.name: Counter(log.read_text().split()) for log in logs}


def fit(*, epochs=1, folder=None, resume=None, **data):
    module = Learner(lambda batch: (batch[0] if isinstance(batch, list) else batch).tolist())
    saved = [ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1)] if folder else []
    quiet_trainer(max_epochs=epochs, callbacks=saved, enable_checkpointing=bool(folder)).fit(
        module, ckpt_path=resume, **data
    )
    return module.seen


def of_module(dataset, workers, **settings):
    options = ld.LoaderOptions(num_workers=workers)
    return ld.FastDataModule.from_datasets(
        dataset, batch_size=16, seed=3, shuffle="blocks", options=options, **settings
    )


@pytest.mark.filterwarnings("ignore:.*a sample waits")  # the number of workers is set, too low
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("by", ["module", "loader", "make_loader"])
def test_a_training_reads_each_group_once_a_process(tmp_path, workers, by):
    chunks = Chunks(tmp_path)
    settings = {"num_workers": workers, "shuffle": "blocks"}
    if by == "module":
        seen = fit(datamodule=of_module(chunks, workers))
    elif by == "loader":
        executor = "workers" if workers else "inline"
        loader = ld.FastDataLoader(chunks, 16, seed=3, executor=executor, **settings)
        seen = fit(train_dataloaders=loader)
    else:

        class Own(ld.FastDataModule):
            def train_dataset(self):
                return chunks

            def train_dataloader(self):
                return self.make_loader(chunks, stage="train", **settings)

        seen = fit(datamodule=Own(batch_size=16, seed=3))
    order = list(chain(*seen))
    assert sorted(order) == list(range(COUNT))
    assert order != list(range(COUNT))
    counts = [count for counter in chunks.reads().values() for count in counter.values()]
    assert max(counts) <= 2  # once an epoch; the next one is begun before this one ends


@pytest.fixture(params=["table", "parts of tables", "chunks"])
def dataset(request, tmp_path):
    """Rows of Parquet files; some of them, one table after the other; a user's own files."""
    if request.param == "chunks":
        return Chunks(tmp_path)
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tables = []
    for start in (0, 150):
        path = tmp_path / f"{start}.parquet"
        rows = np.arange(start, start + 150)
        parquet.write_table(pa.table({"x": rows}), path, row_group_size=13)
        source = sources.ParquetSource(path, columns=["x"])
        tables.append(sources.SourceDataset(source, number))
    if request.param == "table":
        return tables[0]
    return Subset(ConcatDataset(tables), list(range(0, 300, 2)))


def number(row, _index):
    return torch.tensor(int(row["x"]))


@pytest.mark.cases(1)
@pytest.mark.filterwarnings("ignore:.*a sample waits")  # the number of workers is set, too low
def test_a_training_goes_on_within_its_blocks(dataset, tmp_path):
    wanted = fit(datamodule=of_module(dataset, 2), epochs=2, folder=tmp_path / "saved")
    half = len(wanted) // 2
    one, two = list(chain(*wanted[:half])), list(chain(*wanted[half:]))
    assert len(set(one)) == len(one) == len(dataset)
    assert sorted(one) == sorted(two)
    assert one != two
    for step in (4, 12):
        (file,) = (tmp_path / "saved").glob(f"*step={step}.ckpt")
        assert fit(datamodule=of_module(dataset, 1), epochs=2, resume=file) == wanted[step:]


@pytest.mark.parametrize("shuffle", ["block", "", "True"])
def test_other_texts_are_refused(shuffle):
    data = TensorDataset(torch.arange(9))
    with pytest.raises(OptionsError, match=f"shuffle={shuffle!r} has to be"):
        ld.FastDataLoader(data, 3, shuffle=shuffle)
    with pytest.raises(OptionsError, match=f"shuffle={shuffle!r} has to be"):
        ld.FastDataModule.from_datasets(data, batch_size=3, shuffle=shuffle).train_dataloader()

"""Shuffled in blocks, a training reads each stored group once a process."""

from __future__ import annotations

import os
from collections import Counter
from functools import lru_cache
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset
from trainers import trained

import lightning_fastdata as ld
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


@pytest.mark.filterwarnings("ignore:.*a sample waits")  # the number of workers is set, too low
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("by", ["module", "loader", "make_loader"])
def test_a_training_reads_each_group_once_a_process(tmp_path, workers, by):
    chunks = Chunks(tmp_path)
    settings = {"num_workers": workers, "shuffle": "blocks"}

    class Own(ld.FastDataModule):
        def train_dataloader(self):
            return self.make_loader(chunks, stage="train", **settings)

    executor = "workers" if workers else "inline"
    given = {
        "module": lambda: ld.FastDataModule.from_datasets(chunks, batch_size=16, **settings),
        "loader": lambda: ld.FastDataLoader(chunks, 16, executor=executor, **settings),
        "make_loader": lambda: Own(batch_size=16),
    }
    order = list(chain(*trained(given[by](), torch.Tensor.tolist, max_epochs=2)))
    one, two = order[:COUNT], order[COUNT:]
    assert sorted(one) == sorted(two) == list(range(COUNT))
    assert one != two
    assert list(range(COUNT)) not in (one, two)
    counts = [count for counter in chunks.reads().values() for count in counter.values()]
    assert max(counts) <= 3  # once an epoch; the next one is begun before this one ends


@pytest.mark.parametrize("shuffle", ["block", "", "True"])
def test_other_texts_are_refused(shuffle):
    data = TensorDataset(torch.arange(9))
    with pytest.raises(OptionsError, match=f"shuffle={shuffle!r} has to be"):
        ld.FastDataLoader(data, 3, shuffle=shuffle)
    with pytest.raises(OptionsError, match=f"shuffle={shuffle!r} has to be"):
        ld.FastDataModule.from_datasets(data, batch_size=3, shuffle=shuffle).train_dataloader()

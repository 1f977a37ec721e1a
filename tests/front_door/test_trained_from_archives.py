"""A training on records of archives or objects sees what it sees of the same samples in memory."""

from __future__ import annotations

import tarfile
import zlib

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from samples import Samples
from trainers import trained

import lightning_fastdata as ld
from lightning_fastdata import sources
from tests.ext.sources.object_server import ObjectServer

COUNT = 36


def record(index):
    return np.random.default_rng(index).integers(0, 256, 48, np.uint8).tobytes()


def decode(raw, index):
    noise = torch.rand(1).item()
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).float() + noise, index


IN_MEMORY = Samples(lambda index: decode(record(index), index), COUNT)


def as_it_is(raw, index):
    return bytes(raw), index


def decode_kept(sample):
    return decode(*sample)


@pytest.fixture(params=["tar", "objects", "kept objects"])
def dataset(request, tmp_path):
    """The records as files of an archive, and as objects behind a server that fails at times."""
    if request.param == "tar":
        with tarfile.open(tmp_path / "x.tar", "w") as archive:
            for index in range(COUNT):
                (tmp_path / "one").write_bytes(record(index))
                archive.add(tmp_path / "one", f"{index:03}")
        yield sources.SourceDataset(sources.TarSource(tmp_path / "x.tar"), decode)
        return
    pytest.importorskip("obstore")
    server = ObjectServer({f"{index:03}": record(index) for index in range(COUNT)})
    server.fail_share = 0.05
    keys = [f"{index:03}" for index in range(COUNT)]
    objects = sources.ObjectSource(server.url, keys, client_options={"allow_http": True})
    if request.param == "kept objects":
        records = sources.SourceDataset(objects, as_it_is)
        yield ld.CachedDataset(records, tmp_path / "cache", key="photos", transform=decode_kept)
    else:
        yield sources.SourceDataset(objects, decode)
    server.close()


def fit(dataset, *, workers, folder=None, resume=None):
    data = ld.FastDataModule.from_datasets(
        dataset, batch_size=5, seed=2, options=ld.LoaderOptions(num_workers=workers)
    )
    saved = [ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1)] if folder else []
    how = {"max_epochs": 2, "callbacks": saved, "enable_checkpointing": bool(folder)}
    return trained(data, summed, resume=resume, **how)


def summed(batch):
    return zlib.crc32(batch[0].numpy().tobytes()), batch[1].tolist()


@pytest.mark.cases(1)
@pytest.mark.filterwarnings("ignore:.*a sample waits")  # the number of workers is set, too low
def test_a_training_sees_the_same_and_resumes(dataset, tmp_path):
    wanted = fit(IN_MEMORY, workers=2)
    assert fit(dataset, workers=2, folder=tmp_path / "saved") == wanted
    (file,) = (tmp_path / "saved").glob("*step=9.ckpt")
    assert fit(dataset, workers=1, resume=file) == wanted[9:]

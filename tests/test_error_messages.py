"""The texts by which people search are those that torch, Lightning and Python give today."""

from __future__ import annotations

import inspect
import pickle
import re
import sys
from multiprocessing import spawn
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.utilities.model_helpers import is_overridden
from PIL import Image
from torch.utils.data import DataLoader, RandomSampler, default_collate

PAGE = (Path(__file__).parents[1] / "docs/error-messages.md").read_text()
QUOTED = re.findall(r"^### `([^`]+)`", PAGE, re.MULTILINE)


def rows_of(*lengths):
    return [torch.zeros(length) for length in lengths]


def many_workers(tmp_path):
    with pytest.warns(UserWarning, match="worker processes") as told:
        DataLoader([1], num_workers=999)
    raise RuntimeError(str(told[0].message).replace("999", "16"))


def few_workers(tmp_path):
    # It comes on machines with more than two CPUs.
    source = inspect.getsource(data_connector)
    raise RuntimeError(re.sub(r'"\s+f?"', "", source))


def times_out(tmp_path):
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as Iterator

    class Late:
        _timeout = 60
        _pin_memory = False

        def _try_get_data(self, timeout):
            return False, None

    Iterator._get_data(Late())


def cut_off(tmp_path):
    file = tmp_path / "photo.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(file)
    file.write_bytes(file.read_bytes()[:2000])
    Image.open(file).load()


def bootstrapping(tmp_path):
    process = spawn.process.current_process()
    process._inheriting = True
    try:
        spawn.get_preparation_data("name")
    finally:
        del process._inheriting


def empty(tmp_path):
    RandomSampler([])


def objects(tmp_path):
    default_collate([object()])


BOOTSTRAPPING = (
    "An attempt has been made to start a new process before the current process has finished its "
    "bootstrapping phase"
)
GIVES = {
    "stack expects each tensor to be equal size": lambda _: default_collate(rows_of(1, 2)),
    "batch must contain tensors, numpy arrays, numbers, dicts or lists": objects,
    "num_samples should be a positive integer value, but got num_samples=0": empty,
    "Expected a parent": lambda _: is_overridden("fit", object()),
    "This DataLoader will create 16 worker processes in total": many_workers,
    "does not have many workers which may be a bottleneck": few_workers,
    "DataLoader timed out after 60 seconds": times_out,
    "image file is truncated": cut_off,
    BOOTSTRAPPING: bootstrapping,
}
if sys.version_info < (3, 14):
    GIVES["Can't pickle local object"] = lambda _: pickle.dumps(lambda: None)


@pytest.mark.parametrize("text", GIVES)
@pytest.mark.filterwarnings("ignore")
def test_the_text_is_the_one_that_is_given_today(text, tmp_path):
    assert text in QUOTED
    with pytest.raises(Exception) as raised:
        GIVES[text](tmp_path)
    assert text in " ".join(str(raised.value).split())


def test_each_text_has_a_cure_without_and_with_the_package():
    parts = re.split(r"^### ", PAGE.partition("## It did not help")[0], flags=re.MULTILINE)[1:]
    assert len(parts) >= 20
    for part in parts:
        assert part.count("- **Cure:** ") == part.count("- **Here:** ") == 1, part

"""What is known of each executor stands in one row, which all other code asks."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from misses import each
from torch.utils.data import TensorDataset

from lightning_fastdata import FastDataLoader
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.executors.kinds import ExecutorName, executor_for, kind_of
from lightning_fastdata.loading.options import LoaderOptions

NAMES = get_args(ExecutorName)


def test_each_name_has_its_row():
    for name in NAMES:
        assert kind_of(name).what
        assert LoaderOptions(executor=name, num_workers=2).executor == name


@each("workers", [0, 2])
@each("stream", [True, False])
@each("name", [name for name in NAMES if name != "torch"])
def test_who_fetches_can_read_the_dataset_with_so_many_workers(name, stream, workers):
    found = executor_for(name, stream=stream, workers=workers)
    assert executor_for(found, stream=stream, workers=workers) == found
    assert kind_of(found).reads_streams or not stream
    assert workers or not kind_of(found).side_processes
    if found != name:
        assert (stream and not kind_of(name).reads_streams) or not workers


@pytest.mark.parametrize("name", ["thread", "Workers", 3])
def test_what_is_no_executor_is_refused_with_those_that_there_are(name):
    with pytest.raises(OptionsError, match="'auto', 'torch', 'inline', 'gather', 'workers', 'ray'"):
        LoaderOptions(executor=name)
    loader = FastDataLoader(TensorDataset(torch.zeros(2, 1)))
    loader.executor = name
    with pytest.raises(OptionsError, match=f"executor is {name!r}"):
        next(iter(loader))

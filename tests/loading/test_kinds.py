"""What is known of each executor stands in one row, which all other code asks."""

from __future__ import annotations

from typing import get_args

import pytest
from loading.planned import Stream
from misses import each
from torch.utils.data import TensorDataset, default_collate

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.kinds import (
    ExecutorName,
    Resources,
    executor_for,
    kind_of,
    open_executor,
)
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
    dataset = Stream() if stream else TensorDataset()
    if stream and not kind_of(name).reads_streams:
        with pytest.raises(OptionsError, match="is a stream"):
            open_executor(
                FetchPlan(dataset=dataset, collate_fn=default_collate), Resources(executor=name)
            )


@pytest.mark.parametrize("name", ["torch", "thread", "Workers"])
def test_what_is_no_executor_is_refused_with_those_that_there_are(name):
    plan = FetchPlan(dataset=Stream(), collate_fn=default_collate)
    with pytest.raises(OptionsError, match="'inline', 'gather', 'workers', 'ray'"):
        open_executor(plan, Resources(executor=name))

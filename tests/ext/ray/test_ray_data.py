"""Ray Data reads in processes of its own: the training process reads it, and ranks share it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from front_door import other_streams
from front_door.other_streams import COUNT, RayRows, as_it_is, fails, open_ray, write_ray

from lightning_fastdata import FastDataLoader, FastDataModule
from lightning_fastdata.errors import OptionsError

ray.cloudpickle.register_pickle_by_value(other_streams)  # which workers of Ray cannot import
pytestmark = pytest.mark.usefixtures("cluster")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    written = tmp_path_factory.mktemp("rows")
    write_ray(written, 2)
    return written


def numbers(loader):
    return [number for batch in loader for number in batch["number"].tolist()]


def test_its_rows_are_read_once_and_explain_says_why_without_workers(folder):
    data = FastDataModule.from_datasets(open_ray(folder, False, as_it_is), batch_size=4)
    loader = data.train_dataloader()
    assert loader.num_workers == 0
    assert "Ray Data reads in processes of its own" in data.explain()
    assert sorted(numbers(loader)) == list(range(COUNT))


def test_workers_that_would_wait_for_ever_are_refused(folder):
    stream = open_ray(folder, False, as_it_is)
    with pytest.raises(OptionsError, match=r"they would wait for ever\. Leave num_workers out"):
        FastDataModule.from_datasets(stream, num_workers=2).train_dataloader()


def test_two_consumers_of_a_streaming_split_share_the_rows(folder):
    parts = open_ray(folder, False, as_it_is).rows.streaming_split(2)
    loaders = [FastDataLoader(RayRows(part), 4, num_workers=0) for part in parts]
    with ThreadPoolExecutor(2) as threads:
        one, two = threads.map(numbers, loaders)
    assert sorted(one + two) == list(range(COUNT))


def test_a_row_that_cannot_be_read_is_named(folder):
    with pytest.raises(ray.exceptions.RayError, match="is damaged"):
        numbers(FastDataLoader(open_ray(folder, False, fails), 4, num_workers=0))

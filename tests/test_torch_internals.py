"""Each private name of torch that the package uses is there, and is what it is taken for."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info
from torch.utils.data._utils import worker

import lightning_fastdata
from lightning_fastdata import torch_internals
from lightning_fastdata.torch_internals import (
    MAKES_BATCHES,
    being_read,
    collate,
    collate_tensor_fn,
    default_collate_fn_map,
    default_store,
    next_has_arrived,
    not_compiled,
    pinned,
    set_worker_info,
    under_way,
)

PACKAGE = Path(lightning_fastdata.__file__).parent
NAMES = (
    "_utils", "_worker_info", "_task_info", "_rcvd_idx", "_send_idx", "_data_queue",
    "_get_default_store", "_get_iterator", "_dynamo",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_only_the_seam_uses_the_name_and_its_docstring_has_it(name):
    used = re.compile(rf"(?<!\w){name}(?!\w)")
    elsewhere = [
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        if file.name != "torch_internals.py" and used.search(file.read_text("utf-8"))
    ]
    assert elsewhere == []
    assert used.search(torch_internals.__doc__)


def test_what_a_process_is_told_is_what_torch_returns_in_it():
    assert get_worker_info() is None
    try:
        set_worker_info(number=2, workers=3, seed=5, dataset="data")
        info = get_worker_info()
        assert (info.id, info.num_workers, info.seed, info.dataset) == (2, 3, 5, "data")
    finally:
        worker._worker_info = None


def test_torchs_own_collation_is_made_of_these():
    samples = [{"x": torch.tensor([1.0]), "y": 2}, {"x": torch.tensor([3.0]), "y": 4}]
    ours = collate(samples, collate_fn_map=default_collate_fn_map)
    theirs = default_collate(samples)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert default_collate_fn_map[torch.Tensor] is collate_tensor_fn


def test_torch_pins_nested_batches_with_the_function_that_we_call():
    assert list(inspect.signature(pinned).parameters) == ["value", "device"]
    from torch.utils.data._utils.pin_memory import pin_memory

    assert list(inspect.signature(pin_memory).parameters)[:2] == ["data", "device"]
    assert pinned({"text": ["a"]}, None) == {"text": ["a"]}


class Breaks(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 3:
            raise ValueError("broken")
        return index


class BreaksTogether(Breaks):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def collates(samples):
    raise ValueError("broken")


ONE = 3 if sys.version_info < (3, 12) else [2, 3]  # from there on comprehensions have no frame


@pytest.mark.parametrize(
    ("dataset", "how", "known"),
    [
        (Breaks(), {"batch_size": 2}, ONE),
        (BreaksTogether(), {"batch_size": 2}, [2, 3]),
        (Breaks(), {"batch_size": None}, 3),
        (Breaks(), {"batch_size": 2, "collate_fn": collates}, None),
    ],
)
def test_an_error_of_torchs_own_loop_shows_what_it_read(dataset, how, known):
    with pytest.raises(ValueError, match="broken") as raised:
        list(DataLoader(dataset, **how))
    assert being_read(raised.value) == known
    batches = iter(lightning_fastdata.FastDataLoader(dataset, executor="torch", **how))
    with pytest.raises(ValueError, match="broken") as raised:
        list(batches)
    notes = [] if known is None else [f"sample {known}", f"one of the samples {known}"]
    notes = notes[isinstance(known, list) :][:1]
    assert getattr(raised.value, "__notes__", []) == [
        f"While reading {note} of the dataset." for note in notes
    ]
    if known is not None:
        next(batches)  # it goes on, as torch's does


def test_an_error_of_something_else_shows_nothing():
    with pytest.raises(ValueError, match="broken") as raised:
        Breaks()[3]
    assert being_read(raised.value) is None


def test_a_loader_makes_its_batches_by_these_methods():
    assert all(callable(getattr(DataLoader, name)) for name in MAKES_BATCHES)


def test_a_loader_keeps_its_workers_under_the_name_that_ours_has():
    loader = DataLoader(range(4), num_workers=1, persistent_workers=True)
    assert loader._iterator is None
    list(loader)
    kept = loader._iterator
    list(loader)
    assert loader._iterator is kept is not None
    kept._shutdown_workers()


def test_the_iterator_over_workers_tells_what_has_arrived():
    batches = iter(DataLoader(range(6), num_workers=2, prefetch_factor=1))
    assert {"_task_info", "_rcvd_idx", "_send_idx", "_data_queue"} <= vars(batches).keys()
    assert isinstance(next_has_arrived(batches), bool)
    next(batches)
    assert under_way(batches) == (3, (1, 2))
    list(batches)
    assert next_has_arrived(batches) is True
    assert under_way(batches) == (6, ())


def test_of_other_iterators_nothing_is_known():
    assert next_has_arrived(iter([1])) is None
    assert under_way(iter([1])) is None


def test_the_store_at_which_ranks_met_is_found():
    assert default_store() is None
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        found = default_store()
        found.set("key", "value")
        assert found.get("key") == b"value"
    finally:
        dist.destroy_process_group()


def test_what_is_compiled_runs_as_it_was_written_within_a_block():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    doubled = torch.compile(lambda x: x * 2, backend=backend)
    with not_compiled():
        assert doubled(torch.ones(())) == 2
    assert not compiled
    assert doubled(torch.ones(())) == 2
    assert len(compiled) == 1

"""What torch's DataLoader is relied upon for holds with every executor, too.

torch's own loader over the same data is the judge wherever it can be.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import warnings
from collections import OrderedDict, deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from alike import alike
from loading.test_cycled import Numbers
from misses import Misses, each
from processes import until
from thoroughness import LONG
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
    random_split,
)

from lightning_fastdata.errors import BatchError, FastDataWarning, OptionsError, WorkerError
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.order.samplers import ShuffleSampler

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*[Ss]parse"),
    pytest.mark.filterwarnings("ignore:.*nested tensors"),
]

ENGINE = ("inline", "workers")
ROWS = TensorDataset(torch.randn(30, 2, 3), torch.randperm(30))
Point = namedtuple("Point", ["x", "label"])


class Made(Dataset):
    """Samples are what a function makes of their index."""

    def __init__(self, make: Any, length: int = 12) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.make(index)


@each("executor", [None, "auto", "inline", "workers", "torch"])
@each(
    "arguments",
    [{"prefetch_factor": 4}, {"persistent_workers": True}, {"multiprocessing_context": "spawn"}],
)
@each("workers", [{"num_workers": 0}, {}])
def test_arguments_for_workers_are_refused_without_workers(executor, arguments, workers) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        DataLoader(ROWS, **workers, **arguments)
    with pytest.raises(OptionsError, match=next(iter(arguments)) + " is .* num_workers is 0"):
        FastDataLoader(ROWS, executor=executor, **workers, **arguments)


@each("importable", [True, False])
def test_arguments_for_workers_are_taken_where_their_number_is_left_open(
    importable, monkeypatch
) -> None:
    monkeypatch.setattr("lightning_fastdata.loading.loader.may_start_processes", lambda: importable)
    arguments = {"prefetch_factor": 4, "multiprocessing_context": "fork"}
    loader = FastDataLoader(ROWS, 5, num_workers="auto", persistent_workers=True, **arguments)
    assert len(list(loader)) == 6


class Holder:
    """A batch of a kind that only its own class can pin."""

    def __init__(self, samples: list[Any]) -> None:
        self.stacked = torch.stack([torch.as_tensor(s) for s in samples])
        self.pinned = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Holder) and torch.equal(self.stacked, other.stacked)

    __hash__ = None  # type: ignore[assignment]

    def pin_memory(self) -> Holder:
        self.pinned = True
        return self


def both(executor: str, how: Any, dataset: Any = ROWS, epochs: int = 1) -> tuple[Any, Any]:
    """Return the epochs of our loader and of torch's; ``how`` makes fresh arguments for each.

    torch needs no workers to give its order and its batches, and is quicker without.
    """
    settings = {"num_workers": 1, **how()}
    ours = FastDataLoader(dataset, executor=executor, **settings)
    workers = settings["num_workers"] if settings.get("persistent_workers") else 0
    plain = {} if workers else {"multiprocessing_context": None, "prefetch_factor": None}
    theirs = DataLoader(dataset, **{**settings, **how(), "num_workers": workers, **plain})
    found = []
    for loader in (ours, theirs):
        torch.manual_seed(11)
        # Wider than list(), which would ask for the length.
        batches = [[batch for batch in loader] for _ in range(epochs)]  # noqa: C416
        found.append((batches, torch.rand(1)))
    ours.close()
    return found[0], found[1]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(4)


class EveryThird(Sampler[int]):
    def __iter__(self) -> Any:
        return iter(range(0, 30, 3))


ORDERS: dict[str, Any] = {
    "one by one": dict,
    "in batches": lambda: {"batch_size": 4},
    "without the last": lambda: {"batch_size": 4, "drop_last": True},
    "larger than the data": lambda: {"batch_size": 64},
    "not batched": lambda: {"batch_size": None},
    "not batched, shuffled": lambda: {"batch_size": None, "shuffle": True},
    "shuffled": lambda: {"shuffle": True, "batch_size": 7},
    "shuffled by a generator": lambda: {"shuffle": True, "batch_size": 7, "generator": generator()},
    "a list": lambda: {"sampler": [4, 4, 29, -1], "batch_size": 3},
    "an own sampler": lambda: {"sampler": EveryThird(), "batch_size": 4},
    "with replacement": lambda: {
        "sampler": RandomSampler(ROWS, replacement=True, num_samples=50, generator=generator())
    },
    "more than the data": lambda: {"sampler": RandomSampler(ROWS, num_samples=75)},
    "a random subset": lambda: {"sampler": SubsetRandomSampler([3, 1, 8]), "batch_size": 2},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * 5 + [3.0] * 25, 20)},
    "weighted, each once": lambda: {
        "sampler": WeightedRandomSampler([1.0, 2.0] * 15, 20, replacement=False)
    },
    "a part by a generator": lambda: {"sampler": SubsetRandomSampler([-4, -1, 8, 5], generator())},
    "of one rank": lambda: {"sampler": DistributedSampler(ROWS, 4, 3, seed=5), "batch_size": 3},
    "of one rank, in order": lambda: {"sampler": DistributedSampler(ROWS, 4, 1, shuffle=False)},
    "of one rank, cut": lambda: {"sampler": DistributedSampler(ROWS, 4, 2, drop_last=True)},
    "by the package": lambda: {"sampler": ShuffleSampler(ROWS, seed=1), "batch_size": 7},
    "a batch sampler": lambda: {"batch_sampler": BatchSampler(SequentialSampler(ROWS), 4, True)},
    "a number of NumPy's": lambda: {"num_workers": np.int64(1), "prefetch_factor": np.int64(2)},
    "a list of batches": lambda: {"batch_sampler": [[1, 2], [5], [2, 2, 2]]},
    "batches that are queues": lambda: {"batch_sampler": [deque([1, 2]), deque([5])]},
    "batches that are sets": lambda: {"batch_sampler": [{1, 2}, frozenset([5])]},
    "batches that are keys": lambda: {
        "batch_sampler": [{1: 0, 2: 0}, {5: 0}.keys()],
        "collate_fn": list,
    },
    "batches as samples": lambda: {
        "sampler": BatchSampler(RandomSampler(ROWS), 4, False),
        "batch_size": None,
    },
    "nothing at all": lambda: {"sampler": [], "batch_size": 3},
    "ahead by one": lambda: {"batch_size": 3, "prefetch_factor": 1},
    "kept workers": lambda: {"batch_size": 3, "persistent_workers": True, "shuffle": True},
}


NOT_GATHERED = (
    *("not batched", "not batched, shuffled", "batches as samples"),
    "batches that are keys",  # which are collated otherwise
)


@pytest.mark.cases(21)
@pytest.mark.parametrize("executor", [*ENGINE, "gather"])
@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_samples_is_that_of_torch(executor: str, order: str) -> None:
    if executor == "gather" and order in NOT_GATHERED:
        pytest.skip("gather makes torch's batches")
    ours, theirs = both(executor, ORDERS[order], epochs=2 if order == "kept workers" else 1)
    assert alike(ours, theirs)


class Sized(list[Any]):
    """Batches whose ``batch_size`` means something of the user's own."""

    batch_size: object = None


@each("size", [(2, 1), "dynamic", 2.5, {"images": 2}])
@each("workers", [0, "auto"])
def test_batches_may_say_of_their_size_what_they_like(size: object, workers: Any) -> None:
    batches = Sized([[1, 2], [5]])
    batches.batch_size = size
    loader = FastDataLoader(ROWS, batch_sampler=batches, num_workers=workers)
    assert alike(list(loader), list(DataLoader(ROWS, batch_sampler=batches)))
    loader.close()


DATASETS: dict[str, Any] = {
    "concatenated": lambda: ConcatDataset([ROWS, ROWS]),
    "subset": lambda: Subset(ROWS, [7, 3, 3]),
    "stacked": lambda: StackDataset(ROWS, TensorDataset(torch.arange(30))),
    "stacked by name": lambda: StackDataset(a=ROWS, b=Made(float, 30)),
    "split": lambda: random_split(ROWS, [0.5, 0.5], generator())[1],
    "list": lambda: [torch.tensor(i) for i in range(9)],
    "range": lambda: range(9),
    "array": lambda: np.arange(12.0).reshape(6, 2),
    "text": lambda: "a line of letters",
}


@pytest.mark.cases(14)
@pytest.mark.parametrize("executor", ENGINE)
@pytest.mark.parametrize("kind", DATASETS)
def test_any_kind_of_dataset_is_read(executor: str, kind: str) -> None:
    ours, theirs = both(executor, lambda: {"batch_size": 4}, DATASETS[kind]())
    assert alike(ours, theirs)


LEAVES: dict[str, Any] = {
    "string": lambda i: f"s{i}",
    "bytes": lambda i: bytes([i]),
    "number": float,
    "huge number": lambda i: 2**40 + i,
    "NumPy number": np.float32,
    "NumPy truth": lambda i: np.bool_(i % 2),
    "array without axes": np.array,
    "empty array": lambda i: np.zeros((0, 4), np.int16),
    "array": lambda i: np.full((2, 3), i, np.float64),
    "list": lambda i: [i, [str(i), (i, 1.0)]],
    "ordered dict": lambda i: OrderedDict(a=i, b={"c": torch.ones(2) * i}),
    "named tuple": lambda i: Point(torch.ones(3) * i, str(i)),
    "complex": lambda i: torch.full((2,), complex(i, 1)),
    "expanded": lambda i: torch.tensor([i]).expand(5),
    "large": lambda i: torch.full((40, 50), i, dtype=torch.int16),
    "shared memory": lambda i: torch.full((9,), i).share_memory_(),
    "scalar tensor": torch.tensor,
    "empty tensor": lambda i: torch.empty(0, 3),
    "bfloat16": lambda i: torch.full((5,), i, dtype=torch.bfloat16),
    "truth": lambda i: i % 2 == 0,
    "numbers": lambda i: (i, i / 3, np.float32(i), np.int16(i)),
    "strided": lambda i: torch.arange(12).reshape(3, 4).T + i,
    "mixed numbers": lambda i: i if i % 2 else i / 2,
    "mixed types": lambda i: torch.full((2,), i) if i % 3 else torch.full((2,), i).double(),
    "pixels": lambda i: torch.full((3, 64, 64), i, dtype=torch.uint8),
}
SINGLE: dict[str, Any] = {
    **LEAVES,
    "nothing": lambda i: None,
    "sparse": lambda i: (torch.eye(3) * i).to_sparse(),
    "sparse rows": lambda i: (torch.eye(3) * i).to_sparse_csr(),
    "parameter": lambda i: torch.nn.Parameter(torch.ones(2) * i, requires_grad=False),
    "a set": lambda i: {i, "x"},
}


MIXED = ("mixed numbers", "mixed types")
NO_NUMBERS = ("string", "bytes", "list", "ordered dict", "named tuple")
"""A batch that holds any of these is collated; others may be written row by row."""
ALONE = ("string", "array without axes", "expanded", "large", *MIXED)
"""What is tried as a sample by itself, too; a sample may hold others beside each other."""


def check_kinds(executor: str, kinds: dict[str, Any], size: int | None) -> None:
    """Check that samples of all kinds come as they do from torch."""
    rows = [kind for kind in LEAVES if kind not in (*MIXED, *NO_NUMBERS)]
    others = [kind for kind in kinds if kind not in (*MIXED, *rows)]
    with Misses() as misses:
        for group in (rows, others):
            make = partial(_together, {kind: kinds[kind] for kind in group})
            ours, theirs = both(executor, lambda: {"batch_size": size}, Made(make))
            misses.check(alike(ours[1], theirs[1]), "what is drawn next")
            for one, other in zip(ours[0][0], theirs[0][0], strict=True):
                for kind in group:
                    misses.check(alike(one[kind], other[kind]), kind)
        for kind in kinds if LONG else ALONE:
            ours, theirs = both(executor, lambda: {"batch_size": size}, Made(kinds[kind]))
            misses.check(alike(ours, theirs), kind, "alone")


def _together(makers: dict[str, Any], index: int) -> dict[str, Any]:
    return {kind: make(index) for kind, make in makers.items()}


@each("turned", [lambda i: i // 3 % 2, lambda i: i % 2])
@each("size", [1, 50_000])
@each("executor", ENGINE)
def test_the_fields_of_a_batch_have_the_order_of_its_first_sample(executor, turned, size) -> None:
    def make(index: int) -> dict[str, torch.Tensor]:
        sample = {"x": torch.full((size,), index), "y": torch.full((size,), -index)}
        return dict(reversed(sample.items())) if turned(index) else sample

    ours, theirs = both(executor, lambda: {"batch_size": 3}, Made(make))
    assert [list(batch) for batch in ours[0][0]] == [list(batch) for batch in theirs[0][0]]
    assert alike(ours, theirs)


@each("form", ["to_sparse", "to_sparse_csr"])
@each("workers", [2, "auto"])
def test_sparse_samples_are_tried_without_a_word(form, workers) -> None:
    rows = Made(lambda i: getattr(torch.eye(3) * i, form)())
    with warnings.catch_warnings():
        warnings.simplefilter("error", FastDataWarning)
        loader = FastDataLoader(rows, batch_size=None, num_workers=workers)
    assert loader.plan is not None
    assert "RuntimeError" not in loader.plan.explain()


@pytest.mark.parametrize("executor", ENGINE)
def test_leaves_of_every_kind_are_collated_as_by_torch(executor: str) -> None:
    check_kinds(executor, LEAVES, 5)


@pytest.mark.parametrize("executor", ENGINE)
def test_single_samples_of_every_kind_are_converted_as_by_torch(executor: str) -> None:
    check_kinds(executor, SINGLE, None)


def with_turned_axes(samples: list[torch.Tensor]) -> list[Any]:
    rows = torch.stack(samples)
    array = np.asfortranarray(rows.numpy().reshape(len(rows), -1))
    return [rows.mT, rows.permute(2, 0, 1), rows.unsqueeze(1).permute(0, 3, 1, 2), array]


@each("executor", ENGINE)
@each("long", [4, 2000])
def test_batches_whose_axes_were_turned_lie_in_memory_as_those_of_torch(executor, long) -> None:
    def make(index: int) -> torch.Tensor:
        return torch.arange(3.0 * long).view(3, long) + index

    how = {"batch_size": 4, "collate_fn": with_turned_axes}
    ours, theirs = both(executor, lambda: how, Made(make, 8))
    assert alike(ours, theirs, strides=True)
    for (turned, *_, array), (_, *_, wanted) in zip(ours[0][0], theirs[0][0], strict=True):
        turned.mT.view(4, -1)  # torch refuses that of a batch in another order
        assert array.strides == wanted.strides
    ours, theirs = both(executor, lambda: {"batch_size": None}, Made(lambda i: make(i).T))
    assert alike(ours, theirs, strides=True)


@each("numbers", [3, 3000])
@each("loader", [partial(DataLoader, num_workers=1), partial(FastDataLoader, num_workers=1)])
def test_arrays_of_which_workers_hand_over_copies_may_be_written_to(loader, numbers) -> None:
    kept = np.arange(float(numbers))
    kept.flags.writeable = False
    for (array,) in loader(Made(lambda _: kept, 2), batch_size=1, collate_fn=list):
        array[:] = 7
        assert array.tolist() == [7.0] * numbers


def frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@each("numbers", [3, 300, 30_000])
@each("kind", [">f4", ">i8", "f4", [("a", "i4"), ("b", "f8")], "M8[s]", "?"])
@each("read_only", [False, True])
def test_arrays_from_workers_are_those_of_torchs_workers(numbers, kind, read_only) -> None:
    rows = np.ones((3, numbers), kind)
    kept = [rows, np.asfortranarray(rows)]
    kept = [frozen(array) if read_only else array for array in kept]
    found = []
    for loader in (DataLoader, FastDataLoader):
        (batch,) = loader(Made(lambda _: kept, 1), collate_fn=list, num_workers=1)
        found.append([(each.dtype, each.strides, each.flags.writeable) for each in batch[0]])
        assert alike(batch, [[rows.astype(rows.dtype.newbyteorder("="))] * 2])
    assert found[0] == found[1]


@each("executor", ENGINE)
@each("sample", [torch.arange(3), torch.eye(2), "text", np.arange(3), [1, 2], {"x": 1}, 7])
def test_single_samples_that_are_to_be_collated_are_what_torch_makes_of_them(
    executor, sample
) -> None:
    def batches(loader: Any, **arguments: Any) -> Any:
        given = {"batch_size": None, "collate_fn": default_collate, **arguments}
        try:
            return list(loader(Made(lambda _: sample, 3), **given))
        except (TypeError, KeyError, BatchError):
            return "none can be made"

    ours = batches(FastDataLoader, num_workers=1, executor=executor)
    assert alike(ours, batches(DataLoader))


@each("executor", ENGINE)
@each("kind", ["sparse", "sparse rows", "nothing", "a set"])
def test_what_torch_does_not_collate_is_an_error_that_says_what_it_was(executor, kind) -> None:
    with pytest.raises((TypeError, RuntimeError)) as theirs:
        next(iter(DataLoader(Made(SINGLE[kind]), batch_size=2)))
    with pytest.raises(BatchError) as ours:
        next(iter(FastDataLoader(Made(SINGLE[kind]), 2, num_workers=1, executor=executor)))
    assert str(theirs.value).splitlines()[0] in str(ours.value)


@pytest.mark.parametrize("executor", ENGINE)
def test_nested_tensors_pass_as_single_samples(executor: str) -> None:
    dataset = Made(lambda i: torch.nested.nested_tensor([torch.ones(i + 1), torch.zeros(2)]), 4)
    loader = FastDataLoader(dataset, batch_size=None, num_workers=1, executor=executor)
    assert [len(nested.unbind()[0]) for nested in loader] == [1, 2, 3, 4]
    with pytest.raises(BatchError, match="nested tensors are not currently supported"):
        next(iter(FastDataLoader(dataset, 2, num_workers=1, executor=executor)))


@pytest.mark.parametrize("executor", ENGINE)
def test_batches_of_an_own_type_travel_and_are_pinned_by_their_own_method(executor: str) -> None:
    how = {"batch_size": 3, "collate_fn": Holder, "num_workers": 2}
    ours = FastDataLoader(Made(float), **how, executor=executor)
    assert alike(list(ours), list(DataLoader(Made(float), **how)))
    if torch.accelerator.is_available():
        assert all(batch.pinned for batch in FastDataLoader(Made(float), **how, pin_memory=True))


class Batched(Dataset):
    """Gives the samples of a batch in one call, each with how many were asked for."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("asked for a single sample")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, len(indices)) for index in indices]


class PassesOn(Dataset):
    """Has the attributes of the dataset that it holds, and so its ``__getitems__``, too."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return "read alone", index

    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return getattr(self.data, name)


@each("executor", ENGINE)
@each(
    "wrap",
    [
        PassesOn,
        lambda data: PassesOn(TensorDataset(torch.arange(12))),
        lambda data: Subset(PassesOn(data), [5, 1, 7, 2]),
        lambda data: Subset(data, [5, 1, 7, 2]),
        lambda data: Subset(Subset(data, range(10)), [3, 1, 7]),
        lambda data: StackDataset(data, data),
    ],
)
def test_batched_fetching_is_honoured_also_below_wrappers(wrap, executor) -> None:
    ours, theirs = both(executor, lambda: {"batch_size": 2}, wrap(Batched()))
    assert alike(ours, theirs)


@pytest.mark.cases(8)
@pytest.mark.parametrize("executor", ["inline", "workers"])
@pytest.mark.parametrize("batch_size", [None, 1, 3])
@pytest.mark.parametrize("chained", [False, True])
def test_streams_and_chains_of_them_are_read_as_by_torch(executor, batch_size, chained) -> None:
    dataset = ChainDataset([Numbers(7), Numbers(2)]) if chained else Numbers(8)
    ours, theirs = both(executor, lambda: {"batch_size": batch_size}, dataset)
    assert alike(ours, theirs)


@pytest.mark.parametrize("executor", [*ENGINE, "gather"])
def test_the_length_is_that_of_torch(executor: str) -> None:
    for order in ("in batches", "without the last", "more than the data", "a list of batches"):
        theirs = DataLoader(ROWS, **ORDERS[order]())
        assert len(FastDataLoader(ROWS, **ORDERS[order](), executor=executor)) == len(theirs)
    with pytest.raises(TypeError):
        len(FastDataLoader(ROWS, sampler=EveryThird(), executor=executor))
    with pytest.raises(TypeError):
        len(FastDataLoader(Numbers(3), executor=executor))


class Unmeasured(Made):
    """Asks a server for its length, say, and may be given as a dataset or as a sampler."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__(torch.tensor)
        self.error = error

    def __len__(self) -> int:
        raise self.error("not known")

    def __iter__(self) -> Any:
        return iter([5, 9, 2])


class UnmeasuredStream(Unmeasured, IterableDataset):
    pass


@each("executor", ENGINE)
@each("error", [RuntimeError, NotImplementedError])
def test_a_length_that_raises_is_not_known(executor: str, error: type[Exception]) -> None:
    sampler = Unmeasured(error)
    assert alike(*both(executor, lambda: {"sampler": sampler, "batch_size": 2}, sampler))
    assert alike(*both(executor, lambda: {"batch_size": 2}, UnmeasuredStream(error)))
    loader = FastDataLoader(ROWS, 2, sampler=sampler, executor=executor)
    next(iter(loader))
    assert loader.state_dict()["batches"] == 1
    loader.close()


@pytest.mark.cases(6)
@pytest.mark.parametrize("executor", ENGINE)
@pytest.mark.parametrize("form", ["name", "context", "torch", None])
def test_every_form_of_multiprocessing_context_is_taken(executor: str, form: str | None) -> None:
    context: Any = {
        "name": "fork",
        "context": multiprocessing.get_context("fork"),
        "torch": torch.multiprocessing.get_context("fork"),
        None: None,
    }[form]
    how = {"batch_size": 4, "multiprocessing_context": context}
    ours, theirs = both(executor, lambda: how)
    assert alike(ours, theirs)


BAD: dict[str, dict[str, Any]] = {
    "negative workers": {"num_workers": -1},
    "negative timeout": {"timeout": -1},
    "sampler and shuffle": {"sampler": [1], "shuffle": True},
    "two samplers": {"batch_sampler": [[1]], "sampler": [1]},
    "batch sampler and size": {"batch_sampler": [[1]], "batch_size": 3},
    "drop_last of nothing": {"batch_size": None, "drop_last": True},
    "prefetch without workers": {"prefetch_factor": 3},
    "kept workers without workers": {"persistent_workers": True},
    "context without workers": {"multiprocessing_context": "fork"},
    "no such context": {"multiprocessing_context": "fok", "num_workers": 1},
    "stream with a sampler": {"dataset": Numbers(3), "sampler": [1]},
    "stream shuffled": {"dataset": Numbers(3), "shuffle": True},
    "stream with batches": {"dataset": Numbers(3), "batch_sampler": [[1]]},
}


@each("executor", ENGINE)
@each("case", BAD)
def test_arguments_that_torch_refuses_are_refused_alike(executor: str, case: str) -> None:
    how = {"dataset": ROWS, **BAD[case]}
    with pytest.raises((ValueError, TypeError)) as theirs:
        DataLoader(**how)
    with pytest.raises(type(theirs.value)) as ours:
        FastDataLoader(**how, executor=executor)
    if isinstance(ours.value, OptionsError):  # which names the value besides
        assert f"{next(iter(BAD[case]))} is {next(iter(BAD[case].values()))!r}" in str(ours.value)
    else:
        assert str(ours.value) == str(theirs.value)


@each("executor", ENGINE)
@each(
    "name", ["batch_size", "sampler", "drop_last", "dataset", "batch_sampler", "persistent_workers"]
)
def test_what_torch_fixes_at_construction_stays_fixed(executor: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} attribute should not be set"):
        setattr(FastDataLoader(ROWS, executor=executor), name, None)


def test_a_dataset_that_grows_is_read_to_its_new_end() -> None:
    data = list(range(10))
    loader = FastDataLoader(data, batch_size=5, num_workers=1, executor="workers")
    assert len(list(loader)) == 2
    data.extend(range(10))
    assert len(list(loader)) == len(loader) == 4


@pytest.mark.parametrize("executor", [*ENGINE, "torch"])
def test_a_full_shared_memory_or_another_default_device_is_no_matter_of_a_loader(
    executor, monkeypatch
) -> None:
    def full(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    with torch.device("meta"):  # as a program makes a model without memory for it
        loader = FastDataLoader(Made(float), 2, num_workers=2, executor=executor)
    monkeypatch.undo()
    with contextlib.closing(loader):
        assert [torch.cat(list(loader)).tolist() for _ in range(2)] == 2 * [list(range(12))]


@pytest.mark.parametrize("executor", [*ENGINE, "gather"])
def test_no_gradient_is_recorded_and_no_thread_is_taken_from_the_caller(executor: str) -> None:
    threads, affinity = torch.get_num_threads(), os.sched_getaffinity(0)
    with contextlib.closing(
        FastDataLoader(ROWS, batch_size=4, num_workers=2, executor=executor)
    ) as loader:
        assert not any(x.requires_grad for batch in loader for x in batch)
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == (threads, affinity)


@pytest.mark.parametrize("executor", [*ENGINE, "gather", "torch"])
def test_a_forked_process_keeps_the_batch_that_it_was_given(executor: str) -> None:
    rows = torch.arange(240.0)[:, None].expand(240, 1000).contiguous()
    theirs = list(DataLoader(rows, batch_size=10))
    reading, writing = os.pipe()
    children = []
    with contextlib.closing(FastDataLoader(rows, 10, num_workers=1, executor=executor)) as loader:
        for number, batch in enumerate(loader):
            if number in (0, 3, 4):
                children.append(os.fork())
                if not children[-1]:
                    os.close(writing)
                    os.read(reading, 1)
                    os._exit(not torch.equal(batch, theirs[number]))
    os.close(writing)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]


class Parents(Dataset):
    """Each sample is the process id of the parent of the process that reads it."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return os.getppid()


@pytest.mark.parametrize("kept", ["unchanged", True])
def test_a_forked_process_reads_with_workers_of_its_own(kept) -> None:
    how = {"num_workers": 2, "persistent_workers": kept, "multiprocessing_context": "fork"}
    with contextlib.closing(FastDataLoader(Parents(), 3, executor="workers", **how)) as loader:
        assert [batch.tolist() for batch in loader] == 2 * [3 * [os.getpid()]]
        child = os.fork()
        if not child:
            signal.alarm(20)  # it would wait for an answer that its parent may have taken
            own = [batch.tolist() for _ in range(2) for batch in loader]
            loader.close()
            os._exit(own != 4 * [3 * [os.getpid()]])
        assert os.waitpid(child, 0)[1] == 0
        assert [batch.tolist() for batch in loader] == 2 * [3 * [os.getpid()]]


@each("shuffle", [False, True])
def test_threads_that_read_one_loader_have_whole_epochs(shuffle) -> None:
    how = {"num_workers": 2, "persistent_workers": "unchanged", "executor": "workers"}
    dataset = Made(torch.tensor, 60)
    with contextlib.closing(FastDataLoader(dataset, 4, shuffle=shuffle, **how)) as loader:

        def epochs(_: int) -> list[list[int]]:
            return [sorted(torch.cat(list(loader)).tolist()) for _ in range(8)]

        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(epochs, range(2))) == 2 * [8 * [list(range(60))]]


@pytest.mark.parametrize("executor", ["workers", "gather"])
def test_a_fork_takes_no_batch_of_the_epoch_that_its_parent_reads(executor: str) -> None:
    rows = torch.arange(60)
    with contextlib.closing(FastDataLoader(rows, 4, num_workers=2, executor=executor)) as loader:
        batches = iter(loader)
        taken = [next(batches)]
        child = os.fork()
        if not child:
            signal.alarm(20)  # it would wait for an answer that its parent may have taken
            with contextlib.suppress(BaseException):
                for _ in range(2):
                    with pytest.raises(WorkerError, match="of which this one is a fork"):
                        next(batches)
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(torch.cat([*taken, *batches]), rows)


def test_a_loader_may_be_annotated_with_what_it_gives() -> None:
    assert FastDataLoader[list[torch.Tensor]].__origin__ is FastDataLoader


# Workers


def children() -> set[int]:
    gc.collect()
    return {child.pid for child in psutil.Process().children(recursive=True)}


def gone(pids: set[int]) -> bool:
    """Wait for processes to end; whoever waited for them too may have reaped them."""
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    return True


def facts(index: int) -> Any:
    info = get_worker_info()
    met = Path(os.environ["FASTDATA_TEST_GATE"])
    (met / str(os.getpid())).touch()
    until(lambda: len(list(met.iterdir())) == 2)  # or one takes all samples before another wakes
    return (info.id, info.num_workers, info.seed - info.id, os.getpid(), type(info.dataset) is Made)


def test_worker_info_is_that_of_torch_and_there_is_none_in_the_caller(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("FASTDATA_TEST_GATE", str(tmp_path))
    ours = FastDataLoader(Made(facts, 40), batch_size=None, num_workers=2, executor="workers")
    theirs = DataLoader(Made(facts, 40), batch_size=None, num_workers=2)
    mine = list(ours)
    for met in tmp_path.iterdir():
        met.unlink()
    other = list(theirs)
    assert {row[0] for row in mine} == {row[0] for row in other} == {0, 1}
    assert {row[1] for row in mine} == {2}
    assert len({row[2] for row in mine}) == 1  # one seed for all, of which each adds its number
    assert len({row[3] for row in mine}) == 2
    assert os.getpid() not in {row[3] for row in mine}
    assert all(row[4] for row in mine)
    assert get_worker_info() is None
    alone = FastDataLoader(
        Made(lambda i: get_worker_info() is None), batch_size=None, executor="inline"
    )
    assert all(alone)


@pytest.mark.cases(1)
@pytest.mark.parametrize("persistent", [False, True])
def test_an_iterator_that_is_dropped_midway_ends_its_processes(persistent) -> None:
    before = children()
    how = {"num_workers": 2, "persistent_workers": persistent, "executor": "workers"}
    loader = FastDataLoader(Made(float, 400), **how)
    running = iter(loader)
    next(running)
    started = children() - before
    assert started
    del running
    if persistent:
        assert not started - children()
    del loader
    gc.collect()
    assert gone(started)


def with_daemons(index: int) -> float:
    return sum(1 for _ in FastDataLoader(Made(float, 6), num_workers=1, executor="workers"))


def test_side_processes_have_no_side_processes_as_workers_of_torch_have_none() -> None:
    loader = FastDataLoader(Made(with_daemons, 5), num_workers=1, executor="workers")
    with pytest.raises(AssertionError, match="daemonic processes are not allowed"):
        next(iter(loader))


@each("limit_s", [0.0, 0.01])
@each("context", ["fork", "spawn"])
def test_a_time_limit_that_a_program_sets_for_its_sockets_is_none_of_workers(
    context, limit_s
) -> None:
    how = {"num_workers": 2, "multiprocessing_context": context, "persistent_workers": True}
    with contextlib.closing(FastDataLoader(Made(float), 2, executor="workers", **how)) as loader:
        socket.setdefaulttimeout(limit_s)
        try:
            got = [torch.cat(list(loader)).tolist() for _ in range(2)]
        finally:
            socket.setdefaulttimeout(None)
        assert got == 2 * [list(range(12))]
        assert not loader.faults.deaths


def test_a_process_may_be_bound_to_a_cpu_by_worker_init_fn() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    loader = FastDataLoader(
        Made(lambda i: sorted(os.sched_getaffinity(0)) == allowed[:1]),
        num_workers=1,
        worker_init_fn=lambda number: os.sched_setaffinity(0, allowed[:1]),
        executor="workers",
    )
    assert all(loader)
    assert sorted(os.sched_getaffinity(0)) == allowed


# -- rows of "What differs from torch's DataLoader" ------------------------------------------------


@each("executor", ENGINE)
def test_integers_and_floats_of_one_batch_are_collated_wherever_it_is_read(executor) -> None:
    mixed = Made(lambda i: torch.tensor([i + 0.5] if i else [i]), 2)
    wanted = next(iter(DataLoader(mixed, 2)))
    how = {"num_workers": int(executor == "workers"), "executor": executor}
    assert alike(next(iter(FastDataLoader(mixed, 2, **how))), wanted)


@each("executor", ["inline", "torch"])
def test_iterators_that_share_a_generator_draw_from_it_as_torchs_do(executor) -> None:
    def found(kind: type, **how: Any) -> list[Any]:
        shared = torch.Generator().manual_seed(3)
        one, other = (kind(range(6), 2, True, generator=shared, **how) for _ in range(2))
        iter(one)  # it is never asked for a batch
        together = [[a.tolist(), b.tolist()] for a, b in zip(one, other, strict=True)]
        nested = [[a.tolist(), [b.tolist() for b in other]] for a in one]
        return [together, nested, shared.get_state().tolist()]

    assert found(FastDataLoader, executor=executor) == found(DataLoader)


@each("executor", [*ENGINE, "torch"])
def test_a_batch_sampler_is_begun_once_in_an_epoch(executor) -> None:
    class Begun(Sampler):
        times = 0

        def __iter__(self):
            self.times += 1
            return iter([[0], [1]])

        def __len__(self) -> int:
            return 2

    batches = Begun()
    how = {"num_workers": int(executor != "inline"), "executor": executor}
    loader = FastDataLoader(range(2), batch_sampler=batches, **how)
    for epoch in range(2):
        list(loader)
        assert batches.times == epoch + 1


@each("executor", ["workers", "torch"])
def test_another_collate_fn_holds_from_the_next_epoch_on_though_workers_stay(executor) -> None:
    loader = FastDataLoader(range(2), 1, num_workers=1, executor=executor, persistent_workers=True)
    first = iter(loader)
    assert next(first).tolist() == [0]
    loader.collate_fn = len
    assert next(first).tolist() == [1]
    assert list(loader) == [1, 1]
    loader.close()


@each(
    ("executor", "given"),
    [
        ("torch", {}),
        ("torch", {"prefetch_factor": 3}),
        ("torch", {"persistent_workers": True}),
        ("torch", {"multiprocessing_context": "fork"}),
        ("workers", {"prefetch_factor": 3, "persistent_workers": True}),
    ],
)
def test_a_program_may_set_the_workers_to_none_and_back(executor, given) -> None:
    loader = FastDataLoader(range(6), 2, num_workers=1, executor=executor, **given)
    for workers in (0, 1, 0):
        loader.num_workers = workers
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]


OF_WORKERS = ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context")


@each("given", [{}, {"num_workers": 1}, {"num_workers": "auto"}, {"num_workers": 1, "timeout": 9}])
def test_torchs_loader_can_be_made_of_what_a_loader_has(given) -> None:
    ours = FastDataLoader(range(6), 2, **given)
    names = (*OF_WORKERS, "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator")
    has = {name: getattr(ours, name) for name in names}
    theirs = DataLoader(ours.dataset, batch_sampler=ours.batch_sampler, **has)
    assert [batch.tolist() for batch in theirs] == [[0, 1], [2, 3], [4, 5]]
    assert theirs.timeout == given.get("timeout", 0)
    again = FastDataLoader(ours.dataset, 2, **has)
    assert type(again.timeout) is type(ours.timeout)

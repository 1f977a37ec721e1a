"""Gathered batches are those of torch's DataLoader, to the bit."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from alike import alike
from hypothesis import given
from hypothesis import strategies as st
from misses import each
from thoroughness import max_examples
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from lightning_fastdata.batches.memory import SlotPool
from lightning_fastdata.errors import DatasetError, OptionsError
from lightning_fastdata.executors.columns import (
    ColumnDataset,
    TokenWindows,
    rows_of,
)
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.gather import GatherExecutor, GatherJob
from lightning_fastdata.executors.kinds import Resources, open_executor
from lightning_fastdata.loading.loader import FastDataLoader

GENERATOR = np.random.default_rng(0)
TENSOR_TYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.uint16, torch.uint32, torch.float8_e4m3fn),
]
ARRAY_TYPES = ["?", "u1", "i1", "u2", "i2", "u4", "i4", "i8", "f2", "f4", "f8", "c8"]


def tensor(rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if 0 in shape:
        return torch.empty((rows, *shape), dtype=dtype)
    count = rows * math.prod(shape)
    bits = torch.from_numpy(GENERATOR.integers(0, 256, count * dtype.itemsize, np.uint8))
    # Not-a-numbers, infinities and negative zeros are among them.
    return (bits > 127 if dtype is torch.bool else bits.view(dtype)).view(rows, *shape)


def array(rows: int, shape: tuple[int, ...], code: str) -> np.ndarray:
    count = rows * math.prod(shape)
    if code == "?":
        return GENERATOR.integers(0, 2, count).astype(bool).reshape(rows, *shape)
    bits = GENERATOR.integers(0, 256, count * int(code[1]), np.uint8)
    return bits.view(code).reshape(rows, *shape)


SHAPES = st.sampled_from([(), (1,), (5,), (2, 3), (0,), (3, 1, 2)])


@st.composite
def numbers(draw: Any, rows: int) -> Any:
    shape = draw(SHAPES)
    if draw(st.booleans()):
        made = tensor(rows, shape, draw(st.sampled_from(TENSOR_TYPES)))
        return made.T.contiguous().T if len(shape) == 1 and draw(st.booleans()) else made
    made = array(rows, shape, draw(st.sampled_from(ARRAY_TYPES)))
    if not shape and made.dtype.kind in "fc":
        made[np.isnan(made)] = 1  # Collation of single numbers makes all not-a-numbers the same.
    form = draw(st.sampled_from(["plain", "reversed", "spread"]))
    return {"plain": made, "reversed": made[::-1], "spread": np.repeat(made, 2, 0)[::2]}[form]


@st.composite
def datasets(draw: Any, depth: int = 2) -> Any:
    rows = draw(st.integers(1, 40))
    kind = draw(st.sampled_from(["tensors", "columns", "row", "named", "windows"]))
    if kind == "tensors":
        types = draw(st.lists(st.sampled_from(TENSOR_TYPES), min_size=1, max_size=3))
        data: Any = TensorDataset(*(tensor(rows, draw(SHAPES), dtype) for dtype in types))
    elif kind == "columns":
        data = ColumnDataset([draw(numbers(rows)), draw(numbers(rows))])
    elif kind == "named":
        data = ColumnDataset({"x": draw(numbers(rows)), 3: draw(numbers(rows))})
    elif kind == "windows":
        dtype = draw(st.sampled_from([torch.int64, torch.int32, torch.uint8]))
        row = array(rows + 6, (), draw(st.sampled_from(["u1", "u2", "i4"])))
        data = TokenWindows(row, 7, stride=draw(st.integers(1, 9)), dtype=dtype)
    else:
        data = draw(numbers(rows))
    for _ in range(draw(st.integers(0, depth))):
        wrapper = draw(st.sampled_from(["subset", "stack"]))
        if wrapper == "subset":
            index = st.integers(-len(data), len(data) - 1)
            indices = draw(st.lists(index, min_size=1, max_size=30))
            form = draw(st.sampled_from([list, np.array, torch.tensor]))
            data = Subset(data, form(indices))
        else:
            other = tensor(len(data), (2,), torch.float32)
            pair = draw(st.booleans())
            data = StackDataset(data, other) if pair else StackDataset(one=data, two=other)
    return data


same = partial(alike, strides=True)


def plan_of(dataset: Any, **settings: Any) -> FetchPlan:
    default = {"collate_fn": default_collate, "default_collation": True}
    return FetchPlan(dataset=dataset, **{**default, **settings})


@contextmanager
def begun(dataset: Any, batches: Any, threads: int = 0, **settings: Any) -> Iterator[Any]:
    """Have an executor that has begun an epoch while a block runs."""
    executor = GatherExecutor(plan_of(dataset, **settings), threads=threads)
    with closing(executor):
        executor.start_epoch(batches, 0)
        yield executor


def gathered(dataset: Any, batches: list[Any], *, threads: int = 0) -> list[Any]:
    with begun(dataset, batches, threads) as executor:
        return list(executor)


@max_examples(150)
@given(data=st.data(), dataset=datasets(), threads=st.sampled_from([0, 1, 3]))
def test_batches_are_those_of_torch_to_the_bit(data, dataset, threads) -> None:
    index = st.integers(-len(dataset), len(dataset) - 1)
    batches = data.draw(st.lists(st.lists(index, min_size=1, max_size=9), max_size=12))
    theirs = list(DataLoader(dataset, batch_sampler=batches))
    as_arrays = [np.array(batch) for batch in batches]
    assert rows_of(dataset) is not None
    assert same(gathered(dataset, batches, threads=threads), theirs)
    assert same(gathered(dataset, as_arrays, threads=threads), theirs)


def hugging_face(rows: int = 30) -> Any:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "ids": datasets.Sequence(datasets.Value("int32")),
            "image": datasets.Array2D((2, 3), "uint8"),
            "box": datasets.Sequence(datasets.Value("float64"), length=4),
            "score": datasets.Value("float64"),
            "label": datasets.Value("int64"),
        }
    )
    columns = {
        "ids": GENERATOR.integers(0, 99, (rows, 5)).tolist(),
        "image": GENERATOR.integers(0, 99, (rows, 2, 3)).tolist(),
        "box": GENERATOR.random((rows, 4)).tolist(),
        "score": GENERATOR.random(rows).tolist(),
        "label": list(range(rows)),
    }
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.mark.cases(6)
@pytest.mark.parametrize(
    "view",
    [
        lambda d: d,
        lambda d: d.shuffle(seed=1),
        lambda d: d.select([4, 2, 9]),
        lambda d: d.select(range(5, 12)).shuffle(seed=2),
        lambda d: d.map(lambda row: {"label": row["label"] + 1}, writer_batch_size=7),
        lambda d: Subset(d, [3, -1, 7]),
    ],
)
@pytest.mark.parametrize("form", ["torch", "numpy"])
def test_tables_of_hugging_face_are_gathered_where_they_lie(view, form) -> None:
    names = ["label", "ids", "box", "score"]
    dataset = view(hugging_face().with_format(form, columns=names))
    assert rows_of(dataset) is not None
    batches = list(BatchSampler(torch.randperm(len(dataset)).tolist(), 4, drop_last=False))
    theirs = list(DataLoader(dataset, batch_sampler=batches))
    for _ in range(2):
        assert same(gathered(dataset, batches, threads=1), theirs)


def test_other_tables_of_hugging_face_are_not_gathered() -> None:
    datasets = pytest.importorskip("datasets")
    dataset = hugging_face().remove_columns("image")
    ragged = datasets.Dataset.from_dict({"x": [[1], [2, 3], [4]]})
    missing = datasets.Dataset.from_dict({"x": [1.0, None, 2.0]})
    words = datasets.Dataset.from_dict({"x": ["a", "b"]})
    for other in (
        dataset,
        dataset.with_format("torch", dtype=torch.float16),
        dataset.with_format("torch", columns=["label"], output_all_columns=True),
        dataset.with_transform(lambda rows: rows),
        *(table.with_format("torch") for table in (ragged, missing, words, dataset.select([]))),
    ):
        assert rows_of(other) is None


def test_no_row_of_pictures_is_read_to_see_whether_they_are_numbers() -> None:
    datasets = pytest.importorskip("datasets")
    broken = [{"bytes": b"no picture", "path": None}]
    pictures = datasets.Dataset.from_dict(
        {"picture": broken}, features=datasets.Features({"picture": datasets.Image()})
    )
    assert rows_of(pictures.with_format("torch")) is None


def test_a_format_that_is_set_later_counts() -> None:
    dataset = hugging_face().with_format("torch", columns=["score"])
    first = gathered(dataset, [[1, 2]])
    dataset.set_format("torch", columns=["label"])
    assert same(gathered(dataset, [[1, 2]]), list(DataLoader(dataset, batch_sampler=[[1, 2]])))
    assert list(first[0]) == ["score"]


class Changed(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        return tuple(2 * value for value in super().__getitem__(index))


TABLE = torch.arange(24.0).view(8, 3)
REFUSED = {
    "a subclass": Changed(TABLE),
    "gradients": TensorDataset(TABLE.clone().requires_grad_()),
    "sparse": TensorDataset(TABLE.to_sparse()),
    "numbers beyond int64": np.array([1, 2**64 - 1], np.uint64),
    "strings": np.array(["a", "b"]),
    "a subset with an index out of range": Subset(TABLE, [1, 8]),
    "a subset by truth": Subset(TABLE, [True, False]),
    "joined rows": ConcatDataset([TABLE, TABLE]),
    "samples": Subset([1, 2, 3], [0, 1]),
    "a list": [1.0, 2.0],
}


@each("kind", REFUSED)
def test_what_is_not_rows_as_they_are_is_not_gathered(kind) -> None:
    assert rows_of(REFUSED[kind]) is None
    with pytest.raises(OptionsError, match="neither tensors nor arrays"):
        open_executor(plan_of(REFUSED[kind]), Resources(executor="gather"))


def test_a_collate_function_of_the_user_is_never_passed_over() -> None:
    with pytest.raises(OptionsError, match="default"):
        open_executor(plan_of(TABLE, default_collation=False), Resources(executor="gather"))


@each("threads", [0, 2])
@each("data", [TensorDataset(TABLE), Subset(TABLE, range(8)), TABLE.numpy()])
@each("bad", [8, -9, 2**40])
def test_an_index_out_of_range_raises_what_the_dataset_raises_at_its_batch(
    data, bad, threads
) -> None:
    with pytest.raises(IndexError) as theirs:
        data[bad]
    with begun(data, [[0, 1], [2], [3, bad], [4]], threads) as executor:
        assert len(next(executor)) in (1, 2)
        next(executor)
        with pytest.raises(IndexError, match="^" + str(theirs.value)[:20].replace("(", ".")):
            next(executor)
        assert same(list(executor), list(DataLoader(data, batch_sampler=[[4]])))


def test_an_empty_dataset_has_no_batches() -> None:
    assert gathered(TensorDataset(torch.empty(0, 3)), []) == []


def test_a_batch_that_several_threads_write_is_whole_when_it_is_delivered() -> None:
    table = torch.arange(64, dtype=torch.uint8)[:, None].repeat(1, 2**20)
    pool = SlotPool(limit_bytes=2**28, shared=False)
    for _ in range(5):
        job = GatherJob(rows_of(table), np.arange(63, -1, -1), [64], pool)
        start = threading.Barrier(4)
        threads = [
            threading.Thread(target=lambda job=job, start=start: (start.wait(), job.work()))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        start.wait()
        (batch,) = job.batches()
        ends = batch[:, -1].clone()
        for thread in threads:
            thread.join()
        assert ends.tolist() == list(range(63, -1, -1))
        assert torch.equal(batch, table.flip(0))
        batch.zero_()  # so that what the next job leaves out shows


def test_who_waits_for_rows_that_are_dropped_goes_on() -> None:
    pool = SlotPool(limit_bytes=2**28, shared=False)
    job = GatherJob(rows_of(TABLE), np.arange(3), [1, 3], pool)
    job.cancel()
    waiting = threading.Thread(target=lambda: list(job.batches()), daemon=True)
    waiting.start()
    waiting.join(20)
    assert not waiting.is_alive()


@pytest.mark.parametrize("threads", [0, 1])
def test_memory_of_batches_that_are_dropped_is_used_again(threads) -> None:
    batches = [range(i, i + 400) for i in range(0, 3600, 5)]
    with begun(torch.randn(4000, 64), batches, threads) as executor:
        places = {batch.untyped_storage().data_ptr() for batch in executor}
    assert len(places) < 720 / 4


def test_without_threads_a_batch_is_read_when_it_is_asked_for() -> None:
    table = torch.zeros(6, 2)
    with begun(table, iter([[0, 1], [2, 3], [4, 5]])) as executor:
        for value in range(3):
            table += 1
            assert next(executor).unique().item() == value + 1


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_a_sampler_of_the_user_is_not_asked_long_before(threads) -> None:
    asked = []
    batches = ([asked.append(i) or i % 8] for i in range(100))
    with begun(TABLE, batches, threads, look_ahead=8) as executor:
        for delivered, _ in enumerate(executor):
            assert len(asked) <= delivered + (9 if threads else 1)


@pytest.mark.parametrize("threads", [0, 1])
def test_what_is_replaced_between_epochs_is_read_anew(threads) -> None:
    data = TensorDataset(torch.zeros(4, 2))
    part = Subset(data, [0, 1])
    executor = GatherExecutor(plan_of(part), threads=threads)
    for epoch in range(3):
        data.tensors = (torch.arange(8.0).view(4, 2) + epoch,)
        part.indices = [epoch, 3]
        executor.start_epoch([[0, 1]], epoch)
        assert torch.equal(next(executor)[0], data.tensors[0][[epoch, 3]])
        assert list(executor) == []
    executor.close()


@pytest.mark.cases(1)
@pytest.mark.parametrize("end", ["close", "drop"])
def test_threads_end_with_their_executor(end) -> None:
    def running() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name.startswith("fastdata gather")}

    before = running()
    executor = GatherExecutor(plan_of(torch.rand(4000, 500)), threads=3)
    executor.start_epoch([range(1000)] * 9, 0)
    next(executor)
    mine = running() - before
    assert 1 <= len(mine) <= 3
    if end == "close":
        executor.close()
    del executor
    gc.collect()
    for thread in mine:
        thread.join(20)
    assert not running() & mine


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@each("odd", [[True, False], [1.0], ["a"], [[1, 2]], [[1], [2, 3]], [None], []])
def test_other_indices_than_whole_numbers_are_for_the_dataset_to_judge(odd) -> None:
    def outcome(read: Any) -> Any:
        try:
            return read()
        except Exception as error:
            return type(error), str(error)

    ours = outcome(lambda: gathered(TABLE, [odd]))
    theirs = outcome(lambda: list(DataLoader(TABLE, batch_sampler=[odd])))
    assert type(ours) is type(theirs)
    if isinstance(ours, list):
        assert same(ours, theirs)
    else:
        assert ours == theirs


def test_a_mapped_file_is_gathered_through_the_loader_as_by_torch(tmp_path) -> None:
    images = np.lib.format.open_memmap(tmp_path / "m.npy", "w+", np.uint8, (50, 64, 64, 3))
    images[:] = GENERATOR.integers(0, 256, images.shape)
    data = ColumnDataset({"image": images, "label": torch.arange(50)})
    for workers in (0, 2):
        how = {"batch_size": 8, "shuffle": True, "drop_last": True}
        order = [torch.Generator().manual_seed(3) for _ in range(2)]
        ours = FastDataLoader(
            data, **how, num_workers=workers, executor="gather", generator=order[0]
        )
        theirs = DataLoader(data, **how, generator=order[1])
        for _ in range(2):
            assert same(list(ours), list(theirs))
        ours.close()


def test_columns_that_cannot_be_a_dataset_are_refused_by_name() -> None:
    with pytest.raises(DatasetError, match="no columns"):
        ColumnDataset({})
    with pytest.raises(DatasetError, match="'x': 3, 'y': 4"):
        ColumnDataset({"x": np.zeros(3), "y": np.zeros(4)})
    with pytest.raises(DatasetError, match=r"one array, of shape \(40, 3\)"):
        ColumnDataset(np.zeros((40, 3)))
    with pytest.raises(DatasetError, match=r"Column 'x' .* has no rows"):
        ColumnDataset({"x": np.float32(3)[...]})
    with pytest.raises(DatasetError, match=r"Column 'x' .* type list"):
        ColumnDataset({"x": [1, 2]})
    with pytest.raises(DatasetError, match=r"Column 0 .* <U1"):
        ColumnDataset([np.array(["a"])])
    with pytest.raises(DatasetError, match=r"float64 \[4\]"):
        TokenWindows(np.zeros(4), 2)
    with pytest.raises(DatasetError, match=r"int64 \[2, 2\]"):
        TokenWindows(torch.zeros(2, 2, dtype=torch.int64), 2)
    with pytest.raises(DatasetError, match=r"dtype of TokenWindows is torch\.bfloat16"):
        TokenWindows(np.arange(4), 2, dtype=torch.bfloat16)
    with pytest.raises(DatasetError, match="stride of TokenWindows is 0"):
        TokenWindows(np.arange(4), 2, stride=0)
    with pytest.raises(DatasetError, match=r"length of TokenWindows is 2\.5; give a whole number"):
        TokenWindows(np.arange(4), 2.5)
    with pytest.raises(DatasetError, match="dtype of TokenWindows is int64"):
        TokenWindows(np.arange(4), 2, dtype="int64")


@given(tokens=st.integers(0, 30), length=st.integers(1, 8), stride=st.integers(1, 9))
def test_windows_are_slices_and_all_that_fit(tokens, length, stride) -> None:
    row = np.arange(tokens, dtype=np.uint16)
    data = TokenWindows(row, length, stride=stride)
    starts = [s for s in range(0, tokens, stride) if s + length <= tokens]
    assert [data[i].tolist() for i in range(len(data))] == [
        row[s : s + length].tolist() for s in starts
    ]
    assert [w.tolist() for w in data.__getitems__(range(len(data)))] == [
        data[i].tolist() for i in range(len(data))
    ]

"""A program may change what it reads while it trains: each batch is what torch's DataLoader reads.

Each kind of change is made at each moment at which one is made, with each sort of workers, kept or
not, through each front door; in a long run by each of those who make one, with each number. The
oracle is the same program on torch's DataLoader with as many workers: without any a batch is read
as things are at that moment, with workers as they were when the epoch began, or the first epoch if
the user keeps them. Where the number is chosen, the oracle is torch with workers that are not kept.
In place of another batch a warning may come, before the first one.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import math
import multiprocessing
import pickle
import threading
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from misses import Misses
from thoroughness import LONG, some
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
    get_worker_info,
)
from torch.utils.data._utils.collate import default_collate_fn_map
from trainers import Learner, quiet_trainer

from lightning_fastdata import (
    DataThroughputCallback,
    FastDataLoader,
    FastDataModule,
    FastDataWarning,
    LoaderOptions,
)
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.executors import fetch, inline
from lightning_fastdata.insight import stage as measured

LENGTH, BATCH, EPOCHS = 8, 2, 2
IN_A_GLOBAL: dict[str, int] = {"added": 0}


class Rows(Dataset):
    """Sample ``i`` is ``i`` and what ``look`` sees."""

    of_all = 0

    def __init__(self, look: Callable[[Rows, Any], Any], **held: Any) -> None:
        self.look = look
        self.__dict__.update(held)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: Any) -> torch.Tensor:
        return torch.tensor([int(index), int(self.look(self, int(index)))])

    def set_epoch(self, epoch: int) -> None:
        self.told = epoch


class Stream(IterableDataset):
    """As many samples as :class:`Rows` has, shared out among workers."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, LENGTH, step):
            yield torch.tensor([index, int(self.held[-1])])


class Beside(Dataset):
    """Sample ``i`` is the samples ``i`` of several datasets."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        samples = (part[index] for part in self.parts)
        return torch.stack([one[0] if isinstance(one, tuple) else one for one in samples])


class Chosen(Sampler):
    """Gives the sample of the lowest weight, as it is when that is asked for."""

    def __init__(self) -> None:
        self.weights = torch.arange(LENGTH, dtype=torch.float64)

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        for _ in range(LENGTH):
            yield int(self.weights.argmin())


class Joined:
    """Collates, and adds a number of its own."""

    added = 0

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) + self.added


def plus_one(data: Any, name: str) -> None:
    setattr(data, name, getattr(data, name) + 1)


World = tuple[dict[str, Any], Callable[[], object]]
"""Arguments of a loader, and what changes what it reads."""


def attribute(_: Path) -> World:
    data = Rows(lambda own, _: own.number, number=0)
    return {"dataset": data}, partial(plus_one, data, "number")


def told_the_epoch(_: Path) -> World:
    data, epochs = Rows(lambda own, _: own.told, told=0), itertools.count(10)
    return {"dataset": data}, lambda: data.set_epoch(next(epochs))


def element_of_a_list(_: Path) -> World:
    data = Rows(lambda own, i: own.rows[i], rows=[0] * LENGTH)
    return {"dataset": data}, lambda: data.rows.__setitem__(5, data.rows[5] + 1)


def item_of_a_dict(_: Path) -> World:
    data = Rows(lambda own, _: own.items["a"]["b"], items={"a": {"b": 0}})
    return {"dataset": data}, lambda: data.items["a"].update(b=data.items["a"]["b"] + 1)


def tensor_in_place(_: Path) -> World:
    data = Rows(lambda own, i: own.rows[i], rows=torch.zeros(LENGTH))
    return {"dataset": data}, lambda: data.rows.add_(1)


def array_in_place(_: Path) -> World:
    data = Rows(lambda own, i: own.rows[i], rows=np.zeros(LENGTH))
    return {"dataset": data}, lambda: data.rows.__iadd__(1)


def object_within(_: Path) -> World:
    data = Rows(lambda own, _: own.config.deep.number, config=types.SimpleNamespace())
    data.config.deep = types.SimpleNamespace(number=0)
    return {"dataset": data}, partial(plus_one, data.config.deep, "number")


def function_in_its_place(_: Path) -> World:
    data = Rows(lambda _own, _i: 0)
    numbers = itertools.count(1)
    return {"dataset": data}, lambda: setattr(data, "look", partial(_always, next(numbers)))


def _always(value: Any, *_: object) -> Any:
    return value


def class_attribute(_: Path) -> World:
    own = type("Own", (Rows,), {"of_all": 0, "__module__": __name__})
    return {"dataset": own(lambda data, _: data.of_all)}, partial(plus_one, own, "of_all")


def global_of_the_module(_: Path) -> World:
    IN_A_GLOBAL["added"] = 0
    data = Rows(lambda _own, _i: IN_A_GLOBAL["added"])
    return {"dataset": data}, lambda: IN_A_GLOBAL.update(added=IN_A_GLOBAL["added"] + 1)


def variable_closed_over(_: Path) -> World:
    number = 0

    def add() -> None:
        nonlocal number
        number += 1

    return {"dataset": Rows(lambda _own, _i: number)}, add


def buffer_of_the_past(_: Path) -> World:
    past = deque([0], maxlen=4)
    return {"dataset": Rows(lambda own, _: own.past[-1], past=past)}, lambda: past.append(
        past[-1] + 1
    )


def collation(_: Path) -> World:
    joined = Joined()
    return {"dataset": Rows(lambda *_: 0), "collate_fn": joined}, partial(plus_one, joined, "added")


def weights_of_a_sampler(_: Path) -> World:
    sampler = Chosen()
    last = itertools.count()
    return {"dataset": Rows(lambda *_: 0), "sampler": sampler}, lambda: sampler.weights.__setitem__(
        next(last) % LENGTH, 100.0
    )


def list_of_a_sampler(_: Path) -> World:
    order = list(range(LENGTH))
    return {"dataset": Rows(lambda *_: 0), "sampler": order}, order.reverse


def indices_of_a_subset(_: Path) -> World:
    subset = Subset(Rows(lambda *_: 0), list(range(LENGTH)))
    return {"dataset": subset}, subset.indices.reverse


def part_of_a_whole(_: Path) -> World:
    inner = Rows(lambda own, _: own.number, number=0)
    whole = ConcatDataset([inner, Rows(lambda *_: 0)])
    return {"dataset": whole}, partial(plus_one, inner, "number")


def beside_an_open_file(folder: Path) -> World:
    (folder / "open.txt").touch()
    opened = (folder / "open.txt").open()  # which cannot be compared
    data = Rows(lambda own, _: own.number, number=0, opened=opened)
    return {"dataset": data}, partial(plus_one, data, "number")


def columns_in_place(_: Path) -> World:
    rows = torch.zeros(LENGTH, 2)
    return {"dataset": TensorDataset(rows)}, lambda: rows.add_(1)


def columns_replaced(_: Path) -> World:
    data = TensorDataset(torch.zeros(LENGTH, 2))
    return {"dataset": data}, lambda: setattr(data, "tensors", (data.tensors[0] + 1,))


def shared_value(_: Path) -> World:
    value = multiprocessing.Value("i", 0)
    data = Rows(lambda own, _: own.value.value, value=value)
    return {"dataset": data}, partial(plus_one, value, "value")


def shared_tensor(_: Path) -> World:
    rows = torch.zeros(LENGTH).share_memory_()
    return {"dataset": Rows(lambda own, i: own.rows[i], rows=rows)}, lambda: rows.add_(1)


def content_of_a_file(folder: Path) -> World:
    file = folder / "number.txt"
    file.write_text("0")
    data = Rows(lambda own, _: own.file.read_text(), file=file)
    return {"dataset": data}, lambda: file.write_text(str(int(file.read_text()) + 1))


def buffer_of_a_stream(_: Path) -> World:
    past = deque([0], maxlen=4)
    return {"dataset": Stream(past)}, lambda: past.append(past[-1] + 1)


def attribute_of_a_stream(_: Path) -> World:
    data = Stream([0])
    return {"dataset": data}, lambda: setattr(data, "held", [data.held[-1] + 1])


KINDS = (
    attribute, told_the_epoch, element_of_a_list, item_of_a_dict, tensor_in_place, array_in_place,
    object_within, function_in_its_place, class_attribute, global_of_the_module,
    variable_closed_over, buffer_of_the_past, collation, weights_of_a_sampler, list_of_a_sampler,
    indices_of_a_subset, part_of_a_whole, beside_an_open_file, columns_in_place, columns_replaced,
    shared_value, shared_tensor, content_of_a_file, buffer_of_a_stream, attribute_of_a_stream,
)  # fmt: skip
STREAMS = (buffer_of_a_stream, attribute_of_a_stream)
SEEN_AT_ONCE = (shared_value, shared_tensor, content_of_a_file)
"""Workers, too, see these at some moment within an epoch; when, torch does not say."""
APART = (
    collation, weights_of_a_sampler, list_of_a_sampler, part_of_a_whole, *SEEN_AT_ONCE, *STREAMS,
)  # fmt: skip
TOGETHER = tuple(kind for kind in KINDS if kind not in APART)
"""Torch knows of no kinds: of these it reads all in one training."""
WHO = ("step", "epoch start", "epoch end", "callback", "validation", "thread")
SORTS_OF_MAKERS = (("step", "thread"), ("epoch start",), ("epoch end", "callback"), ("validation",))
"""Those of one sort make their change at the same moment of a training."""
WORKERS = (0, 1, 2, "auto here", "auto aside")
SORTS_OF_READERS = ((0,), (1, 2), ("auto here",), ("auto aside",))
DOORS = ("FastDataModule", "from_loaders", "FastDataLoader")


class Seen(Learner):
    """Notes the batches of training, and lets the change be made when it is time."""

    def __init__(self, who: str, change: Callable[[], object], told: list[Any]) -> None:
        super().__init__(lambda batch: None)
        self.batches: list[list[Any]] = []
        self.warned: int | None = None
        """Batches that had come when a warning came."""
        self._who, self._change, self._told = who, change, told

    def _now(self, who: str) -> None:
        if self._who == who:
            self._change()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        if self.warned is None and self._told:
            self.warned = len(self.batches)
        batch = batch[0] if isinstance(batch, list | tuple) else batch
        self.batches.append(batch.tolist())
        self._now("step")
        self._now(f"step {len(self.batches)}")
        if self._who == "thread":
            thread = threading.Thread(target=self._change)
            thread.start()
            thread.join()
        return super().training_step(batch, 0)

    def validation_step(self, *_: object) -> None:
        self._now("validation")

    def on_train_epoch_start(self) -> None:
        # Before the first one Lightning has made torch's iterators; ours begin behind it.
        if self.current_epoch:
            self._now("epoch start")

    def on_train_epoch_end(self) -> None:
        self._now("epoch end")


class Changes(Callback):
    def __init__(self, module: Seen) -> None:
        self.module = module

    def on_train_epoch_end(self, *_: object) -> None:
        self.module._now("callback")


def trainer_of(epochs: int, callback: Callback) -> Trainer:
    return quiet_trainer(max_epochs=epochs, num_sanity_val_steps=0, callbacks=[callback])


def trained(
    who: str, make: Callable[[Path], World], folder: Path, door: Callable[..., Any]
) -> Seen:
    """Return what a training has seen whose data come through a door."""
    arguments, change = make(folder)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", FastDataWarning)
        module = Seen(who, change, raised)
        trainer = trainer_of(EPOCHS, Changes(module))
        given = door(arguments)
        if isinstance(given, FastDataModule):
            trainer.fit(module, datamodule=given)
        else:
            trainer.fit(module, given, DataLoader(Rows(lambda *_: 0), LENGTH))
    return module


def all_together(folder: Path) -> World:
    """Return what holds the data of all kinds of :data:`TOGETHER`, and changes all of them."""
    worlds = [kind(folder) for kind in TOGETHER]
    parts = [arguments["dataset"] for arguments, _ in worlds]
    return {"dataset": Beside(parts)}, lambda: [change() for _, change in worlds]


def by_torch(who: str, make: Callable[[Path], World], workers: int, *, kept: bool) -> Any:
    """Return the batches of the same program on torch's DataLoader."""
    if make not in TOGETHER:
        return _by_torch(who, make, workers, kept)
    at = TOGETHER.index(make)
    together = _by_torch(who, all_together, workers, kept)
    return [[samples[at] for samples in batch] for batch in together]


@cache
def _by_torch(who: str, make: Callable[[Path], World], workers: int, kept: bool) -> Any:
    folder = Path(_folders.name) / f"{who}-{make.__name__}-{workers}-{kept}"
    folder.mkdir(parents=True)
    how = {"batch_size": BATCH, "num_workers": workers, "persistent_workers": kept}
    return trained(who, make, folder, lambda given: DataLoader(**given, **how)).batches


def by_torch_with_any_number(who: str, make: Callable[[Path], World]) -> Iterator[Any]:
    """Yield the batches with each number of workers that may be chosen, the likeliest first."""
    likely = sorted(range(1, 5), reverse=make in STREAMS)
    return (by_torch(who, make, each, kept=False) for each in likely)


def ours(door: str, workers: int | str, given: dict[str, Any], *, kept: bool) -> Any:
    """Return what loads the same data by this package."""
    how: dict[str, Any] = {"num_workers": "auto" if isinstance(workers, str) else workers}
    if kept:
        how["persistent_workers"] = True
    aside = {"executor": "workers"} if workers == "auto aside" else {}
    if door == "FastDataLoader":
        return FastDataLoader(**given, batch_size=BATCH, **how, **aside)
    validation = DataLoader(Rows(lambda *_: 0), LENGTH)
    if door == "from_loaders":
        options = {"options": LoaderOptions(**aside)} if aside else {}
        if isinstance(workers, str):
            loader = DataLoader(**given, batch_size=BATCH)
            return FastDataModule.from_loaders(loader, validation, num_workers="auto", **options)
        loader = DataLoader(**given, batch_size=BATCH, **how)
        kept_too = {**how, "pin_memory": False} if kept else {}
        return FastDataModule.from_loaders(loader, validation, **kept_too)

    class Own(FastDataModule):
        def train_dataloader(self) -> Any:
            others = {name: value for name, value in given.items() if name != "dataset"}
            ordered = "sampler" in others or isinstance(given["dataset"], Stream)
            order = {} if ordered or door == "shuffled" else {"shuffle": False}
            return self.make_loader(given["dataset"], stage="train", **others, **order)

        def val_dataloader(self) -> Any:
            return validation

    return Own(BATCH, options=LoaderOptions(**how, **aside))


_folders = types.SimpleNamespace(name="")


def rows() -> list[dict[str, Any]]:
    """Return the cases: all in a long run, else each kind within an epoch and between two.

    Over the kinds any change, reader and door meet.
    """
    factors: dict[str, tuple[Any, ...]] = {
        "kind": KINDS, "who": WHO, "workers": WORKERS, "kept": (False, True), "door": DOORS,
    }  # fmt: skip
    if LONG:
        cases = itertools.product(*factors.values())
        return [dict(zip(factors, row, strict=True)) for row in cases]
    few = []
    for number, kind in enumerate(KINDS):
        turn, at = divmod(number, len(SORTS_OF_READERS))
        for sort in (0, 1 + number % 3):
            makers = SORTS_OF_MAKERS[sort]
            readers = SORTS_OF_READERS[(sort + at) % len(SORTS_OF_READERS)]
            few.append({
                "kind": kind, "who": makers[turn // 2 % len(makers)],
                "workers": readers[turn % len(readers)], "kept": number % 3 == 0,
                "door": DOORS[(turn + sort) % len(DOORS)],
            })  # fmt: skip
    return few


@pytest.mark.timeout(7200 if LONG else 300)
@pytest.mark.parametrize("who", WHO)
def test_each_batch_is_what_torch_reads_or_a_warning_comes_first(who, tmp_path) -> None:
    _folders.name = str(tmp_path / "torch")
    with Misses() as misses:
        for number, row in enumerate(rows()):
            if row["who"] == who:
                workers, kind = row["workers"], row["kind"]
                kept = row["kept"] and workers in (1, 2)
                within = who in ("step", "thread")
                if within and kind in SEEN_AT_ONCE and workers != 0:
                    continue
                with misses.case(kind.__name__, who, workers, "kept" * kept, row["door"]):
                    folder = tmp_path / str(number)
                    folder.mkdir()
                    door = partial(ours, row["door"], workers, kept=kept)
                    seen = trained(who, kind, folder, door)
                    if not isinstance(workers, str):
                        wanted = [by_torch(who, kind, workers, kept=kept)]
                    else:  # with how many, is left open, and a sampler or a stream may tell
                        wanted = by_torch_with_any_number(who, kind)
                    _judge(seen, wanted)


STEPS = (3, 5, 6, 7)


@pytest.mark.parametrize("step", STEPS)
def test_a_change_by_one_step_alone_is_read_when_torch_reads_it(step, tmp_path) -> None:
    _folders.name = str(tmp_path / "torch")
    with Misses() as misses:
        for number, kind in enumerate(KINDS):
            # In a short run each kind changes at one of the steps.
            if kind in SEEN_AT_ONCE or not (LONG or STEPS[number % 4] == step):
                continue
            with misses.case(kind.__name__):
                door = DOORS[(number + step) % len(DOORS)]
                seen = trained(
                    f"step {step}", kind, tmp_path, partial(ours, door, "auto here", kept=False)
                )
                _judge(seen, by_torch_with_any_number(f"step {step}", kind))
                assert seen.warned is None


class OwnCopy(Rows):
    """Reading a sample changes the dataset, and the samples that come later."""

    def __init__(self, look: Callable[[Rows, Any], Any]) -> None:
        super().__init__(look, reads=0, kept={}, rows=[0] * LENGTH, opened=None)


def counts_reads(data: Any, _: int) -> int:
    data.reads += 1
    return data.reads


def keeps_what_it_read(data: Any, index: int) -> int:
    return data.kept.setdefault(index % 2, len(data.kept) + index)


def writes_into_a_list(data: Any, index: int) -> int:
    data.rows[(index + 1) % LENGTH] += 1
    return data.rows[index]


def goes_on_in_a_file(data: Any, _: int) -> int:
    if data.opened is None:
        data.opened = open(__file__, "rb")  # noqa: SIM115
    return len(data.opened.read(10)) and data.opened.tell()


def counts_in_a_global(_: Any, __: int) -> int:
    IN_A_GLOBAL["added"] += 1
    return IN_A_GLOBAL["added"]


def kept_in_a_default(index: int, kept: dict[int, int] = {}) -> int:  # noqa: B006
    return kept.setdefault(index % 3, index + len(kept))


def memoized(function: Callable[[int], int]) -> Callable[[int], int]:
    kept: dict[int, int] = {}

    def wrapper(index: int) -> int:
        return kept.setdefault(index % 3, function(index) + len(kept))

    return wrapper


@memoized
def kept_in_a_closure(index: int) -> int:
    return index


def kept_at_a_function(index: int) -> int:
    kept_at_a_function.reads += 1  # type: ignore[attr-defined]
    return index + kept_at_a_function.reads  # type: ignore[attr-defined]


kept_at_a_function.reads = 0  # type: ignore[attr-defined]


@functools.lru_cache
def remembers(index: int) -> int:
    return index + remembers.cache_info().misses


LOOKS: dict[str, Callable[[Any, int], Any]] = {
    "counts reads": counts_reads,
    "keeps what it read": keeps_what_it_read,
    "writes into a list": writes_into_a_list,
    "goes on in a file": goes_on_in_a_file,
    "counts in a global": counts_in_a_global,
    "remembers what it read": lambda _, index: remembers(index % 2),
    "keeps in a default": lambda _, index: kept_in_a_default(index),
    "keeps in a closure": lambda _, index: kept_in_a_closure(index),
    "keeps at a function": lambda _, index: kept_at_a_function(index),
}


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_what_reading_changes_in_a_worker_ends_with_the_epoch(context, tmp_path) -> None:
    _folders.name = str(tmp_path / "torch")
    IN_A_GLOBAL["added"] = 0
    names = list(LOOKS) if context == "fork" else ["counts reads"]
    with Misses() as misses:
        for number, name in enumerate(names):
            with misses.case(name):
                given = {"dataset": OwnCopy(LOOKS[name])}
                how: dict[str, Any] = {"batch_size": BATCH, "multiprocessing_context": context}
                wanted = list(by_epochs(DataLoader(**given, **how, num_workers=1)))
                stay = {"persistent_workers": "unchanged", "executor": "workers"}
                loader = FastDataLoader(**given, **how, **stay, num_workers=1)
                assert list(by_epochs(loader)) == wanted
                if context == "fork":  # else the training process reads, and warns of it
                    auto = FastDataLoader(**given, **how, num_workers="auto")
                    assert list(by_epochs(auto)) == wanted
                if context == "fork" and (LONG or number % 4 == 0):
                    door = partial(ours, DOORS[number % 3], "auto aside", kept=False)
                    module = trained("nobody", partial(_always, (given, int)), tmp_path, door)
                    assert module.batches == [*itertools.chain(*wanted)]


def by_epochs(loader: Any) -> Iterator[list[Any]]:
    for _ in range(EPOCHS):
        yield [batch.tolist() for batch in loader]


def tensor_of_rows(length: int, width: int) -> World:
    rows = torch.zeros(length, width, dtype=torch.uint8)
    return {"dataset": TensorDataset(rows)}, lambda: rows.add_(1)


def array_below_a_tensor(length: int, width: int) -> World:
    rows = np.zeros((length, width), np.uint8)
    return {"dataset": TensorDataset(torch.from_numpy(rows))}, lambda: rows.__iadd__(1)


def indices_below_a_subset(length: int, width: int) -> World:
    indices = np.arange(length)
    whole = TensorDataset(torch.arange(length * width).reshape(length, width).to(torch.uint8))
    return {"dataset": Subset(whole, indices)}, lambda: np.copyto(indices, indices[::-1].copy())


@pytest.mark.parametrize("make", [tensor_of_rows, array_below_a_tensor, indices_below_a_subset])
@pytest.mark.parametrize(("executor", "width"), [("gather", 4), ("workers", 400)])
def test_rows_of_an_epoch_are_those_of_its_start(executor, width, make, monkeypatch) -> None:
    monkeypatch.setattr(fetch, "COPIED_BYTES", 2**16)
    length = 300

    def first_numbers(loader: Any, change: Callable[[], object]) -> list[list[int]]:
        seen = []
        for _ in range(2):
            for number, (batch,) in enumerate(loader):
                seen.append(batch[:, 0].tolist())
                if number == 2:
                    change()
        return seen

    given, change = make(length, width)
    wanted = first_numbers(DataLoader(**given, batch_size=4, num_workers=1), change)
    given, change = make(length, width)
    loader = FastDataLoader(**given, batch_size=4, num_workers="auto")
    assert loader.executor == executor
    seen = first_numbers(loader, change)
    others = [at for at, pair in enumerate(zip(seen, wanted, strict=True)) if pair[0] != pair[1]]
    assert others[:3] == []


@pytest.mark.parametrize("how", [{"batch_size": None}, {"batch_size": 2, "collate_fn": list}])
def test_steps_and_batches_that_are_read_share_no_memory(how) -> None:
    def seen(loader: Any, rows: torch.Tensor) -> list[Any]:
        found = []
        for batch in loader:
            found.append([row.tolist() for row in batch])
            for row in batch:
                row.add_(10)
            rows += 1
        return [*found, rows.tolist()]

    class Views(Rows):
        def __getitem__(self, index: Any) -> torch.Tensor:
            return self.rows[index]

    ours_rows, torchs_rows = torch.zeros(LENGTH, 3), torch.zeros(LENGTH, 3)
    torchs = DataLoader(Views(print, rows=torchs_rows), **how, num_workers=1)
    wanted = seen(torchs, torchs_rows)
    assert (
        seen(FastDataLoader(Views(print, rows=ours_rows), **how, num_workers="auto"), ours_rows)
        == wanted
    )


def test_an_epoch_that_has_grown_too_large_to_be_read_at_once_is_warned_of(monkeypatch) -> None:
    monkeypatch.setattr(inline, "_MOST_BYTES", 1000)
    data = Rows(lambda own, _: own.number, number=0)
    loader = FastDataLoader(data, BATCH, num_workers="auto")
    list(loader)
    monkeypatch.setattr(inline, "_MOST_BYTES", 1)
    with pytest.warns(FastDataWarning, match="larger than was seen"):
        next(iter(loader))


def test_the_small_last_batch_of_an_epoch_does_not_stand_for_larger_ones(monkeypatch) -> None:
    class Three(Rows):
        """Three batches and one sample."""

        def __len__(self) -> int:
            return 25

    loader = FastDataLoader(Three(lambda own, _: own.number, number=0), 8, num_workers="auto")
    list(loader)
    monkeypatch.setattr(inline, "_MOST_BYTES", 3 * 8 * 2 * 8)
    with pytest.warns(FastDataWarning, match="larger than was seen"):
        next(iter(loader))


@pytest.mark.parametrize("workers", [0, 1, "auto"])
def test_another_size_of_batches_that_keep_theirs_is_warned_of(workers) -> None:
    batches = BatchSampler(range(LENGTH), 2, drop_last=False)
    loader = FastDataLoader(Rows(lambda *_: 0), batch_sampler=batches, num_workers=workers)
    for size in (1, 2):  # between epochs it may be another one
        batches.batch_size = size
        assert [len(batch) for batch in loader] == [size] * (LENGTH // size)
    begun = iter(loader)
    next(begun)
    batches.batch_size = 3
    with pytest.warns(FastDataWarning, match="batch_size was 2 and is 3"):
        next(begun)


class Resizes(Callback):
    """Changes the size of a loader's batches, within an epoch or behind it."""

    def __init__(self, loader: DataLoader, *, within: bool) -> None:
        self.loader, self.within = loader, within

    def _change(self, trainer: Trainer) -> None:
        batches: Any = self.loader.batch_sampler
        batches.batch_size = (3, 4, 2)[trainer.current_epoch]

    def on_train_batch_end(self, trainer: Trainer, _: object, *rest: object) -> None:
        if self.within and rest[-1] == 1:
            self._change(trainer)

    def on_train_epoch_end(self, trainer: Trainer, _: object) -> None:
        if not self.within:
            self._change(trainer)


@pytest.mark.parametrize("workers", [None, 1, "auto"])
@pytest.mark.parametrize("within", [False, True])
def test_another_size_of_a_given_loaders_batches_holds_from_the_next_epoch_on(
    workers, within
) -> None:
    given = DataLoader(Rows(lambda *_: 0), 2, sampler=list(range(12)))
    resizes, model = Resizes(given, within=within), Learner(len)
    data = FastDataModule.from_loaders(given, num_workers=workers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_trainer(max_epochs=3, callbacks=[resizes]).fit(model, datamodule=data)
    told = [str(each.message) for each in caught if "batch_size was" in str(each.message)]
    assert [text.partition(" since")[0][-14:] for text in told] == (
        ["was 2 and is 3", "was 3 and is 4", "was 4 and is 2"] if within else []
    )
    assert model.seen == [2] * 6 + [3] * 4 + [4] * 3


def test_epochs_of_more_batches_than_the_one_before_are_trained_on_to_their_end() -> None:
    given = DataLoader(range(24), 4)
    model, sizes = Learner(len), iter([8, 4, 2])

    class Next(Callback):
        def on_train_epoch_end(self, *_: object) -> None:
            given.batch_sampler.batch_size = next(sizes)

    data = FastDataModule.from_loaders(given)
    quiet_trainer(max_epochs=3, callbacks=[Next()]).fit(model, datamodule=data)
    assert model.seen == [4] * 6 + [8] * 3 + [4] * 6


def test_the_length_is_that_of_the_epoch_that_is_read_or_else_of_the_next_one() -> None:
    given = DataLoader(range(24), 4)
    loader = FastDataModule.from_loaders(given).train_dataloader()
    for size, batches in ((8, 3), (2, 12), (3, 8)):
        given.batch_sampler.batch_size = size
        asked = iter(loader)
        assert len(loader) == len(asked) == batches
        next(asked)
        given.batch_sampler.batch_size = 1
        assert len(loader) == batches
        with pytest.warns(FastDataWarning, match="change it between epochs"):
            assert len(list(asked)) == batches - 1
        assert len(loader) == 24
    loader = pickle.loads(pickle.dumps(loader))
    assert len(loader) == len(list(loader)) == 24


def _plus_hundred(samples: list[int]) -> torch.Tensor:
    return torch.tensor(samples) + 100


class Counts(IterableDataset[int]):
    """A stream that splits itself among workers."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, 11, step))


SET: dict[str, Callable[[Any], None]] = {
    "collate_fn": lambda loader: setattr(loader, "collate_fn", _plus_hundred),
    "batch_size": lambda loader: setattr(loader.batch_sampler, "batch_size", 3),
    "drop_last": lambda loader: setattr(loader.batch_sampler, "drop_last", True),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [range(11), Counts()], ids=["range", "stream"])
@pytest.mark.parametrize("name", SET)
def test_what_is_set_of_a_given_loader_between_epochs_is_read_as_by_torch(
    name, dataset, workers
) -> None:
    def batches(loader: Any) -> list[list[int]]:
        return [batch.tolist() for batch in loader]

    given = DataLoader(dataset, 2, num_workers=workers)
    data = FastDataModule.from_loaders(given)
    loader = data.train_dataloader()
    assert batches(loader) == batches(given)
    SET[name](given)
    assert batches(loader) == batches(given)
    assert batches(data.train_dataloader()) == batches(given)


def _set_reversed(loader: Any) -> None:
    loader.batch_sampler.sampler = range(10, -1, -1)


@pytest.mark.parametrize(
    ("change", "dataset", "shuffle"),
    [
        *((change, dataset, None) for change in SET.values() for dataset in (range(11), Counts())),
        *((_set_reversed, range(11), shuffle) for shuffle in (False, True)),
    ],
)
def test_a_loader_is_given_as_the_program_has_set_it_and_not_as_it_was_made(
    change, dataset, shuffle
) -> None:
    given = DataLoader(dataset, 2, shuffle)
    change(given)
    loader = FastDataModule.from_loaders(given).train_dataloader()
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in given]


@pytest.mark.parametrize("name", ["sampler", "worker_init_fn"])
def test_what_is_set_of_a_given_loader_and_not_taken_over_is_warned_of(name) -> None:
    given = DataLoader(range(4), 2)
    loader = FastDataModule.from_loaders(given).train_dataloader()
    before = [batch.tolist() for batch in loader]
    if name == "sampler":
        given.batch_sampler.sampler = [3, 2, 1, 0]
    else:
        given.worker_init_fn = print
    with pytest.warns(FastDataWarning, match=f"The {name} of the DataLoader .* was replaced"):
        assert [batch.tolist() for batch in loader] == before


def test_a_size_that_no_batch_has_is_an_error_for_as_long_as_it_is_set() -> None:
    given = DataLoader(range(4), 2)
    data = FastDataModule.from_loaders(given)
    loader = data.train_dataloader()
    given.batch_sampler.batch_size = 0
    for read in (len, list, list, lambda _: data.train_dataloader()):
        with pytest.raises(OptionsError, match=r"batch_size of the DataLoader .* is 0; allowed"):
            read(loader)
    given.batch_sampler.batch_size = 3
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3]]


def _plus_hundred_of_rows(samples: list[tuple[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack([row for (row,) in samples]) + 100]


@pytest.mark.parametrize("given_to", ["module", "nobody"])
def test_gathered_rows_are_read_one_by_one_for_another_collate_fn(given_to) -> None:
    def batches(loader: Any) -> list[list[int]]:
        return [batch.tolist() for (batch,) in loader]

    dataset = TensorDataset(torch.arange(5))
    if given_to == "module":
        given: Any = DataLoader(dataset, 2, num_workers=1)
        loader: Any = FastDataModule.from_loaders(given).train_dataloader()
    else:
        given = loader = FastDataLoader(dataset, 2, num_workers="auto")
    assert loader.executor == "gather"
    expected = DataLoader(dataset, 2)
    for collate_fn in (default_collate, _plus_hundred_of_rows, default_collate):
        given.collate_fn = expected.collate_fn = collate_fn
        assert batches(loader) == batches(expected)


class Adds:
    """Adds a number to samples, and is equal to any other of its class."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Adds)

    def __hash__(self) -> int:
        return 0

    def __call__(self, samples: list[int]) -> torch.Tensor:
        return torch.tensor(samples) + self.number


@pytest.mark.parametrize("kind", [FastDataLoader, DataLoader])
def test_a_collate_fn_that_equals_the_one_before_takes_its_place(kind) -> None:
    given = kind(range(2), 2, collate_fn=Adds(0))
    loader = FastDataModule.from_loaders(given).train_dataloader() if kind is DataLoader else given
    assert [batch.tolist() for batch in loader] == [[0, 1]]
    given.collate_fn = Adds(100)
    assert [batch.tolist() for batch in loader] == [[100, 101]]


@pytest.mark.parametrize("order", [np.arange(4), torch.arange(4), [0, 1, 2, 3]])
def test_another_sampler_of_any_kind_in_a_given_loader_is_warned_of(order) -> None:
    given = DataLoader(range(4), 2, sampler=order)
    loader = FastDataModule.from_loaders(given).train_dataloader()
    given.batch_sampler.sampler = copy.copy(order)
    with pytest.warns(FastDataWarning, match="The sampler of the DataLoader"):
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_a_method_that_is_set_once_more_of_a_given_loader_is_no_change() -> None:
    given = DataLoader(range(2), 2, worker_init_fn=types.MethodType(print, "starts"))
    loader = FastDataModule.from_loaders(given).train_dataloader()
    given.worker_init_fn = types.MethodType(print, given.worker_init_fn.__self__)
    assert [batch.tolist() for batch in loader] == [[0, 1]]


def test_a_given_loader_whose_worker_init_fn_is_deleted_is_read_as_by_torch() -> None:
    given = DataLoader(range(2), 2)
    loader = FastDataModule.from_loaders(given).train_dataloader()
    del given.worker_init_fn
    for each in (loader, FastDataModule.from_loaders(given).train_dataloader()):
        assert [batch.tolist() for batch in each] == [batch.tolist() for batch in given]


def test_a_given_loader_is_not_kept_alive_and_copies_follow_none() -> None:
    given = DataLoader(range(4), 2)
    data = FastDataModule.from_loaders(given)
    copied = copy.deepcopy(data).train_dataloader()
    given.batch_sampler.batch_size = 3
    assert [len(batch) for batch in copied] == [2, 2]
    loader, watched = data.train_dataloader(), weakref.ref(given)
    del given
    gc.collect()
    assert watched() is None
    assert [len(batch) for batch in loader] == [3, 1]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("name", SET)
def test_copies_of_a_data_module_have_what_was_set_of_its_loader_before(name, copied) -> None:
    given = DataLoader(range(11), 2)
    data = FastDataModule.from_loaders(given)
    SET[name](given)
    expected = [batch.tolist() for batch in given]
    for each in (copied(data), copied(copied(data)), data):
        for loader in (each.train_dataloader(), each.train_dataloader()):
            for _ in range(2):
                assert [batch.tolist() for batch in loader] == expected


def test_what_is_registered_in_torchs_table_of_collations_holds_from_the_next_epoch_on(
    monkeypatch,
) -> None:
    def register(number: int) -> None:
        def collated(samples: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
            return torch.tensor([int(str(sample)) + number for sample in samples])

        monkeypatch.setitem(default_collate_fn_map, Path, collated)

    data = [Path(str(index)) for index in range(4)]
    how = {"executor": "workers", "persistent_workers": "unchanged"}
    loader = FastDataLoader(data, 4, num_workers=1, **how)
    for number in (10, 20, 30):
        register(number)
        assert [batch.tolist() for batch in loader] == [[number + each for each in range(4)]]


def test_a_random_subset_whose_indices_steps_change_is_read_as_torch_reads_it() -> None:
    def seen(kind: Any, workers: int | str) -> list[int]:
        subset = SubsetRandomSampler(list(range(20)), torch.Generator().manual_seed(1))
        found = []
        for batch in kind(Rows(lambda *_: 0), 1, sampler=subset, num_workers=workers):
            found += batch[:, 0].tolist()
            subset.indices[:] = [(index + 20) % 40 for index in subset.indices]
        return found

    for workers in (1, 2, "auto"):
        wanted = seen(DataLoader, 1 if workers == "auto" else workers)
        assert seen(FastDataLoader, workers) == wanted


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("how", [{"replacement": True, "num_samples": 400}, {"num_samples": 400}])
def test_orders_behind_epochs_that_are_broken_off_are_torchs_where_a_sampler_draws_as_it_goes(
    how: Any, workers: int
) -> None:
    def seen(kind: Any) -> list[list[int]]:
        sampler = RandomSampler(range(20), generator=torch.Generator().manual_seed(1), **how)
        loader = kind(list(range(20)), 4, sampler=sampler, num_workers=workers)
        return [batch.tolist() for _ in range(3) for batch in itertools.islice(loader, 2)]

    assert seen(FastDataLoader) == seen(DataLoader)


def test_rows_are_gathered_of_a_random_subset_whose_indices_steps_change_as_torch_reads_it() -> (
    None
):
    def seen(kind: Any, **how: Any) -> list[int]:
        subset = SubsetRandomSampler(list(range(20)), torch.Generator().manual_seed(1))
        found = []
        for (batch,) in kind(TensorDataset(torch.arange(40)), 1, sampler=subset, **how):
            found += batch.tolist()
            subset.indices[:] = [(index + 20) % 40 for index in subset.indices]
        return found

    assert seen(FastDataLoader, executor="gather", num_workers=0) == seen(DataLoader)


def test_a_sampler_without_batches_may_give_tensors_of_indices() -> None:
    indices = [torch.tensor([3, 4]), torch.tensor([1])]
    data, how = TensorDataset(torch.arange(10)), {"batch_size": None, "sampler": indices}
    wanted = [batch[0].tolist() for batch in DataLoader(data, **how, num_workers=1)]
    for workers in (0, 1, "auto"):
        loader = FastDataLoader(data, **how, num_workers=workers)
        assert [batch[0].tolist() for batch in loader] == wanted


def test_batches_of_a_sampler_that_uses_its_list_again_are_what_they_were() -> None:
    class Growing(Sampler):
        def __iter__(self) -> Iterator[list[int]]:
            batch = [0]
            for index in range(1, LENGTH):
                yield batch
                batch.append(index)
                batch.pop(0)

        def __len__(self) -> int:
            return LENGTH - 1

    rows = TensorDataset(torch.arange(LENGTH))
    for data, workers in ((Rows(lambda *_: 0), 1), (rows, "auto")):
        loader = FastDataLoader(data, batch_sampler=Growing(), num_workers=workers)
        # A batch of rows is a list of one tensor.
        assert [int(batch[0].flatten()[0]) for batch in loader] == list(range(LENGTH - 1))


def test_what_is_read_ahead_of_a_shuffled_epoch_is_not_older_than_the_epoch(tmp_path) -> None:
    _folders.name = str(tmp_path / "torch")
    with Misses() as misses:
        for kind in some(KINDS, 6):
            given, _ = kind(tmp_path)
            if "sampler" in given or isinstance(given["dataset"], IterableDataset):
                continue
            with misses.case(kind.__name__):
                door = partial(ours, "shuffled", "auto aside", kept=False)
                seen = trained("validation", kind, tmp_path, door)
                wanted = by_torch("validation", kind, 1, kept=False)
                assert by_epoch(seen.batches) == by_epoch(wanted)


def by_epoch(batches: list[Any]) -> list[Any]:
    """Return the samples of each epoch, sorted."""
    samples = list(itertools.chain(*batches))
    each = len(samples) // EPOCHS
    return [sorted(samples[at : at + each]) for at in range(0, len(samples), each)]


def _judge(seen: Seen, wanted: Iterable[list[Any]]) -> None:
    others = []
    for one in wanted:
        if seen.batches == one:
            return
        pairs = zip(seen.batches, one, strict=False)
        others.append(next((at for at, (a, b) in enumerate(pairs) if a != b), len(one)))
        if seen.warned is not None and seen.warned <= others[-1]:
            return
    told = "nothing was said" if seen.warned is None else f"batch {seen.warned} was warned of"
    raise AssertionError(f"{told}, and batch {max(others)} was another one: {seen.batches}")


@pytest.mark.parametrize(
    ("changes", "within_s", "advised"),
    [
        (False, math.inf, "DataLoader(persistent_workers=True)"),
        (True, math.inf, ""),
        # What takes longer to compare may change unseen.
        (False, 0.0, "DataLoader(persistent_workers=True), if your program changes nothing"),
    ],
)
def test_to_keep_workers_is_not_advised_where_they_would_read_something_else(
    changes, within_s, advised, monkeypatch
) -> None:
    monkeypatch.setattr(measured, "_COMPARED_WITHIN_S", within_s)
    data = Rows(lambda own, _: own.number, number=0)
    callback = DataThroughputCallback(summary=False, report=False)
    trainer = trainer_of(8, callback)
    # Each step starts an epoch, so that to start workers takes nearly all of the time.
    module = Seen("epoch end" if changes else "nobody", partial(plus_one, data, "number"), [])
    trainer.fit(module, DataLoader(data, LENGTH, num_workers=1))
    told = str(callback.report.as_dict())
    assert "FD310" in told
    assert advised in told
    assert ("persistent_workers=True" in told) is bool(advised)
    assert ("if your program" in told) is ("if your program" in advised)


def test_what_takes_too_long_to_compare_is_not_looked_at_in_each_epoch(monkeypatch) -> None:
    looks: list[object] = []

    def look(*read: object, **how: object) -> None:
        looks.append(read)

    monkeypatch.setattr(measured, "fingerprint", look)
    trainer = trainer_of(8, DataThroughputCallback(summary=False, report=False))
    data = Rows(lambda own, _: own.number, number=0)
    trainer.fit(Seen("nobody", plus_one, []), DataLoader(data, LENGTH))
    assert 2 <= len(looks) <= 4

"""Memory that runs out anywhere between host memory and the step changes nothing of a training."""

from __future__ import annotations

import itertools
import warnings

import albumentations as A
import pytest
import torch
from albumentations.pytorch import ToTensorV2
from alike import alike
from conformance.pieces import Images, Rows
from device.host_streams import OnStreams, made_ahead
from misses import each
from torch.utils.data import default_collate
from trainers import Keeps, quiet_trainer

from lightning_fastdata import LoaderOptions
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.plugin.bindings import BatchSizeGuard
from lightning_fastdata.plugin.guard.parts import joined, part_of, rows_of

torch.set_num_threads(1)
ROWS, BATCH = 24, 6
WAYS = ("off", "auto")
PLACES = ("move", "pipeline", "transform", "hook", "step")
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Memory:
    """Runs out for batches of more samples than ``fits``, or at the call of some numbers."""

    def __init__(self, place="", *, fits=ROWS, calls=(), error=FULL):
        self.place, self.fits, self.calls, self.error = place, fits, set(calls), error
        self.counts = itertools.count()
        self.failed = 0

    def take(self, place, rows):
        if place == self.place and (rows > self.fits or next(self.counts) in self.calls):
            self.failed += 1
            raise self.error


class Moved:
    """A batch that is moved as a whole, like those of graph libraries."""

    is_cpu = True

    def __init__(self, memory):
        self.memory = memory

    def to(self, device, **_):
        self.memory.take("move", 1)
        return self

    def record_stream(self, stream):
        pass


class Pipelined(OnStreams):
    """Runs out of memory while what the workers drew is carried out."""

    memory = Memory()

    def setup(self, stage):
        pipeline, *_ = self._transforms["train"]
        apply = pipeline.apply

        def full(batch, draws):
            self.memory.take("pipeline", len(batch[0]))
            return apply(batch, draws)

        pipeline.apply = full


class Model(Keeps):
    def __init__(self, memory):
        super().__init__()
        self.memory = memory

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.memory.take("hook", len(batch[0]))
        return [batch[0] + 1, *batch[1:]]

    def training_step(self, batch, batch_idx):
        self.memory.take("step", len(batch[0]))
        return super().training_step([batch[0].clone(), batch[1].clone()], batch_idx)


def doubled(batch):
    return [batch[0].float() * 2, *batch[1:]]


def train(memory, way="off", *, pictures=False, guard="warn", function=doubled):
    """Return the batches that the steps saw, and what was told of memory."""
    about = {
        "batch_size": BATCH,
        "options": LoaderOptions(num_workers=0, executor="inline", probe=pictures),
        "prefetch": way,
        "seed": 3,
        "guard": guard,
    }
    if pictures:
        recipe = A.Compose([A.RandomCrop(8, 8), A.HorizontalFlip(), ToTensorV2()])
        data = Pipelined.from_datasets(Images(ROWS), augment=recipe, augment_on="gpu", **about)
        data.memory = memory
    else:

        def collate(samples):
            return [*default_collate(samples), Moved(memory)]

        data = OnStreams.from_datasets(Rows(ROWS), collate_fn=collate, **about)

    def transform(batch):
        memory.take("transform", len(batch[0]))
        return function(batch)

    data.register_transform(transform)
    model = Model(memory)
    with made_ahead(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        quiet_trainer(callbacks=[BatchSizeGuard()], max_epochs=2).fit(model, data)
    texts = [str(one.message) for one in told if one.category is FastDataWarning]
    return model.seen, [text for text in texts if "memory" in text]


@pytest.fixture(scope="module")
def calm():
    return {pictures: train(Memory(), pictures=pictures)[0] for pictures in (False, True)}


@each("place", PLACES)
@each("way", WAYS)
def test_memory_that_runs_out_once_changes_nothing(calm, way, place):
    pictures = place == "pipeline"
    calls = 0
    for number in (0, 1, 4):
        memory = Memory(place, calls=[number])
        seen, _ = train(memory, way, pictures=pictures)
        calls += memory.failed
        if place == "step":
            seen = [rejoined(parts) for parts in of_batches(seen)]
        assert alike(seen, calm[pictures])
    assert calls == 3


def of_batches(seen):
    """Yield the parts of each batch, whose samples are as many as a batch has."""
    parts, rows = [], 0
    for part in seen:
        parts.append(part)
        rows += len(part[0])
        if rows == BATCH:
            yield parts
            parts, rows = [], 0


def rejoined(parts):
    return [torch.cat(column) for column in zip(*parts, strict=True)]


@each("place", ("transform", "hook"))
@each("way", WAYS)
def test_batches_that_never_fit_come_in_parts_that_are_joined(calm, way, place):
    memory = Memory(place, fits=2)
    seen, told = train(memory, way)
    assert alike(seen, calm[False])
    # Once it is known what fits, nothing is tried in vain again. First what is ahead is dropped.
    assert memory.failed == (3 if way == "auto" else 2)
    assert "parts of 3" in told[-2]
    assert "parts of 2" in told[-1]


@each("way", WAYS)
def test_draws_that_the_device_has_no_memory_for_are_carried_out_on_the_host(calm, way):
    # On its side stream, where there is one, and then on that of the steps.
    memory = Memory("pipeline", calls=range(1 if way == "off" else 2))
    seen, told = train(memory, way, pictures=True)
    assert alike(seen, calm[True])
    assert "in host memory" in told[-1]
    assert "a batch ahead" in told[0] or way == "off"


def test_a_batch_that_was_sent_ahead_goes_before_a_step_is_taken_in_parts(calm):
    memory = Memory("step", calls=[2])
    seen, told = train(memory, "auto")
    assert memory.failed == 1
    assert alike(seen, calm[False])
    assert len(told) == 1
    assert "no memory for a batch ahead" in told[0]


def test_a_transform_draws_for_each_part_anew():
    def noise(batch):
        return [torch.rand(len(batch[0])), *batch[1:]]

    seen, _ = train(Memory("hook", fits=3), function=noise)
    for values, _ in seen:
        assert len(set(values.tolist())) == BATCH


def test_a_policy_that_raises_and_none_leave_the_error_alone():
    for guard in ("raise", "off"):
        with pytest.raises(torch.OutOfMemoryError):
            train(Memory("transform", fits=2), guard=guard)


def test_what_does_not_fit_by_single_samples_is_the_error_of_torch():
    with pytest.raises(torch.OutOfMemoryError) as raised:
        train(Memory("hook", fits=0))
    assert any("set a smaller batch_size" in note for note in raised.value.__notes__)


def test_other_errors_on_the_way_go_through():
    memory = Memory("hook", calls=[1], error=ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        train(memory)
    assert memory.failed == 1


BATCHES = {
    "tensor": torch.arange(10).reshape(5, 2),
    "pair": [torch.arange(5), torch.ones(5, 3)],
    "names": {"x": torch.zeros(5, 2), "name": list("abcde"), "of": torch.tensor(2)},
    "nested": ({"a": [torch.arange(5), "all"]}, tuple("vwxyz"), None),
    "boxes of each": [[torch.zeros(3, 4)] * 5, [{"boxes": torch.zeros(5, 4)}] * 5],
}


@each("name", BATCHES)
@each("size", (1, 2, 4))
def test_parts_of_a_batch_are_joined_to_it(name, size):
    batch = BATCHES[name]
    parts = [part_of(batch, at, min(at + size, 5), 5) for at in range(0, 5, size)]
    assert [rows_of(part) for part in parts] == [size] * (5 // size) + [1] * bool(5 % size)
    whole = joined(parts)
    assert rows_of(whole) == 5
    assert str(whole) == str(batch)


@each("batch", [(torch.zeros(4), torch.zeros(5)), torch.tensor(1.0), None])
def test_samples_that_cannot_be_told_apart_are_not_counted(batch):
    assert rows_of(batch) is None

"""A stream goes on behind any batch as if it had never stopped, or says first that it does not.

The oracle is the loop that nobody stopped. What torchdata's tests of StatefulDataLoader state of
streams is stated here for later epochs, too.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from itertools import chain, islice
from types import SimpleNamespace

import albumentations as A
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from misses import each
from resilience.runs import (
    Recorder,
    first_difference,
    lines,
    lines_before,
    through_a_file,
    train,
    warned,
)
from thoroughness import some
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from virtual_time import virtual_time

from lightning_fastdata import FastDataLoader, FastDataModule
from lightning_fastdata.errors import DatasetError, FastDataWarning, OptionsError
from lightning_fastdata.executors.fetch import FetchPlan
from lightning_fastdata.executors.inline import StreamAsk, StreamFetcher
from lightning_fastdata.executors.stream_state import LanePosition, StreamState
from lightning_fastdata.host import clock
from lightning_fastdata.plugin.module import KEY, TrainingRun

LENGTH, BATCH, EPOCHS = 14, 2, 3
AGAIN = pytest.mark.filterwarnings("ignore:To go on where:lightning_fastdata.FastDataWarning")


def mine(order):
    """What of an order belongs to this worker."""
    info = get_worker_info()
    return order[info.id :: info.num_workers] if info is not None else order


def ordered(number):
    order = list(range(LENGTH))
    random.Random(number).shuffle(order)
    return mine([100 * number + index for index in order])


# -- streams with a state --------------------------------------------------------------------------


class Resumes(IterableDataset):
    """Sets its count back in a generator, but for what a state said."""

    def __init__(self):
        self.at, self.resume = 0, None

    def __iter__(self):
        self.at, self.resume = self.resume or 0, None
        for sample in ordered(0)[self.at :]:
            self.at += 1
            yield sample

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.resume = state["at"]


class CountsAtItsEnd(Resumes):
    """Counts its passes, and does not set back where it is."""

    passes = 0

    def __iter__(self):
        for sample in super().__iter__():
            yield sample + 1000 * self.passes
        self.passes += 1

    def state_dict(self):
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state):
        self.resume, self.passes = state["at"], state["passes"]


class CountsPasses(IterableDataset):
    """Has another order in each pass, and counts them at their ends; its state is a live dict."""

    def __init__(self):
        self.live = {"passes": 0, "at": 0, "noise": torch.zeros(2)}

    def __iter__(self):
        live = self.live
        samples = ordered(live["passes"])
        while live["at"] < len(samples):
            live["at"] += 1
            yield samples[live["at"] - 1]
        live["passes"], live["at"] = live["passes"] + 1, 0

    def state_dict(self):
        return self.live

    def load_state_dict(self, state):
        self.live = state


class SetsUp(IterableDataset):
    """Sets itself up in ``__iter__``, before its first sample is asked for."""

    def __iter__(self):
        self.at = 0
        return self.read()

    def read(self):
        samples = ordered(0)
        while self.at < len(samples):
            self.at += 1
            yield samples[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class OwnIterator(IterableDataset, Iterator):
    """Is its own iterator, and draws from a generator that it makes in ``__iter__``."""

    passes = 0

    def __iter__(self):
        self.at, self.passes = 0, self.passes + 1
        self.random = random.Random(self.passes)
        return self

    def __next__(self):
        if self.at == len(mine(range(LENGTH))):
            raise StopIteration
        self.at += 1
        return self.random.randrange(10**6)

    def state_dict(self):
        version, words, kept = self.random.getstate()
        return {"at": self.at, "passes": self.passes, "random": [version, list(words), kept]}

    def load_state_dict(self, state):
        self.at, self.passes = state["at"], state["passes"]
        version, words, kept = state["random"]
        self.random.setstate((version, tuple(words), kept))


class Samples(Iterator):
    def __init__(self, samples):
        self.samples, self.at = samples, 0

    def __next__(self):
        if self.at == len(self.samples):
            raise StopIteration
        self.at += 1
        return self.samples[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class OfIterator(IterableDataset):
    """Gives an iterator that has the state."""

    def __iter__(self):
        return Samples(ordered(0))


class KnowsPasses(IterableDataset):
    """Knows which pass it is, and its iterator how far that has come."""

    passes, goes_on = 0, False

    def __iter__(self):
        self.passes += not self.goes_on
        self.goes_on = False
        return Samples(ordered(self.passes))

    def state_dict(self):
        return {"passes": self.passes}

    def load_state_dict(self, state):
        self.passes, self.goes_on = state["passes"], True


class CountsIterators(IterableDataset):
    """Has another order in each pass, which its iterator alone can tell."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        return OfPass(self)


class OfPass:
    """A pass of a stream, whose number is part of its state."""

    def __init__(self, stream):
        self.stream, self.number, self.at = stream, stream.passes, 0

    def __iter__(self):
        return self

    def __next__(self):
        samples = ordered(self.number)
        if self.at >= len(samples):
            raise StopIteration
        self.at += 1
        return samples[self.at - 1]

    def state_dict(self):
        return {"number": self.number, "at": self.at}

    def load_state_dict(self, state):
        self.stream.passes = self.number = state["number"]
        self.at = state["at"]


class Once(IterableDataset, Samples):
    """Ends for ever."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    @property
    def samples(self):
        return mine(range(LENGTH))


class Uneven(CountsPasses):
    """Has less for the second worker than for the first, and nothing for the third."""

    def __iter__(self):
        info = get_worker_info()
        limit = LENGTH if info is None else (6, 1, 0)[info.id]
        for sample in super().__iter__():
            if self.live["at"] <= limit:
                yield sample


class Awkward(CountsPasses):
    """Holds what a checkpoint does not give back, or fails to tell its state."""

    def __init__(self, held=None):
        super().__init__()
        self.held = held

    def state_dict(self):
        if isinstance(self.held, Exception):
            raise self.held
        return {**super().state_dict(), "parts": [1, self.held]}


STATEFUL = (
    Resumes,
    CountsAtItsEnd,
    CountsPasses,
    SetsUp,
    OwnIterator,
    OfIterator,
    KnowsPasses,
    CountsIterators,
    Once,
    Uneven,
)


# -- streams without one ---------------------------------------------------------------------------


class Plain(IterableDataset):
    def __iter__(self):
        yield from ordered(0)


class Listed(IterableDataset):
    """Gives an iterator of Python, which has no state."""

    def __iter__(self):
        return iter(ordered(0))


class Drawing(IterableDataset):
    """Draws from the global generators of its worker."""

    def __iter__(self):
        for sample in ordered(0):
            yield sample, random.random(), np.random.random(), torch.rand(())


class Rotated(CountsPasses):
    """Pictures through a pipeline, which this package keys by sample."""

    def __init__(self):
        super().__init__()
        self.pipeline = A.Compose([A.RandomBrightnessContrast(p=1)])

    def __iter__(self):
        for sample in super().__iter__():
            yield self.pipeline(image=np.full((2, 2, 3), sample % 100, np.uint8))["image"]


class RotatedAndItsOwn(OwnIterator):
    """Is its own iterator, whose samples go through a pipeline."""

    def __init__(self):
        self.pipeline = A.Compose([A.RandomBrightnessContrast(p=1)])

    def __next__(self):
        return self.pipeline(image=np.full((2, 2, 3), super().__next__() % 100, np.uint8))["image"]


class OfItsTime(IterableDataset):
    """Shuffles by what differs in each program, as by the clock."""

    def __init__(self, time):
        self.time = time

    def __iter__(self):
        yield from ordered(self.time)


# -- the law ---------------------------------------------------------------------------------------


def loader_of(stream, workers, persistent=True, executor=None, batch=BATCH, **how):
    kept = {"persistent_workers": persistent, "multiprocessing_context": "fork"} if workers else {}
    executor = executor or ("workers" if workers else "inline")
    stream = stream() if isinstance(stream, type) else stream
    return FastDataLoader(stream, batch, num_workers=workers, executor=executor, **kept, **how)


def text(batch):
    return repr(batch.tolist() if isinstance(batch, torch.Tensor) else batch)


def run(loader, epochs):
    """Each batch of these epochs, and the state behind it."""
    for epoch in epochs:
        for batch in loader:
            yield (epoch, text(batch)), through_a_file(loader.state_dict())


def stops(found):
    """Behind the first batches and in mid-epoch, at an epoch's end, and at the beginning of one."""
    first = sum(epoch == 0 for (epoch, _), _ in found)
    return [at for at in (1, 2, 3, first, first + 1, first + 2, first + 4) if at <= len(found)]


def check(make, epochs=EPOCHS, again=None):
    torch.manual_seed(3)
    loader = make()
    found = list(run(loader, range(epochs)))
    loader.close()
    for at in stops(found) if loader.num_workers == 0 else some(stops(found), 2):
        state = found[at - 1][1]
        torch.manual_seed(4)
        resumed = (again or make)()
        resumed.load_state_dict(state)
        rest = [batch for batch, _ in run(resumed, range(state["epoch"], epochs))]
        resumed.close()
        assert rest == [batch for batch, _ in found[at:]], f"behind {at} batches"


@each("stream", STATEFUL)
def test_a_state_goes_on_in_the_training_process_without_a_word(stream):
    check(lambda: loader_of(stream, 0))


@pytest.mark.cases(5)
@each("workers", [3, 2, 1])
@each("stream", STATEFUL)
def test_a_state_goes_on_in_workers_that_are_kept(stream, workers):
    check(lambda: loader_of(stream, workers))


@pytest.mark.cases(3)
@AGAIN
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    ("before", "after"), [("inline", "torch"), ("workers", "workers"), ("torch", "workers")]
)
@pytest.mark.parametrize("how", [{}, {"batch": 3, "drop_last": True}, {"batch": None}])
def test_a_stream_without_a_state_is_read_again_by_any_executor(before, after, persistent, how):
    workers = 0 if before == "inline" else 2

    def made(executor):
        return loader_of(Plain, workers, persistent, executor, **how)

    check(lambda: made(before), again=lambda: made(after))


@AGAIN
@pytest.mark.filterwarnings("ignore:Drawing draws:lightning_fastdata.FastDataWarning")
def test_what_is_read_again_draws_what_workers_drew():
    check(lambda: loader_of(Drawing, 2, persistent=False), epochs=1)


@pytest.mark.parametrize("stream", [Rotated, RotatedAndItsOwn])
@pytest.mark.parametrize("workers", [0, 2])
def test_keys_of_samples_go_on(stream, workers):
    check(lambda: loader_of(stream, workers))


def saved_after(batches, stream, workers, **how):
    stopped = loader_of(stream, workers, **how)
    given = iter(stopped)
    for _ in range(batches):
        next(given)
    state = through_a_file(stopped.state_dict())
    stopped.close()
    return state


def resumed(state, stream, workers, **how):
    again = loader_of(stream, workers, **how)
    again.load_state_dict(state)
    return again


def told_by(loader):
    with warned() as texts:
        batches = [text(batch) for batch in loader]
    loader.close()
    return texts, batches


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_again_is_said_once(workers):
    texts, rest = told_by(resumed(saved_after(5, Plain, workers), Plain, workers))
    assert len(rest) == (3 if workers else 2)
    (said,) = texts
    assert "5 batches of Plain" in said
    assert "read again and dropped, in " in said


def test_batches_as_they_are_ready_come_once_from_a_state():
    whole = told_by(loader_of(CountsPasses, 2, in_order=False))[1]
    stopped = loader_of(CountsPasses, 2, in_order=False)
    given = iter(stopped)
    taken = [text(next(given)) for _ in range(3)]
    state = stopped.state_dict()
    stopped.close()
    texts, rest = told_by(resumed(state, CountsPasses, 2, in_order=False))
    assert (texts, sorted(taken + rest)) == ([], sorted(whole))


def test_without_a_state_batches_as_they_are_ready_are_refused_within_an_epoch():
    with pytest.warns(FastDataWarning, match="cannot go on within this epoch"):
        state = saved_after(3, Plain, 2, in_order=False)
    again = resumed(state, Plain, 2)
    with pytest.raises(OptionsError, match="after 3 batches that came as they were ready"):
        next(iter(again))
    again.close()


@pytest.mark.parametrize(("executor", "workers"), [("inline", 0), ("torch", 0), ("workers", 1)])
@pytest.mark.parametrize("time", [0, 1])
def test_a_stream_that_is_read_again_and_gives_others_is_told(executor, workers, time):
    state = saved_after(3, OfItsTime(0), workers, executor=executor)
    texts, _ = told_by(resumed(state, OfItsTime(time), workers, executor=executor))
    assert sum("gave other samples" in said for said in texts) == time


def with_noise(samples):
    return torch.tensor(samples) + torch.rand(())


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("stream", "how"), [(Drawing, {}), (CountsPasses, {"collate_fn": with_noise})]
)
def test_draws_that_no_state_holds_are_told(workers, stream, how):
    texts, _ = told_by(resumed(saved_after(3, stream, workers, **how), stream, workers, **how))
    assert sum("draws from global generators" in said for said in texts) == 1


@each("keeps", [False, True])
@each("goes_on", ["in its own loader", "in another one"])
def test_an_epoch_behind_a_boundary_draws_other_numbers_than_the_one_before(keeps, goes_on) -> None:
    def made():
        generator = torch.Generator().manual_seed(5)
        how = {"executor": "workers", "persistent_workers": keeps, "generator": generator}
        return FastDataLoader(Drawing(), 2, num_workers=1, **how)

    def draws(loader):
        return [[field.tolist() for field in batch] for batch in loader]

    before = made()
    first, state = draws(before), before.state_dict()
    after = before if goes_on == "in its own loader" else made()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FastDataWarning)
        after.load_state_dict(state)
        second, third = draws(after), draws(after)
    assert len({str(each) for each in (first, second, third)}) == 3
    if keeps and after is before:  # its workers go on as if nothing had been loaded
        never_stopped = made()
        assert [first, second, third] == [draws(never_stopped) for _ in range(3)]


class Timed(CountsPasses):
    """Its state takes seconds of a clock."""

    def __init__(self, cost_s):
        super().__init__()
        self.cost_s, self.calls = cost_s, 0

    def state_dict(self):
        self.calls += 1
        clock.sleep(self.cost_s)
        return {}


@pytest.mark.parametrize(("cost_s", "calls"), [(0.0, 1000), (0.001, 10), (1, 1)])
def test_states_take_one_hundredth_of_the_time(cost_s, calls):
    stream = Timed(cost_s)
    with virtual_time():
        state = StreamState(stream)
        state.begin(None)
        for _ in range(1000):
            state.take()
            clock.sleep(0.001)  # a batch
    assert abs(stream.calls - calls) <= 1


@AGAIN
@pytest.mark.parametrize(
    ("held", "why"),
    [
        (random.Random(1), "holds what no checkpoint gives back"),
        (RuntimeError("not yet"), r"raised RuntimeError \(not yet\)"),
    ],
)
def test_a_state_that_cannot_be_saved_is_told_once_and_the_stream_read_again(held, why):
    stopped = loader_of(Awkward(held), 2)
    given = iter(stopped)
    for _ in range(3):
        next(given)
    with pytest.warns(FastDataWarning, match=rf"Awkward.state_dict\(\) {why}"):
        stopped.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = through_a_file(stopped.state_dict())
    rest = list(map(text, given))
    stopped.close()
    assert told_by(resumed(state, Awkward(held), 2))[1] == rest


@AGAIN
def test_a_shuffle_buffer_of_hugging_face_loses_nothing():
    datasets = pytest.importorskip("datasets")

    def stream():
        rows = [{"x": number} for number in range(20)]
        found = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=3)
        return found.shuffle(seed=1, buffer_size=5).filter(lambda row: row["x"] % 3)

    with pytest.warns(FastDataWarning, match="leaves out the samples in its shuffle buffer"):
        check(lambda: loader_of(stream(), 2))


# -- what it refuses -------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [Plain, CountsPasses])
def test_another_number_of_workers_or_of_samples_is_refused_within_an_epoch(stream):
    state = saved_after(3, stream, 2)
    for workers, batch, match in (
        (0, 2, "Set num_workers=2"),
        (1, 2, "now is among 1"),
        (3, 2, "now is among 3"),
        (2, 3, "Set batch_size=2"),
    ):
        again = resumed(state, stream, workers, batch=batch)
        with pytest.raises(OptionsError, match=match):
            next(iter(again))
        again.close()


def test_an_epoch_behind_one_that_torch_read_says_that_it_begins_anew():
    loader = loader_of(CountsPasses, 0, executor="torch")
    list(loader)
    texts, _ = told_by(resumed(loader.state_dict(), CountsPasses, 0, executor="torch"))
    assert "torch's iterator gives no state of it" in texts[0]


@pytest.mark.parametrize(("stream", "told"), [(Plain, 0), (CountsPasses, 1)])
def test_another_number_of_workers_begins_an_epoch_and_says_what_is_lost(stream, told):
    stopped = loader_of(stream, 2)
    list(stopped)
    state = through_a_file(stopped.state_dict())
    stopped.close()
    texts, batches = told_by(resumed(state, stream, 1))
    assert len(batches) == LENGTH // BATCH
    assert [one.count("1 workers read it, and 2 did") for one in texts] == [1] * told


def test_what_was_read_in_the_training_process_goes_on_in_one_worker():
    rest = told_by(resumed(saved_after(3, CountsPasses, 0), CountsPasses, 1))[1]
    assert rest == told_by(loader_of(CountsPasses, 0))[1][3:]


class Long(IterableDataset):
    def __iter__(self):
        return iter(range(100))


def test_a_position_that_is_not_known_is_an_error():
    loader = loader_of(CountsPasses, 0, batch=None)
    list(islice(loader, 10))
    assert loader.state_behind(9)["batches"] == 1
    long = loader_of(Long, 0, batch=None)
    list(islice(long, 90))
    with pytest.raises(OptionsError, match=r"after 50 batches .* not known: 90 were"):
        long.state_behind(40)


@AGAIN
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_has_become_shorter_is_an_error(workers):
    class Short(IterableDataset):
        def __iter__(self):
            yield from range(3)

    state = saved_after(5, Plain, workers)
    with pytest.raises(DatasetError, match=r"Short has ended after 2 batches, and 5 were"):
        next(iter(resumed(state, Short, workers)))


def test_the_rest_of_a_pass_that_is_read_first_is_no_stall():
    """Each sample is noted, as the training may have to wait for it."""
    noted, then = [], []

    class Waits(CountsPasses):
        def __iter__(self):
            for sample in super().__iter__():
                then.append(noted[-1])
                yield sample

    stream = Waits()
    plan = FetchPlan(dataset=stream, collate_fn=list, default_collation=False)
    ask = StreamAsk(0, BATCH, LanePosition(passes=1))
    batch = StreamFetcher(plan).batch(ask, 1, noted.append)
    assert batch == ordered(1)[:BATCH]
    assert then[:LENGTH] == list(range(LENGTH))


class Refusing(CountsPasses):
    def load_state_dict(self, state):
        raise RuntimeError("another version")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_that_cannot_be_loaded_ends_the_epoch_with_its_error(workers):
    again = iter(resumed(saved_after(4, CountsPasses, workers), Refusing, workers))
    with pytest.raises(RuntimeError, match="another version") as raised:
        next(again)
    notes = "".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert "in iter() or load_state_dict" in notes
    assert list(again) == []  # and never the beginning in place of the rest


@pytest.mark.parametrize("broken", [[{"state": None, "x": 1}], [{}]])
def test_what_is_no_position_is_refused(broken):
    state = {**saved_after(2, CountsPasses, 0), "lanes": broken}
    with pytest.raises(OptionsError, match="no position in a stream"):
        next(iter(resumed(state, CountsPasses, 0)))


# -- in a Trainer ----------------------------------------------------------------------------------


class Asks(Callback):
    """Saves at the end of the first epoch."""

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(pl_module.file.with_suffix(".ckpt"))


def trained(folder, name, stream, resume=None, saves=Asks, **how):
    def index(samples):
        return {"index": torch.tensor(samples)}

    data = FastDataModule.from_datasets(stream(), batch_size=BATCH, num_workers=0, collate_fn=index)
    train(Recorder(folder / name), data, folder, resume=resume, callbacks=[saves()], **how)
    return lines(folder / name)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@each("stream", [CountsPasses, OwnIterator, KnowsPasses, CountsIterators, Resumes])
def test_an_epoch_that_a_checkpoint_ended_is_not_trained_again(tmp_path, stream):
    whole = trained(tmp_path, "whole", stream)
    kept = lines_before(tmp_path / "whole.ckpt")
    rest = trained(tmp_path, "rest", stream, resume=tmp_path / "whole.ckpt")
    assert first_difference(rest, whole[kept:]) is None


class SavesInItsFirstStep(Callback):
    """Saves when the first batch of the second epoch has been read, and is not taken yet."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == (1, 0):
            trainer.save_checkpoint(pl_module.file.with_suffix(".ckpt"))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@each("saves", [Asks, SavesInItsFirstStep])
@each(
    ("stream", "told"),
    [(CountsPasses, 1), (CountsIterators, 1), (Listed, 0), (Plain, 0)],
)
def test_a_pass_that_was_left_before_its_end_is_told(tmp_path, saves, stream, told):
    trained(tmp_path, "left", stream, saves=saves, limit_train_batches=2)
    saved = torch.load(tmp_path / "left.ckpt", weights_only=True)["FastDataModule"]
    again = resumed(saved["lightning_fastdata"]["loaders"][""], stream, 0)
    with warned() as texts:
        next(iter(again))
    assert ["left before its end" in text for text in texts] == [True] * told


def on_rank(rank, loader, saved):
    """Return what a rank goes on from."""
    data = FastDataModule.from_datasets(loader.dataset)
    data.load_state_dict({KEY: {"loaders": {"": saved}}})
    data._fit_trainer = SimpleNamespace(global_rank=rank, train_dataloader=loader)
    return TrainingRun(data).resumed(loader)


@pytest.mark.parametrize(("epoch", "told"), [(0, 0), (1, 1)])
def test_another_rank_reads_its_own_part_and_is_told_that_the_state_is_of_none(epoch, told):
    found = [state for (of, _), state in run(loader_of(CountsPasses, 0), range(2)) if of == epoch]
    loader = loader_of(CountsPasses, 0)
    with warned() as texts:
        state = on_rank(1, loader, found[1])
    assert (state.batches, state.lanes, state.digest) == (2, [], None)
    assert [text.count("was saved on rank 0") for text in texts] == [1] * told


@AGAIN
@pytest.mark.parametrize("executor", ["torch", "inline"])
def test_what_another_rank_reads_again_is_not_held_against_that_of_rank_0(executor):
    saved = saved_after(3, OfItsTime(0), 0, executor=executor)
    again = loader_of(OfItsTime(1), 0, executor=executor)
    again.load_state_dict(on_rank(1, again, saved).as_dict())
    assert not any("gave other samples" in said for said in told_by(again)[0])


@pytest.mark.filterwarnings("ignore:.*cannot go on within this epoch")
@pytest.mark.parametrize(("stream", "goes_on"), [(CountsPasses, True), (Plain, False)])
def test_batches_as_they_are_ready_are_gone_on_from_by_all_ranks_or_by_none(stream, goes_on):
    saved = saved_after(3, stream, 2, in_order=False)
    for rank in range(2):
        again = loader_of(stream, 2, in_order=False)
        with warned() as told:
            again.load_state_dict(on_rank(rank, again, saved).as_dict())
        assert len(told) == (rank if goes_on else 0)
        assert all("each rank had taken others" in said for said in told)
        if goes_on:
            assert len(told_by(again)[1]) == LENGTH // BATCH + 1 - 3
        else:
            with pytest.raises(OptionsError, match="after 3 batches that came as they were ready"):
                next(iter(again))
            again.close()


class TellsSeeds(CountsPasses):
    def __iter__(self):
        for sample in super().__iter__():
            yield sample, get_worker_info().seed


@AGAIN
@pytest.mark.filterwarnings("ignore:.*draws from global gen:lightning_fastdata.FastDataWarning")
@pytest.mark.parametrize("stream", [Drawing, TellsSeeds])
def test_a_loader_that_has_workers_goes_on_from_a_state_with_the_seeds_of_it(stream):
    loader = loader_of(stream, 2)
    found = list(run(loader, range(1)))
    for _ in range(2):
        loader.load_state_dict(found[2][1])
        assert [batch for batch, _ in run(loader, range(1))] == [batch for batch, _ in found[3:]]
    loader.close()


def test_a_stream_with_a_state_that_torch_itself_reads_is_told_what_saves_it():
    for executor, known in (("torch", False), ("auto", True), ("inline", True)):
        loader = loader_of(CountsPasses, 0, executor=executor)
        batches = iter(loader)
        seen = [next(batches).tolist() for _ in range(3)]
        loader.load_state_dict(loader.state_dict())
        with warned() as texts:
            seen += [next(iter(loader)).tolist()]
        assert ([*chain(*seen)] == ordered(0)[: 4 * BATCH]) is known
        assert any('executor="inline"' in said for said in texts) is not known


class CountsAndDraws(CountsPasses):
    """Has a state, and draws from torch's global generator."""

    def __iter__(self):
        for sample in super().__iter__():
            yield sample, torch.rand(())


def test_a_stream_with_a_state_without_workers_gives_the_batches_of_torch():
    found = []
    for loader in (
        DataLoader(CountsAndDraws(), BATCH + 1),
        FastDataLoader(CountsAndDraws(), BATCH + 1),
        FastDataModule.from_datasets(
            CountsAndDraws(), batch_size=BATCH + 1, num_workers=0
        ).train_dataloader(),
    ):
        torch.manual_seed(5)
        found.append([text(batch) for _ in range(EPOCHS) for batch in loader])
    assert found[0] == found[1] == found[2]
    assert loader.executor == "inline"


class OfItsTimeWithAState(OfItsTime):
    """Has a state that no checkpoint gives back."""

    def state_dict(self):
        return {"random": random.Random(1)}

    def load_state_dict(self, state):
        pass


@pytest.mark.filterwarnings(
    "ignore:OfItsTimeWithAState.state_dict:lightning_fastdata.FastDataWarning"
)
@pytest.mark.parametrize(("executor", "workers"), [("inline", 0), ("workers", 1), ("torch", 0)])
def test_torch_is_named_only_where_it_reads_what_has_a_state(executor, workers):
    state = saved_after(3, OfItsTimeWithAState(0), workers, executor=executor)
    texts, _ = told_by(resumed(state, OfItsTimeWithAState(1), workers, executor=executor))
    by_torch = executor == "torch"
    assert ["torch's own loader read it" in said for said in texts] == [by_torch, False]
    assert ['executor="inline"' in said for said in texts] == [False, by_torch]
    assert not any("it has none" in said or "give it state_dict" in said for said in texts)

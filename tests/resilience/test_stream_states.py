"""Streams that hold their state in any of the ways that torchdata's protocol allows go on exactly.

The oracle is the loop that nobody stopped. What torchdata's tests of StatefulDataLoader state of
streams is stated here for later epochs, too.
"""

from __future__ import annotations

import io
import random
import warnings
from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from misses import each
from resilience.runs import Recorder, first_difference, lines, lines_before, train
from thoroughness import some
from torch.utils.data import IterableDataset, get_worker_info

from lightning_fastdata import FastDataLoader, FastDataModule, LoaderOptions
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.executors.stream_position import counts_only

LENGTH, BATCH, EPOCHS = 14, 2, 3


def mine(order):
    """What of an order belongs to this worker."""
    info = get_worker_info()
    return order[info.id :: info.num_workers] if info is not None else order


def ordered(number):
    order = list(range(LENGTH))
    random.Random(number).shuffle(order)
    return mine([100 * number + index for index in order])


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


class CountsPasses(IterableDataset):
    """Has another order in each pass, and counts them at their ends."""

    def __init__(self):
        self.passes, self.at = 0, 0

    def __iter__(self):
        samples = ordered(self.passes)
        while self.at < len(samples):
            self.at += 1
            yield samples[self.at - 1]
        self.passes, self.at = self.passes + 1, 0

    def state_dict(self):
        return {"passes": self.passes, "at": self.at}

    def load_state_dict(self, state):
        self.passes, self.at = state["passes"], state["at"]


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


class Once(IterableDataset, Iterator):
    """Ends for ever."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == len(mine(range(LENGTH))):
            raise StopIteration
        self.at += 1
        return self.at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Draws(CountsPasses):
    """Draws from the global generators of its worker."""

    def __iter__(self):
        for sample in super().__iter__():
            yield sample + int(1e6 * (random.random() + np.random.random() + torch.rand(())))


STREAMS = (Resumes, CountsPasses, SetsUp, OwnIterator, OfIterator, KnowsPasses, Once)


def loader_of(stream, workers, persistent=True):
    kept = {"persistent_workers": persistent, "multiprocessing_context": "fork"} if workers else {}
    executor = "workers" if workers else "inline"
    return FastDataLoader(stream(), BATCH, num_workers=workers, executor=executor, **kept)


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def run(loader, epochs):
    """Each batch of these epochs, and the state behind it."""
    for epoch in epochs:
        for batch in loader:
            yield (epoch, batch.tolist()), through_a_file(loader.state_dict())


def stops(found):
    """Behind the first batch and in mid-epoch, at an epoch's end, and at the beginning of one."""
    first = sum(epoch == 0 for (epoch, _), _ in found)
    return [at for at in (1, 3, first, first + 1, first + 2, first + 4) if at <= len(found)]


def check(stream, workers, persistent=True):
    torch.manual_seed(3)
    loader = loader_of(stream, workers, persistent)
    found = list(run(loader, range(EPOCHS)))
    loader.close()
    for at in some(stops(found), 2) if workers else stops(found):
        state = found[at - 1][1]
        torch.manual_seed(4)
        again = loader_of(stream, workers, persistent)
        again.load_state_dict(state)
        rest = [batch for batch, _ in run(again, range(state["epoch"], EPOCHS))]
        again.close()
        assert rest == [batch for batch, _ in found[at:]], f"behind {at} batches"


@each("stream", STREAMS)
def test_the_training_process_goes_on(stream):
    check(stream, 0)


@pytest.mark.cases(4)
@each("workers", [2, 1])
@each("stream", [*STREAMS, Draws])
def test_workers_that_are_kept_go_on(stream, workers):
    check(stream, workers)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (1, True)])
def test_draws_that_a_resume_cannot_repeat_are_told(workers, persistent):
    stopped = loader_of(Draws, workers, persistent)
    given = iter(stopped)
    states = [stopped.state_dict() for _ in islice(given, 3)]
    list(given)
    states.append(stopped.state_dict())
    stopped.close()
    for state in (states[2], states[3]):
        again = loader_of(Draws, workers, persistent)
        again.load_state_dict(state)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            next(iter(again))
        again.close()
        told = [w for w in told if "draws from global generators" in str(w.message)]
        assert len(told) == (0 if persistent else 1)


class OfItsTime(IterableDataset):
    """Shuffles by what differs in each program, as by the clock, and has no state."""

    def __init__(self, time):
        self.time = time

    def __iter__(self):
        yield from ordered(self.time)


@pytest.mark.parametrize(("executor", "workers"), [("inline", 0), ("torch", 0), ("workers", 1)])
@pytest.mark.parametrize("time", [0, 1])
def test_a_stream_that_is_read_again_and_gives_others_is_told(executor, workers, time):
    stopped = FastDataLoader(OfItsTime(0), BATCH, num_workers=workers, executor=executor)
    state = [stopped.state_dict() for _ in islice(stopped, 3)][2]
    stopped.close()
    again = FastDataLoader(OfItsTime(time), BATCH, num_workers=workers, executor=executor)
    again.load_state_dict(state)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        list(again)
    assert sum("gave other samples" in str(warning.message) for warning in told) == time


class CountsAtItsEnd(Resumes):
    """Counts its passes, and does not set back where it is."""

    passes = 0

    def __iter__(self):
        yield from super().__iter__()
        self.passes += 1

    def state_dict(self):
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state):
        self.resume, self.passes = state["at"], state["passes"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_that_counts_the_end_of_a_pass_twice_is_told(workers):
    stopped = loader_of(CountsAtItsEnd, workers)
    list(stopped)
    again = loader_of(CountsAtItsEnd, workers)
    again.load_state_dict(stopped.state_dict())
    stopped.close()
    with pytest.warns(FastDataWarning, match="'passes': 1} became .*'passes': 2}"):
        list(again)
    again.close()


class Asks(Callback):
    """Saves at the end of the first epoch."""

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(pl_module.file.with_suffix(".ckpt"))


def trained(folder, name, stream, resume=None, **how):
    def index(samples):
        return {"index": torch.tensor(samples)}

    options = LoaderOptions(executor="inline", num_workers=0)
    data = FastDataModule.from_datasets(
        stream(), batch_size=BATCH, options=options, collate_fn=index
    )
    train(Recorder(folder / name), data, folder, resume=resume, callbacks=[Asks()], **how)
    return lines(folder / name)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@each("stream", [CountsPasses, OwnIterator, KnowsPasses, Resumes])
def test_an_epoch_that_a_checkpoint_ended_is_not_trained_again(tmp_path, stream):
    whole = trained(tmp_path, "whole", stream)
    kept = lines_before(tmp_path / "whole.ckpt")
    rest = trained(tmp_path, "rest", stream, resume=tmp_path / "whole.ckpt")
    assert first_difference(rest, whole[kept:]) is None


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_pass_that_was_left_before_its_end_is_told(tmp_path):
    trained(tmp_path, "left", CountsPasses, limit_train_batches=2)
    saved = torch.load(tmp_path / "left.ckpt", weights_only=True)["FastDataModule"]
    again = loader_of(CountsPasses, 0)
    again.load_state_dict(saved["lightning_fastdata"]["loaders"][""])
    with pytest.warns(FastDataWarning, match="before epoch 1 was left before its end"):
        next(iter(again))


def test_an_order_that_was_read_on_from_a_boundary_is_saved_again():
    first = list(run(loader_of(CountsPasses, 0), range(EPOCHS)))
    whole = [batch for batch, _ in first]
    for at in range(1, len(whole)):
        again = loader_of(CountsPasses, 0)
        again.load_state_dict(first[at - 1][1])
        if next(iter(again), None) is None:
            continue  # behind the last batch of an epoch its end is still to come
        state = again.state_dict()
        last = loader_of(CountsPasses, 0)
        last.load_state_dict(state)
        assert [batch for batch, _ in run(last, range(state["epoch"], EPOCHS))] == whole[at + 1 :]


def test_another_rank_is_told_that_a_state_is_not_of_its_part():
    found = list(run(loader_of(CountsPasses, 0), range(2)))
    for at, told in ((2, 0), (9, 1)):
        state = found[at][1]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lanes = counts_only(state["stream"], state["epoch"])["lanes"]
        assert [str(each.message).count("was saved on rank 0") for each in caught] == [1] * told
        assert [lane["state"] for lane in lanes] == [None]

"""However often a training is stopped and goes on, it takes each step of the straight one once."""

from __future__ import annotations

import random
import signal
from functools import cache
from itertools import islice

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from misses import each
from resilience.cells import (
    BEGINS_ANEW,
    ENDINGS,
    EPOCHS,
    FEATURES,
    HOOKS,
    LENGTHS,
    LOADERS,
    SAMPLES,
    STEPS,
    Module,
    SavesIn,
    arguments_of,
    families_of,
    make_model,
    make_module,
    tuners_of,
)
from resilience.runs import (
    Images,
    Recorder,
    Stop,
    first_difference,
    lines,
    lines_before,
    train,
)
from torch.utils.data import IterableDataset, get_worker_info

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

MOST_LIVES = 40
NEVER = 10**6
TUNED = [name for name in FEATURES if "finder" in name]
AGAIN = [(name, each) for name in FEATURES if name not in TUNED for each in families_of(name)]


def by_chance(seed, loaders):
    """Lives without end: who loads, how it ends, and after how many steps."""
    chance = random.Random(seed)
    while True:
        yield chance.choice(loaders), chance.choice([*ENDINGS]), chance.choice([0, 1, 1, 2, 3, 5])


def lives(folder, make, planned, *, tuners=lambda when: [], **arguments):
    """The record of a training of many lives, and how each ended."""
    record, told, resume = [], [], None
    for number, (loader, ending, steps) in enumerate(islice(planned, MOST_LIVES)):
        own = folder / str(number)
        own.mkdir()
        taken = 0 if resume is None else lines_before(resume)
        told.append(f"{ending} at {taken + steps} with {loader} from {taken}")
        model, data = make(loader, own / "record")
        callbacks, model.raising = ENDINGS[ending](own, taken + steps)
        callbacks += tuners("later" if number else "first")
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        ended = True
        try:
            train(model, data, own, resume=resume, callbacks=callbacks, **arguments)
        except (Stop, SystemExit, SIGTERMException):
            ended = False
        finally:
            for each, handler in handlers.items():
                signal.signal(each, handler)
        record = [*record[:taken], *lines(own / "record")]
        if ended:
            return record, told
        files = sorted(own.glob("*.ckpt"), key=lambda file: file.stat().st_mtime_ns)
        resume = files[-1] if files else resume
    raise AssertionError(f"it comes to no end: {told}")


def of_feature(feature):
    return lambda loader, file: (make_model(feature, file), make_module(feature, loader))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    @cache
    def record(feature, loader="inline", length="epochs"):
        folder = tmp_path_factory.mktemp("straight")
        model, data = of_feature(feature)(loader, folder / "record")
        about = {"callbacks": tuners_of(feature, "first"), **arguments_of(feature, length)}
        train(model, data, folder, **about)
        return lines(folder / "record")

    return record


@pytest.mark.cases(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("feature", "loaders"), AGAIN)
def test_many_lives_take_the_steps_of_one(tmp_path, straight, feature, loaders, length, seed):
    planned = by_chance(seed, loaders)
    got, told = lives(tmp_path, of_feature(feature), planned, **arguments_of(feature, length))
    assert first_difference(got, straight(feature, loaders[0], length)) is None, told


INTERRUPTED = [(0, 1), (2, 2), (2, STEPS - 3), (STEPS - 1, 1), (STEPS - 1, 3), (STEPS, 2)]


@each(("first", "then"), INTERRUPTED)
def test_a_step_that_was_interrupted_and_a_kill_behind_it_lose_no_batch(
    tmp_path, straight, first, then
):
    """Lightning counts a batch less after an interrupted step."""
    planned = [("inline", "raised", first), ("workers-1", "killed", then)]
    planned.append(("inline", "killed", NEVER))
    got, told = lives(tmp_path, of_feature("plain"), planned, **arguments_of("plain"))
    assert first_difference(got, straight("plain")) is None, told


@pytest.mark.cases(2)
@each("ending", ["on_train_epoch_end", "raised"])
@each("feature", TUNED)
def test_a_tuner_before_a_stop_or_after_it_changes_no_step(tmp_path, straight, feature, ending):
    planned = [("inline", ending, 3), ("inline", "raised", NEVER)]
    about = {"tuners": lambda when: tuners_of(feature, when), **arguments_of(feature)}
    got, told = lives(tmp_path, of_feature(feature), planned, **about)
    whole = straight(feature)
    got = got[-len(whole) :] if feature in BEGINS_ANEW else got
    assert first_difference(got, whole) is None, told


class Stream(IterableDataset):
    """As many samples as the images have, shared among workers; with a state or without one.

    It is told the epoch, as streams of libraries are.
    """

    __module__ = "datasets"

    def __init__(self, *, stateful):
        self.stateful, self.at, self.epoch = stateful, 0, 0
        if stateful:
            self.state_dict = lambda: {"at": self.at}
            self.load_state_dict = lambda state: setattr(self, "at", state["at"])

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        while worker + self.at * workers < SAMPLES:
            index = worker + self.at * workers
            self.at += 1
            yield {"image": torch.tensor([index, self.epoch]), "index": index}
        self.at = 0


class StreamModule(Module):
    def __init__(self, loader, *, stateful):
        super().__init__(loader)
        self.stateful = stateful

    def train_dataset(self):
        return Stream(stateful=self.stateful)

    def val_dataset(self):
        return Images(4)


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("loader", ["inline", "workers-1", "workers-2"])
@pytest.mark.parametrize("one_cycle", [False, True])
@pytest.mark.parametrize("stateful", [False, True])
def test_many_lives_take_the_batches_of_one_stream(tmp_path, loader, one_cycle, stateful, seed):
    # One cycle asks for the number of steps, which a stream does not know.
    about = arguments_of("stream", "steps" if one_cycle else "epochs")

    def make(name, file):
        return Recorder(file, one_cycle=one_cycle), StreamModule(LOADERS[name], stateful=stateful)

    calm = tmp_path / "straight"
    calm.mkdir()
    train(*make(loader, calm / "record"), calm, **about)
    got, told = lives(tmp_path, make, by_chance(seed, [loader]), **about)
    assert first_difference(got, lines(calm / "record")) is None, told


class Lines(IterableDataset):
    """Begins anew each time, or behind what a state said."""

    begin, at = 0, -1

    def __iter__(self):
        for at in range(self.begin, SAMPLES):
            self.at = at
            yield {"index": at}
        self.begin, self.at = 0, -1


class LinesWithState(Lines):
    def state_dict(self):
        return {"at": self.at + 1}

    def load_state_dict(self, state):
        self.begin, self.at = state["at"], state["at"] - 1


@pytest.mark.cases(3)
@each("hook", HOOKS[::-1])
@each("stream", [Lines, LinesWithState])
def test_a_stream_whose_loader_is_made_anew_is_saved_in_any_hook(tmp_path, stream, hook):
    about = {"max_epochs": EPOCHS, "limit_val_batches": 1, "reload_dataloaders_every_n_epochs": 1}
    saves = SavesIn(hook, STEPS + 2, tmp_path)
    for name, callbacks, resume in (("a", [saves], None), ("b", [], saves.file)):
        data = Module(LOADERS["inline"])
        data.train_dataset = stream
        model = Recorder(tmp_path / name)
        train(model, data, tmp_path, callbacks=callbacks, resume=resume, **about)
    kept = lines_before(saves.file)
    assert first_difference(lines(tmp_path / "b"), lines(tmp_path / "a")[kept:]) is None

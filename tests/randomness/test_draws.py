from __future__ import annotations

import pickle
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.randomness import global_generators as draws
from lightning_fastdata.randomness.global_generators import (
    DrawWatch,
    PythonGenerator,
    kept_random_state,
)
from lightning_fastdata.randomness.seeds import OwnGenerators, seed_global_generators

DRAWS = {
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "shuffle": lambda: random.shuffle([1, 2, 3]),
    "numpy": np.random.rand,
    "numpy normal": np.random.randn,
    "numpy choice": lambda: np.random.choice(5),
    "torch": lambda: torch.rand(1),
    "torch permutation": lambda: torch.randperm(5),
}


@pytest.fixture(autouse=True)
def _leave_no_trace() -> Iterator[None]:
    generator = np.random.get_bit_generator()
    with kept_random_state():
        yield
        np.random.set_bit_generator(generator)


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_every_draw_is_seen_and_undone(draw) -> None:
    watch = DrawWatch()
    assert not watch.drew()
    first = draw()
    assert watch.drew()
    watch.restore()
    assert not watch.drew()
    again = draw()
    assert repr(first) == repr(again)


def test_a_deviate_kept_back_is_asked_for_anew_where_the_words_are_those_of_before() -> None:
    np.random.seed(0)
    np.random.rand(2)  # as many words as a pair of normal deviates takes
    with kept_random_state():
        np.random.seed(1)
    np.random.seed(0)
    np.random.randn()
    with kept_random_state():
        np.random.seed(1)
    kept_back = np.random.randn()
    np.random.seed(0)
    assert np.random.randn(2)[1] == kept_back


@pytest.mark.parametrize("first", DRAWS.values(), ids=DRAWS)
def test_a_block_that_draws_leaves_what_comes_after_as_it_was(first) -> None:
    after = []
    for _ in range(2):
        seed_global_generators(3, 1, 4)
        first()
        if after:
            with kept_random_state():
                seed_global_generators(1, 5, 9)
                for draw in DRAWS.values():
                    draw()
        after.append([repr(draw()) for draw in DRAWS.values()])
    assert after[0] == after[1]


def test_another_generator_behind_numpy_is_watched_too() -> None:
    np.random.set_bit_generator(np.random.PCG64(3))
    watch = DrawWatch()
    assert not watch.drew()
    first = np.random.rand()
    assert watch.drew()
    watch.restore()
    assert np.random.rand() == first


def test_a_watch_may_begin_again() -> None:
    watch = DrawWatch()
    np.random.rand()
    watch.begin()
    assert not watch.drew()
    np.random.rand()
    assert watch.drew()


def test_the_states_behind_random_and_numpy_are_where_they_are_read() -> None:
    assert draws._python_address()
    assert draws._deviate_offset()


@pytest.mark.parametrize("offset", [draws._deviate_offset(), 0], ids=["memory", "get_state"])
def test_numpys_generator_is_put_back_to_the_very_state_it_had(offset) -> None:
    generator = draws.NumpyGenerator(offset)
    for steps in range(12):
        np.random.seed(steps)
        for _ in range(steps):  # an odd number leaves a deviate
            np.random.randn()
        generator.begin()
        assert not generator.moved()
        wanted = np.random.get_state()
        for _ in range(steps % 3 + 1):
            np.random.randn()
        assert generator.moved()
        generator.restore()
        assert repr(np.random.get_state()) == repr(wanted)
        assert not generator.moved()
    np.random.set_state(("MT19937", [1] * 624, 5, 1, 0.25))
    generator.begin()
    assert np.random.randn() == 0.25
    assert generator.moved()  # by the deviate alone
    generator.restore()
    assert np.random.randn() == 0.25


def test_a_generator_that_took_the_place_of_numpys_in_a_block_goes_again() -> None:
    np.random.seed(3)
    wanted = np.random.rand()
    np.random.seed(3)
    before = np.random.mtrand.get_bit_generator()
    with kept_random_state():
        np.random.set_bit_generator(np.random.PCG64(3))
        np.random.rand()
    assert np.random.mtrand.get_bit_generator() is before
    assert np.random.rand() == wanted


@pytest.mark.parametrize("address", [draws._python_address(), 0], ids=["memory", "getstate"])
def test_python_s_generator_is_put_back_to_the_very_state_it_had(address) -> None:
    watch = PythonGenerator(address)
    random.seed(7)
    random.gauss(0, 1)  # keeps a second deviate back
    for draws_before in (0, 1, 623, 624):
        for _ in range(draws_before):
            random.random()
        state = random.getstate()
        watch.begin()
        assert not watch.moved()
        for _ in range(624 // 2):
            random.random()  # two words each: the position is back where it was
        assert watch.moved()
        watch.restore()
        assert random.getstate() == state
        random.gauss(0, 1)  # takes what was kept back, and no word
        assert watch.moved()
        watch.restore()
        assert random.getstate() == state


class Seldom(Dataset):
    """Draws for some samples only, and may fail after that."""

    def __init__(self, drawing: set[int], failing: int = -1) -> None:
        self.drawing = drawing
        self.failing = failing

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        value = 0.0
        if index in self.drawing:
            value = random.random() + np.random.rand() + float(torch.rand(()))
        if index == self.failing:
            raise ValueError(f"drew {value}")
        return torch.tensor([index, value], dtype=torch.float64)


def expected(index: int, epoch: int) -> float:
    with kept_random_state():
        seed_global_generators(5, epoch, index)
        return random.random() + np.random.rand() + float(torch.rand(()))


@pytest.mark.cases(8)
@pytest.mark.parametrize("executor", ["inline", "workers"])
@pytest.mark.parametrize("drawing", [{37}, {0}, {3, 4, 40}, set(range(48)), set()])
@pytest.mark.parametrize("collate_fn", [None, list], ids=["default", "list"])
def test_draws_have_the_key_of_their_sample_however_seldom_they_are(
    executor, drawing, collate_fn
) -> None:
    loader = FastDataLoader(
        Seldom(drawing), 8, num_workers=2, seed=5, executor=executor, collate_fn=collate_fn
    )
    for epoch in range(2):
        rows = [row for batch in loader for row in batch]
        assert [int(row[0]) for row in rows] == list(range(48))
        for index, value in torch.stack(rows).tolist():
            assert value == (expected(int(index), epoch) if index in drawing else 0.0)


DRAW = {"random": random.random, "numpy": np.random.rand, "torch": lambda: float(torch.rand(()))}


class OneGeneratorAfterAnother(Dataset):
    """The later the sample, the more generators it draws from."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [draw() if index >= 12 * at else 0.0 for at, draw in enumerate(DRAW.values(), 1)]
        return torch.tensor([index, *drawn], dtype=torch.float64)


@pytest.mark.parametrize("executor", ["inline", "workers"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_generators_that_are_drawn_from_later_have_the_key_of_their_sample_too(
    executor, shuffle
) -> None:
    loader = FastDataLoader(
        OneGeneratorAfterAnother(), 8, shuffle=shuffle, num_workers=2, seed=5, executor=executor
    )
    for epoch in range(2):
        rows = torch.cat(list(loader)).tolist()
        assert sorted(row[0] for row in rows) == list(range(48))
        for index, *values in rows:
            with kept_random_state():
                seed_global_generators(5, epoch, int(index))
                keyed = [draw() for draw in DRAW.values()]
            due = [index >= 12 * at for at in (1, 2, 3)]
            assert values == [
                value if is_due else 0.0 for value, is_due in zip(keyed, due, strict=True)
            ]


@pytest.mark.parametrize("executor", ["inline", "workers"])
def test_an_error_after_the_first_draw_is_that_of_the_key(executor) -> None:
    loader = FastDataLoader(Seldom({21}, failing=21), 8, num_workers=1, seed=5, executor=executor)
    with pytest.raises(ValueError, match=f"drew {expected(21, 0)}"):
        list(loader)


class Hands(Dataset):
    """Gives its numbers to whoever asks first, as a queue of patches does, and draws."""

    def __init__(self, numbers: int, own: bool) -> None:
        self.left, self.own = list(range(numbers))[::-1], own

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index):
        drawn = (random.random(), np.random.rand(), torch.rand(())) if self.own else ()
        return self.left.pop(), *drawn


def noisy(samples):
    """Collate, and draw."""
    return torch.tensor([sample[0] for sample in samples]), torch.rand(()), np.random.rand()


@pytest.mark.parametrize("collate_fn", [None, noisy])
@pytest.mark.parametrize("own", [True, False], ids=["drawn", "not drawn"])
@pytest.mark.parametrize(
    ("executor", "workers"), [("inline", 0), ("workers", 1), (None, 0)], ids=str
)
def test_a_sample_that_draws_is_read_once(executor, workers, own, collate_fn) -> None:
    loader = FastDataLoader(
        Hands(24, own), 4, num_workers=workers, executor=executor, collate_fn=collate_fn
    )
    given = [batch[0].tolist() for batch in loader]
    assert given == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def stacked_and_noisy(samples):
    """Collate, and draw."""
    return torch.stack(samples), torch.rand(()), np.random.rand(), random.random()


@pytest.mark.parametrize("executor", ["inline", "workers"])
def test_a_collation_that_draws_changes_nothing_of_what_samples_draw(executor) -> None:
    drawing = {2, 3, 11, 12, 40}  # not the first one that is read
    loader = FastDataLoader(
        *(Seldom(drawing), 8),
        seed=5,
        num_workers=int(executor == "workers"),
        executor=executor,
        collate_fn=stacked_and_noisy,
    )
    drawn = torch.cat([rows[:, 1] for rows, *_ in loader]).tolist()
    assert drawn == [expected(i, 0) if i in drawing else 0.0 for i in range(48)]


@pytest.mark.parametrize("dataset", [Seldom(set(range(48))), OneGeneratorAfterAnother()])
def test_inline_leaves_the_generators_of_the_training_alone(dataset) -> None:
    batches = iter(FastDataLoader(dataset, 8, executor="inline", num_workers=0))
    next(batches)  # for which torch's generator gives a seed, as to torch's own iterators
    np.random.randn()
    watch = DrawWatch()
    for _ in batches:
        assert not watch.drew()


def test_generators_that_were_sent_to_a_process_are_those_of_the_dataset_there():
    held = {
        "numpy": np.random.default_rng(3),
        "torch": torch.Generator(),
        "python": random.Random(),
    }
    own, there = pickle.loads(pickle.dumps((OwnGenerators(held), held)))
    before = [str(x) for x in states(there)]
    own.key(0, 0, 0)
    assert all(str(x) != y for x, y in zip(states(there), before, strict=True))


def states(held):
    yield held["numpy"].bit_generator.state
    yield held["torch"].initial_seed()
    yield held["python"].getstate()


class Draws(Dataset):
    """Draws from a generator of its own, or leaves that to its ``collate_fn``."""

    def __init__(self, *, itself):
        self.generator = np.random.default_rng(7) if itself else None

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return 0.0 if self.generator is None else self.generator.random()


class DrawsForBatches:
    def __init__(self):
        self.generator = np.random.default_rng(7)

    def __call__(self, samples):
        return torch.tensor(samples) + self.generator.random()


@pytest.mark.parametrize("itself", [True, False])
def test_generators_that_are_held_draw_the_same_with_any_number_of_workers(itself) -> None:
    def drawn(workers):
        collate_fn = None if itself else DrawsForBatches()
        loader = FastDataLoader(
            Draws(itself=itself), 2, num_workers=workers, collate_fn=collate_fn, seed=5
        )
        epochs = [torch.cat(list(loader)).tolist() for _ in range(2)]
        loader.close()
        return epochs

    first, second = drawn(0)
    assert len(set(first)) == (12 if itself else 6)
    assert first != second
    assert drawn(1) == drawn(3) == [first, second]

"""What a dataset draws from generators of its own depends on seed, epoch and sample alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset
from trainers import trained

from lightning_fastdata import FastDataLoader, FastDataModule, LoaderOptions

SAMPLES, EPOCHS = 12, 2
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")
GENERATORS = {
    "numpy": np.random.default_rng,
    "numpy mt19937": lambda seed: np.random.Generator(np.random.MT19937(seed)),
    "random state": np.random.RandomState,
    "python": random.Random,
    "torch": lambda seed: torch.Generator().manual_seed(seed),
}


def draw(generator):
    if isinstance(generator, random.Random):
        return generator.getrandbits(30)
    if isinstance(generator, torch.Generator):
        return int(torch.randint(2**30, (), generator=generator))
    integers = getattr(generator, "integers", None) or generator.randint
    return int(integers(2**30))


class Attribute(Dataset):
    """Draws one number for each sample from ``self.generator``."""

    def __init__(self, generator):
        self.generator = generator

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return index, draw(self.generator)


class Nested(Attribute):
    """Draws in a transform that holds the generator."""

    def __init__(self, generator):
        self.transforms = [{"jitter": Jitter(generator)}]

    def __getitem__(self, index):
        return index, self.transforms[0]["jitter"]()


@dataclass
class Jitter:
    generator: object = field(repr=False)

    def __call__(self):
        return draw(self.generator)


class Slots(Attribute):
    """Draws by an object without ``__dict__``, which holds a method of the generator."""

    def __init__(self, generator):
        self.transform = Slot(generator)

    def __getitem__(self, index):
        return index, self.transform.take()


class Slot:
    __slots__ = ("take",)

    def __init__(self, generator):
        self.take = generator.random if isinstance(generator, random.Random) else None


class Late(Attribute):
    """Makes its generator when it first reads, of what torch seeded the worker with."""

    generator = None

    def __init__(self, _generator):
        pass

    def __getitem__(self, index):
        if self.generator is None:
            self.generator = np.random.default_rng(torch.initial_seed())
        return index, draw(self.generator)


class Batched(Attribute):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def halves(generator):
    whole = Attribute(generator)
    return ConcatDataset([Subset(whole, range(6)), Subset(whole, range(6, 12))])


def fit(dataset, executor, workers):
    options = LoaderOptions(num_workers=workers, executor=executor, probe=False)
    data = FastDataModule.from_datasets(dataset, batch_size=3, options=options, seed=1)
    return list(chain(*trained(data, rows_of, max_epochs=EPOCHS)))


def rows_of(batch):
    return list(zip(*(part.tolist() for part in batch), strict=True))


def read(dataset, executor="inline", workers=0, **arguments):
    """Return the rows of all epochs, each ``(index, drawn)``."""
    arguments = {"batch_size": 3, "seed": 1, **arguments}
    loader = FastDataLoader(dataset, num_workers=workers, executor=executor, **arguments)
    rows = [row for _ in range(EPOCHS) for batch in loader for row in rows_of(batch)]
    loader.close()
    return rows


def test_a_training_does_not_depend_on_which_worker_reads_a_sample():
    runs = [
        fit(Attribute(np.random.default_rng(3)), executor, workers)
        for executor, workers in [("workers", 2), ("workers", 1), ("inline", 0)]
    ]
    assert runs[0] == runs[1] == runs[2]
    assert len({drawn for _, drawn in runs[0]}) == SAMPLES * EPOCHS


@pytest.mark.parametrize("kind", GENERATORS)
def test_each_kind_of_generator_is_keyed_and_left_as_it_was(kind):
    make = GENERATORS[kind]
    generator, untouched = make(3), make(3)
    here = read(Attribute(generator))
    assert draw(generator) == draw(untouched)
    assert here == read(Attribute(make(3)), "workers", 2)
    assert len({drawn for _, drawn in here}) == SAMPLES * EPOCHS
    # Another seed of the generator, or of the loader, is another stream.
    others = read(Attribute(make(4))) + read(Attribute(make(3)), seed=2)
    assert not {drawn for _, drawn in here} & {drawn for _, drawn in others}


@pytest.mark.cases(2)
@pytest.mark.parametrize("style", [Nested, Slots, Late, Batched, halves])
def test_generators_are_found_wherever_a_dataset_holds_them(style):
    def make():
        return style(random.Random(3))

    runs = [read(make()), read(make(), "workers", 1), read(make(), "workers", 3)]
    assert runs[0] == runs[1] == runs[2]
    assert len({drawn for _, drawn in runs[0]}) == SAMPLES * EPOCHS


class Masking:
    """A ``collate_fn`` that makes its generator at its first batch, as a collator with a seed."""

    generator = None

    def __call__(self, indices):
        self.generator = self.generator or np.random.default_rng(3)
        return torch.tensor(indices), torch.from_numpy(self.generator.integers(2**30, size=3))


def test_a_generator_that_collate_fn_makes_at_its_first_batch_is_keyed():
    ways = [("inline", 0), ("workers", 1), ("workers", 2)]
    runs = [read(list(range(SAMPLES)), *way, collate_fn=Masking()) for way in ways]
    assert runs[0] == runs[1] == runs[2]
    assert len({drawn for _, drawn in runs[0]}) == SAMPLES * EPOCHS


def test_two_generators_of_one_seed_draw_different_numbers():
    class Two(Attribute):
        def __getitem__(self, index):
            return draw(self.generator[0]), draw(self.generator[1])

    rows = read(Two([random.Random(3), np.random.default_rng(3)]))
    assert len({number for row in rows for number in row}) == 2 * SAMPLES * EPOCHS

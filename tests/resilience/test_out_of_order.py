"""Where batches do not come in order, a loop that is left goes on with those it had not taken."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from torch.utils.data import Dataset, RandomSampler

from lightning_fastdata import FastDataLoader
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.order.samplers import BlockShuffleSampler

LENGTH, BATCH = 26, 2
FORK = multiprocessing.get_context("fork")


class Waits(Dataset):
    """Numbers, of which some are there as soon as a gate is opened."""

    def __init__(self, slow=(), gate=None):
        self.slow, self.gate = slow, gate

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        if index in self.slow:
            self.gate.wait()
        return index


def drawn(seed):
    return RandomSampler(range(LENGTH), generator=torch.Generator().manual_seed(seed))


SAMPLERS = {
    "in order": lambda: None,
    "by seed and epoch": lambda: BlockShuffleSampler(range(LENGTH), seed=4),
    "from a generator": lambda: drawn(6),
}


def make(executor, sampler, data, **more):
    workers = {"multiprocessing_context": "fork", "num_workers": 2} if executor != "inline" else {}
    own = {"num_workers": 0, "sampler": SAMPLERS[sampler](), "seed": 3, "executor": executor}
    return FastDataLoader(data, BATCH, **{**own, "in_order": False, **workers, **more})


def whole(sampler):
    return [batch.tolist() for batch in make("inline", sampler, Waits())]


def states_of(loader, gate, open_after):
    """Each batch of a loop, and the state behind it; the gate opens after so many."""
    found = []
    for number, batch in enumerate(loader, start=1):
        found.append((batch.tolist(), loader.state_dict()))
        if number == open_after:
            gate.set()
    return found


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("executor", ["workers", "torch"])
def test_a_loop_goes_on_with_the_batches_that_it_had_not_taken(executor, sampler):
    order, gate = whole(sampler), FORK.Event()
    loader = make(executor, sampler, Waits({order[1][0], order[3][1]}, gate), prefetch_factor=4)
    found = states_of(loader, gate, open_after=2)
    taken = [batch for batch, _ in found]
    assert sorted(taken) == sorted(order)
    assert taken != order
    for count, (_, state) in enumerate(found[:-1], start=1):
        again = make("inline", sampler, Waits())
        again.load_state_dict(state)
        rest = [batch for batch in order if batch not in taken[:count]]
        assert [batch.tolist() for batch in again] == rest, f"after {count} batches"


def test_a_resumed_loop_that_is_overtaken_again_goes_on_again():
    order, sampler = whole("from a generator"), "from a generator"
    state, taken = None, []
    for takes in (3, 2):  # in both the second batch of the order waits
        gate = FORK.Event()
        loader = make("workers", sampler, Waits({order[1][0]}, gate), prefetch_factor=4)
        if state is not None:
            loader.load_state_dict(state)
        given = iter(loader)
        taken += [next(given).tolist() for _ in range(takes)]
        state = loader.state_dict()
        gate.set()
        loader.close()
    again = make("inline", sampler, Waits())
    again.load_state_dict(state)
    rest = [batch.tolist() for batch in again]
    assert rest == [batch for batch in order if batch not in taken]
    assert sorted(taken + rest) == sorted(order)


@pytest.mark.parametrize("executor", ["inline", "torch"])
def test_a_resumed_loop_whose_batches_come_in_order_goes_on_again(executor):
    order, gate = whole("in order"), FORK.Event()
    loader = make("torch", "in order", Waits({order[1][0]}, gate), prefetch_factor=4)
    given = iter(loader)
    taken = [next(given).tolist() for _ in range(3)]
    state = loader.state_dict()
    gate.set()
    assert state["late"] == [1, 3]
    for takes in (1, 2, len(order) - 6):
        loader = FastDataLoader(Waits(), BATCH, num_workers=0, seed=3, executor=executor)
        loader.load_state_dict(state)
        given = iter(loader)
        taken += [next(given).tolist() for _ in range(takes)]
        state = loader.state_dict()
    assert taken == [order[number] for number in (0, 2, 4, 1, 3, *range(5, len(order)))]


def test_batches_of_another_size_leave_out_those_that_were_overtaken_and_say_so():
    order, gate = whole("by seed and epoch"), FORK.Event()
    loader = make("workers", "by seed and epoch", Waits({order[0][0]}, gate))
    given = iter(loader)
    assert next(given).tolist() == order[1]
    state = loader.state_dict()
    gate.set()
    loader.close()
    sampler = BlockShuffleSampler(range(LENGTH), seed=4)
    again = FastDataLoader(Waits(), 3, sampler=sampler, num_workers=0, seed=3)
    again.load_state_dict(state)
    with pytest.warns(FastDataWarning, match="1 batches of 2 samples that others had overtaken"):
        rest = [index for batch in again for index in batch.tolist()]
    assert rest == [index for batch in order[2:] for index in batch]


def test_several_ranks_are_told_that_only_what_one_had_taken_is_known():
    data = Waits()
    state = make("inline", "in order", data).state_dict()
    state |= {"batches": 3, "reached": 4, "late": [1], "samples": 4 * BATCH, "batch_size": 1}
    state |= {"world_size": 2, "in_order": False}
    again = make("inline", "in order", data)
    again.load_state_dict(state)
    with pytest.warns(FastDataWarning, match="leave in_order=True"):
        next(iter(again))

"""A plain loop over FastDataLoader that is left anywhere goes on from its ``state_dict()``.

The behaviours are the public ones of torchdata's StatefulDataLoader, and those that it lacks.
"""

from __future__ import annotations

import contextlib
import io
import random
import re
from collections import UserDict
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from misses import each
from resilience.cells import LOADERS, Draws, Reversing, weighted
from resilience.runs import Images, digest, rows, through_a_file, warned
from torch.utils.data import BatchSampler, RandomSampler

from lightning_fastdata import BucketBatchSampler, FastDataLoader, prefetch
from lightning_fastdata.errors import OptionsError

LENGTH, BATCH = 22, 4
STEPS = 6


def make(loader="inline", data=Images, length=LENGTH, **arguments):
    """A shuffled loader in a world whose global generators stand elsewhere each time."""
    for anew in (torch.seed, np.random.seed, random.seed):
        anew()
    executor, workers = LOADERS[loader]
    if "sampler" not in arguments:
        generator = torch.Generator().manual_seed(6)
        arguments["sampler"] = RandomSampler(range(length), generator=generator)
    return FastDataLoader(
        data(length),
        1 if "batch_sampler" in arguments else BATCH,
        num_workers=workers,
        executor=executor,
        **{"seed": 3, **arguments},
    )


def seen(batches):
    return [digest(batch) for batch in batches]


def epochs(count, loader="inline", **how):
    """The digests of whole epochs, which nobody disturbed."""
    whole = make(loader, **how)
    return [seen(whole) for _ in range(count)]


def left_after(batches, loader="inline", **how):
    """The state of a loop that was left after so many batches."""
    stopped = make(loader, **how)
    given = iter(stopped)
    for _ in range(batches):
        next(given)
    return through_a_file(stopped.state_dict())


def resumed(state, loader="inline", **how):
    again = make(loader, **how)
    again.load_state_dict(state)
    return again


WAYS = ["inline", "workers-1", "workers-4", "torch-0", "torch-2"]
LEFT = [(way, way, at) for way in ("inline", "workers-2", "torch-2") for at in (0, 1, 3, STEPS - 1)]
LEFT += [(before, after, 3) for before, after in pairwise([*WAYS, WAYS[0]])]


@pytest.mark.cases(5)
@each(("before", "after", "at"), LEFT)
def test_a_loop_that_is_left_goes_on_with_the_next_batch_whoever_reads_it(before, after, at):
    first, second = epochs(2)
    again = resumed(left_after(at, before), after)
    assert seen(again) == first[at:]
    assert seen(again) == second


@pytest.mark.parametrize("exhausted", [False, True])
def test_a_state_at_the_end_of_an_epoch_is_followed_by_a_whole_one(exhausted):
    first, second, third = epochs(3)
    stopped = make()
    given = iter(stopped)
    assert seen(islice(given, STEPS)) == first
    if exhausted:
        assert next(given, None) is None
    again = resumed(stopped.state_dict())
    assert seen(again) == second
    assert seen(again) == third


@pytest.mark.parametrize("loader", ["inline", "workers-2", "gather-1"])
def test_states_that_are_taken_while_iterating_disturb_nothing(loader):
    how = {"data": rows} if loader == "gather-1" else {}
    first, second = epochs(2, loader, **how)
    watched = make(loader, **how)
    states = []
    for expected in (first, second):
        found = []
        for batch in watched:
            found.append(digest(batch))
            states.append(watched.state_dict())
            assert watched.state_dict() == states[-1]
        assert found == expected
    left = [*first, *second]
    for at in (0, 2, STEPS - 1, STEPS):
        again = resumed(states[at], loader, **how)
        rest = [*seen(again), *(seen(again) if at < STEPS - 1 else [])]
        assert rest == left[at + 1 :]


def test_a_state_from_before_the_first_iteration_begins_at_the_start():
    (first,) = epochs(1)
    state = make().state_dict()
    assert (state["epoch"], state["batches"]) == (0, 0)
    assert seen(resumed(state)) == first


def test_a_state_that_was_loaded_and_not_used_is_the_state():
    (first,) = epochs(1)
    state = left_after(3)
    assert resumed(state).state_dict() == state
    assert seen(resumed(resumed(state).state_dict())) == first[3:]


def test_the_state_that_was_loaded_last_counts():
    (first,) = epochs(1)
    again = resumed(left_after(4))
    again.load_state_dict(left_after(1))
    assert seen(again) == first[1:]


def test_a_state_may_be_loaded_into_a_loop_that_runs():
    (first,) = epochs(1)
    again = make("workers-1")
    next(iter(again))
    again.load_state_dict(left_after(4))
    assert seen(again) == first[4:]


def test_a_resumed_loop_that_is_left_goes_on_again():
    (first,) = epochs(1)
    again = resumed(left_after(2))
    given = iter(again)
    next(given)
    assert seen(resumed(again.state_dict())) == first[3:]


@pytest.mark.parametrize(("before", "after"), [("inline", "workers-2"), ("workers-4", "inline")])
def test_what_samples_draw_is_what_they_would_have_drawn(before, after):
    (first,) = epochs(1, data=Draws)
    assert seen(resumed(left_after(3, before, data=Draws), after, data=Draws)) == first[3:]


class Backwards(BatchSampler):
    """A batch sampler of the user's own, of a size that it states."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch[::-1]


def in_batches(kind, size):
    order = list(range(LENGTH))
    if kind == "a sampler":
        return {"sampler": order, "batch_size": size}
    if kind == "an own batch sampler":
        return {"batch_sampler": Backwards(order, size, drop_last=False)}
    # Batches of one sample, of which each of so many ranks takes one in a step.
    ranks = {"num_replicas": size, "rank": 0, "drop_last": True}
    return {"batch_sampler": BucketBatchSampler([1] * LENGTH, batch_size=1, **ranks)}


@each("kind", ["a sampler", "an own batch sampler", "ranks of buckets"])
@each(("before", "at", "after"), [(4, 3, 6), (2, 4, 3), (3, 2, 2), (1, 9, 2), (2, 1, 11)])
def test_an_epoch_that_goes_on_in_other_steps_is_over_where_nothing_is_left(
    kind, before, at, after
):
    def taken(size, state=None):
        loader = FastDataLoader(Images(LENGTH), executor="inline", **in_batches(kind, size))
        if state is not None:
            loader.load_state_dict(state)
        for batch in loader:
            yield batch, through_a_file(loader.state_dict())

    with warned():
        state = next(islice(taken(before), at - 1, None))[1]
        given = list(taken(after, state))
        for number, (_, left) in enumerate(given, 1):
            assert left["epoch"] == (number == len(given))
            if number < len(given):
                rest = [batch for batch, _ in taken(after, left)]
                assert seen(rest) == seen(batch for batch, _ in given[number:])


@each("order", ["a generator", "the package's own"])
@each("length", [16, 30])
def test_a_step_that_changes_the_length_of_the_dataset_ends_no_epoch(length, order):
    data = list(range(24))
    generator = torch.Generator().manual_seed(6)
    how = {"shuffle": "blocks"} if order != "a generator" else {"shuffle": True}
    loader = FastDataLoader(data, 4, generator=generator, num_workers=1, **how)
    epochs = []
    for number, _ in enumerate(loader, 1):
        if number == 2:
            data[:] = range(length)  # which the worker reads in the next epoch
        state = loader.state_dict()
        epochs.append((state["epoch"], state["batches"]))
    assert epochs == [*((0, number) for number in range(1, 6)), (1, 0)]
    loader.close()


# -- states as data --------------------------------------------------------------------------------


def test_a_state_is_small_and_plain():
    """It is for an order by seed and epoch; a generator of the user's own has 2,500 words."""
    state = left_after(3, sampler=Reversing(LENGTH))
    file = io.BytesIO()
    torch.save(state, file)
    assert len(repr(state)) < 2048
    assert {"version", "package", "epoch", "batches", "samples", "length"} <= state.keys()
    assert {"batch_size", "world_size", "seed", "order", "digest", "dataset"} <= state.keys()
    assert (state["version"], state["batches"], state["samples"]) == (1, 3, 12)


def test_a_state_is_a_copy():
    stopped = make(sampler=Reversing(LENGTH))
    given = iter(stopped)
    next(given)
    state = stopped.state_dict()
    kept = through_a_file(state)
    next(given)
    assert state == kept


# -- what has changed is said ----------------------------------------------------------------------


def told_of(state, **how):
    """The texts of the warnings of an epoch that goes on from a state."""
    with warned() as texts:
        seen(resumed(state, **how))
    return texts


@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize(
    ("how", "names"),
    [
        ({"length": LENGTH + 2}, r"24 samples and had 22"),
        ({"seed": 4}, r"seed=4 and was 3"),
        ({"sampler": Reversing(LENGTH)}, r"Reversing and was that of RandomSampler"),
        ({"length": LENGTH + 2, "seed": 4}, r"24 samples and had 22"),
    ],
)
def test_the_first_thing_that_differs_is_named(at, how, names):
    text = told_of(left_after(at), **how)[0]
    assert re.search(names, text), text


def test_buckets_of_another_size_are_told_once_as_another_order():
    """And not as the same order, cut anew."""

    def loader_of(size):
        batches = BucketBatchSampler(range(1, LENGTH + 1), batch_size=size)
        return FastDataLoader(Images(LENGTH), batch_sampler=batches)

    stopped = loader_of(4)
    list(islice(stopped, 3))
    again = loader_of(6)
    again.load_state_dict(through_a_file(stopped.state_dict()))
    with warned() as texts:
        list(again)
    (text,) = texts
    assert re.search("gives another order now.* buckets batches of another size", text), text


def test_another_version_of_the_package_is_named():
    state = {**left_after(3), "package": "0.0.1"}
    (text,) = told_of(state)
    assert "0.0.1" in text


@each("state", [{}, {"epoch": 1}, None, [1], "state"])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(OptionsError, match="state_dict"):
        resumed(state)


@each(
    ("name", "value", "said"),
    [
        ("batches", -1, "batches"),
        ("epoch", "1", "epoch"),
        ("samples", None, "samples"),
        ("version", 99, r"version 99.*reads version 1"),
    ],
)
def test_an_impossible_position_and_a_later_form_are_refused(name, value, said):
    with pytest.raises(OptionsError, match=said):
        resumed({**left_after(3), name: value})


# -- samplers and datasets with a state of their own -----------------------------------------------


ORDERS = {
    "a sampler with a state": lambda: {"sampler": Reversing(LENGTH)},
    "a sampler with a generator": lambda: {"sampler": weighted(LENGTH)},
    "a generator of the loader": lambda: {
        "sampler": None, "shuffle": True, "generator": torch.Generator().manual_seed(8)
    },
}  # fmt: skip


@pytest.mark.cases(6)
@each("order", ORDERS.values())
@each("loader", ["inline", "workers-2", "torch-2"])
@each("at", [0, 1, 4, STEPS])
def test_an_order_of_ones_own_goes_on(order, loader, at):
    whole = [batch for epoch in epochs(3, **order()) for batch in epoch]
    again = resumed(left_after(at, loader, **order()), loader, **order())
    assert [*seen(again), *seen(again)] == whole[at : at + 2 * STEPS - at % STEPS]


class OverData(BatchSampler):
    """Draws its batches itself, and has the dataset in the place of a sampler, as in libraries."""

    def __init__(self):
        super().__init__(range(LENGTH), BATCH, False)
        self.generator = torch.Generator().manual_seed(9)

    def __iter__(self):
        drawn = torch.randperm(LENGTH, generator=self.generator).split(BATCH)
        return (indices.tolist() for indices in drawn)


def test_a_batch_sampler_over_its_data_goes_on_with_the_generator_that_it_has():
    first, second = epochs(2, sampler=None, batch_sampler=OverData())
    again = resumed(
        left_after(STEPS, sampler=None, batch_sampler=OverData()),
        sampler=None,
        batch_sampler=OverData(),
    )
    assert first != second == seen(again)


class Counting(Images):
    """Has a state of its own, which its samples show."""

    def __init__(self, length):
        super().__init__(length)
        self.stage = 0

    def __getitem__(self, index):
        return {**super().__getitem__(index), "stage": self.stage}

    def state_dict(self):
        return {"stage": self.stage}

    def load_state_dict(self, state):
        self.stage = state["stage"]


KEPT = [("workers-2", "unchanged"), ("workers-2", True), ("torch-2", True)]


@pytest.mark.parametrize(("loader", "kept"), [("inline", False), *KEPT])
def test_a_dataset_with_a_state_gets_it_back(loader, kept):
    how = {"data": Counting, "persistent_workers": kept}
    stopped = make(**{**how, "persistent_workers": False})
    stopped.dataset.stage = 7
    next(iter(stopped))
    state = through_a_file(stopped.state_dict())
    with contextlib.closing(make(loader, **how)) as again:
        if kept:  # by workers that have read before
            assert len(seen(again)) == STEPS
        again.load_state_dict(state)
        assert {int(i) for batch in again for i in batch["stage"]} == {7}
        assert again.dataset.stage == 7


class Table(Images, UserDict):
    """A mapping, whose ``state_dict()`` is its data, as that of a TensorDict."""

    def __init__(self, length):
        super().__init__(length)
        UserDict.__init__(self)

    def __getitem__(self, index):
        return Images.__getitem__(self, index)

    def __len__(self):
        return Images.__len__(self)

    def state_dict(self):
        raise AssertionError

    def load_state_dict(self, state):
        raise AssertionError


def test_the_data_of_a_mapping_is_no_state_of_reading():
    stopped = make(data=Table)
    next(iter(stopped))
    assert stopped.state_dict()["dataset_state"] is None


class ForUser(Reversing):
    """Has methods of these names that its user alone can call."""

    def state_dict(self, steps):
        return {"steps": steps}

    def load_state_dict(self, state, steps):
        raise AssertionError


class ImagesForUser(Images):
    state_dict, load_state_dict = ForUser.state_dict, ForUser.load_state_dict


@each("loader", ["inline", "workers-2"])
def test_methods_that_need_other_arguments_are_not_called(loader):
    def how():
        return {"data": ImagesForUser, "sampler": ForUser(LENGTH)}

    (whole,) = epochs(1, **how())
    assert seen(resumed(left_after(2, loader, **how()), loader, **how())) == whole[2:]


# -- batches that do not come --------------------------------------------------------------------


class Bad(Images):
    def __getitem__(self, index):
        if 4 <= index < 8 or 12 <= index < 16:
            raise ValueError("bad")
        return super().__getitem__(index)


@pytest.mark.filterwarnings("ignore::lightning_fastdata.FastDataWarning")
@pytest.mark.parametrize("loader", ["inline", "workers-2", "torch-2"])
def test_a_batch_of_which_nothing_is_left_is_passed(loader):
    how = {"data": Bad, "on_bad_sample": "skip", "sampler": range(LENGTH)}
    ((*whole,),) = epochs(1, loader, **how)
    assert len(whole) == STEPS - 2
    for at in (1, 2, 3):
        assert seen(resumed(left_after(at, loader, **how), loader, **how)) == whole[at:]


def passing_over_errors(given, most=LENGTH):
    """The batches, at most so many, that a loop sees which goes on where one has raised."""
    found = []
    while len(found) < most:
        try:
            found.append(digest(next(given)))
        except StopIteration:
            break
        except Exception:
            continue
    return found


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("loader", ["inline", "workers-1", "torch-0"])
def test_a_loop_that_passes_over_errors_goes_on_behind_what_it_has_seen(loader, in_order):
    how = {"data": Bad, "sampler": range(LENGTH), "in_order": in_order}
    whole = passing_over_errors(iter(make(loader, **how)))
    assert len(whole) == STEPS - 2
    stopped = make(loader, **how)
    given = iter(stopped)
    for at in range(1, len(whole)):
        assert passing_over_errors(given, 1) == whole[at - 1 : at]
        again = resumed(through_a_file(stopped.state_dict()), loader, **how)
        assert passing_over_errors(iter(again)) == whole[at:]


def test_a_batch_that_raised_is_read_again_if_the_loop_ends_there():
    given = iter(stopped := make(data=Bad, sampler=range(LENGTH)))
    assert len(passing_over_errors(given, 1)) == 1
    with pytest.raises(ValueError, match="bad"):
        next(given)
    again = resumed(stopped.state_dict(), data=Bad, sampler=range(LENGTH))
    with pytest.raises(ValueError, match="bad"):
        next(iter(again))


# -- other loops -----------------------------------------------------------------------------------


def drawing(batch):
    return {**batch, "drawn": torch.rand(3)}


@pytest.mark.cases(2)
@pytest.mark.parametrize("transform", [None, drawing])
@pytest.mark.parametrize("loader", ["inline", "workers-2"])
def test_prefetching_goes_on_behind_what_the_loop_took(loader, transform):
    def make_batches():
        return prefetch(make(loader), "cpu", transform)

    straight = make_batches()
    whole = [*seen(straight), *seen(straight)]
    assert len(set(whole)) == 2 * STEPS
    for at in (1, 3, STEPS):
        stopped = make_batches()
        assert seen(islice(iter(stopped), at)) == whole[:at]
        again = make_batches()
        again.load_state_dict(through_a_file(stopped.state_dict()))
        assert [*seen(again), *(seen(again) if at < STEPS else [])] == whole[at:]


def test_fabric_goes_on(tmp_path):
    whole = epochs(2)
    fabric = Fabric(accelerator="cpu", devices=1)
    stopped = make("workers-1")
    given = iter(fabric.setup_dataloaders(stopped))
    next(given)
    next(given)
    fabric.save(tmp_path / "file", {"loader": stopped.state_dict()})
    again = make("workers-2")
    again.load_state_dict(fabric.load(tmp_path / "file")["loader"])
    loader = fabric.setup_dataloaders(again)
    assert seen(loader) == whole[0][2:]
    assert seen(loader) == whole[1]


def test_fabric_saves_and_loads_a_loader_in_its_state(tmp_path):
    (first,) = epochs(1)
    fabric = Fabric(accelerator="cpu", devices=1)
    stopped = make()
    next(iter(stopped))
    fabric.save(tmp_path / "file", {"loader": stopped})
    again = make()
    fabric.load(tmp_path / "file", {"loader": again})
    assert seen(again) == first[1:]

"""Batches on the device, one ahead: the same ones, whatever order the device works in."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import random
import weakref
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import albumentations as A
import numpy as np
import pytest
import torch
from albumentations.pytorch import ToTensorV2
from conformance.datasets import Images
from device.host_streams import HostStreams
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities import move_data_to_device
from rig.late_cuda import late_cuda
from rig.late_trainings import Announced, check_lane, consume, doubled, read, reused_batches
from thoroughness import max_examples
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_fastdata import FastDataLoader, prefetch
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.batches.staged import StagedBatch, leaves, move, shows_its_memory
from lightning_fastdata.device.backend import DeviceStreams
from lightning_fastdata.device.prefetch import SideLane
from lightning_fastdata.errors import OptionsError, TransformError

torch.set_num_threads(1)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
Pair = namedtuple("Pair", "left right")


@dataclass
class Sample:
    image: Any
    label: Any


@dataclass(frozen=True)
class Frozen:
    image: Any


class HasTo:
    def __init__(self, value):
        self.value = value

    def to(self, device, **_):
        return HasTo(self.value.to(device))


# The device


@max_examples(60)
@given(seed=st.integers(0, 2**32), count=st.integers(0, 9), transformed=st.booleans())
def test_every_batch_is_read_unharmed_in_any_order_of_the_devices_work(seed, count, transformed):
    with late_cuda("late" if seed % 5 == 0 else "random", seed) as cuda:
        batches = prefetch(reused_batches(cuda, count), "cuda", doubled if transformed else None)
        seen = read(consume(batches))
        assert not cuda.torn
    factor = 2 if transformed else 1
    assert seen == [[[factor * number] * 8] * 3 for number in range(count)]


@max_examples(15)
@given(seed=st.integers(0, 2**32))
def test_batches_cross_a_lane_unharmed_in_any_order_of_the_devices_work(seed):
    check_lane("random", seed)


def test_a_transform_runs_while_the_step_before_its_batch_computes():
    with late_cuda("late") as cuda:
        batches = iter(prefetch(reused_batches(cuda, 4), "cuda", doubled))
        next(batches)
        next(batches)
        cuda.note(CUDA)  # the step with the second batch
        next(batches)
        (side,) = cuda.side_streams
        side.synchronize()
        assert cuda.copied == 3
        assert cuda.notes == 0


def moved(batch):
    return move(batch, CUDA, non_blocking=True)


def test_batches_whose_memory_cannot_be_seen_take_the_straight_way():
    with late_cuda("late") as cuda:
        lane = SideLane(DeviceStreams(CUDA))
        batch = [HasTo(torch.ones(2).pin_memory())]
        landed = lane.send(batch, moved).land()
        (side,) = cuda.side_streams
        assert not side.queue
        assert landed[0].value.read().tolist() == [1, 1]
        sparse = [torch.eye(2).to_sparse()]
        assert lane.send(sparse, list).land() == sparse
        assert not side.queue


def test_what_is_dropped_early_leaves_no_source_and_no_work_behind():
    with late_cuda("late-side") as cuda:
        sources = []

        def watched():
            for batch in reused_batches(cuda, 5):
                sources.append(weakref.ref(batch[0]))
                yield batch

        batches = prefetch(Announced(watched()), "cuda")
        iterator = iter(batches)
        next(iterator)
        torch.cuda.synchronize()
        next(iterator)
        del iterator, batches
        gc.collect()
        assert len(sources) == 3
        assert all(source() is None for source in sources)
        assert cuda.copied == 3
        assert not cuda.torn


# The order of things


class Breaks(Dataset):
    """Sample ``i`` is ``i``; sample 3 raises."""

    def __len__(self):
        return 6

    def __getitem__(self, i):
        if i == 3:
            raise KeyError("sample 3")
        return torch.tensor(i)


def outcomes(batches):
    """Return what each request gave, errors included."""
    found, iterator = [], iter(batches)
    while True:
        try:
            found.append(next(iterator).tolist())
        except StopIteration:
            return found
        except Exception as error:
            found.append(type(error))


def eager(batches, transform=None):
    """One ahead on real tensors of the CPU, where each order of work is the host's."""
    return prefetch(batches, CPU, transform, streams=lambda _: HostStreams())


@pytest.mark.cases(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("executor", ["torch", "workers"])
def test_an_error_comes_at_the_batch_it_belongs_to(workers, executor):
    loader = FastDataLoader(Breaks(), 1, num_workers=workers, executor=executor)
    plain = outcomes(loader)
    assert KeyError in plain
    assert outcomes(eager(loader)) == plain == outcomes(prefetch(loader, "cpu"))


def test_an_error_of_the_transform_comes_at_its_batch_and_is_no_end():
    def refuses(batch):
        if 4 in batch:
            raise ZeroDivisionError
        return batch

    loader = DataLoader(torch.arange(10), 2)
    expected = [[0, 1], [2, 3], ZeroDivisionError, [6, 7], [8, 9]]
    assert outcomes(eager(loader, refuses)) == expected
    assert outcomes(prefetch(loader, "cpu", refuses)) == expected


class Drawing(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.rand(2) + i


def test_a_dataset_that_draws_beside_the_training_gives_the_same_either_way():
    seen = []
    for make in (eager, lambda loader: prefetch(loader, "cpu")):
        torch.manual_seed(4)
        batches = make(DataLoader(Drawing(), 2, shuffle=True))
        seen.append([(batch, torch.rand(1)) for _ in range(2) for batch in batches])
    for (ours, our_draw), (theirs, their_draw) in zip(*seen, strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(our_draw, their_draw)


def test_an_iterator_can_be_copied_and_its_copy_has_ended():
    batches = iter(eager(DataLoader(torch.arange(3))))
    next(batches)
    assert list(copy.deepcopy(batches)) == list(pickle.loads(pickle.dumps(batches))) == []
    assert next(batches).tolist() == [1]


# The batches


def same(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            same(ours[key], theirs[key])
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
    elif isinstance(ours, Sample | HasTo):
        same(vars(ours), vars(theirs))
    else:
        assert ours == theirs


def nested(leaf):
    keys = st.sampled_from("abc")
    return st.one_of(
        st.lists(leaf, max_size=3),
        st.lists(leaf, max_size=3).map(tuple),
        st.dictionaries(keys, leaf, max_size=3),
        st.dictionaries(keys, leaf, max_size=3).map(OrderedDict),
        st.dictionaries(keys, leaf, max_size=3).map(lambda d: defaultdict(list, d)),
        st.tuples(leaf, leaf).map(lambda pair: Pair(*pair)),
        st.tuples(leaf, leaf).map(lambda pair: Sample(*pair)),
    )


LEAVES = st.one_of(
    st.integers(0, 9).map(lambda n: torch.full((2,), n)),
    st.integers(0, 9).map(lambda n: HasTo(torch.full((2,), n))),
    st.sampled_from([None, "text", b"bytes", 3, 2.5, True]),
)


@max_examples(100)
@given(batch=st.recursive(LEAVES, nested, max_leaves=8))
def test_structures_are_moved_as_lightning_moves_them(batch):
    meta = torch.device("meta")
    for device in (CPU, meta):
        ours, theirs = move(batch, device), move_data_to_device(batch, device)
        found = [leaf.value if isinstance(leaf, HasTo) else leaf for leaf in leaves(ours)]
        assert all(leaf.device == device for leaf in found)
        if device == CPU:
            same(ours, theirs)


def test_further_structures_are_moved_and_their_tensors_found():
    meta = torch.device("meta")
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    draws_free = StagedBatch([torch.ones(2)], None, "val")
    assert move(packed, meta).data.device == meta
    assert move(Frozen(torch.ones(2)), meta).image.device == meta
    assert move(draws_free, meta).batch[0].device == meta
    assert move(draws_free, meta).stage == "val"
    assert len(list(leaves(packed))) == 2
    assert len(list(leaves([draws_free, Frozen(torch.ones(1))]))) == 2
    assert shows_its_memory(torch.ones(2))
    assert not shows_its_memory(torch.eye(2).to_sparse())
    assert not shows_its_memory(HasTo(torch.ones(1)))


def recipe():
    return A.Compose(
        [A.RandomCrop(8, 8), A.HorizontalFlip(), A.RandomBrightnessContrast(p=0.8), ToTensorV2()]
    )


def images_loader(*, on_device, executor="torch", workers=0):
    return FastDataLoader(
        Images(10),
        4,
        num_workers=workers,
        seed=3,
        transform=as_batch_transform(recipe()),
        on_device=on_device,
        staged="train" if on_device else None,
        executor=executor,
    )


@pytest.mark.cases(2)
@pytest.mark.parametrize("executor", ["torch", "workers", "inline"])
def test_a_loaders_own_pipeline_is_carried_out_as_albumentations_would(executor):
    loader = images_loader(on_device=True, executor=executor, workers=2)
    epoch = 0
    for make in (lambda: prefetch(loader, "cpu"), lambda: eager(loader)):
        for _pass in range(2):
            plain = images_loader(on_device=False)
            plain.epoch = lambda number=epoch: number
            epoch += 1
            for ours, oracle in zip(make(), plain, strict=True):
                same(ours, oracle)


def test_a_pipeline_given_to_prefetch_draws_by_sample():
    loader = DataLoader(Images(10), 4)
    one, other = (list(prefetch(loader, "cpu", recipe(), seed=seed)) for seed in (1, 1))
    same(one, other)
    assert one[0][0].shape == (4, 3, 8, 8)
    third = list(prefetch(loader, "cpu", recipe(), seed=2))
    assert not all(torch.equal(a, b) for (a, _), (b, _) in zip(one, third, strict=True))


def noisy(batch):
    """A transform that draws from every global generator."""
    return batch + torch.rand(batch.shape) + np.random.rand() + random.random()


@max_examples(25)
@given(count=st.integers(1, 13), size=st.integers(1, 5), epochs=st.integers(1, 3))
def test_batches_are_bitwise_the_same_ahead_and_not(count, size, epochs):
    loader = DataLoader(torch.arange(count), size)
    straight, ahead_of = prefetch(loader, "cpu", noisy), eager(loader, noisy)
    assert len(straight) == len(ahead_of) == len(loader)
    epochs_seen = []
    for _ in range(epochs):
        ours = []
        for batch in ahead_of:
            torch.rand(3)  # the training draws, too
            ours.append(batch)
        theirs = list(straight)
        same(ours, theirs)
        epochs_seen.append(theirs)
    for before, after in itertools.pairwise(epochs_seen):
        assert not torch.equal(before[0], after[0])


# The interface


def test_it_stands_for_the_loader_and_passes_the_epoch_on():
    sampler = DistributedSampler(torch.arange(8), 2, 0, seed=1)
    loader = DataLoader(torch.arange(8), 2, sampler=sampler)
    batches = prefetch(loader, "cpu", noisy)
    assert batches.dataset is loader.dataset
    assert batches.batch_size == 2
    batches.set_epoch(5)
    assert sampler.epoch == 5
    first = list(batches)
    assert not torch.equal(first[0], next(iter(batches)))
    batches.set_epoch(5)
    same(first, list(batches))
    with pytest.raises(AttributeError):
        _ = batches.no_such_thing


def test_bad_arguments_are_refused():
    with pytest.raises(OptionsError, match="cannot be iterated"):
        prefetch(3, "cpu")
    with pytest.raises(TransformError):
        prefetch([], "cpu", "flip")
    with pytest.raises(OptionsError, match="device='gpu' is no device"):
        prefetch([], "gpu")
    with pytest.raises(OptionsError, match="device is 'cuda:77'"):
        prefetch([], "cuda:77")

"""Operations inside compositions are timed without anybody noticing."""

from __future__ import annotations

import copy
import pickle
import random
import threading
from collections import deque

import albumentations as A
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rig.virtual_crew import on_machine
from thoroughness import max_examples
from torch.utils.data import Dataset
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2
from virtual_time import virtual_time

from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.host import clock
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.randomness.seeds import reseed
from lightning_fastdata.stamps.operations import OperationWatch
from lightning_fastdata.types import SampleKey

PIXELS = np.random.default_rng(0).integers(0, 256, (24, 20, 3), dtype=np.uint8)
TENSOR = torch.from_numpy(PIXELS).permute(2, 0, 1).contiguous()

LEAVES = st.sampled_from(
    [
        A.HorizontalFlip(p=0.5),
        A.RandomBrightnessContrast(p=0.7),
        A.GaussNoise(p=0.5),
        A.Affine(rotate=(-20, 20), p=0.5),
        A.CoarseDropout(p=0.5),
        A.RandomCrop(12, 12, p=0.5),
    ]
)


def containers(children):
    some = st.lists(children, min_size=1, max_size=3)
    return st.one_of(
        some.map(lambda ops: A.OneOf(copy.deepcopy(ops), p=0.8)),
        some.map(lambda ops: A.SomeOf(copy.deepcopy(ops), n=1, p=0.8)),
        some.map(lambda ops: A.Sequential(copy.deepcopy(ops), p=0.8)),
    )


PIPELINES = st.lists(st.recursive(LEAVES, containers, max_leaves=4), min_size=1, max_size=4)


@given(PIPELINES, st.integers(0, 1000), st.booleans())
@max_examples(40)
def test_albumentations_draws_and_computes_the_same_while_it_is_timed(operations, seed, replay):
    kind = A.ReplayCompose if replay else A.Compose
    plain = kind(copy.deepcopy(operations), p=0.9)
    timed = copy.deepcopy(plain)
    watch = OperationWatch(timed, every=1)
    listed = timed.transforms
    for index in range(3):
        results = []
        for pipeline in (plain, timed):
            watch.begin()
            # As the loader does it for each sample, here in the midst of a timed task.
            reseed([pipeline], SampleKey(seed, 0, index))
            results.append(pipeline(image=PIXELS))
            drawn = pipeline.random_generator.random(), pipeline.py_random.random()
            results.append(drawn)
            found = watch.end()
        assert np.array_equal(results[0]["image"], results[2]["image"])
        assert results[1] == results[3]
        if replay:
            assert str(results[0]["replay"]["transforms"]).count("applied") == str(
                results[2]["replay"]["transforms"]
            ).count("applied")
        names = {type(operation).__name__ for operation in operations}
        assert {name for name, _, _ in found} <= names
    assert timed.transforms is listed


def torchvision_pipelines(module):
    leaves = [
        module.RandomHorizontalFlip(),
        module.ColorJitter(0.4, 0.4),
        module.RandomResizedCrop(12, antialias=True),
        module.GaussianBlur(3),
    ]
    return [
        module.Compose(leaves),
        module.Compose([module.RandomApply(leaves[:2], p=0.5), leaves[2]]),
        module.Compose((module.RandomChoice(leaves[:2]), module.RandomOrder(leaves[2:]))),
        module.Compose([module.Compose(leaves[:2]), lambda image: image * 1]),
    ]


@pytest.mark.parametrize("pipeline", torchvision_pipelines(v1) + torchvision_pipelines(v2))
def test_torchvision_draws_and_computes_the_same_while_it_is_timed(pipeline):
    watch = OperationWatch(pipeline, every=1)
    listed = pipeline.transforms
    for seed in range(4):
        results = []
        for timed in (False, True):
            torch.manual_seed(seed)
            random.seed(seed)
            if timed:
                watch.begin()
            results.append((pipeline(TENSOR), torch.rand(1), random.random()))
            found = watch.end()
        assert torch.equal(results[0][0], results[1][0])
        assert results[0][1:] == results[1][1:]
        assert sum(calls for _, calls, _ in found) == len(listed)
    assert pipeline.transforms is listed


def slow_step(image):
    clock.sleep(0.002)
    return image


class Images(Dataset):
    """Reads for a while, then transforms."""

    def __init__(self, transform, length=64, read_s=0.0):
        self.transform, self.length, self.read_s = transform, length, read_s

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        clock.sleep(self.read_s)
        if isinstance(self.transform, A.Compose):
            return self.transform(image=PIXELS)["image"]
        return self.transform(TENSOR)


def test_one_of_so_many_tasks_is_timed_and_never_the_first():
    watch = OperationWatch(Images(v2.Compose([v2.Identity()])), every=4)
    timed = []
    for _ in range(12):
        watch.begin()
        timed.append(watch.end() is not None)
    assert [at for at, was in enumerate(timed) if was] == [1, 5, 9]


def test_a_dataset_without_compositions_tells_of_no_operations():
    watch = OperationWatch(Images(v2.Identity()), every=1)
    watch.begin()
    assert watch.end() is None


def test_each_operation_has_its_calls_and_its_time():
    inner = A.OneOf([A.Blur(p=1), A.MedianBlur(p=1)], p=1)
    dataset = Images(v1.Compose([slow_step, v1.RandomHorizontalFlip(), slow_step]))
    dataset.other = A.Compose([inner, A.HorizontalFlip(p=1), A.Compose([A.VerticalFlip(p=1)])])
    watch = OperationWatch(dataset, every=1)
    with virtual_time():
        watch.begin()
        for i in range(3):
            dataset[i]
            dataset.other(image=PIXELS)
        found = {name: (calls, total) for name, calls, total in watch.end()}
    assert {name: calls for name, (calls, _) in found.items()} == {
        "slow_step": 6, "RandomHorizontalFlip": 3, "OneOf": 3, "HorizontalFlip": 3, "Compose": 3,
    }  # fmt: skip
    assert found["slow_step"][1] == 6 * 2_000_000


def test_an_operation_within_an_operation_counts_once():
    inner = A.Compose([A.HorizontalFlip(p=1)])
    dataset = Images(v1.Compose([lambda image: torch.from_numpy(inner(image=PIXELS)["image"])]))
    dataset.inner = inner
    watch = OperationWatch(dataset, every=1)
    watch.begin()
    dataset[0]
    assert [name for name, _, _ in watch.end()] == ["<lambda>"]


@pytest.mark.parametrize("ended", [True, False])
def test_compositions_are_restored_after_an_error(ended):
    def fails(image):
        raise ValueError("an operation")

    pipeline = v2.Compose([v2.Identity(), fails])
    listed = pipeline.transforms
    watch = OperationWatch(pipeline, every=2)
    watch.begin()
    watch.begin()
    with pytest.raises(ValueError, match="an operation"):
        pipeline(TENSOR)
    if ended:
        watch.end()
    else:
        watch.begin()
    assert pipeline.transforms is listed
    assert pipeline.transforms == [pipeline.transforms[0], fails]


def test_a_list_that_was_exchanged_meanwhile_stays():
    pipeline = v2.Compose([v2.Identity()])
    watch = OperationWatch(pipeline, every=1)
    watch.begin()
    mine = pipeline.transforms = [v2.RandomHorizontalFlip()]
    watch.end()
    assert pipeline.transforms is mine


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_that_is_made_meanwhile_holds_the_operations_themselves(copied):
    pipeline = A.Compose([A.HorizontalFlip(p=1), A.OneOf([A.Blur(p=1)], p=1)])
    watch = OperationWatch(pipeline, every=1)
    watch.begin()
    other = copied(pipeline)
    watch.end()
    assert [type(operation) for operation in other.transforms] == [A.HorizontalFlip, A.OneOf]


def test_a_thread_beside_the_timed_one_is_neither_timed_nor_disturbed():
    pipeline = v1.Compose([slow_step])
    listed = pipeline.transforms
    watch = OperationWatch(pipeline, every=1)
    watch.begin()
    found = []

    def other():
        watch.begin()
        pipeline(TENSOR)
        found.append(watch.end())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    pipeline(TENSOR)
    assert found == [None]
    assert [calls for _, calls, _ in watch.end()] == [1]
    assert pipeline.transforms is listed


@pytest.mark.parametrize(
    ("executor", "workers"), [("torch", 0), ("torch", 1), ("inline", 0), ("workers", 1)]
)
def test_every_executor_tells_which_operation_takes_the_time(executor, workers):
    records = deque()
    dataset = Images(v2.Compose([v2.Identity(), slow_step]), read_s=0.0005)
    with on_machine():
        loader = FastDataLoader(dataset, 4, executor=executor, num_workers=workers)
        loader.record_stamps(records)
        for _ in loader:
            pass
        loader.close()
    timed = [task for stamps in records for task in stamps.tasks if task.operations is not None]
    assert timed
    for task in timed:
        spent = {name: (calls, total) for name, calls, total in task.operations}
        assert spent == {
            "Identity": (task.samples, 0), "slow_step": (task.samples, task.samples * 2_000_000)
        }  # fmt: skip
        assert task.read_ns == task.samples * 2_500_000
    assert type(dataset.transform.transforms[0]) is v2.Identity


@pytest.mark.cases(2)
@pytest.mark.parametrize("executor", ["torch", "inline", "workers"])
def test_batches_of_a_seeded_pipeline_are_the_same_with_stamps(executor):
    pipeline = A.Compose([A.RandomBrightnessContrast(p=1), A.OneOf([A.HorizontalFlip(p=1)], p=0.5)])
    runs = []
    for record in (False, True):
        workers = 0 if executor == "inline" else 1
        loader = FastDataLoader(Images(pipeline), 4, executor=executor, num_workers=workers)
        if record:
            loader.record_stamps(deque())
        runs.append(torch.stack(list(loader)))
        loader.close()
    assert torch.equal(*runs)


@pytest.mark.cases(2)
@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("executor", ["torch", "workers"])
def test_a_loaders_own_transform_draws_the_same_with_stamps(executor, on_device):
    pipeline = A.Compose(
        [A.RandomCrop(12, 12), A.HorizontalFlip(p=0.5), A.OneOf([A.GaussNoise(p=1)], p=0.5)]
    )
    runs, names = [], set()
    for record in (False, True):
        loader = FastDataLoader(
            Images(lambda _: PIXELS), 4, executor=executor, num_workers=1,
            transform=as_batch_transform(pipeline), on_device=on_device,
            staged="train" if on_device else None,
        )  # fmt: skip
        records = deque()
        if record:
            loader.record_stamps(records)
        runs.append([batch.draws.blob if on_device else batch for batch in loader])
        loader.close()
        timed = [task.operations or () for stamps in records for task in stamps.tasks]
        names |= {operation.name for operations in timed for operation in operations}
    assert len(runs[0]) == 16
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))
    assert names == {"RandomCrop", "HorizontalFlip", "OneOf"}

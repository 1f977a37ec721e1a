"""The kernels of the first batches are compiled once a node, before those batches are there."""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
from unittest import mock

import albumentations as A
import numpy as np
import pytest
import torch
from augment.batches import keys
from augment.test_launches import USUAL, compiled_for, many
from misses import each
from rig.late_cuda import late_cuda
from rig.late_trainings import Case, train
from virtual_time import VirtualClock, virtual_time

from lightning_fastdata.augment.replay import warm_up
from lightning_fastdata.augment.replay.triton import kernels_of, prepare
from lightning_fastdata.augment.replay.warm_up import compile_early, prepare_kernels
from lightning_fastdata.augment.stage_transform import StageTransform
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.host import clock

CUDA = torch.device("cuda", 0)
KERNEL = {"name": "across", "arguments": ["uint8", 0], "constants": {"BLOCK": 512}}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of Triton that is empty, and Triton's compiler in the place of its interpreter."""
    pytest.importorskip("triton")
    importlib.import_module("lightning_fastdata.augment.replay.kernels.fused")  # as conftest wants
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(warm_up, "_pending", [])
    return tmp_path / "triton"


class Compiler:
    """Stands for the process that compiles: it holds the lock until it is done."""

    def __init__(self):
        self.asked = []
        self.held = None

    def __call__(self, asked, lock):
        self.asked.append(asked)
        self.held = os.dup(lock.fileno())

    def done(self):
        """End, all kernels compiled."""
        os.write(self.held, b"done")
        os.close(self.held)


def asked_of(compose, rows=8):
    """Return the kernels that are asked for before a training with batches of so many samples."""
    samples = many((40, 48), count=4)
    with late_cuda("eager") as cuda:
        transform = as_batch_transform(compose)
        prepare_kernels(transform, samples, keys(1)[0], rows, CUDA, first_of_node=True)
    assert len(cuda.compiled) <= 1
    return [kernel for asked, _ in cuda.compiled for kernel in asked["kernels"]]


def launched_of(compose, rows=8, batches=4):
    """Return what Triton compiles for the first batches of that training."""
    transform = as_batch_transform(compose)
    worker, samples = transform.in_worker(on_device=True), many((40, 48), count=4)
    launched = set()
    for number in range(batches):
        own = keys(rows * batches)[rows * number : rows * (number + 1)]
        pairs = [worker(samples[key.index % 4], key) for key in own]
        batch = torch.stack([sample["image"] for sample, _ in pairs]).to("meta")
        draws = worker.collate([tape for _, tape in pairs])
        for run in draws.programs["image"].runs:
            batch, made = prepare(run, draws.blob.to("meta"), batch)
            launched |= set(map(compiled_for, made))
    return launched


@each("name", USUAL)
def test_what_is_asked_for_is_what_the_first_batches_launch(name):
    compose = A.Compose(USUAL[name][0])
    asked = asked_of(compose)
    assert len(asked) == 1 + len(launched_of(compose))
    told = {json.dumps(kernel, sort_keys=True) for kernel in asked}
    assert len(told) == len(asked)


def test_kernels_differ_where_those_of_triton_do():
    """What is told of a launch is as fine as what Triton decides by, and no finer."""
    told, compiled = set(), set()
    compose = A.Compose([A.Blur(p=0.5), A.HorizontalFlip(p=1), A.Normalize(), A.ToTensorV2()])
    worker = as_batch_transform(compose).in_worker(on_device=True)
    for side in (1, 15, 16, 17, 20, 24):
        samples = many((side, side), count=4)
        pairs = [worker(one, key) for one, key in zip(samples, keys(4), strict=True)]
        draws = worker.collate([tape for _, tape in pairs])
        batch = torch.stack([sample["image"] for sample, _ in pairs]).to("meta")
        told |= {json.dumps(one) for one in kernels_of(draws, {"image": batch})}
        (run,) = draws.programs["image"].runs
        launches = prepare(run, draws.blob.to("meta"), batch)[1]
        compiled |= set(map(compiled_for, launches))
    assert len(told) == len(compiled)


def test_a_training_asks_once_before_its_first_batch():
    """Its two epochs ask for nothing more."""
    seen = train(Case("inline", "pinned", "off", augmented=True), "eager")
    [(asked, copied)] = seen.compiled
    assert copied == 0
    assert asked["capability"] == 90
    assert {kernel["name"] for kernel in asked["kernels"]} == {"trial", "fused"}


def test_a_pipeline_that_runs_code_of_the_user_is_not_drawn_in_the_training_process():
    def opens_files(image, **_):
        raise AssertionError("it ran")

    first = [A.Lambda(image=opens_files), A.Resize(32, 32), A.HorizontalFlip()]
    assert asked_of(A.Compose(first)) == []


def test_a_pipeline_that_cannot_be_drawn_is_left_to_the_training_to_report():
    class Broken(StageTransform):
        def first_kernels(self, samples, key, rows):
            raise KeyError("image")

    with late_cuda("eager") as cuda:
        prepare_kernels(Broken(), [{}], keys(1)[0], 8, CUDA, first_of_node=True)
    assert cuda.compiled == []


def test_no_random_state_of_the_training_is_touched():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    asked_of(A.Compose(USUAL["kaggle"][0]))
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert after == before


# The ranks of a node


def check_ranks():
    """One rank of a node compiles, all wait for it, and nobody asks for the same again."""
    compiler, slept = Compiler(), []

    class Clock(VirtualClock):
        def sleep(self, seconds):
            super().sleep(seconds)
            slept.append(seconds)
            if len(slept) == 3:
                compiler.done()

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ),
        clock.installed(Clock()),
    ):
        os.environ["TRITON_CACHE_DIR"] = folder
        for rank in (0, 1, 2):
            compile_early([KERNEL], (9, 0), first_of_node=rank == 0, compiler=compiler)
        warm_up.wait()
        assert len(slept) == 3
        compile_early([KERNEL], (9, 0), first_of_node=True, compiler=compiler)
        warm_up.wait()
        assert [asked["capability"] for asked in compiler.asked] == [90]
        other = Compiler()
        compile_early([KERNEL], (8, 0), first_of_node=True, compiler=other)
        assert [asked["capability"] for asked in other.asked] == [80]
        other.done()
        warm_up.wait()


def test_one_rank_of_a_node_compiles_once_and_all_wait_for_it():
    check_ranks()


def test_nobody_waits_for_longer_than_a_minute():
    compiler = Compiler()
    compile_early([KERNEL], (9, 0), first_of_node=True, compiler=compiler)
    with virtual_time() as time:
        began = time.monotonic_ns()
        warm_up.wait()
        assert 60e9 <= time.monotonic_ns() - began < 61e9
    os.close(compiler.held)


def test_a_compiler_that_dies_is_not_waited_for_and_another_training_tries_again():
    compiler = Compiler()
    for attempts in (1, 2):
        compile_early([KERNEL], (9, 0), first_of_node=True, compiler=compiler)
        os.close(compiler.held)
        with virtual_time() as time:
            began = time.monotonic_ns()
            warm_up.wait()
            assert time.monotonic_ns() == began
        assert len(compiler.asked) == attempts


def test_a_cache_that_cannot_be_written_leaves_it_to_the_first_launch(cache):
    cache.write_text("a file")
    compiler = Compiler()
    compile_early([KERNEL], (9, 0), first_of_node=True, compiler=compiler)
    warm_up.wait()
    assert compiler.asked == []


# The compiler

COUNTED = """
import json, sys
from lightning_fastdata.augment.replay.kernels.compiling import _Device, KERNELS, OPTIONS, driver
import torch
driver.set_active(_Device(90))
for name, given, constants in json.loads(sys.argv[1]):
    memory = torch.empty(1 << 16, dtype=torch.uint8)
    made = [
        memory.view(getattr(torch, one[0]))[one[1]:] if isinstance(one, list) else one
        for one in given
    ]
    KERNELS[name].warmup(*made, grid=(1,), **constants, **OPTIONS)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_launch_finds_in_the_cache_what_was_compiled_early_wherever_its_images_lie(cache):
    """Also where the images lie at an address that is no multiple of 16."""
    compose = A.Compose(USUAL["imagenet"][0])
    worker = as_batch_transform(compose).in_worker(on_device=True)
    pairs = [worker(one, key) for one, key in zip(many(count=8), keys(8), strict=True)]
    draws = worker.collate([tape for _, tape in pairs])
    batch = torch.stack([sample["image"] for sample, _ in pairs])
    (run,) = draws.programs["image"].runs
    compile_early(kernels_of(draws, {"image": batch.to("meta")}), (9, 0), first_of_node=True)
    warm_up.wait()
    made = sorted(cache.rglob("*.cubin"))
    assert len(made) == 1 + run.launches
    launches = []
    for apart in (0, 3):
        for launch in prepare(run, draws.blob, batch)[1]:
            first, *rest = [
                [str(one.dtype).removeprefix("torch."), 0] if torch.is_tensor(one) else one
                for one in launch.arguments
            ]
            launches.append([launch.kernel, [[first[0], apart], *rest], dict(launch.constants)])
    subprocess.run([sys.executable, "-c", COUNTED, json.dumps(launches)], check=True)
    assert sorted(cache.rglob("*.cubin")) == made

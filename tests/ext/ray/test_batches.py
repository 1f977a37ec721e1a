"""Actors deliver what side processes of this machine do, byte for byte and in the same order."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

import albumentations as A
import numpy as np
import pytest
import ray
import torch
from ext.ray.clusters import actors, wait_until
from ray.util import list_named_actors
from torch.utils.data import Dataset, get_worker_info

from lightning_fastdata import FastDataLoader, FastDataModule, LoaderOptions
from lightning_fastdata.errors import DatasetError

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("cluster")


class Sample(NamedTuple):
    """Pickled by value, as classes of a script are."""

    image: Any
    drawn: Any
    name: str


class Drawing(Dataset):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Any:
        image = torch.rand(3, 16, 16) + index
        return Sample(image, (random.random(), np.random.rand(2)), f"sample {index}")


def plain(batch: Any) -> Any:
    """Return a batch as values that Python compares."""
    if isinstance(batch, torch.Tensor):
        batch = batch.numpy()
    if isinstance(batch, np.ndarray):
        return str(batch.dtype), batch.shape, batch.tobytes()
    if isinstance(batch, tuple | list):
        return type(batch).__name__, [plain(each) for each in batch]
    return batch


def epochs(executor: str, dataset: Any, count: int = 2, **how: Any) -> list[Any]:
    how = {"batch_size": 8, "shuffle": True, "persistent_workers": True, "seed": 3, **how}
    torch.manual_seed(5)
    loader = FastDataLoader(dataset, executor=executor, **{"num_workers": 2, **how})
    seen = [[plain(batch) for batch in loader] for _ in range(count)]
    loader.close()
    return seen


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"collate_fn": list, "drop_last": True, "num_workers": 1},
        {"batch_size": None, "shuffle": False, "num_workers": 1},
    ],
    ids=["collated by default", "collated by a function", "single samples"],
)
def test_batches_are_those_of_side_processes(how) -> None:
    assert epochs("ray", Drawing(), **how) == epochs("workers", Drawing(), **how)


def test_order_and_content_stay_while_actors_come_and_go_within_an_epoch() -> None:
    how = {"batch_size": 4, "persistent_workers": True}
    expected = [plain(batch) for batch in FastDataLoader(Drawing(), num_workers=1, **how)]
    loader = FastDataLoader(Drawing(), executor="ray", num_workers=1, **how)
    seen = []
    for number, batch in enumerate(loader):
        seen.append(plain(batch))
        if number in (5, 15, 25):
            loader.set_workers({5: 3, 15: 1, 25: 2}[number])
    assert seen == expected
    loader.close()


class Numbered(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return index, info.id, info.num_workers, info.dataset is self, os.getpid()


def test_an_actor_is_a_worker_as_torch_knows_them() -> None:
    loader = FastDataLoader(Numbered(), 2, executor="ray", num_workers=2, in_order=False)
    batches = [[column.tolist() for column in batch] for batch in loader]
    assert sorted(index for batch in batches for index in batch[0]) == list(range(24))
    assert {number for batch in batches for number in batch[1]} <= {0, 1}
    assert all(batch[2] == [2, 2] and batch[3] == [True, True] for batch in batches)
    assert os.getpid() not in {pid for batch in batches for pid in batch[4]}
    loader.close()


class Pictures(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return np.random.default_rng(index).integers(0, 256, (40, 40, 3), np.uint8), index


@pytest.mark.parametrize("place", ["cpu", "gpu"])
def test_a_pipeline_gives_the_same_pixels_in_either_place(place) -> None:
    pipeline = A.Compose([A.RandomCrop(32, 32), A.HorizontalFlip(), A.RandomBrightnessContrast()])

    def batches(executor: str) -> list[Any]:
        options = LoaderOptions(executor=executor, num_workers=1)
        how = {"augment": pipeline, "augment_on": place, "options": options, "seed": 4}
        module = FastDataModule.from_datasets(Pictures(), batch_size=6, **how)
        loader = module.train_dataloader()
        made = [module.on_after_batch_transfer(batch, 0) for batch in loader]
        loader.close()
        return [plain(batch) for batch in made]

    assert batches("ray") == batches("workers")


class Locked(Dataset):
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index


class Missing(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        if index == 13:
            raise KeyError("no such picture")
        return index


def failing(number: int) -> None:
    raise FileNotFoundError(f"no folder for {number}")


def test_errors_are_raised_in_their_turn_and_say_where() -> None:
    loader = FastDataLoader(Missing(), 4, executor="ray", num_workers=2)
    batches = iter(loader)
    assert [next(batches).tolist()[0] for _ in range(3)] == [0, 4, 8]
    with pytest.raises(
        KeyError, match=r"side process \d on \S+ while reading sample 13(.|\n)*no such"
    ):
        next(batches)
    loader.close()


def test_what_cannot_begin_says_why() -> None:
    with pytest.raises(DatasetError, match=r"Locked cannot be sent to actors.*lock"):
        next(iter(FastDataLoader(Locked(), executor="ray", num_workers=1)))
    how = {"executor": "ray", "num_workers": 1, "worker_init_fn": failing}
    with pytest.raises(FileNotFoundError, match="no folder for 0"):
        next(iter(FastDataLoader(Missing(), **how)))


def test_a_loader_that_is_closed_leaves_no_actor_and_the_connection_as_it_was(cluster) -> None:
    loader = FastDataLoader(Drawing(), 8, executor="ray", num_workers=1, persistent_workers=True)
    next(iter(loader))
    assert actors(cluster)
    loader.close()
    wait_until(lambda: not actors(cluster))
    assert ray.is_initialized()


SCRIPT = """
import sys, torch
import lightning_fastdata
from lightning_fastdata import FastDataLoader
assert "ray" not in sys.modules
loader = FastDataLoader(torch.arange(10**6), executor="ray", num_workers=1)
batches = iter(loader)
print(next(batches), flush=True)
sys.stdin.read()
"""


def test_a_program_that_is_killed_leaves_no_actor(cluster) -> None:
    wait_until(lambda: not actors(cluster))
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout.readline() == "tensor([0])\n"
        assert actors(cluster)
        assert not list_named_actors(all_namespaces=True)  # as one that outlives its program is
        program.kill()
    wait_until(lambda: not actors(cluster))


def test_a_cluster_that_is_gone_is_not_looked_for() -> None:
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        os.mkdir(f"{folder}/ray")
        Path(folder, "ray", "ray_current_cluster").write_text("127.0.0.1:1")
        environment = {**os.environ, "RAY_TMPDIR": folder}
        command = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(
            command,
            env=environment,
            input="",
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert done.stdout == "tensor([0])\n", done.stderr


def test_without_ray_an_error_says_how_to_get_it() -> None:
    code = "import sys; sys.modules['ray'] = None" + SCRIPT.replace("assert", "#")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert 'OptionsError: executor="ray" needs Ray' in done.stderr
    assert "pip install 'lightning-fastdata[ray]'" in done.stderr

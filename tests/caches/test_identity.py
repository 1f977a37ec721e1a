"""A dataset is the same in another run if it is made of the same, and another one if it is not."""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import subprocess
import sys
import textwrap

import albumentations as A
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from lightning_fastdata.caches.identity import identity
from lightning_fastdata.errors import DatasetError

SCRIPT = """
import sys, torch, numpy as np
from torch.utils.data import Dataset, Subset
from torchvision.transforms import v2
from lightning_fastdata.caches.identity import identity

FACTOR = {factor}

def helper(value):
    return value * {times}

class Data(Dataset):
    names = {{"b", "a", "c"}}
    scale = [{factor}]
    def __init__(self):
        self.words = set("the quick brown fox jumps over the lazy dog".split())
        self.table = np.arange(10)
        self.weights = torch.ones(3) * {weight}
        self.fix = lambda value: value + {added}
        self.steps = v2.Compose([v2.Resize({size}), v2.ToImage()])
        self.path = {path!r}
    def __len__(self):
        return 5
    def __getitem__(self, index):
        {comment}
        return helper(index) + FACTOR

print(identity(Subset(Data(), [1, 2])))
"""
GIVEN = {
    "factor": 1,
    "times": 2,
    "weight": 1.5,
    "added": 3,
    "size": 32,
    "path": "/nowhere",
    "comment": "pass",
}


def run(seed=0, **changed):
    script = textwrap.dedent(SCRIPT.format(**{**GIVEN, **changed}))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_what_counts_in_another_process(tmp_path):
    file = tmp_path / "data.bin"
    file.write_bytes(b"1234")
    first = run(path=str(file))
    assert run(seed=7, path=str(file)) == first
    assert run(seed=7, path=str(file), comment="# of no effect\n        pass") == first
    others = {
        run(path=str(file), **{name: value})
        for name, value in [("factor", 2), ("times", 3), ("weight", 2.5), ("added", 4), ("size", 9)]
    }
    file.write_bytes(b"12345")
    others.add(run(path=str(file)))
    assert len(others | {first}) == 7


class Plain(Dataset):
    def __init__(self, **held):
        vars(self).update(held)

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        ("a", "b"),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"a": 2}),
        (np.arange(3), np.arange(4)),
        (np.arange(3, dtype=np.int32), np.arange(3)),
        (torch.zeros(2), torch.ones(2)),
        (torch.zeros(4), torch.zeros(2, 2)),
        (torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4)),
        (lambda x: x + 1, lambda x: x + 2),
        ({1, 2}, {1, 3}),
    ],
)
def test_what_a_dataset_holds_counts(one, other):
    assert identity(Plain(held=one)) == identity(Plain(held=one))
    assert identity(Plain(held=one)) != identity(Plain(held=other))


def test_equal_strings_count_as_equal_whether_or_not_they_are_one_object():
    name = "".join(["a", "b"])
    assert identity(Plain(held=[name, name])) == identity(Plain(held=["".join(["a", "b"]), name]))


def test_which_samples_of_a_dataset_count():
    data = Plain(held=1)
    assert identity(Subset(data, [0, 1])) != identity(Subset(data, [0, 2]))


def test_a_memory_map_counts_by_its_file(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(5))
    opened = np.load(tmp_path / "a.npy", mmap_mode="r")
    first = identity(Plain(held=opened))
    assert identity(Plain(held=np.load(tmp_path / "a.npy", mmap_mode="r"))) == first
    np.save(tmp_path / "a.npy", np.arange(6))
    assert identity(Plain(held=np.load(tmp_path / "a.npy", mmap_mode="r"))) != first


def test_listed_files_count_by_size_and_time(tmp_path):
    files = [tmp_path / f"{number}.bin" for number in range(3)]
    for file in files:
        file.write_bytes(b"x")
    data = Plain(samples=[(str(file), 0) for file in files])
    first = identity(data)
    assert identity(data) == first
    files[1].write_bytes(b"xy")
    assert identity(data) != first


def test_what_cannot_be_compared_asks_for_a_key(tmp_path):
    with (tmp_path / "x").open("wb") as file, pytest.raises(DatasetError, match=r"key="):
        identity(Plain(held=file))


class Part:
    def __init__(self, value):
        self.value = value
        self.whole = self


def test_objects_that_refer_to_each_other_are_compared():
    assert identity(Plain(held=Part(1))) == identity(Plain(held=Part(1)))
    assert identity(Plain(held=Part(1))) != identity(Plain(held=Part(2)))


def test_pipelines_are_compared_by_what_they_do():
    def pipeline(limit):
        return A.Compose([A.Resize(8, 8), A.Blur(blur_limit=limit)], seed=None)

    assert identity(Plain(held=pipeline(3))) == identity(Plain(held=pipeline(3)))
    assert identity(Plain(held=pipeline(3))) != identity(Plain(held=pipeline(5)))


def test_what_holds_itself_asks_for_a_key():
    held = []
    held.append(held)
    with pytest.raises(DatasetError, match=r"key="):
        identity(Plain(held=held))


class Annotated(Dataset):
    kind: str = "plain"

    def __init__(self):
        self.factor = 3

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index * self.factor


def test_what_python_notes_on_a_class_makes_no_difference():
    before = identity(Annotated())
    pickle.loads(pickle.dumps(Annotated()))
    copy.copy(Annotated())
    inspect.get_annotations(Annotated)
    assert Annotated.__slotnames__ == []
    assert identity(Annotated()) == before

"""What is asked of Albumentations beyond its documentation is there, and only in the seam."""

from __future__ import annotations

import re
from pathlib import Path

import albumentations as A
import numpy as np
from misses import each

import lightning_fastdata
from lightning_fastdata.augment.albumentations import tape
from lightning_fastdata.augment.albumentations.tape import function_by_key

PACKAGE = Path(lightning_fastdata.__file__).parent
OF_A_TRANSFORM = ("apply_with_params", "update_transform_params", "get_params_dependent_on_data")


def test_only_the_seam_uses_a_private_name():
    used = [f.name for f in PACKAGE.rglob("*.py") if "_key2func" in f.read_text("utf-8")]
    assert used == ["tape.py"]


def test_the_seams_docstring_names_all_that_is_replaced():
    named = set(re.findall(r"``(\w+)``", tape.__doc__))
    assert set(OF_A_TRANSFORM) <= named


def test_a_transform_calls_what_it_has_for_the_key():
    flip, image = A.HorizontalFlip(p=1), np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    assert {"image", "mask"} <= function_by_key(flip).keys()
    assert np.array_equal(function_by_key(flip)["image"](image), image[:, ::-1])
    assert np.array_equal(flip(image=image)["image"], image[:, ::-1])


@each("name", OF_A_TRANSFORM)
def test_a_transform_runs_through_the_method(name):
    called = []
    pipeline = A.Compose([A.RandomCrop(2, 2, p=1)])
    (transform,) = pipeline.transforms
    original = getattr(transform, name)

    def instead(*args, **kwargs):
        called.append(name)
        return original(*args, **kwargs)

    setattr(transform, name, instead)
    pipeline(image=np.zeros((4, 4, 3), np.uint8))
    assert called == [name]

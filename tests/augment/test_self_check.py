"""Pipelines are recorded with the known version of Albumentations alone."""

from __future__ import annotations

import albumentations as A
import pytest

from lightning_fastdata.augment.albumentations import tape
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.errors import FastDataWarning


@pytest.fixture
def installed(monkeypatch):
    """Have the metadata of installed libraries tell these versions."""

    def tell(**versions):
        monkeypatch.setattr(tape, "version_of", versions.get)
        tape.refusal.cache_clear()

    yield tell
    tape.refusal.cache_clear()


def planned():
    return as_batch_transform(A.Compose([A.HorizontalFlip(), A.Normalize()]))


def test_the_installed_albumentations_is_the_known_one():
    assert tape.refusal() is None


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ({"albumentations": "2.0.7"}, "Albumentations 2.0.7 has not been tried"),
        ({"albumentations": "3.0"}, "Albumentations 3.0 has not been tried"),
        ({}, "Albumentations of an unknown version"),
        ({"albumentations": "2.0.8", "albumentationsx": "2.1.4"}, "AlbumentationsX 2.1.4"),
    ],
)
def test_with_any_other_the_worker_does_all_and_a_warning_says_why(installed, versions, reason):
    installed(**versions)
    with pytest.warns(FastDataWarning, match="run whole in the workers, on the CPU") as told:
        transforms = [planned() for _ in range(3)]
    assert len(told) == 1
    assert reason in str(told[0].message)
    assert "pip install albumentations==2.0.8" in str(told[0].message)
    assert not transforms[0].defers
    assert reason in transforms[0].explain()

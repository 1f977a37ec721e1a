"""Other libraries under the name of Albumentations, as real environments of a subprocess."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from misses import each

from lightning_fastdata.augment.pipeline.trial import recording_fault, refusal

ORIGINAL = Path(importlib.util.find_spec("albumentations").origin).parent

# What people do, in a process of its own: a pipeline on the CPU, against the library itself.
PIPELINE = """
import warnings
import numpy as np
from lightning_fastdata.randomness.seeds import reseed
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.types import SampleKey
import albumentations as A

def build():
    return A.Compose(
        [A.HorizontalFlip(), A.RandomCrop(6, 6), A.Rotate(p=0.5), A.Normalize()],
        bbox_params=A.BboxParams("coco", label_fields=["classes"]),
    )

with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    transforms = [as_batch_transform(build()) for _ in range(3)]
told = [str(one.message) for one in told if issubclass(one.category, FastDataWarning)]
sample = {
    "image": np.arange(192, dtype=np.uint8).reshape(8, 8, 3),
    "bboxes": [[1, 1, 4, 5]],
    "classes": [2],
}
drawn = set()
for index in range(6):
    # On a device, too: there is nothing left to do there.
    worker = transforms[0].in_worker(on_device=True)
    result, tape = worker(dict(sample), SampleKey(0, 0, index))
    compose = build()
    reseed((compose,), SampleKey(0, 0, index))
    expected = compose(**sample)
    assert tape is None
    assert np.array_equal(result["image"], expected["image"])
    assert np.array_equal(result["bboxes"], expected["bboxes"])
    drawn.add(result["image"].tobytes())
assert len(drawn) > 1
print(len(told), *told)
print(transforms[0].explain())
"""

UPDATE = "params = self.update_transform_params(params=params, data=kwargs)"
COPIES = "kwargs = {key: deepcopy(value) for key, value in kwargs.items()}; "


def run(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter that finds packages at ``paths`` first."""
    root = str(Path(__file__).parents[2])
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), root]),
        "NO_ALBUMENTATIONS_UPDATE": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
        cwd=paths[0] if paths else None,
        check=False,
    )


def describe(folder: Path, name: str, version: str) -> None:
    """Install the metadata of a distribution that brings the package ``albumentations``."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "top_level.txt").write_text("albumentations\n")
    (info / "RECORD").write_text("albumentations/__init__.py,,\n")


@pytest.fixture
def albumentations_x(tmp_path) -> Path:
    (tmp_path / "albumentations").symlink_to(ORIGINAL)
    describe(tmp_path, "albumentationsx", "2.1.4")
    return tmp_path


def changed(folder: Path, old: str, new: str) -> Path:
    """Install a copy of Albumentations in which one name is another one."""
    copy = folder / "albumentations"
    shutil.copytree(ORIGINAL, copy)  # compiled files too, as most modules stay as they are
    found = 0
    for file in copy.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if old in text:
            found += text.count(old)
            file.write_text(text.replace(old, new), encoding="utf-8")
    assert found
    describe(folder, "albumentations", "2.0.99")
    return folder


def test_the_installed_albumentations_can_be_recorded() -> None:
    assert refusal() is None
    assert recording_fault() is None


@pytest.mark.slow
def test_an_albumentations_that_can_be_recorded_is_not_warned_about() -> None:
    found = run(
        PIPELINE.replace("assert tape is None", "").replace("on_device=True", "on_device=False")
    )
    assert found.returncode == 0, found.stderr
    told, *table = found.stdout.splitlines()
    assert told == "0"
    assert "device" in "".join(table)
    assert "pip install" not in found.stdout


@pytest.mark.slow
def test_albumentationsx_is_told_by_its_metadata_and_runs_whole_on_the_cpu(
    albumentations_x,
) -> None:
    found = run(PIPELINE, albumentations_x)
    assert found.returncode == 0, found.stderr
    told, *table = found.stdout.splitlines()
    assert told.startswith("1 Albumentations pipelines run whole in the workers, on the CPU")
    assert "is AlbumentationsX 2.1.4" in told
    assert "pip install albumentations==2.0.8" in told
    assert [line.split()[1] for line in table[1:5]] == ["worker"] * 4
    assert "AlbumentationsX" in table[5]


@pytest.mark.slow
@pytest.mark.cases(1)
@each(
    ("old", "new", "reason"),
    [
        ("apply_with_params", "apply_parameters", "no attribute 'apply_with_params'"),
        ("_key2func", "_functions_by_key", "no attribute '_key2func'"),
        ("set_random_state", "set_generators", "no method set_random_state"),
        (".processors", ".label_processors", "no attribute 'processors'"),
        # It still has every name, and does not call what they name.
        (
            "return self.apply_with_params(params, **kwargs)",
            "return type(self).apply_with_params(self, params, **kwargs)",
            "passes the recorder by",
        ),
        # And here a transform hands on copies of what it was given.
        (UPDATE, COPIES + UPDATE, "came out differently"),
    ],
)
def test_a_changed_albumentations_runs_on_the_cpu_and_says_why(tmp_path, old, new, reason) -> None:
    found = run(PIPELINE, changed(tmp_path, old, new))
    assert found.returncode == 0, found.stderr
    told, *table = found.stdout.splitlines()
    assert told.startswith("1 Albumentations pipelines run whole in the workers, on the CPU")
    assert "Albumentations 2.0.99 cannot be recorded" in told
    assert reason in told
    assert [line.split()[1] for line in table[1:5]] == ["worker"] * 4
    assert reason in table[5]

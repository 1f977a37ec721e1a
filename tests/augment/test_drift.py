"""Whether the installed Albumentations looks like the one that device forms were written for."""

from __future__ import annotations

import json
from pathlib import Path

from augment.albumentations_surface import changed, surface

from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.pipeline.known_version import KNOWN_VERSION

GOLDEN = json.loads((Path(__file__).parent / "albumentations_2_0_8.json").read_text("utf-8"))


def test_the_transforms_are_those_that_device_forms_were_written_for():
    found = surface()
    told = changed(GOLDEN, found)
    assert not told, (
        f"Albumentations {found['version']} differs from {GOLDEN['version']} in {told}, with a "
        f"device form: {sorted(DEVICE_OPS.keys() & set(told))}. Go through each, then write the "
        "file anew as albumentations_surface.py says."
    )


def test_the_version_that_messages_recommend_is_the_one_that_was_written_down():
    assert GOLDEN["version"] == KNOWN_VERSION


def test_every_device_form_belongs_to_a_transform_that_was_written_down():
    assert DEVICE_OPS.keys() <= GOLDEN["transforms"].keys()
    # What the recorder hooks into is overridden by none of them.
    assert not [name for name in DEVICE_OPS if GOLDEN["transforms"][name]["overrides"]]

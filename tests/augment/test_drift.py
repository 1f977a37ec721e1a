"""Whether the installed Albumentations looks like the one that device forms were written for."""

from __future__ import annotations

import copy
import json
from pathlib import Path

from augment.albumentations_surface import changes, surface
from misses import each

from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.pipeline.trial import CHECKED_VERSION

GOLDEN = json.loads((Path(__file__).parent / "albumentations_2_0_8.json").read_text("utf-8"))


def test_the_transforms_are_those_that_device_forms_were_written_for():
    found = surface()
    told = changes(GOLDEN, found)
    with_device_form = [line for line in told if line.split(":")[0].split("(")[0] in DEVICE_OPS]
    assert not told, (
        f"Albumentations {found['version']} differs from {GOLDEN['version']} in {len(told)} "
        f"places, {len(with_device_form)} of them in operations with a device form:\n  "
        + "\n  ".join([*with_device_form, *(line for line in told if line not in with_device_form)])
        + "\nGo through each, then write the file anew as albumentations_surface.py says."
    )


def test_the_version_that_messages_recommend_is_the_one_that_was_written_down():
    assert GOLDEN["version"] == CHECKED_VERSION


def test_every_device_form_belongs_to_a_transform_that_was_written_down():
    assert DEVICE_OPS.keys() <= GOLDEN["transforms"].keys()
    # What the recorder hooks into is overridden by none of them.
    assert not [name for name in DEVICE_OPS if GOLDEN["transforms"][name]["overrides"]]


@each(
    ("change", "told"),
    [
        (lambda all_: all_.pop("Blur"), "Blur: is gone"),
        (lambda all_: all_.update(Blurred=all_["Blur"]), "Blurred: is new"),
        (
            lambda all_: all_["Rotate"].update(base="Affine"),
            "Rotate: base was DualTransform, is Affine",
        ),
        (
            lambda all_: all_["Rotate"]["arguments"].update(limit="(-45, 45)"),
            "Rotate(limit): default was (-90, 90), is (-45, 45)",
        ),
        (lambda all_: all_["Rotate"]["arguments"].pop("p"), "Rotate(p): is gone, was 0.5"),
        (
            lambda all_: all_["Resize"]["arguments"].update(keep="False"),
            "Resize(keep): is new, False",
        ),
        (
            lambda all_: all_["Blur"]["overrides"].append("apply_with_params"),
            "Blur: overrides was [], is ['apply_with_params']",
        ),
    ],
)
def test_a_change_is_told_with_its_class_and_argument(change, told):
    after = copy.deepcopy(GOLDEN)
    change(after["transforms"])
    assert changes(GOLDEN, after) == [told]
    assert changes(GOLDEN, GOLDEN) == []

"""Whether recordings give what the installed Albumentations gives, found out by trying.

The recorder hooks into attributes that Albumentations does not promise to keep. So tiny pipelines
are run and recorded, the recordings are computed, and all has to be the same. Otherwise every
operation stays on the CPU, and a warning says so.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from lightning_fastdata.augment.pipeline.plan import analyse
from lightning_fastdata.augment.record.tape import Recorder
from lightning_fastdata.augment.replay.program import compile_tapes
from lightning_fastdata.augment.replay.torch import replay
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.randomness.seeds import reseed
from lightning_fastdata.tree import has_method
from lightning_fastdata.types import SampleKey

if TYPE_CHECKING:
    from lightning_fastdata.augment.ops.operation import DeviceOp
    from lightning_fastdata.augment.pipeline.tree import Node
    from lightning_fastdata.augment.replay.program import Draws


CHECKED_VERSION: Final = "2.0.8"
"""The version of Albumentations that device forms and recorder are tested with."""
_DRAWS: Final = 8


@functools.cache
def refusal() -> str | None:
    """Return why no pipeline may be recorded in this environment, or None.

    The first call of a process tries it out, and warns if there is a reason.
    """
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    # Both libraries install a package called `albumentations`; only the metadata tells them apart.
    other = _version("albumentationsx")
    known = f"`import albumentations` is AlbumentationsX {other}, which cannot be recorded"
    reason = recording_fault() if other is None else known
    if reason is not None:
        warnings.warn(what_it_means(reason), FastDataWarning, stacklevel=2)
    return reason


def what_it_means(reason: str) -> str:
    """Return what follows from a reason not to record, and what to do about it."""
    return (
        f"Albumentations pipelines run whole in the workers, on the CPU, because {reason}. They "
        "give what the installed library gives. To have a GPU run what it can: "
        f"pip uninstall albumentations albumentationsx; pip install albumentations=="
        f"{CHECKED_VERSION}."
    )


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def recording_fault() -> str | None:
    """Return why pipelines cannot be recorded with the installed Albumentations, or None."""
    try:
        faults = (_difference(compose, names) for compose, names in _pipelines())
        fault = next(filter(None, faults), None)
    except Exception as error:
        # An unknown version may fail anywhere, in any way, and training goes on without it.
        fault = f"recording a pipeline raised {type(error).__name__}: {error}"
    version = _version("albumentations") or "of an unknown version"
    return None if fault is None else f"Albumentations {version} cannot be recorded ({fault})"


def _pipelines() -> list[tuple[Node, tuple[str, ...]]]:
    """Return pipelines, each with the operations that have to be deferred."""
    import albumentations as alb

    chosen = alb.OneOf([alb.HorizontalFlip(), alb.Sequential([alb.VerticalFlip(p=1)])], p=0.8)
    order = alb.SomeOf([alb.Transpose(), alb.RandomRotate90()], n=1)
    everything = alb.Compose(
        [chosen, alb.ToGray(p=0.5), order, alb.CenterCrop(4, 4)],
        bbox_params=alb.BboxParams("pascal_voc", label_fields=["labels"], min_visibility=0.3),
        keypoint_params=alb.KeypointParams("xy", remove_invisible=True),
        additional_targets={"other": "image", "part": "mask"},
        save_applied_params=True,
    )
    # An operation without a device form: what was noted before it has to be computed.
    barrier = alb.Compose([alb.HorizontalFlip(), alb.InvertImg(p=0.5), alb.VerticalFlip()])
    replayed = alb.ReplayCompose([alb.HorizontalFlip(), alb.RandomRotate90()])
    plain = ("HorizontalFlip", "VerticalFlip", "RandomRotate90")
    return [
        (everything, (*plain, "Transpose", "CenterCrop")),
        (barrier, plain[:2]),
        (replayed, (plain[0], plain[2])),
    ]


def _difference(compose: Node, names: tuple[str, ...]) -> str | None:
    """Return what differs between a real and a recorded pipeline, or None."""
    from lightning_fastdata.augment.ops import DEVICE_OPS

    if not has_method(compose, "set_random_state"):
        return "its pipelines have no method set_random_state"
    image, other = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), np.uint8)
    data: dict[str, Any] = {"image": image}
    if "other" in compose.additional_targets:
        data |= {"other": other, "mask": other[..., 0], "part": image[..., 1]}
    if compose.processors:
        data |= {"bboxes": [[1, 2, 4, 7], [5, 5, 8, 8]], "labels": [3, 4], "keypoints": [(2, 3)]}
    ops = {name: DEVICE_OPS[name] for name in names}
    recorder = Recorder(compose, analyse(compose, ops, size=(8, 8)), ops)
    seen = set()
    for index in range(_DRAWS):
        for pipeline in (compose, recorder.compose):
            reseed((pipeline,), SampleKey(0, 0, index))
        real, (copied, tape) = compose(**data), recorder(data)
        seen |= {op.name for track in tape.values() for op in track.ops}
        replayed = _computed(copied, compile_tapes([tape]), ops)
        if not alike(real, replayed):
            unlike = [name for name in real if not alike(real[name], replayed.get(name))]
            return f"recorded, {', '.join(unlike) or 'a pipeline'} came out differently"
    if seen != set(names):
        return f"it passes the recorder by: of {', '.join(names)} only {len(seen)} were noted"
    return None


def _computed(
    result: Mapping[str, Any], draws: Draws, ops: Mapping[str, DeviceOp]
) -> dict[str, Any]:
    done = dict(result)
    for name, program in draws.programs.items():
        batch = torch.from_numpy(np.array(result[name]))[None]
        done[name] = replay(program, draws.blob, batch, ops)[0].numpy()
    return done


def alike(one: Any, other: Any) -> bool:
    """Whether two results of a pipeline are the same: structure, types, dtypes and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        floats = one.dtype.kind in "fc"
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=floats)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)

"""Whether recordings and device forms give what Albumentations gives, found out by trying.

:func:`refusal` tries the installed Albumentations, as the recorder hooks into attributes that it
does not promise to keep: tiny pipelines are run and recorded, the recordings are computed, and all
has to be the same. Otherwise every operation stays on the CPU, and a warning says so.

:func:`try_operations` tries each operation of a pipeline on what a dataset gives it. From the same
pixels and draws both ways are computed, and the difference is held to a :class:`Bound`. What comes
next goes on from Albumentations' pixels, so that no operation has to answer for another.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import os
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from lightning_fastdata.augment.pipeline.bounds import (
    EQUAL,
    FEW_ELSEWHERE,
    LIKE,
    SPLINES,
    bound_of,
    levels_per_unit,
)
from lightning_fastdata.augment.pipeline.fields import is_too_wide
from lightning_fastdata.augment.pipeline.plan import analyse
from lightning_fastdata.augment.pipeline.tree import is_albumentations, is_container
from lightning_fastdata.augment.record.tape import Recorder, function_by_key
from lightning_fastdata.augment.replay.program import compile_tapes
from lightning_fastdata.augment.replay.torch import replay, run_whole
from lightning_fastdata.augment.stage_transform import plain_tensors
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.host import clock
from lightning_fastdata.randomness.seeds import reseed
from lightning_fastdata.tree import has_method
from lightning_fastdata.types import SampleKey

if TYPE_CHECKING:
    from lightning_fastdata.augment.ops.operation import DeviceOp, TapeOp
    from lightning_fastdata.augment.pipeline.plan import Plan
    from lightning_fastdata.augment.pipeline.tree import Node
    from lightning_fastdata.augment.replay.program import Draws


class Tried(NamedTuple):
    """One operation on one image or mask, both ways."""

    leaf: int
    """Number of the transform in its pipeline."""
    name: str
    """Class name of the transform."""
    form: tuple[object, ...]
    """Whether it was an image, and of which shape and dtype: tried once for each."""
    fault: str | None
    """In what the device form is too far off; None: it is within its bound."""


def try_operations(
    compose: Node,
    given: Mapping[str, Any],
    plan: Plan,
    ops: Mapping[str, DeviceOp],
    *,
    seed: int = 0,
    budget_s: float = 1.0,
    clock_s: Callable[[], float] = clock.process_time,
) -> tuple[Tried, ...]:
    """Try every operation that a plan may leave to the device, in both ways.

    A copy of the pipeline is run on ``given`` with every operation forced: nothing is skipped, and
    each branch of a choice is taken in turn. What Albumentations refuses is left out. After
    ``budget_s`` seconds by ``clock_s`` nothing more is tried.
    """
    ends_s = clock_s() + budget_s
    tried: list[Tried] = []
    for turn in range(turns(compose)):
        if clock_s() >= ends_s:
            break
        forced = copy.deepcopy(compose)
        force(forced, turn)
        trial = _OperationTrial(forced, plan, ops, tried, lambda: clock_s() < ends_s)
        reseed((forced,), SampleKey(seed, 0, turn))
        try:
            with warnings.catch_warnings(), plain_tensors():
                warnings.simplefilter("ignore")  # what Albumentations thinks of these draws
                trial(copy.deepcopy(dict(given)))
        except Exception:  # forced together, operations may leave too little to crop
            continue
    return tuple(tried)


def turns(node: Node) -> int:
    """Return how many runs it takes to have each branch of a pipeline once."""
    if not is_container(node):
        return 1
    counts = [turns(child) for child in node.transforms]
    return sum(counts) if _chooses_one(node) else max(counts, default=1)


def force(node: Node, turn: int) -> None:
    """Have a pipeline skip nothing, and take the branches that are due at a turn."""
    name = type(node).__name__
    node.p = 1.0
    if not is_container(node):
        return
    if not _chooses_one(node):
        if is_albumentations(node) and name in ("SomeOf", "RandomOrder"):
            node.n, node.replace = len(node.transforms), False
        for child in node.transforms:
            force(child, turn % turns(child))
        return
    first = 0
    for place, child in enumerate(node.transforms):
        count = turns(child)
        here = first <= turn < first + count
        force(child, turn - first if here else 0)
        if here and name == "OneOf":
            node.transforms_ps = [float(other is child) for other in node.transforms]
        elif here:
            node.p = float(place == 0)  # OneOrOther
        first += count


def _chooses_one(node: Node) -> bool:
    return is_albumentations(node) and type(node).__name__ in ("OneOf", "OneOrOther")


class _OperationTrial(Recorder):
    """Records a pipeline, and computes each operation at once, in both ways."""

    def __init__(
        self,
        compose: Node,
        plan: Plan,
        ops: Mapping[str, DeviceOp],
        tried: list[Tried],
        has_time: Callable[[], bool],
    ) -> None:
        super().__init__(compose, plan, ops, copied=False)
        self._keeps_params = True  # Albumentations needs all of them
        self._tried = tried
        self._has_time = has_time
        self._forms = {(one.leaf, one.form) for one in tried}

    def _record(self, hooked: Any, params: dict[str, Any], /, **data: Any) -> Any:
        before = {
            key: self._target(key, data[key]).real
            for key, _ in hooked.targets
            if self._is_pixels(key, data.get(key))
        }
        result = super()._record(hooked, params, **data)
        for key, is_image in hooked.targets:
            target = self._targets.get(key)
            if key not in before or target is None or not target.pending:
                continue
            noted = target.pending.pop().op
            pixels = np.ascontiguousarray(before[key])
            wanted = function_by_key(hooked.transform)[key](pixels.copy(), **params)
            form = is_image, pixels.shape, pixels.dtype.str
            if (hooked.leaf, form) not in self._forms and self._has_time():
                self._forms.add((hooked.leaf, form))
                fault = _fault(hooked, noted, pixels, wanted, is_image=is_image)
                self._tried.append(Tried(hooked.leaf, type(hooked.transform).__name__, form, fault))
            array = isinstance(wanted, np.ndarray)
            target.real = np.ascontiguousarray(wanted) if array else wanted
        return result


def _fault(
    hooked: Any, noted: TapeOp, pixels: np.ndarray, wanted: object, *, is_image: bool
) -> str | None:
    """Return in what the device form differs from what Albumentations makes of the same pixels."""
    op, transform = hooked.op, hooked.transform
    run = None if op is None else op.image if is_image else op.mask
    if op is None or run is None or (not is_image and is_too_wide(pixels)):
        return None
    batch = torch.from_numpy(pixels.copy())[None]
    batch = batch.unsqueeze(-1) if is_image and batch.ndim == 3 else batch
    arrays = {name: torch.from_numpy(one[None]) for name, one in noted.encoded.arrays.items()}
    made = run_whole(run, batch, dict(noted.encoded.static), arrays)[0].numpy()
    want = np.asarray(wanted)
    what = "an image" if is_image else "a mask"
    if made.size != want.size or (is_image and made.dtype != want.dtype):
        return f"{what} became {made.dtype} {made.shape}, not {want.dtype} {want.shape}"
    if op.draws_pixels(transform):
        return None
    floats = pixels.dtype.kind == "f"
    gap = np.abs(want.astype(np.float64) - made.reshape(want.shape))
    bound = FEW_ELSEWHERE if op.name in SPLINES else EQUAL
    if is_image:
        bound = LIKE if op.owner is not None else bound_of(transform)
        gap = gap * levels_per_unit(transform, pixels.dtype)
        # Levels are those of floats in [0, 1]; others have as much more room.
        gap = gap / max(1.0, float(np.abs(pixels).max(initial=0))) if floats else gap
    if bound.exceeded(gap, from_floats=floats):
        return f"{what} was {gap.max(initial=0):.3g} levels off"
    return None


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

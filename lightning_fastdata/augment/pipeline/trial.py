"""Whether recordings and device forms give what Albumentations gives, found out by trying."""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import os
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from lightning_fastdata.augment.pipeline.fields import is_too_wide
from lightning_fastdata.augment.pipeline.plan import analyse
from lightning_fastdata.augment.pipeline.tree import is_albumentations, is_container, list_leaves
from lightning_fastdata.augment.record.tape import Recorder, function_by_key
from lightning_fastdata.augment.replay.program import compile_tapes
from lightning_fastdata.augment.replay.torch import replay, run_whole
from lightning_fastdata.augment.stage_transform import plain_tensors
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.randomness.seeds import reseed
from lightning_fastdata.types import SampleKey

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_fastdata.augment.ops.operation import DeviceOp, TapeOp
    from lightning_fastdata.augment.pipeline.plan import Plan
    from lightning_fastdata.augment.pipeline.tree import Node

SAME: Final = 1e-3
"""Levels: values that are closer are equal. float32 sums differ in the last bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What is asked of the values of images, in levels of which 255 span the range."""

    largest: float
    """No difference is larger."""
    equal: float
    """Share of values of uint8 images that are equal, 0..1."""
    mean: float = 1.0
    """Mean absolute difference."""
    of_floats: float
    """No difference of float32 images is larger."""

    def exceeded(self, gap: np.ndarray, *, from_floats: bool) -> bool:
        """Return whether differences, in levels, are larger than they may be.

        The share counts only where no difference is too large: small images have few values.
        """
        if not np.isfinite(gap).all():
            return True
        largest = self.of_floats if from_floats else self.largest
        if largest >= 255:
            too_many = int((gap > SAME).sum()) > max(1, (1 - self.equal) * gap.size)
            return too_many or bool(gap.size and gap.mean() > max(self.mean, 255 / gap.size))
        return bool(gap.max(initial=0) > largest + SAME)


EQUAL: Final = Bound(largest=0, equal=1, of_floats=1e-3)
RESIZE: Final = Bound(largest=1, equal=0.998, of_floats=0.01)
SHARED: Final = Bound(largest=1, equal=0.999, of_floats=0.01)
"""Colours that OpenCV rounds, and blurs."""
SUMS: Final = Bound(largest=1, equal=0.99, of_floats=0.05)
"""Sums of many terms, in whatever order."""
JITTER: Final = Bound(largest=3, equal=0.999, of_floats=0.05)
CLAHE: Final = Bound(largest=2, equal=0.999, of_floats=2)
THROUGH_BYTES: Final = Bound(largest=1, equal=0.999, of_floats=1)
"""float32 images are made uint8 first."""
UNSHARP: Final = Bound(largest=8, equal=0.99, of_floats=8)
"""Rounding decides what is below its threshold."""
FEW_ELSEWHERE: Final = Bound(largest=255, equal=0.999, of_floats=255)
"""Nearest pixels at positions that differ in the last bit: few are another one's."""

LIKE: Final = Bound(largest=255, equal=0, mean=2.5, of_floats=255)
"""Forms that users register, who say how close they are: what is alike on average."""


def opencv_major(version: str | None = None) -> int:
    """Return the first number of a version, as in ``4.10.0`` or ``5.0.0-pre``; None: installed."""
    if version is None:
        import cv2

        version = str(cv2.__version__)
    return int(version.split(".", maxsplit=1)[0])


def warps(version: str | None = None) -> Bound:
    """Return the bound for warps that read between the pixels."""
    if opencv_major(version) < 5:
        return Bound(largest=0, equal=1, of_floats=0.01)
    return Bound(largest=1, equal=0.999, mean=0.001, of_floats=0.2)


def fields(version: str | None = None) -> Bound:
    """Return the bound for distortions whose field is made of sums and logarithms.

    With OpenCV 4 the last bit of such a field decides between two positions in 1/32 pixel.
    """
    if opencv_major(version) < 5:
        return Bound(largest=8, equal=0.99, mean=0.01, of_floats=8)
    return Bound(largest=1, equal=0.999, mean=0.001, of_floats=0.2)


_SPLINES: Final = frozenset({"PiecewiseAffine", "ThinPlateSpline"})
_WARPS: Final = frozenset({"Affine", "Rotate", "SafeRotate", "ShiftScaleRotate"})
_FIELDS: Final = _SPLINES | {
    "ChromaticAberration",
    "GridDistortion",
    "OpticalDistortion",
    "Perspective",
}
_RESIZES: Final = frozenset({"RandomResizedCrop", "RandomSizedCrop", "Resize"})
_NAMED: Final[Mapping[str, Bound]] = {
    **dict.fromkeys(("AdvancedBlur", "Blur", "Defocus", "Emboss", "GaussianBlur"), SUMS),
    **dict.fromkeys(("MotionBlur", "RingingOvershoot"), SUMS),
    "CLAHE": CLAHE,
    "ColorJitter": JITTER,
    "HueSaturationValue": THROUGH_BYTES,
    "UnsharpMask": UNSHARP,
}


def bound_of(transform: Node) -> Bound:
    """Return the bound for images behind a transform of Albumentations; masks are equal."""
    name = type(transform).__name__
    if getattr(transform, "interpolation", None) == 0:
        return FEW_ELSEWHERE if name in _SPLINES else EQUAL
    if name in _WARPS:
        return warps()
    if name in _FIELDS:
        return fields()
    if name in _RESIZES:
        return RESIZE
    if name == "Downscale":
        return EQUAL if set(transform.interpolation_pair.values()) == {0} else RESIZE
    if name == "Sharpen":
        return EQUAL if transform.method == "gaussian" else SUMS
    return _NAMED.get(name, EQUAL)


def is_equal(name: str) -> bool:
    """Return whether images behind a transform of this name are equal, whatever its settings."""
    others = _WARPS | _FIELDS | _RESIZES | _NAMED.keys()
    return name not in others and name not in {"Downscale", "Sharpen"}


BUDGET_S: Final = 1.0
"""Seconds of the CPU after which nothing more is tried."""


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
    budget_s: float = BUDGET_S,
    clock_s: Callable[[], float] = time.process_time,
) -> tuple[Tried, ...]:
    """Try every operation that a plan may leave to the device, in both ways.

    Args:
        compose: The pipeline; it stays as it is.
        given: What it is called with.
        plan: Where its operations run.
        ops: Device forms by name.
        seed: Of the draws.
        budget_s: Seconds after which nothing more is tried.
        clock_s: Tells the time.

    Returns:
        What was tried, in order. A combination that Albumentations refuses is left out.
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
    """Records a pipeline, and carries out each operation at once, in both ways."""

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
            if key in before and target is not None and target.pending:
                noted = target.pending.pop().op
                pixels = np.ascontiguousarray(before[key])
                wanted = function_by_key(hooked.transform)[key](pixels.copy(), **params)
                form = is_image, pixels.shape, pixels.dtype.str
                if (hooked.leaf, form) not in self._forms and self._has_time():
                    self._forms.add((hooked.leaf, form))
                    fault = _fault(hooked, noted, pixels, wanted, is_image=is_image)
                    self._tried.append(
                        Tried(hooked.leaf, type(hooked.transform).__name__, form, fault)
                    )
                array = isinstance(wanted, np.ndarray)
                target.real = np.ascontiguousarray(wanted) if array else wanted
        return result


def _fault(
    hooked: Any, noted: TapeOp, pixels: np.ndarray, wanted: Any, *, is_image: bool
) -> str | None:
    """Return in what the device form differs from what Albumentations makes of the same pixels."""
    op, transform = hooked.op, hooked.transform
    run = op.image if is_image else op.mask
    if run is None or (not is_image and is_too_wide(pixels)):
        return None
    batch = torch.from_numpy(pixels.copy())[None]
    gray = is_image and batch.ndim == 3
    batch = batch.unsqueeze(-1) if gray else batch
    arrays = {name: torch.from_numpy(one[None]) for name, one in noted.encoded.arrays.items()}
    made = run_whole(run, batch, dict(noted.encoded.static), arrays)[0].numpy()
    want = np.asarray(wanted)
    what = "an image" if is_image else "a mask"
    if made.size != want.size or (is_image and made.dtype != want.dtype):
        return f"{what} became {made.dtype} {made.shape}, not {want.dtype} {want.shape}"
    if op.draws_pixels(transform):
        return None
    gap = np.abs(want.astype(np.float64) - made.reshape(want.shape))
    if not is_image:
        bound = FEW_ELSEWHERE if op.name in _SPLINES else EQUAL
    else:
        bound = LIKE if op.owner is not None else bound_of(transform)
        gap = gap * levels_per_unit(transform, pixels.dtype)
        if pixels.dtype.kind == "f":
            # Levels are told of images in [0, 1]; others have as much more room.
            gap = gap / max(1.0, float(np.abs(pixels).max(initial=0)))
    if bound.exceeded(gap, from_floats=pixels.dtype.kind == "f"):
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
    reason = _other_library() or recording_fault()
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


def _other_library() -> str | None:
    # Both install a package called `albumentations`; only the metadata tells them apart.
    try:
        version = importlib.metadata.version("albumentationsx")
    except importlib.metadata.PackageNotFoundError:
        return None
    return f"`import albumentations` is AlbumentationsX {version}, which cannot be recorded"


def recording_fault() -> str | None:
    """Return why pipelines cannot be recorded with the installed Albumentations, or None."""
    try:
        fault = _difference()
    except Exception as error:
        # An unknown version may fail anywhere, in any way, and training goes on without it.
        fault = f"recording a pipeline raised {type(error).__name__}: {error}"
    return None if fault is None else f"Albumentations {_version()} cannot be recorded ({fault})"


def _version() -> str:
    try:
        return importlib.metadata.version("albumentations")
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"


def _pipelines() -> list[tuple[Any, tuple[str, ...]]]:
    """Return pipelines, each with the operations that have to be left to the device."""
    import albumentations as alb

    boxes = alb.BboxParams("pascal_voc", label_fields=["labels"], min_visibility=0.3)
    points = alb.KeypointParams("xy", remove_invisible=True)
    chosen = alb.OneOf([alb.HorizontalFlip(), alb.Sequential([alb.VerticalFlip(p=1)])], p=0.8)
    order = alb.SomeOf([alb.Transpose(), alb.RandomRotate90()], n=1)
    everything = alb.Compose(
        [chosen, alb.ToGray(p=0.5), order, alb.CenterCrop(4, 4)],
        bbox_params=boxes,
        keypoint_params=points,
        additional_targets={"other": "image", "part": "mask"},
        save_applied_params=True,
    )
    # An operation without a device form: what was noted before it has to be carried out.
    barrier = alb.Compose([alb.HorizontalFlip(), alb.InvertImg(p=0.5), alb.VerticalFlip()])
    replayed = alb.ReplayCompose([alb.HorizontalFlip(), alb.RandomRotate90()])
    plain = ("HorizontalFlip", "VerticalFlip", "RandomRotate90")
    return [
        (everything, (*plain, "Transpose", "CenterCrop")),
        (barrier, plain[:2]),
        (replayed, (plain[0], plain[2])),
    ]


def _difference() -> str | None:
    """Return what differs between real and recorded pipelines, or None."""
    from lightning_fastdata.augment.ops import DEVICE_OPS

    rng = np.random.default_rng(0)
    image, other = rng.integers(0, 256, (2, 8, 8, 3), np.uint8)
    sample = {"image": image, "other": other, "mask": other[..., 0], "part": image[..., 1]}
    labelled = {"bboxes": [[1, 2, 4, 7], [5, 5, 8, 8]], "labels": [3, 4], "keypoints": [(2, 3)]}
    for compose, names in _pipelines():
        if not hasattr(compose, "set_random_state"):
            return "its pipelines have no method set_random_state"
        ops = {name: DEVICE_OPS[name] for name in names}
        recorder = Recorder(compose, analyse(compose, ops, size=(8, 8)), ops)
        data = dict(sample) if "other" in compose.additional_targets else {"image": image}
        data |= labelled if compose.processors else {}
        seen = set()
        for index in range(_DRAWS):
            key = SampleKey(0, 0, index)
            reseed((compose,), key)
            reseed((recorder.compose,), key)
            real, (copied, tape) = compose(**data), recorder(data)
            seen |= {op.name for track in tape.values() for op in track.ops}
            replayed = _carried_out(copied, compile_tapes([tape]), ops)
            if not alike(real, replayed):
                unlike = [name for name in real if not alike(real[name], replayed.get(name))]
                return f"recorded, {', '.join(unlike) or 'a pipeline'} came out differently"
        if seen != set(names):
            return f"it passes the recorder by: of {', '.join(names)} only {len(seen)} were noted"
    return None


def _carried_out(result: dict[str, Any], draws: Any, ops: Mapping[str, Any]) -> dict[str, Any]:
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
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=_floats(one))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


def _floats(array: np.ndarray) -> bool:
    return array.dtype.kind in "fc"


def levels_per_unit(compose: Node, dtype: np.dtype[Any]) -> Any:
    """Return how many of 255 levels a difference of 1 in the output of a pipeline is.

    A number, or an array that can be multiplied with an output image.
    """
    unit: Any = 1.0 if dtype == np.uint8 else 255.0
    first = False
    for leaf in list_leaves(compose):
        name = type(leaf.transform).__name__
        if name == "ToFloat":
            unit = 255.0
        elif name == "ToTensorV2":
            first = True
        elif name == "FromFloat":
            unit = 1.0
        elif name == "Normalize" and leaf.transform.normalization == "standard":
            unit = 255.0 * np.asarray(leaf.transform.std, np.float64)
    return unit[:, None, None] if first and np.ndim(unit) else unit

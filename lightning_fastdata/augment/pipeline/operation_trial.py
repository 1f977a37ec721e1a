"""Each operation of a pipeline tried by itself: what Albumentations and the device form make of it.

A copy of the pipeline is run on what a dataset gives it, with every operation forced: nothing is
skipped, and each branch of a choice is taken in turn. Wherever an operation would be left to the
device, both ways are computed from the same pixels and the same draws, and the largest difference
is held to the bound of that operation. What comes next goes on from Albumentations' pixels, so that
no operation has to answer for another.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch

from lightning_fastdata.augment.callables import plain_tensors
from lightning_fastdata.augment.pipeline.bounds import EQUAL, FEW_ELSEWHERE, LIKE, bound_of
from lightning_fastdata.augment.pipeline.fields import is_too_wide
from lightning_fastdata.augment.pipeline.tree import is_albumentations, is_container
from lightning_fastdata.augment.record.tape import Recorder, function_by_key
from lightning_fastdata.augment.replay.torch import run_whole
from lightning_fastdata.augment.show.parity import levels_per_unit
from lightning_fastdata.randomness.seeds import reseed
from lightning_fastdata.types import SampleKey

if TYPE_CHECKING:
    from lightning_fastdata.augment.ops.operation import DeviceOp, TapeOp
    from lightning_fastdata.augment.pipeline.plan import Plan

BUDGET_S: Final = 1.0
"""Seconds of the CPU after which nothing more is tried."""
_SPLINES: Final = frozenset({"PiecewiseAffine", "ThinPlateSpline"})
"""One mask pixel in a million is another one's."""


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
    compose: Any,
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


def turns(node: Any) -> int:
    """Return how many runs it takes to have each branch of a pipeline once."""
    if not is_container(node):
        return 1
    counts = [turns(child) for child in node.transforms]
    return sum(counts) if _chooses_one(node) else max(counts, default=1)


def force(node: Any, turn: int) -> None:
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


def _chooses_one(node: Any) -> bool:
    return is_albumentations(node) and type(node).__name__ in ("OneOf", "OneOrOther")


class _OperationTrial(Recorder):
    """Records a pipeline, and carries out each operation at once, in both ways."""

    def __init__(
        self,
        compose: Any,
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

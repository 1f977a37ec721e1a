"""Dtypes of images that follow from a pipeline alone, before any image is seen.

A device form is for images of certain dtypes. And a batch is one tensor: all of its images have one
dtype when they leave the worker. Both have to be known before the first sample, see
:mod:`~lightning_fastdata.augment.pipeline.plan`.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from lightning_fastdata.augment.pipeline.tree import (
    CHANGES_SIZE,
    count_leaves,
    in_sequence,
    is_albumentations,
    is_container,
)

if TYPE_CHECKING:
    from lightning_fastdata.augment.ops.operation import DeviceOp, Shape
    from lightning_fastdata.augment.pipeline.tree import Node

CASTS: Final = frozenset({"FromFloat", "Normalize", "ToFloat"})
CHANGES_DTYPE_OR_LAYOUT: Final = CASTS | {"ToTensorV2"}
"""Transforms that are there to change the dtype."""
_USUAL: Final = frozenset({np.dtype(np.uint8), np.dtype(np.float32)})
"""Dtypes that Albumentations is made for: of these its other transforms keep the dtype."""
_OF_ANY_DTYPE: Final = frozenset(
    {
        *("CenterCrop", "Crop", "D4", "HorizontalFlip", "NoOp", "Pad", "PadIfNeeded", "RandomCrop"),
        *("RandomRotate90", "SquareSymmetry", "TimeReverse", "ToTensorV2", "Transpose"),
        "VerticalFlip",
    }
)
"""Transforms whose device forms move values, and never look at them."""
_OF_FLOATS: Final = frozenset(
    {
        *("Affine", "Perspective", "Rotate", "ShiftScaleRotate", "ElasticTransform"),
        *("RandomResizedCrop", "RandomSizedCrop", "Resize"),
        *("CoarseDropout", "Erasing", "Normalize", "ToFloat"),
    }
)
"""Transforms whose device forms take float32 as well as uint8; colours, blurs and noise do not."""
_TRIES: Final = 2
"""Draws with which an unknown transform is tried."""

BYTES: Final = np.dtype(np.uint8)
States: TypeAlias = "frozenset[np.dtype[Any]]"
"""Dtypes that an image may have at one place of a pipeline, by what a sample drew before."""


class Followed(NamedTuple):
    """How the dtype of one image develops along a pipeline."""

    before: tuple[States, ...]
    """Per leaf: its input."""
    after: States
    """What the pipeline returns."""

    @property
    def boundary(self) -> int:
        """Number of the last leaf before or behind which samples may have several dtypes, or -1."""
        places = [*self.before, self.after]
        mixed = [index for index, states in enumerate(places) if len(dtypes_of(states)) > 1]
        return min(mixed[-1], len(self.before) - 1) if mixed else -1

    @property
    def ends_mixed(self) -> bool:
        """Whether samples may come out with several dtypes."""
        return len(dtypes_of(self.after)) > 1


def dtypes_of(states: States) -> tuple[str, ...]:
    """Return the names of the dtypes that images may have, sorted."""
    return tuple(sorted(map(str, states)))


def takes_dtype(op: DeviceOp, dtype: np.dtype[Any]) -> bool:
    """Return whether a device form knows images of a dtype."""
    if dtype == BYTES or op.name in _OF_ANY_DTYPE:
        return True
    return dtype in _USUAL and op.name in _OF_FLOATS


def why_not(op: DeviceOp, states: States) -> str | None:
    """Return why a device form cannot have such images, or None."""
    strange = [dtype for dtype in states if not takes_dtype(op, dtype)]
    return f"no device form for images of {strange[0]}" if strange else None


def follow_dtypes(compose: Node, given: States, shape: Shape = (64, 48, 3)) -> Followed:
    """Follow which dtypes an image may have through a pipeline.

    Unknown transforms are tried with images of ``shape``.
    """
    before: list[States] = []

    def walk(node: Node, states: States, *, some: bool = False, chosen: bool = False) -> States:
        name, own = type(node).__name__, is_albumentations(node)
        applied = chosen or node.p >= 1 or name == "OneOrOther"
        some = some or chosen or not applied
        if not is_container(node):
            before.append(states)
            after = _joined(dtypes_after(node, dtype, shape, tried=some) for dtype in states)
        elif in_sequence(node):
            after = states
            for child in node.transforms:
                after = walk(child, after, some=some)
        elif own and name in {"OneOf", "OneOrOther"}:
            after = _joined(walk(child, states, chosen=True) for child in node.transforms)
        else:
            after = any_order(node, states)
        never = node.p <= 0 and not applied
        return states if never or not count_leaves(node) else after if applied else after | states

    def any_order(node: Node, states: States) -> States:
        first = len(before)
        while True:
            reached = states | _joined(walk(child, states, some=True) for child in node.transforms)
            if reached == states:
                return states
            states = reached
            del before[first:]

    after = walk(compose, given)
    return Followed(tuple(before), after)


def _joined(found: Iterator[States]) -> States:
    return frozenset().union(*found)


def dtypes_after(
    transform: Node,
    dtype: np.dtype[Any],
    shape: Shape = (64, 48, 3),
    *,
    tried: bool = True,
) -> States:
    """Return which dtypes an image of one may have after a transform was applied.

    Transforms that users wrote are ``tried``, as they may do more than one can see, only where some
    samples go without them: where all go through them, a recorder sees in time what they make.
    """
    name = type(transform).__name__
    own = is_albumentations(transform) and name != "Lambda"
    known = dtype in _USUAL and name not in CASTS
    keeps_dtype = (known or name in _OF_ANY_DTYPE) if own else not tried
    if keeps_dtype:
        return frozenset({dtype})
    return frozenset(_tried_dtypes(transform, dtype, shape))


def _tried_dtypes(transform: Node, dtype: np.dtype[Any], shape: Shape) -> set[np.dtype[Any]]:
    """Return the dtypes that a transform makes of images of one; that one, if it refuses them."""
    made: set[np.dtype[Any]] = set()
    rng = np.random.default_rng(0)
    noise = rng.random(shape)
    image = (noise if dtype.kind == "f" else noise * 255).astype(dtype)
    data = {"image": image, "mask": np.zeros(shape[:2], np.uint8)}
    tries = 1 if type(transform).__name__ in CASTS else _TRIES
    with _as_before(), warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            twin = copy.deepcopy(transform)
            twin.deterministic = False  # in a ReplayCompose it looks for a place to write to
            twin.set_random_state(np.random.default_rng(0), random.Random(0))
            for _ in range(tries):
                given = {name: array.copy() for name, array in data.items()}
                made.add(np.asarray(twin(force_apply=True, **given)["image"]).dtype)
        except Exception:  # Code of users may raise anything; a real sample will say so.
            return made or {dtype}
    return made


@contextmanager
def _as_before() -> Iterator[None]:
    """Leave the random numbers of the process as they are: transforms of users may draw there."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def changes_form(transform: Node) -> bool:
    """Return whether a transform may change the shape or dtype of images."""
    name = type(transform).__name__
    if name in CHANGES_DTYPE_OR_LAYOUT or name in CHANGES_SIZE:
        return True
    # ToRGB is there for images of one channel.
    return name == "ToRGB" or bool(name == "ToGray" and transform.num_output_channels != 3)

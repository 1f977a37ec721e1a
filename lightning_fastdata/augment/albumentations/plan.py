"""What an Albumentations pipeline is made of, and where each operation of it runs.

A pipeline is a tree of containers and leaves; at each place in it, images have a size and a dtype.
All device forms take bytes, and some take float32, which ``Normalize`` and ``ToFloat`` make. A
batch is one tensor: all of its images have one dtype when they leave the worker.

Where operations run is decided before any sample. The rules, in order:

1. Everything up to and including the operation that makes the image size the same for all samples
   (``Resize``, ``RandomResizedCrop``, ...) runs in the worker: dataset images may vary in size.
   Without such an operation, batches can only be collated if the dataset's images already have one
   size, so nothing is kept in the worker for this reason.
2. The whole pipeline runs in the worker if an operation changes the dtype of some samples only
   (``ToFloat(p=0.5)``): a batch is one tensor.
3. An operation without a device form runs in the worker on real pixels, and so do the ones before
   it, but only in samples that drew it. A device form takes certain dtypes: those of colours and
   blurs take uint8 alone.
4. An operation that changes the shape or dtype of an image runs on the device only when every
   sample takes it and no later operation may ask for real pixels: a batch must stay one tensor.
5. An operation whose pixels may be a level off runs in the worker if a later operation enlarges
   that error (``HueSaturationValue``, ...), or may do so because a user registered it. So the error
   bound of a pipeline is that of its operations; tests check it for each form on photographs.
   OpenCV 4 rounds the positions that a warp reads to 1/32 of a pixel and blends in integers, so
   that its warps can be equalled. OpenCV 5 blends in float32, in an order that depends on the CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from lightning_fastdata.augment.fields import Mover
from lightning_fastdata.augment.ops.geometry import blends_alike
from lightning_fastdata.augment.ops.operation import DeviceOp, DType, Role
from lightning_fastdata.augment.stage_transform import OpPlacement, Placements, Where
from lightning_fastdata.tree import copy_of_compose, held

if TYPE_CHECKING:
    from albumentations import BaseCompose, BasicTransform

Node: TypeAlias = "BaseCompose | BasicTransform"
"""A container or a transform of a pipeline, or the pipeline itself."""

SEQUENCES: Final = frozenset({"Compose", "ReplayCompose", "Sequential"})
"""Containers that call all their children in the order written."""
GROUPS: Final = frozenset({"OneOf", "SomeOf", "RandomOrder", "OneOrOther"})
"""Containers that choose or reorder their children for each sample."""


class Leaf(NamedTuple):
    """A transform in the tree of a pipeline."""

    transform: BasicTransform
    conditional: bool
    """Whether some samples skip it: it or a container around it has ``p < 1``, or is a choice."""


def is_container(node: object) -> bool:
    """Whether a node of the tree holds other transforms."""
    # An attribute `transforms` does not say so: ColorJitter has one too, a list of functions.
    import albumentations

    return isinstance(node, albumentations.BaseCompose)


def is_albumentations(node: Node) -> bool:
    """Whether the class of a node is Albumentations' own, not a subclass written by a user."""
    return type(node).__module__.split(".")[0] == "albumentations"


def list_leaves(node: Node, *, conditional: bool = False) -> list[Leaf]:
    """Return the transforms of a pipeline in the order in which they are written."""
    conditional = conditional or node.p < 1
    if not is_container(node):
        return [Leaf(node, conditional)]
    inside = [(child, conditional or not in_sequence(node)) for child in node.transforms]
    return [leaf for child, skipped in inside for leaf in list_leaves(child, conditional=skipped)]


def nodes_of(node: Node) -> list[Node]:
    """Return a pipeline with all containers and transforms in it."""
    inside = node.transforms if is_container(node) else ()
    return [node, *(each for child in inside for each in nodes_of(child))]


def followers(compose: Node) -> list[frozenset[int]]:
    """Return, for each transform of a pipeline, the numbers of those that may come after it."""
    after: list[set[int]] = []

    def walk(node: Node) -> range:
        first, parts = len(after), []
        if not is_container(node):
            after.append(set())
        else:
            parts = [walk(child) for child in node.transforms]
        alone = is_albumentations(node) and type(node).__name__ in _ONE_CHILD
        for number, part in enumerate(parts):
            later = [] if alone else parts[number + 1 :] if in_sequence(node) else parts
            again = bool(held(node, "replace"))
            found = {leaf for other in later if again or other != part for leaf in other}
            for leaf in part:
                after[leaf] |= found
        return range(first, len(after))

    walk(compose)
    return list(map(frozenset, after))


def in_sequence(node: Node) -> bool:
    """Whether a node calls all its children in the order written."""
    return is_albumentations(node) and type(node).__name__ in SEQUENCES


def last_opaque(node: Node, *, group_end: int | None = None, first: int = 0) -> int:
    """Return the number of the last leaf that must run unobserved, or -1 for none.

    ``first`` is the number of the node's first leaf. ``group_end`` is the number of the last leaf
    of the outermost group around the node; None: there is no group around it.
    """
    name, own = type(node).__name__, is_albumentations(node)
    end = first + len(list_leaves(node)) - 1
    known = own and (name in SEQUENCES or name in GROUPS)
    observed = known or (not is_container(node) and _plain_call(node))
    last = -1 if observed else end if group_end is None else group_end
    if is_container(node):
        group_end = end if group_end is None and not in_sequence(node) else group_end
        for child in node.transforms:
            last = max(last, last_opaque(child, group_end=group_end, first=first))
            first += len(list_leaves(child))
    return last


def _plain_call(transform: BasicTransform) -> bool:
    """Whether calling a transform goes through Albumentations' own ``__call__``."""
    owner = next(cls for cls in type(transform).__mro__ if "__call__" in vars(cls))
    return owner.__module__.split(".")[0] == "albumentations"


_FIXED_BY_HEIGHT_WIDTH: Final = frozenset(
    {
        *("AtLeastOneBBoxRandomCrop", "CenterCrop", "CropNonEmptyMaskIfExists", "RandomCrop"),
        *("RandomSizedBBoxSafeCrop", "Resize"),
    }
)
_FIXED_BY_SIZE: Final = frozenset({"RandomResizedCrop", "RandomSizedCrop"})
SWAPS_AXES: Final = frozenset({"D4", "RandomRotate90", "SquareSymmetry", "Transpose"})
"""Transforms that turn some images on their side."""
_SIZE_VARIES: Final = frozenset(
    {
        *("BBoxSafeRandomCrop", "Crop", "Lambda", "Mosaic", "Pad", "RandomCropFromBorders"),
        *("RandomCropNearBBox", "RandomScale", "SmallestMaxSize"),
    }
)
CHANGES_SIZE: Final = (
    _FIXED_BY_HEIGHT_WIDTH | _FIXED_BY_SIZE | {"Crop", "LongestMaxSize", "Pad", "PadIfNeeded"}
)
"""Transforms whose output size usually differs from their input size."""
_FITS_IN_ITS_INPUT: Final = frozenset({"SafeRotate"})
"""Transforms with a ``fit_output`` setting whose output nonetheless has the size of the input."""
_ONE_CHILD: Final = frozenset({"OneOf", "OneOrOther"})


class Size(NamedTuple):
    """What is known of the size of all images at one point of a pipeline."""

    exact: tuple[int, int] | None = None
    """``(height, width)`` when all images have it; None when sizes may differ or are unknown."""
    at_most: tuple[int, int] | None = None
    """Upper bounds of height and width, or None."""


def follow_sizes(compose: Node, size: Size, keeps: Collection[type] = ()) -> tuple[int, list[Size]]:
    """Follow what is known of the image size through a pipeline.

    Transforms of the classes in ``keeps`` are known to keep the size.

    Returns:
        The number of the last leaf of the operation that makes the size static, or -1 for none; and
        for each leaf what is known of the size of its input.
    """
    boundary = -1
    sizes: list[Size] = []

    def walk(node: Node, before: Size) -> Size:
        nonlocal boundary
        if is_container(node) and in_sequence(node) and node.p >= 1:
            for child in node.transforms:
                before = walk(child, before)
            return before
        sizes.extend([before] * len(list_leaves(node)))
        after = _node_size(node, before, keeps)
        if before.exact is None and after.exact is not None:
            boundary = len(sizes) - 1
        return after

    walk(compose, size)
    return boundary, sizes


def _node_size(node: Node, before: Size, keeps: Collection[type]) -> Size:
    if not is_container(node):
        after = size_after(node, before, keeps)
    elif in_sequence(node):
        after = before
        for child in node.transforms:
            after = _node_size(child, after, keeps)
    elif is_albumentations(node) and type(node).__name__ in GROUPS:
        pick_one = type(node).__name__ in _ONE_CHILD
        sizes = [
            size_after(child, before, keeps)
            if pick_one and not is_container(child)
            else _node_size(child, before, keeps)
            for child in node.transforms
        ]
        if not pick_one:
            sizes.append(before)
        after = _join(sizes)
    else:
        after = before
    applied = node.p >= 1 or type(node).__name__ == "OneOrOther"
    return after if applied else _join([before, after])


def _join(sizes: list[Size]) -> Size:
    exact = sizes[0].exact if all(size.exact == sizes[0].exact for size in sizes) else None
    bounds = [size.at_most for size in sizes]
    if None in bounds:
        return Size(exact, None)
    heights, widths = zip(*filter(None, bounds), strict=True)
    return Size(exact, (max(heights), max(widths)))


def size_after(transform: BasicTransform, before: Size, keeps: Collection[type] = ()) -> Size:
    """Return what is known of the image size after a transform was applied."""
    name = type(transform).__name__
    if type(transform) in keeps:
        return before
    if not is_albumentations(transform):
        import albumentations

        return before if isinstance(transform, albumentations.ImageOnlyTransform) else Size()
    if name in _FIXED_BY_HEIGHT_WIDTH:
        return _exactly(transform.height, transform.width)
    if name in _FIXED_BY_SIZE:
        return _exactly(*transform.size)
    if name == "LongestMaxSize":
        longest = transform.max_size
        return Size(None, (longest, longest)) if isinstance(longest, int) else Size()
    if name == "PadIfNeeded":
        return _padded(transform, before)
    if name in SWAPS_AXES:
        square = before.exact is not None and before.exact[0] == before.exact[1]
        return before if square else Size()
    if name in _FITS_IN_ITS_INPUT:
        return before
    settings = vars(transform)
    varies = settings.get("fit_output") or settings.get("crop_border")
    keeps_size = settings.get("keep_size", True) and name not in _SIZE_VARIES
    return before if keeps_size and not varies else Size()


def _exactly(height: int, width: int) -> Size:
    return Size((height, width), (height, width))


def _padded_length(length: int, least: int | None, divisor: int | None) -> int:
    """Return the length of an axis after padding to ``least``, or to a multiple of ``divisor``."""
    if least is not None:
        return max(least, length)
    return length + -length % divisor if divisor else length


def _padded(transform: BasicTransform, before: Size) -> Size:
    least = (transform.min_height, transform.min_width)
    divisors = (transform.pad_height_divisor, transform.pad_width_divisor)
    if before.exact is not None:
        height, width = map(_padded_length, before.exact, least, divisors)
        return _exactly(height, width)
    if None in least:
        return Size()
    if (
        before.at_most is not None
        and before.at_most[0] <= least[0]
        and before.at_most[1] <= least[1]
    ):
        return _exactly(*least)
    return Size()


CASTS: Final = frozenset({"FromFloat", "Normalize", "ToFloat"})
CHANGES_DTYPE_OR_LAYOUT: Final = CASTS | {"ToTensorV2"}
"""Transforms whose purpose is to change the dtype or the layout of images."""
_OF_BYTES: Final = frozenset(
    {
        *("ColorJitter", "HueSaturationValue", "RandomBrightnessContrast", "RandomGamma", "ToGray"),
        *("Blur", "GaussianBlur", "MotionBlur"),
    }
)
"""Transforms, of colours and blurs, whose device forms do not take float32, but uint8 alone."""

BYTES: Final = np.dtype(np.uint8)
FLOATS: Final = np.dtype(np.float32)
MASKS: Final = frozenset(
    np.dtype(kind)
    for kind in (np.bool_, np.uint8, np.int8, np.int16, np.int32, np.int64, np.float32)
)
"""Dtypes of masks that device forms take: torch hardly computes with wider unsigned ones."""


def takes_dtype(op: DeviceOp, dtype: DType) -> bool:
    """Return whether a device form takes images of a dtype."""
    return dtype == BYTES or (dtype == FLOATS and op.name not in _OF_BYTES)


def why_no_forms(images: Iterable[DType], masks: Iterable[DType]) -> str | None:
    """Return why there are no device forms for the images and masks of a sample, or None."""
    for what, dtypes, known in (("images", images, {BYTES, FLOATS}), ("masks", masks, MASKS)):
        if strange := set(dtypes) - known:
            return f"there are no device forms for {what} of {strange.pop()}"
    return "the images of a sample have several dtypes" if len(set(images)) > 1 else None


def follow_dtypes(leaves: Iterable[Leaf], given: DType) -> list[DType] | None:
    """Return the dtype that images have before each transform.

    Transforms that users wrote are taken to keep the dtype. If one of them does not, the worker
    computes its images, and so their whole batch.

    Returns:
        One dtype for each transform; None if only some samples may change it, as a batch has one.
    """
    before: list[DType] = []
    for leaf in leaves:
        before.append(given)
        after = dtype_after(leaf.transform, given)
        if leaf.conditional and after != given:
            return None
        given = after
    return before


def dtype_after(transform: Node, dtype: DType) -> DType:
    """Return the dtype of an image after a transform, given its dtype before."""
    name = type(transform).__name__
    if name not in CASTS or not is_albumentations(transform):
        return dtype
    return np.dtype(transform.dtype) if name == "FromFloat" else FLOATS


def changes_form(transform: Node) -> bool:
    """Return whether a transform may change the shape or dtype of images."""
    name = type(transform).__name__
    if not is_albumentations(transform):
        return False
    if name in CHANGES_DTYPE_OR_LAYOUT or name in CHANGES_SIZE:
        return True
    # ToRGB takes images of one channel, and so changes their shape.
    return name == "ToRGB" or bool(name == "ToGray" and transform.num_output_channels != 3)


_ROLES: Final[tuple[Role, ...]] = ("image", "mask")


def target_roles(compose: BaseCompose) -> dict[str, Role]:
    """Return the names under which a pipeline takes images and masks, each with its role."""
    roles: dict[str, Role] = {role: role for role in _ROLES}
    return roles | {name: kind for name, kind in _added(compose).items() if kind in _ROLES}


def argument_names(compose: BaseCompose) -> frozenset[str]:
    """Return the names of everything that a pipeline takes from a sample beside its image.

    Boxes and keypoints are among them only if the pipeline knows their format.
    """
    kinds = {name: name for name in ("masks", *compose.available_keys)} | _added(compose)
    unknown = {"bboxes", "keypoints"} - compose.processors.keys()
    return frozenset(name for name, kind in kinds.items() if kind not in unknown)


def _added(node: Node) -> dict[str, Role]:
    """Return the ``additional_targets`` of a pipeline and of the pipelines within it."""
    if not is_container(node):
        return {}
    added: dict[str, Role] = dict(node.additional_targets)
    for child in node.transforms:
        added |= _added(child)
    return added


def drawn_parameters(transform: BasicTransform, data: dict[str, Any]) -> dict[str, Any]:
    """Return what a transform draws for a sample, as it does when it is called."""
    params: dict[str, Any] = transform.update_transform_params(transform.get_params(), data)
    params.update(transform.get_params_dependent_on_data(params=params, data=data))
    return params


_MASK_FILLS: Final = ("fill_mask", "mask_drop_value")
"""Attributes of dropouts with the value to write to a mask; None there: the mask is unchanged."""


def mover_of(compose: BaseCompose) -> Mover | None:
    """Return the first transform of a pipeline that moves pixels; None: no transform does."""
    import albumentations

    for leaf in list_leaves(compose):
        transform = leaf.transform
        # A Lambda is a NoOp, too: its user answers for what it does to masks.
        if not isinstance(transform, albumentations.DualTransform) or isinstance(
            transform, albumentations.NoOp
        ):
            continue
        if all(vars(transform).get(name, name) is not None for name in _MASK_FILLS):
            return Mover(type(transform).__name__, "bboxes" in compose.processors)
    return None


_WARPS: Final = frozenset({"Affine", "Rotate", "ShiftScaleRotate"})
"""Names of affine warps, in which the device blends bytes as OpenCV does on most CPUs."""
_OFF: Final = frozenset(
    {
        *("RandomResizedCrop", "RandomSizedCrop", "Resize"),
        *("Blur", "GaussianBlur", "MotionBlur", "HueSaturationValue"),
    }
)
"""Transforms whose device form may be a level off in some pixels: ``tests/augment/bounds.py``."""
MOST_PER_LEVEL: Final = 3
"""Most levels that one level of error may become; usual contrast and gamma stay within that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Placements):
    """Where every operation of an Albumentations pipeline runs."""

    conditional: tuple[bool, ...]
    """For each leaf, whether some samples may skip it; on a device it must then keep the form."""
    sees_pixels: tuple[bool, ...]
    """For each leaf, whether its sampler must be given the real image."""
    opaque_until: int
    """Number of the last leaf that must run unobserved, because it or a container around it has its
    own way of calling; -1 for none."""


def analyse(
    compose: Node,
    ops: Mapping[str, DeviceOp],
    *,
    size: tuple[int, int] | None = None,
    refusal: str | None = None,
    channels: int | None = 3,
    dtype: DType = BYTES,
) -> Plan:
    """Decide where each operation of a pipeline runs, given the size and dtype of its images.

    ``size`` is the ``(height, width)`` that all images have; None: they may differ. ``channels`` is
    None for images ``[H, W]``. ``refusal`` is a reason to run everything in the worker, or None.
    """
    leaves = list_leaves(compose)
    before = follow_dtypes(leaves, dtype)
    refusal = refusal or _refusal(leaves)
    if refusal is None and before is None:
        refusal = "the pipeline may change the dtype of some samples only, and a batch has one"
    opaque = last_opaque(compose)
    forms = [device_form(leaf.transform, ops) for leaf in leaves]
    keeps = {op.owner for op in forms if op is not None and op.owner is not None}
    static_from, sizes = follow_sizes(compose, Size(size, size), keeps)
    boundary = max(static_from, opaque)
    sees = [_reads_pixels(leaf.transform, op) for leaf, op in zip(leaves, forms, strict=True)]
    behind = followers(compose)
    placed: dict[int, OpPlacement] = {}
    barrier_after: str | None = None
    for index in reversed(range(len(leaves))):
        leaf, op = leaves[index], forms[index]
        given = dtype if before is None else before[index]
        name = type(leaf.transform).__name__
        why_worker = refusal
        if why_worker is None and index <= opaque:
            why_worker = "a container around or after it calls its transforms in its own way"
        elif why_worker is None and index <= boundary:
            why_worker = "up to the operation that makes the image size the same for all samples"
        why_worker = why_worker or _why_worker(leaf, op, sizes[index], given, barrier_after)
        if why_worker is None:
            # An operation without a place yet may come after it, too, and may run on the device.
            others = (n for n in sorted(behind[index]) if n not in placed or placed[n].on_device)
            after = [(leaves[other].transform, forms[other]) for other in others]
            why_worker = _why_amplified(leaf, given, after)
        if why_worker is None and op is not None:
            # Up to the boundary the worker gives all images one form: only leaves after it count.
            earlier = leaves[boundary + 1 : index]
            size_here = sizes[index].exact or (64, 64)
            if not _has_form(earlier, leaf, op, size_here, channels, given):
                why_worker = "no device form for its settings, or for the images it is given"
        where, why = _where(name, why_worker, barrier_after, sees=sees[index])
        placed[index] = OpPlacement(name, where, why)
        sees[index] |= where == "worker"
        barrier_after = name if sees[index] else barrier_after
    return Plan(
        placements=tuple(placed[index] for index in range(len(leaves))),
        conditional=tuple(leaf.conditional for leaf in leaves),
        sees_pixels=tuple(sees),
        opaque_until=opaque,
    )


def device_form(transform: Node, ops: Mapping[str, DeviceOp]) -> DeviceOp | None:
    """Return the device form of a transform; a user's subclass never inherits one."""
    kind = type(transform)
    own = next((op for op in ops.values() if op.owner is kind), None)
    return ops.get(kind.__name__) if own is None and is_albumentations(transform) else own


def _where(
    name: str, why_worker: str | None, barrier_after: str | None, *, sees: bool
) -> tuple[Where, str]:
    """Return where an operation runs, and why.

    ``barrier_after`` is the next operation that may need real pixels. ``sees`` says whether the
    sampler of this one needs the image.
    """
    if why_worker is not None:
        return "worker", why_worker
    unless = f", unless {barrier_after} was drawn after it" if barrier_after is not None else ""
    if sees:
        return "either", f"needs the pixels to draw ({name}), then on the batch"
    return ("either" if unless else "device"), f"on the batch{unless}"


def _why_worker(
    leaf: Leaf,
    op: DeviceOp | None,
    before: Size,
    given: DType,
    barrier_after: str | None,
) -> str | None:
    if op is None:
        return "no device form"
    if not takes_dtype(op, given):
        return f"no device form for images of {given}"
    if op.owner is not None:
        return None
    # An arbitrary size that is not square stands for an unknown common one.
    one_size = before.exact or (64, 48)
    made = size_after(leaf.transform, Size(one_size, one_size)).exact
    if made is None:
        return "its output size differs between samples"
    crops = held(leaf.transform, "size") is not None
    if crops and leaf.transform.area_for_downscale is not None and made != one_size:
        return "makes some samples smaller, by areas, which has no device form"
    if not changes_form(leaf.transform):
        return None
    if leaf.conditional:
        return "changes the shape or dtype of some samples only"
    if barrier_after is not None:
        return f"changes the shape or dtype, and {barrier_after} after it may need the pixels"
    if before.exact is None and type(leaf.transform).__name__ in CHANGES_SIZE:
        return "the size of images before it is not known"
    return None


def _why_amplified(
    leaf: Leaf, given: DType, after: list[tuple[Node, DeviceOp | None]]
) -> str | None:
    """Return why an operation must be exact, as a later one enlarges errors; None: it need not."""
    if given != BYTES or not may_differ(leaf.transform):
        return None
    for other, op in after:
        if op is not None and (how := why_amplifies(other, op)) is not None:
            return f"equal in the worker alone, and {type(other).__name__} after it {how}"
    return None


def _refusal(leaves: list[Leaf]) -> str | None:
    if len({id(leaf.transform) for leaf in leaves}) < len(leaves):
        return "the same transform object appears twice in the pipeline"
    if any(held(leaf.transform, "replay_mode") for leaf in leaves):
        return "the pipeline replays what another one has drawn"
    return None


def _reads_pixels(transform: Node, op: DeviceOp | None) -> bool:
    if op is not None and op.owner is not None:
        return op.reads_pixels
    if not is_albumentations(transform):
        return True
    name = type(transform).__name__
    return name == "RandomBrightnessContrast" and not transform.brightness_by_max


def _has_form(
    before: list[Leaf],
    leaf: Leaf,
    op: DeviceOp,
    size: tuple[int, int],
    channels: int | None,
    given: DType,
) -> bool:
    """Return whether an operation has a device form for its settings; a few draws are tried.

    A sample whose parameters have no device form goes to the CPU. After a change of shape or dtype
    that would leave images of two forms in one batch, so all draws must have a device form there;
    otherwise one is enough.
    """
    if type(leaf.transform).__name__ in CHANGES_DTYPE_OR_LAYOUT:
        return True
    changes = [other.transform for other in before if changes_form(other.transform)]
    for other in changes:
        channels = held(other, "num_output_channels") or channels
    shape = size if channels is None else (*size, channels)
    transform = copy_of_compose(leaf.transform)
    try:
        found = (_encodes(transform, op, np.zeros(shape, given)) for _ in range(4))
        return all(found) if changes else any(found)
    except Exception:
        # The transform refuses images of this size or kind, with whatever error (a division by the
        # size of a tiny image, too). Albumentations will raise it again for a real image.
        return True


def _encodes(transform: Node, op: DeviceOp, image: np.ndarray) -> bool:
    params = drawn_parameters(transform, {"image": image})
    return op.encode(transform, params, image.shape, image.dtype) is not None


def may_differ(transform: Node) -> bool:
    """Return whether some uint8 values may differ between the device and the library."""
    if not is_albumentations(transform):
        return False
    name = type(transform).__name__
    if held(transform, "interpolation") == 0:
        return False
    if name in _WARPS:
        return not blends_alike()
    return name in _OFF or (name == "ColorJitter" and any(transform.hue))


def why_amplifies(transform: Node, op: DeviceOp) -> str | None:
    """Return how a transform makes many levels of an error of one level; None: it does not."""
    name = type(transform).__name__
    if op.owner is not None:  # such as posterizing, which makes a whole step of one level
        return "may make many levels of one, as it is registered"
    if _levels_of_one(transform) > MOST_PER_LEVEL:
        return f"makes more than {MOST_PER_LEVEL} levels of one"
    changes_hue = name == "HueSaturationValue" or (name == "ColorJitter" and any(transform.hue))
    return "turns a level into many of hue" if changes_hue else None


def _levels_of_one(transform: Node) -> float:
    """Return the most levels that contrast or gamma makes of one; 1 for other transforms."""
    name = type(transform).__name__
    if name == "RandomBrightnessContrast":
        return float(1 + max(transform.contrast_limit))
    if name == "ColorJitter":
        saturated = max(1, 2 * transform.saturation[1] - 1)
        return float(transform.brightness[1] * transform.contrast[1] * saturated)
    if name == "RandomGamma":  # gamma is steepest in the dark
        return float(round(255 * (1 / 255) ** (min(transform.gamma_limit) / 100)))
    return 1.0

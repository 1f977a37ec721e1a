"""Real photographs for the demo, the examples and the tests, without a download.

scikit-image, scikit-learn and matplotlib ship a few colour photographs inside their wheels. Crops
of them, saved as JPEG files in class folders, cost what any folder of photographs costs: open,
read, decode, crop, augment. The class of a crop is the photograph it was cut from.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lightning_fastdata.errors import DatasetError, OptionsError

if TYPE_CHECKING:
    from PIL.Image import Image

PHOTOGRAPHS: dict[str, tuple[str, str]] = {
    "astronaut": ("skimage", "data/astronaut.png"),
    "cat": ("skimage", "data/chelsea.png"),
    "coffee": ("skimage", "data/coffee.png"),
    "galaxies": ("skimage", "data/hubble_deep_field.jpg"),
    "tissue": ("skimage", "data/ihc.png"),
    "motorcycle": ("skimage", "data/motorcycle_left.png"),
    "retina": ("skimage", "data/retina.jpg"),
    "rocket": ("skimage", "data/rocket.jpg"),
    "temple": ("sklearn", "datasets/images/china.jpg"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
    "admiral": ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
}
"""Class name -> (package, path inside the package) of every photograph."""

_MANIFEST = "photos.json"
_DRAWS_PER_BOX = 100


class Box(NamedTuple):
    """A rectangle in pixels; right and lower edge are outside, as Pillow has it."""

    left: int
    upper: int
    right: int
    lower: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What to cut from every photograph. Equal cuts give equal files."""

    train_per_class: int = 192
    """Training crops of each photograph."""
    val_per_class: int = 40
    """Validation crops of each photograph."""
    shortest_px: int = 300
    """The long side of a crop is at least this; both are where the photograph allows it."""
    longest_px: int = 500
    """No side of a crop is longer than this."""
    train_share: float = 0.7
    """Training crops come from this part of each photograph, counted from its left edge."""
    val_share: float = 0.5
    """Validation crops come from this part, counted from the right edge. Where the two parts
    overlap, a validation crop shows pixels that training crops show too: this is a check that
    training works, not a measure of how it generalises."""
    quality: int = 92
    """JPEG quality, with the colour at half resolution (4:2:0), as cameras and the web have it."""
    seed: int = 0
    """Seed of all boxes."""

    def __post_init__(self) -> None:
        if self.train_per_class < 1 or self.val_per_class < 1:
            raise OptionsError(
                f"A cut needs at least one crop per class, not train_per_class="
                f"{self.train_per_class} and val_per_class={self.val_per_class}."
            )


def photograph_path(name: str) -> Path:
    """Return where the photograph ``name`` lies on this machine; nothing is downloaded.

    Raises:
        OptionsError: There is no photograph of this name.
        DatasetError: The package that ships it is not installed, or this version lacks the file.
    """
    if name not in PHOTOGRAPHS:
        raise OptionsError(f"No photograph is named {name!r}; there are {', '.join(PHOTOGRAPHS)}.")
    package, inside = PHOTOGRAPHS[name]
    spec = find_spec(package)
    for root in (spec.submodule_search_locations or []) if spec else []:
        path = Path(root) / inside
        if path.is_file():
            return path
    raise DatasetError(
        f"The photograph {name!r} should be {inside} in the package {package}, which "
        f"{'lacks it' if spec else 'is not installed'}. "
        "Run `pip install 'lightning-fastdata[demo]'`."
    )


def open_photograph(name: str) -> Image:
    """Return the photograph ``name`` as a loaded Pillow image of mode RGB."""
    from PIL import Image

    with Image.open(photograph_path(name)) as image:
        return image.convert("RGB")


def regions(width: int, height: int, cut: Cut) -> tuple[Box, Box]:
    """Return the parts of a photograph that training and validation crops come from."""
    train = Box(0, 0, round(width * cut.train_share), height)
    return train, Box(width - round(width * cut.val_share), 0, width, height)


def draw_boxes(
    region: Box, count: int, cut: Cut, random_state: np.random.Generator
) -> tuple[Box, ...]:
    """Return ``count`` boxes inside ``region``, no two of them equal.

    A side is drawn between ``shortest_px`` and ``longest_px``. Where the region is too narrow for
    that, between 80 % and all of it.

    Raises:
        DatasetError: The region is too small for so many different boxes.
    """
    boxes: dict[Box, None] = {}
    for _ in range(count * _DRAWS_PER_BOX):
        boxes[_draw_box(region, cut, random_state)] = None
        if len(boxes) == count:
            return tuple(boxes)
    raise DatasetError(
        f"{region} has no room for {count} different crops of {cut.shortest_px} to "
        f"{cut.longest_px} px; ask for fewer crops per class."
    )


def _draw_box(region: Box, cut: Cut, random_state: np.random.Generator) -> Box:
    def draw(low: int, high: int) -> int:
        return int(random_state.integers(low, high, endpoint=True))

    rooms = (region.right - region.left, region.lower - region.upper)
    sides = [
        draw(min(cut.shortest_px, round(0.8 * room)), min(cut.longest_px, room)) for room in rooms
    ]
    if max(sides) < cut.shortest_px:
        roomier = int(rooms[1] > rooms[0])
        sides[roomier] = min(cut.shortest_px, rooms[roomier])
    left = region.left + draw(0, rooms[0] - sides[0])
    upper = region.upper + draw(0, rooms[1] - sides[1])
    return Box(left, upper, left + sides[0], upper + sides[1])


def cut_photographs(folder: str | Path, cut: Cut | None = None, *, threads: int = 4) -> Path:
    """Cut all photographs into ``folder/{train,val}/CLASS/NNNN.jpg`` and return ``folder``.

    The folder appears at once when it is complete, and is reused as it is when it already holds
    this very cut. A folder with another cut of ours is replaced.

    Args:
        folder: Where to put the files; its parent is made if it is missing.
        cut: What to cut; by default 2,112 training and 440 validation crops of 11 photographs.
        threads: Crops encoded at the same time.

    Raises:
        DatasetError: ``folder`` exists and holds something else, or a photograph is missing.
    """
    folder = Path(folder)
    cut = cut or Cut()
    recipe = {"cut": asdict(cut), "photographs": list(PHOTOGRAPHS)}
    there = _read_manifest(folder / _MANIFEST)
    if there == recipe:
        return folder
    replace = isinstance(there, dict) and "cut" in there
    if not replace and folder.exists() and any(folder.iterdir()):
        raise DatasetError(
            f"{folder} holds other files, and they are left alone. Name a new or an empty folder."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}-{secrets.token_hex(8)}")
    unfinished.mkdir()  # fails where anything, a link too, has this name
    try:
        with ThreadPoolExecutor(threads) as pool:
            for label, name in enumerate(PHOTOGRAPHS):
                photograph = open_photograph(name)
                jobs = _files_of(unfinished, name, label, photograph.size, cut)
                # list() raises here what a thread raised there.
                list(pool.map(partial(_save, photograph, cut.quality), jobs))
        (unfinished / _MANIFEST).write_text(json.dumps(recipe, indent=1))
        if replace:
            shutil.rmtree(folder)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _read_manifest(manifest: Path) -> object:
    """Return what a folder says of itself; None if it says nothing that can be read."""
    try:
        with manifest.open(encoding="utf-8") as file:
            read: object = json.loads(file.read(1 << 20))
    except (OSError, ValueError, RecursionError):
        return None
    return read


def _files_of(
    root: Path, name: str, label: int, size: tuple[int, int], cut: Cut
) -> Iterator[tuple[Box, Path]]:
    counts = (cut.train_per_class, cut.val_per_class)
    parts = zip(("train", "val"), counts, regions(*size, cut), strict=True)
    for which, (stage, count, region) in enumerate(parts):
        class_folder = root / stage / name
        class_folder.mkdir(parents=True)
        random_state = np.random.default_rng((cut.seed, label, which))
        for number, box in enumerate(draw_boxes(region, count, cut, random_state)):
            yield box, class_folder / f"{number:04d}.jpg"


def _save(photograph: Image, quality: int, job: tuple[Box, Path]) -> None:
    box, path = job
    photograph.crop(box).save(path, "JPEG", quality=quality, subsampling="4:2:0")

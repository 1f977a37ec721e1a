"""How near whole torchvision v2 pipelines given as ``augment=`` are to torchvision itself.

    python benchmarks/parity_v2.py [--only NAME] [--write docs/parity.md]
    python benchmarks/parity_v2.py --launches [--write docs/parity.md]

Each pipeline of ``v2_pipelines.py`` runs on 48 photographs of several sizes, uint8 and float32,
with masks, boxes or points where it is of that kind: by torchvision, sample by sample under the key
of the sample, and through ``FastDataModule`` and ``FastDataLoader``, where all of it runs in the
workers, and where the device computes what it can (here the CPU takes its place). It prints a
table, or writes it into the page. What is called draws are the numbers themselves that torch draws
for a sample, in their order. All of it takes about five minutes of a core, and no time is measured.

``--launches`` prints what a device is given for a batch of 256, by operation (``v2_launches.py``).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves
from torch.utils.data import Dataset, default_collate
from torchvision import tv_tensors
from torchvision.transforms import v2
from v2_launches import table
from v2_pipelines import PIPELINES, Kind, Pipeline

from demo.photos import PHOTOGRAPHS, open_photograph
from lightning_fastdata import FastDataLoader, FastDataModule, LoaderOptions, prefetch
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.randomness.seeds import keyed_draws
from lightning_fastdata.types import SampleKey

Place = Literal["workers", "device"]
BATCH: Final = 8
SIZES: Final = ((224, 224), (180, 240), (256, 192), (144, 208), (288, 216))
"""Height and width of the photographs of a batch, in pixels; those of the last batch differ."""
SEED: Final = 7
_NEAR: Final = {torch.uint8: 1 / 255, torch.float32: 1e-5}
"""Of an image's range: how far a pixel may be, for images of a dtype that go into a pipeline."""
_SLACK: Final = 1e-6
"""Of the range: a level that went through a division and back."""
_SAME_DRAWS: Final = 2 / 255
"""Of the range: with other draws, images of a sample differ by more than that on average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineParity:
    """One pipeline on images of one dtype, against torchvision."""

    name: str
    dtype: torch.dtype
    """Of the images that go in."""
    place: Place
    """Where the pixels were computed."""
    samples: int
    other_draws: int
    """Samples for which torch drew other numbers than for torchvision, or whose images are so far
    off that they were computed with the numbers of another one."""
    equal: float
    """Share of the pixels that are equal to the bit, 0..1."""
    near: float
    """Share of those that are equal or within a level (uint8) or 1e-5 of the range (float32)."""
    largest: float
    """Largest difference, as a share of the range of an image."""
    targets: int
    """Values of masks, boxes, points and labels that differ."""
    failure: str = ""
    """The error that ended it, if one did."""


def photographs(count: int = 48) -> list[Tensor]:
    """Return parts of photographs, uint8 ``[3, H, W]``; nothing is downloaded."""
    whole = [np.asarray(open_photograph(name)) for name in PHOTOGRAPHS]
    random_state = np.random.default_rng(0)
    cuts = []
    for number in range(count):
        image = whole[number % len(whole)]
        block = number // BATCH
        height, width = SIZES[block if block < len(SIZES) else number % len(SIZES)]
        top = int(random_state.integers(0, image.shape[0] - height + 1))
        left = int(random_state.integers(0, image.shape[1] - width + 1))
        cut = image[top : top + height, left : left + width]
        cuts.append(torch.from_numpy(cut.copy()).permute(2, 0, 1).contiguous())
    return cuts


class Samples(Dataset):
    """Photographs in the form in which torchvision's datasets have them."""

    def __init__(self, images: Sequence[Tensor], kind: Kind, dtype: torch.dtype) -> None:
        self.images, self.kind, self.dtype = images, kind, dtype

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        pixels = self.images[index]
        pixels = pixels / 255 if self.dtype.is_floating_point else pixels.clone()
        height, width = pixels.shape[1:]
        image = tv_tensors.Image(pixels)
        if self.kind == "image":
            return image, index
        if self.kind == "video":
            return tv_tensors.Video(torch.stack([pixels.roll(4 * t, 2) for t in range(8)])), index
        if self.kind == "mask":
            return image, tv_tensors.Mask(self.images[index][0] // 64)
        numbers = np.random.default_rng(index)
        if self.kind == "keypoints":
            points = torch.from_numpy(numbers.uniform(0, 1, (5, 2)).astype(np.float32))
            points *= torch.tensor([width, height])
            made = tv_tensors.KeyPoints(points, canvas_size=(height, width))
            return {"image": image, "points": made, "label": index}
        return image, self._boxes(numbers, height, width)

    def _boxes(self, numbers: np.random.Generator, height: int, width: int) -> dict[str, Any]:
        count = int(numbers.integers(1, 5))
        corners = np.sort(numbers.uniform(0, 1, (count, 2, 2)), axis=2)
        x, y = corners[:, 0] * width, corners[:, 1] * height
        boxes = np.stack([x[:, 0], y[:, 0], x[:, 1] + 1, y[:, 1] + 1], 1).astype(np.float32)
        kept = tv_tensors.BoundingBoxes(
            torch.from_numpy(boxes).clamp(max=max(height, width)),
            format="XYXY",
            canvas_size=(height, width),
        )
        target = {
            "boxes": v2.functional.clamp_bounding_boxes(kept),
            "labels": torch.from_numpy(numbers.integers(1, 90, count)),
            "image_id": int(numbers.integers(1000)),
        }
        if self.kind == "boxes and masks":
            rows, columns = torch.arange(height)[:, None], torch.arange(width)
            inside = [
                (rows >= b[1]) & (rows < b[3]) & (columns >= b[0]) & (columns < b[2])
                for b in target["boxes"]
            ]
            target["masks"] = tv_tensors.Mask(torch.stack(inside).to(torch.uint8))
        return target


def collate_detection(samples: Sequence[tuple[Any, Any]]) -> tuple[Any, list[Any]]:
    """Stack the images where they are of one size, and keep the targets in a list."""
    images, targets = zip(*samples, strict=True)
    alike = len({tuple(image.shape) for image in images}) == 1
    return (torch.stack(images) if alike else list(images)), list(targets)


def collate_any(samples: Sequence[Any]) -> Any:
    """Stack what can be stacked; pipelines that keep the sizes of their images make lists."""
    try:
        return default_collate(list(samples))
    except RuntimeError:
        return [list(part) for part in zip(*samples, strict=True)]


def collate_for(kind: Kind) -> Callable[[Sequence[Any]], Any]:
    return collate_detection if kind.startswith("boxes") else collate_any


class Drawn(TorchDispatchMode):
    """Keeps the numbers that torch draws, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.numbers += [one.clone() for one in tree_leaves(out) if isinstance(one, Tensor)]
        return out


def draws_for(pipeline: nn.Module, data: Samples, place: Place, seed: int = SEED) -> list[Any]:
    """Return for each sample what torch draws where the package runs a pipeline in the worker."""
    transform: Any = as_batch_transform(pipeline)
    if place == "device":
        transform = transform.for_samples(data[index] for index in range(BATCH))
    worker, drawn = transform.in_worker(on_device=place == "device"), []
    for index in range(len(data)):
        sample = data[index]
        with Drawn() as seen:
            worker(sample, SampleKey(seed, 0, index))
        drawn.append(seen.numbers)
    return drawn


def equal_draws(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Return whether the same numbers were drawn, in the same order."""
    return len(one) == len(other) and all(map(torch.equal, one, other))


def eager_batches(
    pipeline: nn.Module, data: Samples, drawn: list[Any], *, seed: int = SEED
) -> Iterator[Any]:
    """Yield the batches that torchvision makes, each sample drawn under its key in epoch 0.

    What torch draws for each sample is added to ``drawn``.
    """
    collate = collate_for(data.kind)
    for first in range(0, len(data), BATCH):
        samples = []
        for index in range(first, min(first + BATCH, len(data))):
            sample = data[index]
            with keyed_draws(SampleKey(seed, 0, index)), Drawn() as seen:
                samples.append(_transformed(pipeline, sample, data.kind))
            drawn.append(seen.numbers)
        yield collate(samples)


def _transformed(pipeline: nn.Module, sample: Any, kind: Kind) -> Any:
    """Call a pipeline as a dataset does: with the image alone where nothing moves along."""
    if kind in ("image", "video"):
        return pipeline(sample[0]), sample[1]
    return pipeline(*sample) if isinstance(sample, tuple) else pipeline(sample)


def our_batches(
    pipeline: nn.Module, data: Samples, place: Place, *, seed: int = SEED
) -> Iterator[Any]:
    """Yield the batches of the package, whose pixels are computed at a place."""
    collate = collate_for(data.kind)
    if place == "workers":
        options = LoaderOptions(num_workers=0)
        module = FastDataModule.from_datasets(
            data, batch_size=BATCH, augment=pipeline, options=options, seed=seed, shuffle=False,
            collate_fn=collate,
        )  # fmt: skip
        yield from module.train_dataloader()
        return
    transform: Any = as_batch_transform(pipeline)
    loader = FastDataLoader(
        data, BATCH, num_workers=0, seed=seed, collate_fn=collate, staged="train", on_device=True,
        transform=transform.for_samples(data[index] for index in range(BATCH)),
    )  # fmt: skip
    yield from prefetch(loader, "cpu", seed=seed)


def stds(pipeline: nn.Module) -> tuple[float, ...]:
    """Return what a pipeline divides the channels by at its end; a one where it does not."""
    found = [one.std for one in pipeline.modules() if isinstance(one, v2.Normalize)]
    found += [
        one.std for one in getattr(pipeline, "transforms", ()) if isinstance(one, v2.Normalize)
    ]
    return tuple(found[-1]) if found else (1.0,)


class _Sums:
    """What is counted over the batches of one pipeline."""

    def __init__(self, std: Sequence[float], near: float) -> None:
        self._std, self._near = torch.tensor(std, dtype=torch.float64)[:, None, None], near
        self.samples = self.targets = 0
        self.otherwise: set[int] = set()
        """Samples that were drawn for otherwise."""
        self.values = self.equal = self.within = 0
        self.largest = 0.0

    def add(self, wanted: Any, got: Any) -> None:
        """Compare two batches; AssertionError if they are of different form."""
        (ours, spec), (theirs, wanted_spec) = (
            tree_flatten_with_path(_plain(one)) for one in (got, wanted)
        )
        assert spec == wanted_spec, f"{spec} instead of {wanted_spec}"
        off: dict[int, float] = {}
        for (path, mine), (_, other) in zip(ours, theirs, strict=True):
            if not isinstance(other, Tensor):
                self.targets += int(mine != other)
                continue
            form = f"{mine.dtype} {tuple(mine.shape)} instead of {other.dtype} {tuple(other.shape)}"
            same = mine.shape == other.shape and mine.dtype == other.dtype
            assert same, f"{keystr(path)} is {form}"
            if _is_image(keystr(path), other):
                self._add_pixels(mine, other, off)
            else:
                self.targets += int((mine != other).sum())
        self.otherwise |= {self.samples + row for row, mean in off.items() if mean > _SAME_DRAWS}
        self.samples += BATCH

    def _add_pixels(self, mine: Tensor, other: Tensor, off: dict[int, float]) -> None:
        unit = 1 / 255 if other.dtype == torch.uint8 else self._std
        gaps = (mine.double() - other.double()).abs() * unit
        # A hue of what bicubic has made brighter than white is no number.
        both_none = mine.isnan() & other.isnan()
        gaps = gaps.masked_fill(both_none, 0.0).nan_to_num(1.0)
        self.equal += int(((mine == other) | both_none).sum())
        self.within += int((gaps <= self._near + _SLACK).sum())
        self.values += gaps.numel()
        self.largest = max(self.largest, float(gaps.max()))
        rows = gaps if other.ndim > 3 else gaps[None]
        first = 0 if other.ndim > 3 else len(off)
        for row, gap in enumerate(rows, first):
            off[row] = max(off.get(row, 0.0), float(gap.mean()))


def _plain(value: Any) -> Any:
    """Return a batch as lists, dicts and plain tensors: the kinds of its containers are no matter.

    Tuples of the pipeline become lists where they are collated.
    """
    if isinstance(value, Tensor):
        return value.as_subclass(Tensor)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _is_image(path: str, value: Tensor) -> bool:
    return value.ndim >= 3 and (path.startswith("[0]") or "'image'" in path)


def parity_of(
    name: str, pipeline: Pipeline, dtype: torch.dtype, place: Place, images: Sequence[Tensor]
) -> PipelineParity:
    """Compare one pipeline with torchvision on images of one dtype."""
    data = Samples(images, pipeline.kind, dtype)
    brightest = 1.0 if dtype.is_floating_point else 255.0
    made = pipeline.build(brightest)
    sums, failure = _Sums(stds(made), _NEAR[dtype]), ""
    try:
        drawn: list[Any] = []
        wanted = list(eager_batches(made, data, drawn))
        got = list(our_batches(pipeline.build(brightest), data, place))
        assert len(got) == len(wanted), f"{len(got)} batches instead of {len(wanted)}"
        for theirs, ours in zip(wanted, got, strict=True):
            sums.add(theirs, ours)
        own = draws_for(pipeline.build(brightest), data, place)
        pairs = enumerate(zip(drawn, own, strict=True))
        sums.otherwise |= {index for index, both in pairs if not equal_draws(*both)}
    except Exception as error:  # it is a row of the table
        where = traceback.extract_tb(error.__traceback__)[-1]
        failure = f"{type(error).__name__} in {where.name}: {error}".splitlines()[0]
    return PipelineParity(
        name=name,
        dtype=dtype,
        place=place,
        samples=sums.samples,
        other_draws=len(sums.otherwise),
        equal=sums.equal / max(sums.values, 1),
        near=sums.within / max(sums.values, 1),
        largest=sums.largest,
        targets=sums.targets,
        failure=failure,
    )


def cells(row: PipelineParity) -> list[str]:
    """Return draws, pixels and targets of a row as text."""
    if row.failure:
        return [row.failure, "", "", ""]
    draws = "equal" if not row.other_draws else f"{row.other_draws} of {row.samples} differ"
    return [draws, *map(percent, (row.equal, row.near)), str(row.targets)]


def percent(share: float) -> str:
    """Return a share, rounded down: only what is whole is called so."""
    return "100 %" if share == 1 else f"{np.floor(share * 1e4) / 1e2:.2f} %"


def section(rows: Sequence[PipelineParity]) -> str:
    """Return the part of the page: a line for each pipeline, of what the device computes."""
    by_name: dict[str, dict[torch.dtype, PipelineParity]] = {}
    for row in rows:
        if row.place == "device":
            by_name.setdefault(row.name, {})[row.dtype] = row
    versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("torch", "torchvision"))
    lines = [
        "",
        f"Written by `python benchmarks/parity_v2.py --write docs/parity.md`, with {versions}.",
        "",
        "| pipeline | draws | uint8: equal | near | float32: equal | near | targets that differ |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in by_name.items():
        both = [found[dtype] for dtype in (torch.uint8, torch.float32)]
        other = sum(row.other_draws for row in both)
        shares = [cell for row in both for cell in cells(row)[1:3]]
        draws = "equal" if not other else f"{other} differ"
        failed = next((row.failure for row in both if row.failure), "")
        line = [name, failed or draws, *shares, str(sum(row.targets for row in both))]
        lines.append(f"| {' | '.join(line)} |")
    return "\n".join([*lines, ""])


def written_into(page: str, name: str, part: str) -> str:
    """Return a page with what is between the marks of a name replaced."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, rest = page.split(begin)
    return f"{before}{begin}\n{part}\n{end}{rest.split(end)[1]}"


def show(name: str, part: str, page: Path | None) -> None:
    """Print a part of a page, or write it there, between the marks of its name."""
    if page is None:
        print(part)
    else:
        page.write_text(written_into(page.read_text(), name, part))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="pipelines whose name holds this text")
    parser.add_argument("--place", choices=("workers", "device"), help="one of the two places")
    parser.add_argument("--count", type=int, default=48, help="photographs")
    parser.add_argument("--write", type=Path, help="page to write the table into")
    parser.add_argument("--launches", action="store_true", help="count launches and bytes instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.launches:
        show("launches", f"\n{table()}\n", options.write)
        return
    images, rows = photographs(options.count), []
    places: Sequence[Place] = (options.place,) if options.place else ("workers", "device")
    chosen = {name: one for name, one in PIPELINES.items() if options.only in name}
    for name, pipeline in chosen.items():
        for place in places:
            for dtype in (torch.uint8, torch.float32):
                with warnings.catch_warnings(), contextlib.suppress(KeyboardInterrupt):
                    warnings.simplefilter("ignore")
                    rows.append(parity_of(name, pipeline, dtype, place, images))
                row = rows[-1]
                kind = str(dtype).removeprefix("torch.")
                text = "  ".join(f"{cell:>9}" for cell in cells(row))
                print(f"{name:<36} {place:<8} {kind:<8} {text}  {row.largest:.2g}", flush=True)
    bad = [row for row in rows if row.failure or row.other_draws or row.targets or row.near < 0.95]
    print(f"{len(chosen)} pipelines, {len(rows)} rows, {len(bad)} not as torchvision's")
    if options.write is not None:
        show("torchvision", section(rows), options.write)


if __name__ == "__main__":
    main()

"""How far our pixels are from torchvision's on the user's own files, in decibels."""

from __future__ import annotations

import math
import os
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from lightning_fastdata.errors import DatasetError, OptionsError
from lightning_fastdata.images.crops import CropRule, Placement, keyed_uniform
from lightning_fastdata.images.decoders import choose_decoder
from lightning_fastdata.images.index import scan_folder
from lightning_fastdata.images.reading import MAX_PIXELS, open_image
from lightning_fastdata.images.resample import plan_resample, render, settle_resample
from lightning_fastdata.types import SampleKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_fastdata.images.decoders import DecoderName, Pixels
    from lightning_fastdata.images.resample import Resample

Reference: TypeAlias = Literal["pil", "tensor"]
"""``pil``: torchvision's transforms on the PIL image, as ``ImageFolder`` feeds them by default.
``tensor``: the same transforms on the uint8 tensor of the decoded picture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityRow:
    """One crop of one file, resized in one way, against torchvision."""

    path: str
    """The file."""
    resample: Resample
    """How we were asked to resize."""
    downscale: float
    """Pixels of the crop per pixel of the sample, the larger of the two axes; < 1 enlarges."""
    scale: int
    """Divisor at which the file was decoded; 1 is fully."""
    filter: str
    """What resized the rest: linear, area or antialias."""
    psnr_db: float
    """Peak signal-to-noise ratio in dB; infinite if every pixel is the same. Above 45 dB no eye
    sees a difference; below 35 dB a model might."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """All rows of one comparison; ``str(report)`` is a table."""

    decoder: str
    """Name of the decoder that was used."""
    reference: Reference
    """What was compared with."""
    rows: tuple[ParityRow, ...]
    """One per file, crop and resample, in the order given."""

    def of(self, resample: Resample) -> tuple[float, ...]:
        """Return the dB of every row of this resample."""
        return tuple(row.psnr_db for row in self.rows if row.resample == resample)

    def __str__(self) -> str:
        heads = f"{'crops':>7}{'median dB':>11}{'worst dB':>10}{'identical':>11}  worst file"
        lines = [
            f"PSNR against torchvision ({self.reference}), decoder {self.decoder}",
            f"{'resample':10}{heads}",
        ]
        for resample in dict.fromkeys(row.resample for row in self.rows):
            rows = [row for row in self.rows if row.resample == resample]
            worst = min(rows, key=lambda row: row.psnr_db)
            median = statistics.median(row.psnr_db for row in rows)
            same = sum(math.isinf(row.psnr_db) for row in rows) / len(rows)
            lines.append(
                f"{resample:10}{len(rows):7}{median:11.1f}{worst.psnr_db:10.1f}{same:11.0%}"
                f"  {worst.path} (downscale {worst.downscale:.2f}, 1/{worst.scale}, {worst.filter})"
            )
        return "\n".join(lines)


def parity(
    paths: Sequence[str | os.PathLike[str]],
    rule: CropRule,
    *,
    resamples: Sequence[Resample] = ("auto", "exact"),
    reference: Reference = "pil",
    crops_per_file: int = 1,
    seed: int = 0,
    decoder: DecoderName = "auto",
    max_pixels: int = MAX_PIXELS,
) -> ParityReport:
    """Compare decode, crop and resize with torchvision's on the same boxes of the same files.

    Args:
        paths: The files.
        rule: How samples are cut out; both sides use the same boxes.
        resamples: What to compare.
        reference: What to compare with.
        crops_per_file: Boxes drawn per file; 1 is enough for a rule without randomness.
        seed: Of the boxes.
        decoder: As for ``FastImageFolder``.
        max_pixels: As for ``FastImageFolder``.

    Raises:
        DatasetError: If there are no files, or one cannot be read or decoded.
        OptionsError: If an option has an impossible value.
    """
    if not paths:
        raise DatasetError("parity was given no files to compare. Give at least one.")
    if crops_per_file < 1:
        raise OptionsError(f"crops_per_file is {crops_per_file}; give at least 1.")
    if reference not in ("pil", "tensor"):
        raise OptionsError(f"Unknown reference {reference!r}; choose pil or tensor.")
    settled = [(resample, settle_resample(resample, rule.crop)) for resample in resamples]
    chosen = choose_decoder(decoder)
    out = np.empty((rule.size, rule.size, 3), np.uint8)
    rows = []
    for index, path in enumerate(paths):
        image = open_image(str(path), decoder=chosen, max_pixels=max_pixels)
        for crop in range(crops_per_file):
            uniform = keyed_uniform(SampleKey(seed, crop, index))
            placement = rule.place(image.height, image.width, uniform)
            wanted = torchvision_sample(str(path), placement, rule.size, reference)
            for resample, meaning in settled:
                plan = plan_resample(placement, meaning, scalable=image.scalable)
                render(image, placement, plan, out)
                rows.append(
                    ParityRow(
                        path=str(path),
                        resample=resample,
                        downscale=max(
                            placement.box.height / placement.height,
                            placement.box.width / placement.width,
                        ),
                        scale=plan.scale,
                        filter=plan.filter,
                        psnr_db=psnr_db(out, wanted),
                    )
                )
    return ParityReport(decoder=chosen.name, reference=reference, rows=tuple(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderParity:
    """What training and validation make of one folder, against torchvision's transforms on PIL."""

    folder: str
    """The image folder."""
    size: int
    """Height and width of a sample in pixels."""
    files: int
    """Files of the folder that were compared."""
    total: int
    """Files in the folder."""
    train: ParityReport
    """``RandomResizedCrop(size)`` with ``resample="auto"``, the default, and with ``"exact"``."""
    validation: ParityReport
    """``Resize`` and ``CenterCrop(size)``, which are always exact."""

    def lines(self) -> tuple[str, ...]:
        """Return what was compared, the head of a table, its rows, and how to read them."""
        of_files = f"{self.files} of {self.total} files of {self.folder}, {self.size} px"
        heads = f"{'median dB':>10}{'worst dB':>10}{'identical':>11}  worst file"
        return (
            f"{of_files}, PSNR against torchvision on PIL, decoder {self.train.decoder}",
            f"{'':12}{'resample':9}{heads}",
            self._line("train", self.train, "auto"),
            self._line("train", self.train, "exact"),
            self._line("validation", self.validation, "exact"),
            "Above 45 dB no eye sees a difference; below 35 dB a model might.",
            'FastImageFolder(resample="exact") trains on the pixels of the second row.',
        )

    def _line(self, stage: str, report: ParityReport, resample: Resample) -> str:
        rows = [row for row in report.rows if row.resample == resample]
        worst = min(rows, key=lambda row: row.psnr_db)
        median = statistics.median(report.of(resample))
        same = sum(math.isinf(row.psnr_db) for row in rows) / len(rows)
        return (
            f"{stage:12}{resample:9}{median:10.1f}{worst.psnr_db:10.1f}{same:11.0%}  "
            f"{os.path.relpath(worst.path, self.folder)} (downscale {worst.downscale:.2f})"
        )


def folder_parity(
    folder: str | os.PathLike[str], *, count: int = 64, size: int = 224, seed: int = 0
) -> FolderParity:
    """Compare what ``FastImageFolder`` makes of a folder with what torchvision makes of it.

    Args:
        folder: Image folder with one sub-folder per class.
        count: Files to compare at most, spread evenly over the folder.
        size: Height and width of a sample in pixels.
        seed: Of the random crops.

    Raises:
        DatasetError: If there is no such folder, or a file cannot be read or decoded.
        OptionsError: If ``count`` or ``size`` is below 1.
    """
    if count < 1:
        raise OptionsError(f"count is {count}; give the number of files to compare, at least 1.")
    crops = CropRule(size=size, horizontal_flip=0.5)
    centre = CropRule(size=size, crop="center")
    _, _, index = scan_folder(str(folder))
    total = len(index)
    files = min(count, total)
    paths = [index.path(at * total // files) for at in range(files)]
    return FolderParity(
        folder=str(folder),
        size=size,
        files=files,
        total=total,
        train=parity(paths, crops, resamples=("auto", "exact"), seed=seed),
        validation=parity(paths, centre, resamples=("exact",), seed=seed),
    )


def torchvision_sample(
    path: str, placement: Placement, size: int, reference: Reference = "pil"
) -> Pixels:
    """Return the sample as torchvision makes it: ``[size, size, 3]`` uint8."""
    from torchvision.datasets.folder import pil_loader
    from torchvision.transforms.v2 import functional

    image = pil_loader(path)
    if reference == "tensor":
        image = functional.pil_to_tensor(image)
    box = placement.box
    image = functional.crop(image, box.top, box.left, box.height, box.width)
    image = functional.resize(image, [placement.height, placement.width], antialias=True)
    image = functional.crop(image, placement.top, placement.left, size, size)
    if placement.flip:
        image = functional.horizontal_flip(image)
    pixels: Pixels = image.permute(1, 2, 0).numpy() if reference == "tensor" else np.array(image)
    return pixels


def psnr_db(ours: Pixels, theirs: Pixels) -> float:
    """Return the peak signal-to-noise ratio of two uint8 pictures in dB, infinite if equal."""
    error = float(np.mean((ours.astype(np.float64) - theirs) ** 2))
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)

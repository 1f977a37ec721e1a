"""Training batches from a folder of JPEG photographs: the peers' loaders and ours, in turn.

    python benchmarks/jpeg_folder.py [--rounds 7] [--json FILE] [--publish] [--rows DataLoader,timm]

Shuffled batches of 64, decode, RandomResizedCrop(224), horizontal flip, delivered as uint8 and as
normalised float32, over crops of photographs of about 480 x 375 px (JPEG quality 92, 4:2:0) in the
page cache. Every loader gets as many workers or threads (--workers, 2); torch's own DataLoader of
an ImageFolder is also measured with 0, 1, 2 and 4, of which the best is published against. Each
round reads one epoch with every loader, beginning with another one each time; loaders and their
workers stay between rounds, and the first round is not counted. Ratios are medians over rounds of
the ratio within a round. "decode alone" is what the two threads decode when they do nothing else:
nobody can load faster without decoding less. CPU ms/img is the CPU time of all threads and
processes, which other programs on the machine disturb less than they disturb the speed.
FastImageFolder normalises where it decodes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import cv2
import peers
import psutil
import simplejpeg
import torch
from peers import Epoch, JpegTask
from published import TORCH_WORKERS, Ratio, add_publish, over_best, publish
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from turns import machine

from demo.photos import PHOTOGRAPHS, Cut, cut_photographs
from lightning_fastdata import FastDataLoader, FastDataModule, FastImageFolder
from lightning_fastdata.host.machine import describe_machine, read_versions

BASE, LIMIT = "DataLoader, ImageFolder", "decode alone, threads"
WORKERS, FOLDER = "ours, workers", "DataLoader, FastImageFolder"
DALI, FFCV, PLAIN = "DALI, CPU", "FFCV, jpg", "ours, ImageFolder, workers"


def folder_of(task: JpegTask) -> FastImageFolder:
    normalize = ((peers.MEAN / 255).tolist(), (peers.STD / 255).tolist()) if task.floats else False
    return FastImageFolder(task.folder, size=task.size, horizontal_flip=0.5, normalize=normalize)


def ours(data, task: JpegTask, executor: str) -> Epoch:
    loader = FastDataLoader(data, shuffle=True, executor=executor, **peers.worker_settings(task))
    return lambda: peers.firsts(loader)


@peers.or_reason
def torch_folder(task: JpegTask) -> Epoch:
    loader = DataLoader(folder_of(task), shuffle=True, **peers.worker_settings(task))
    return lambda: peers.firsts(loader)


@peers.or_reason
def ours_folder(task: JpegTask) -> Epoch:
    return ours(folder_of(task), task, "workers")


@peers.or_reason
def ours_plain(task: JpegTask) -> Epoch:
    return ours(ImageFolder(task.folder, peers.torchvision_transform(task)), task, "workers")


def automatic(data, task: JpegTask) -> Epoch:
    """The loader that FastDataModule makes with every option left to it."""
    module = FastDataModule.from_datasets(data, batch_size=task.batch, drop_last=True)
    loader = module.train_dataloader()
    print(f"auto chose {loader.executor} with num_workers={loader.num_workers}")
    return lambda: peers.firsts(loader)


@peers.or_reason
def ours_folder_auto(task: JpegTask) -> Epoch:
    return automatic(folder_of(task), task)


@peers.or_reason
def ours_plain_auto(task: JpegTask) -> Epoch:
    return automatic(ImageFolder(task.folder, peers.torchvision_transform(task)), task)


def decode(path: str) -> int:
    with open(path, "rb", buffering=0) as file:
        return simplejpeg.decode_jpeg(file.read()).shape[0]


def decode_alone(task: JpegTask, *, processes: bool) -> Epoch:
    paths = [path for path, _ in ImageFolder(task.folder).samples]
    if processes:
        pool = get_context("fork").Pool(task.workers)
        return lambda: (torch.empty(n) for n in [len(pool.map(decode, paths, chunksize=16))])
    threads = ThreadPoolExecutor(task.workers)
    return lambda: (torch.empty(n) for n in [len(list(threads.map(decode, paths)))])


def torchs(workers: int) -> str:
    return f"{BASE}, {workers} workers"


def torch_with(workers: int) -> Callable[[JpegTask], Epoch | str]:
    return lambda task: peers.torch_jpeg(replace(task, workers=workers))


PUBLISHED = {
    "": WORKERS,
    " ImageFolder": PLAIN,
    " LitData": "LitData",
    " FFCV": FFCV,
    " DALI": DALI,
}
"""End of the name of a ratio -> its row."""
# Those that fork workers come first, before the others have started threads of their own.
ROWS = {
    BASE: peers.torch_jpeg,
    **{torchs(workers): torch_with(workers) for workers in TORCH_WORKERS},
    "timm": peers.timm_jpeg,
    "WebDataset": peers.webdataset_jpeg,
    "LitData": peers.litdata_jpeg,
    PLAIN: ours_plain,
    "ours, ImageFolder, auto": ours_plain_auto,
    WORKERS: ours_folder,
    FOLDER: torch_folder,
    "ours, auto": ours_folder_auto,
    "decode alone, processes": lambda task: decode_alone(task, processes=True),
    LIMIT: lambda task: decode_alone(task, processes=False),
    FFCV: peers.ffcv_jpeg,
    DALI: peers.dali_jpeg,
}


def check(row: str, task: JpegTask, epoch: Epoch) -> str | None:
    """Run an epoch, and say what is wrong with its batches if anything is."""
    counted = 0
    for images in epoch():
        counted += len(images)
        if row.startswith("decode alone"):
            continue
        shapes = [(task.batch, task.size, task.size, 3), (task.batch, 3, task.size, task.size)]
        if tuple(images.shape) not in shapes:
            return f"delivers {tuple(images.shape)}"
        wanted = torch.float32 if task.floats else torch.uint8
        if images.dtype != wanted:
            return f"delivers {images.dtype}, not {wanted}"
        if images[0].float().std() == 0:
            return "delivers an empty picture"
    return None if counted else "delivers nothing"


def cpu_s() -> float:
    """CPU seconds of this process and of all below it so far."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(spent.user + spent.system for spent in times)


def rate(epoch: Epoch) -> tuple[float, float]:
    """Images per second, and CPU milliseconds of all threads and processes per image."""
    used, began, count = cpu_s(), time.perf_counter(), 0
    for images in epoch():
        count += len(images)
    wall_s = time.perf_counter() - began
    return count / wall_s, (cpu_s() - used) / count * 1000


def measure(task: JpegTask, rows: list[str], rounds: int) -> tuple[dict, dict, dict[str, str]]:
    """Each row's images per second and CPU ms per image, round by round; why others are absent."""
    epochs, absent = {}, {}
    for row in rows:
        epoch = ROWS[row](task)
        if not isinstance(epoch, str):
            try:
                wrong = check(row, task, epoch)
            except Exception as error:
                wrong = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            if wrong is None:
                epochs[row] = epoch
            epoch = wrong
        if isinstance(epoch, str):
            absent[row] = epoch
    rates: dict[str, list[float]] = {row: [] for row in epochs}
    costs: dict[str, list[float]] = {row: [] for row in epochs}
    names = list(epochs)
    for turn in range(rounds + 1):
        first = turn % len(names)
        for row in names[first:] + names[:first]:
            speed, cost_ms = rate(epochs[row])
            if turn:
                rates[row].append(speed)
                costs[row].append(cost_ms)
    return rates, costs, absent


def ratio(rates: dict, row: str, *others: str) -> float | None:
    """Median over rounds of the row against the best of the others; None if one is absent."""
    against = [rates[other] for other in others if other in rates]
    if row not in rates or not against:
        return None
    best = [max(values) for values in zip(*against, strict=True)]
    return statistics.median(a / b for a, b in zip(rates[row], best, strict=True))


TARGETS = [
    ("uint8", WORKERS, (FOLDER,), 1.1),
    ("float32", WORKERS, (FOLDER,), 1.1),
    ("uint8", WORKERS, (DALI, FFCV), 1.5),
    ("uint8", WORKERS, (LIMIT,), 0.75),
    ("uint8", PLAIN, (BASE,), 1.3),
]


def table(kind: str, rates: dict, costs: dict, absent: dict[str, str]) -> list[str]:
    lines = [
        f"| {kind} | img/s | min-max | CPU ms/img | x DataLoader | x decode alone |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row, values in rates.items():
        against = [ratio(rates, row, other) for other in (BASE, LIMIT)]
        cells = ["" if found is None else f"{found:.2f}" for found in against]
        cells.insert(0, f"{statistics.median(costs[row]):.2f}")
        spread = f"{min(values):.0f}-{max(values):.0f}"
        lines.append(
            f"| {row} | {statistics.median(values):.0f} | {spread} | {' | '.join(cells)} |"
        )
    return lines + [f"| {row} | absent: {reason} | | | | |" for row, reason in absent.items()]


def verdicts(found: dict[str, dict]) -> list[dict]:
    return [
        {
            "kind": kind,
            "row": row,
            "against": [other for other in others if other in found[kind]],
            "wanted": wanted,
            "measured": ratio(found[kind], row, *others),
        }
        for kind, row, others, wanted in TARGETS
        if kind in found
    ]


def over_torch(kind: str, rates: dict[str, list[float]]) -> dict[str, Ratio]:
    """Return the ratios that are published; none if torch was not measured in full."""
    spent = {row: [1 / rate for rate in found] for row, found in rates.items()}
    by_workers = {n: spent[torchs(n)] for n in TORCH_WORKERS if torchs(n) in spent}
    if len(by_workers) < len(TORCH_WORKERS):
        return {}
    measured = {end: row for end, row in PUBLISHED.items() if row in spent}
    return {f"jpeg/{kind}{end}": over_best(spent[row], by_workers) for end, row in measured.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--count", type=int, default=2112, help="number of photographs")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kinds", default="uint8,float32")
    parser.add_argument("--rows", default="", help="only rows that contain one of these, a,b,c")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    add_publish(parser)
    options = parser.parse_args()
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    wanted = [part.casefold() for part in options.rows.split(",")]
    rows = [row for row in ROWS if any(part in row.casefold() for part in wanted)]
    per_class = -(-options.count // len(PHOTOGRAPHS))
    cut = Cut(train_per_class=per_class, val_per_class=1, shortest_px=375, longest_px=480)
    cache = Path(tempfile.gettempdir()) / f"fastdata-benchmark-{per_class}"
    about = {
        "machine": describe_machine(torch.device("cpu")),
        "load": os.getloadavg(),
        "versions": {**read_versions(), **peers.versions()},
        "rounds": options.rounds,
        "workers": options.workers,
    }
    print("\n".join(f"{name}: {value}" for name, value in about.items()), end="\n\n")
    found, spent, missing = {}, {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = cut_photographs(cache, cut) / "train"
        task = JpegTask(folder=folder, scratch=Path(scratch), workers=options.workers)
        for kind in options.kinds.split(","):
            variant = replace(task, floats=kind == "float32")
            rates, costs, absent = measure(variant, rows, options.rounds)
            found[kind], spent[kind], missing[kind] = rates, costs, absent
            print("\n".join(table(kind, rates, costs, absent)), end="\n\n", flush=True)
            publish(over_torch(kind, rates), machine(), asked=options.publish)
    judged = verdicts(found)
    for verdict in judged:
        against, measured = " / ".join(verdict["against"]), verdict["measured"]
        said = "not measured" if measured is None else f"{measured:.2f}"
        print(f"{verdict['row']} : {against} = {said}, wanted >= {verdict['wanted']}")
    if options.json:
        results = {
            **about,
            "images_per_s": found,
            "cpu_ms_per_image": spent,
            "absent": missing,
            "targets": judged,
        }
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

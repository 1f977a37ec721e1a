"""Batches made by actors of a Ray cluster: beside local workers, torch's DataLoader and Ray Data.

    python benchmarks/remote.py [--rounds 5] [--count 2112] [--json FILE]

Three tables:

- a folder of JPEG photographs (decode with Pillow, RandomResizedCrop(224), flip, uint8 batches of
  64, 9.6 MB each) read with two workers, each row in a process with a cluster of its own: images/s
  of an epoch, medians over rounds in turn, the first epoch not counted;
- what a batch costs that takes no time to make, of 64 KiB and of 9.6 MB;
- the longest wait for a batch after an actor, all actors, or a node was killed.

"near" actors run on the node of the training process, "far" ones on another node: of this machine,
so that there is no network between them, but an object store of its own, from which every batch is
copied.
Ray Data keeps the order (``preserve_order``), its blocks are batches.
"""

from __future__ import annotations

import os

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import contextlib
import json
import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import peers
import psutil
import ray
import torch
import turns
from ray.cluster_utils import Cluster
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder

from demo.photos import PHOTOGRAPHS, Cut, cut_photographs
from lightning_fastdata import FastDataLoader

NEAR, FAR = (3,), (0, 2)
"""CPUs of each node, as Ray counts them; the training process is on the first, and keeps one."""
SIZES = {"64 KiB": 2**16, "9.6 MB": 64 * 3 * 224 * 224}
SAMPLES = 16


class Zeros(Dataset):
    """Samples that take no time."""

    def __init__(self, batch_bytes: int) -> None:
        self.sample = torch.zeros(batch_bytes // SAMPLES, dtype=torch.uint8)
        self.batches = 400 if batch_bytes < 2**20 else 100

    def __len__(self) -> int:
        return SAMPLES * self.batches

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


class Slow(Dataset):
    """Samples of 5 ms."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.005)
        return torch.full((100,), index)


@contextlib.contextmanager
def connected(nodes: tuple[int, ...]) -> Iterator[Cluster]:
    """Be connected to a cluster of nodes with so many CPUs."""
    how = {"object_store_memory": 2**30, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": nodes[0], **how})
    for cpus in nodes[1:]:
        cluster.add_node(num_cpus=cpus, resources={"reads": cpus}, **how)
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def ray_data(data: Any, batch: int) -> Callable[[], Iterator[torch.Tensor]]:
    """Ray Data over the samples of a dataset; a block is a batch."""
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    ray.data.DataContext.get_current().enable_progress_bars = False
    held = ray.put(data)

    def read(rows: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(1)
        source = ray.get(held)
        samples = [source[int(index)] for index in rows["item"]]
        samples = [each[0] if isinstance(each, tuple) else each for each in samples]
        return {"images": torch.stack(samples).numpy()}

    def epoch() -> Iterator[torch.Tensor]:
        order = list(range(len(data) // batch * batch))
        random.shuffle(order)
        blocks = ray.data.from_items(order, override_num_blocks=len(order) // batch)
        made = blocks.map_batches(read, batch_size=batch)
        for each in made.iter_torch_batches(batch_size=batch, prefetch_batches=4):
            yield each["images"]

    return epoch


def plain(loader: Any) -> Callable[[], Iterator[torch.Tensor]]:
    return lambda: (batch[0] if isinstance(batch, list | tuple) else batch for batch in loader)


def loader_of(row: str, data: Any, batch: int) -> Callable[[], Iterator[torch.Tensor]]:
    how = {"batch_size": batch, "num_workers": 2, "drop_last": True, "persistent_workers": True}
    if row == "Ray Data":
        return ray_data(data, batch)
    if row == "torch DataLoader":
        return plain(DataLoader(data, shuffle=True, **how))
    executor = "workers" if row == "ours, workers" else "ray"
    return plain(FastDataLoader(data, shuffle=True, executor=executor, **how))


ROWS: dict[str, tuple[int, ...] | None] = {
    "torch DataLoader": None,
    "ours, workers": None,
    "ours, ray near": NEAR,
    "ours, ray far": FAR,
    "Ray Data": (2,),
}


def contender(row: str, folder: Path | None, pipe: Any) -> None:
    """Answer each request for an epoch, of photographs or of batches of a size."""
    torch.set_num_threads(1)
    # Other processes do not have this module, which is the spawned one's main module.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    nodes = ROWS[row]
    epochs: dict[str, Any] = {}
    with connected(nodes) if nodes else contextlib.nullcontext():
        while (what := pipe.recv()) is not None:
            if what not in epochs:
                task = peers.JpegTask(folder=folder, scratch=folder)
                photos = ImageFolder(str(folder), peers.torchvision_transform(task))
                epochs.clear()  # who read before lets go of the CPUs
                sizes = {"jpeg": (photos, 64)}
                sizes |= {name: (Zeros(size), SAMPLES) for name, size in SIZES.items()}
                epochs[what] = loader_of(row, *sizes[what])
            count, first_s, began_s = 0, 0.0, time.perf_counter()
            for images in epochs[what]():
                first_s = first_s or time.perf_counter()
                count += len(images)
            ended_s = time.perf_counter()
            if what == "jpeg":
                pipe.send(count / (ended_s - began_s))
            else:
                pipe.send((ended_s - first_s) / (count / SAMPLES - 1) * 1000)
        epochs.clear()


def in_turn(what: str, folder: Path, pipes: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    def asked(row: str) -> float:
        pipes[row].send(what)
        return pipes[row].recv()

    return turns.in_turn({row: lambda row=row: asked(row) for row in pipes}, rounds=rounds)


def recovery(kind: str) -> tuple[float, float]:
    """Median wait for a batch, and the longest one after something was killed; milliseconds."""
    with connected((0, 1, 2)) as cluster:
        loader = FastDataLoader(Slow(), 4, executor="ray", num_workers=3)
        waits, until = [], None
        asked_s = time.perf_counter()
        for number, _ in enumerate(loader):
            waits.append((time.perf_counter() - asked_s) * 1000)
            if number == 400:
                actors = [each for each in psutil.process_iter() if is_actor(each)]
                if kind == "a node of two":
                    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
                for each in {"one actor": actors[:1], "all actors": actors}.get(kind, []):
                    each.kill()
                until = time.perf_counter() + 30
            if until is not None and time.perf_counter() > until:
                break
            asked_s = time.perf_counter()
        loader.close()
    return statistics.median(waits[50:400]), max(waits[401:])


def is_actor(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()).startswith("ray::ReadingActor")
    return False


def row_of(name: str, values: list[float], base: list[float], digits: int) -> str:
    middle, least, most = statistics.median(values), min(values), max(values)
    told = " | ".join(f"{value:.{digits}f}" for value in (middle, least, most))
    return f"| {name} | {told} | {turns.ratio(values, base):.2f} |"


def main() -> None:
    parser = turns.arguments(__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=2112, help="number of photographs")
    parser.add_argument("--kinds", default=",".join(["jpeg", *SIZES, "recovery"]))
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": turns.machine(), "ray": ray.__version__}
    per_class = -(-options.count // len(PHOTOGRAPHS))
    cut = Cut(train_per_class=per_class, val_per_class=1, shortest_px=375, longest_px=480)
    cache = Path(tempfile.gettempdir()) / f"fastdata-benchmark-{per_class}"
    kinds = options.kinds.split(",")
    reads = any(kind in ("jpeg", *SIZES) for kind in kinds)
    folder = cut_photographs(cache, cut) / "train" if reads else cache
    spawn, pipes, processes = get_context("spawn"), {}, []
    for row in ROWS if reads else ():
        pipes[row], theirs = spawn.Pipe()
        processes.append(spawn.Process(target=contender, args=(row, folder, theirs)))
        processes[-1].start()
    for what in ["jpeg", *SIZES]:
        if what not in kinds:
            continue
        found[what] = in_turn(what, folder, pipes, options.rounds)
        unit = "images/s" if what == "jpeg" else "ms a batch"
        against = "ours, workers" if what == "jpeg" else "torch DataLoader"
        print(f"\n| {what} | {unit} | least | most | x {against} |")
        print("| --- | ---: | ---: | ---: | ---: |")
        for row, values in found[what].items():
            print(row_of(row, values, found[what][against], 0 if what == "jpeg" else 2), flush=True)
    for pipe, process in zip(pipes.values(), processes, strict=True):
        pipe.send(None)
        process.join()
    if "recovery" in kinds:
        print("\n| killed | median wait, ms | longest wait, ms |\n| --- | ---: | ---: |")
        for kind in ("one actor", "all actors", "a node of two"):
            found[kind] = recovery(kind)
            print(f"| {kind} | {found[kind][0]:.1f} | {found[kind][1]:.0f} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

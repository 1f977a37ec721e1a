"""Whether memory stays flat over many batches, what takes it, and what ``share`` saves.

    python benchmarks/memory.py --batches 50000
    python benchmarks/memory.py --causes         # 20 planted causes, and 20 healthy datasets
    python benchmarks/memory.py --share          # a list, share, NumPy arrays, datasets

PSS divides memory that several processes map among them, so that sums over processes hold. Program
files are left out, since what others map of them changes the numbers. Each case is a program of its
own: of what a forked one has in common with its parent a part would count as the parent's.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from lightning_fastdata import FastDataLoader, share
from lightning_fastdata.data import PackedStrings
from lightning_fastdata.host.cpu import worker_processes
from lightning_fastdata.insight.evidence import Evidence
from lightning_fastdata.insight.machine import MemoryMeter, memory_text, memory_uses
from lightning_fastdata.insight.verdict import findings

CASES = ("workers", "stream")


class Rows(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((512,), index), index


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        for index in range(self.length):
            yield torch.full((512,), index), f"row {index}"


def pss_bytes(pid):
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        own = [line for line in file if line.startswith(("Pss_Anon:", "Pss_Shmem:"))]
    return sum(int(line.split()[1]) * 1024 for line in own)


def figures_of(pids):
    gc.collect()
    return {
        "training_mib": pss_bytes(os.getpid()) / 2**20,
        "side_mib": sum(map(pss_bytes, pids)) / 2**20,
        "files": len(os.listdir("/proc/self/fd")),
        "side_files": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        "objects": len(gc.get_objects()),
    }


def run(case, batches, workers):
    """Return what was read after the first tenth and at the end of one epoch, and us per batch."""
    kind = Stream if case == "stream" else Rows
    executor = "workers" if case == "stream" else case
    loader = FastDataLoader(
        kind(4 * batches // (workers if case == "stream" else 1)),
        batch_size=4,
        num_workers=workers,
        persistent_workers=True,
        executor=executor,
    )
    running = iter(loader)
    pids = [child.process.pid for child in loader._iterator.children.values()]
    warm = batches // 10
    for _ in range(warm):
        next(running)
    before, began = figures_of(pids), time.perf_counter()
    for _ in range(batches - warm - 4):
        next(running)
    spent_s = time.perf_counter() - began
    after = figures_of(pids)
    loader.close()
    return before, after, 1e6 * spent_s / (batches - warm - 4)


# -- what takes memory -----------------------------------------------------------------------------

SAMPLES = 300_000
_logged = []


class Planted(Dataset):
    """Rows, and something that takes memory: ``held`` by name, and what reading a sample does."""

    def __init__(self, length, read=None, **held):
        self.length, self.read = length, read
        self.__dict__.update(held)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.read is not None:
            self.read(self, index)
        return torch.full((4,), float(index))


class Item:
    def __init__(self, number):
        self.path, self.label = f"train/{number:012d}.jpg", float(number)


def touch(value):
    parts = getattr(value, "__dict__", value)
    parts = parts.values() if isinstance(parts, dict) else parts
    for part in parts if isinstance(parts, list | tuple | type({}.values())) else ():
        touch(part)


def of_list(make, count=SAMPLES):
    def planted():
        def read(dataset, index):
            touch(dataset.samples[index])

        return Planted(count, read, samples=[make(number) for number in range(count)])

    return planted


def of_dict(make, count=SAMPLES):
    def planted():
        def read(dataset, index):
            touch(dataset.index[index])

        return Planted(count, read, index={number: make(number) for number in range(count)})

    return planted


def reading(read, count=20_000, **held):
    return lambda: Planted(count, read, **{name: make() for name, make in held.items()})


def nested(make):
    def planted():
        return Subset(make(), list(range(SAMPLES)))

    return planted


@functools.cache
def large_file():
    file = tempfile.NamedTemporaryFile(suffix=".bin")  # noqa: SIM115  # it stays to the end
    file.write(os.urandom(2**20) * 300)
    file.flush()
    return file


def mapped():
    return np.memmap(large_file().name, np.uint8, "r")


def record(n):
    return {"path": f"train/{n:012d}.jpg", "label": n, "box": [n + 0.5, 2.5]}


@functools.cache
def kept_by_function(index):
    return bytes(4000 + index % 2)


def leak(size=2000):
    return lambda dataset, index: dataset.log.append(bytes(size))


def fill(dataset, index):
    dataset.kept[index] = bytes(4000)


def count(dataset, index):
    dataset.calls[len(dataset.calls)] = bytes(2000)


def row(dataset, index):
    return dataset.x[index]


def packed():
    return PackedStrings("a" * 60 for _ in range(SAMPLES))


PLANTED = {
    "dicts": ("copied", of_list(record)),
    "tuples": ("copied", of_list(lambda n: (f"train/{n:012d}.jpg", float(n), n + 10**6))),
    "paths": ("copied", of_list(lambda n: f"a/rather/long/folder/of/photographs/{n:012d}.jpg" * 3)),
    "Path objects": ("copied", of_list(lambda n: Path(f"train/{n:012d}.jpg"), 2 * SAMPLES)),
    "lists of numbers": ("copied", of_list(lambda n: [n + 0.5, n + 1.5, n + 2.5, n + 3.5])),
    "objects": ("copied", of_list(Item)),
    "a dict of dicts": ("copied", of_dict(record)),
    "a dict of lists": ("copied", of_dict(lambda n: [f"{n:030d}", [n + 0.5] * 4])),
    "within a Subset": ("copied", nested(of_list(record))),
    "a log in the dataset": ("leak", reading(leak(), log=list)),
    "a log of texts": ("leak", reading(lambda d, i: d.log.append(f"{i:d}" * 400), log=list)),
    "a global": ("leak", reading(lambda _, i: _logged.append(bytes(2000)))),
    "a dict of calls": ("leak", reading(count, calls=dict)),
    "tensors": ("leak", reading(lambda d, _: d.log.append(torch.zeros(500)), log=list)),
    "a cache": ("cache", reading(fill, kept=dict)),
    "arrays kept": ("cache", reading(lambda d, i: d.kept.setdefault(i, np.ones(500)), kept=dict)),
    "lru_cache": ("cache", reading(lambda _, i: kept_by_function(i))),
}  # fmt: skip
HEALTHY = {
    "rows": reading(None),
    "few dicts": of_list(record, 1000),
    "ten thousand dicts": of_list(record, 10_000),
    "a small dict": of_dict(record, 2000),
    "an array": reading(row, x=lambda: np.zeros((20_000, 500))),
    "a tensor": reading(row, x=lambda: torch.zeros(20_000, 500)),
    "texts in an array": reading(row, x=lambda: np.full(SAMPLES, "a" * 60)),
    "packed strings": reading(row, x=packed),
    "shared dicts": lambda: share(of_list(record)()),
    "a shared dict": lambda: share(of_dict(record)()),
    "dicts that nobody reads": reading(None, x=lambda: [record(n) for n in range(SAMPLES)]),
    "a bounded cache": reading(lambda d, i: d.kept.__setitem__(i % 100, bytes(4000)), kept=dict),
    "a bounded log": reading(lambda d, i: d.log.append(bytes(4000)), log=lambda: deque(maxlen=100)),
    "memory that is given back": reading(lambda *_: bytes(10**6)),
    "arrays that are given back": reading(lambda *_: np.zeros(10**5), 5000),
    "random draws": reading(lambda *_: torch.rand(100)),
    "imports": reading(lambda *_: __import__("json").dumps([1])),
    "a small file": reading(lambda d, i: d.file[i], file=lambda: mapped()[:10**6]),
    "small numbers": reading(row, x=lambda: [n % 200 for n in range(10**6)]),
    "bytes of its own": reading(lambda d, i: d.x[0], x=lambda: [b"x" * 10**8]),
}  # fmt: skip


def apart(name, *arguments):
    """Return what a function of this module returns in a fresh program, which shares no page."""
    call = f"import json, memory; print(json.dumps(memory.{name}(*{arguments!r})))"
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", call], cwd=Path(__file__).parent,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    return json.loads(found.stdout.splitlines()[-1]) if found.returncode == 0 else None


WAYS = {
    "torch": (DataLoader, {"num_workers": 2}),
    "ours": (FastDataLoader, {"num_workers": 2, "executor": "workers"}),
    "ours, auto": (FastDataLoader, {"num_workers": "auto", "executor": "auto"}),
}


def told(name, way, batch_size=250, epochs=4):
    """Return what is told of a dataset: all uses, those that are blamed, and who read."""
    torch.set_num_threads(1)
    dataset = PLANTED[name][1]() if name in PLANTED else HEALTHY[name]()
    epochs = 1 if len(dataset) > 100_000 else epochs
    kind, arguments = WAYS[way]
    arguments = {**arguments, "batch_size": batch_size, "shuffle": True}
    gc.collect()
    meter = MemoryMeter()
    loader = kind(dataset, persistent_workers=True, **arguments)
    meter.seen(dataset, forked=True)
    for epoch in range(epochs):
        for number, _ in enumerate(loader):
            pids = worker_processes()
            meter.look(pids, step=epoch * len(loader) + number, epoch=epoch)
            if (epoch, number) in ((0, 0), (epochs - 1, 9 * len(loader) // 10)):
                meter.read(pids)
    meter.read(worker_processes())
    seen = meter.seen(dataset, forked=True)
    uses = [(use.cause, memory_text(seen, use)) for use in memory_uses(seen)]
    blamed = [found.code for found in findings(Evidence(memory=seen)) if found.code in CODES]
    return uses, blamed, f"{getattr(loader, 'executor', 'torch')} {loader.num_workers}"


CODES = ("FD334", "FD335", "FD336")


def causes(only):
    """Print a table of what is told of each dataset, with plain loaders and with ours."""
    print(f"| dataset | cause | {' | '.join(WAYS)} |\n|{' --- |' * (2 + len(WAYS))}")
    right, blamed, said = dict.fromkeys(WAYS, 0), dict.fromkeys(WAYS, 0), []
    for name in (*PLANTED, *HEALTHY):
        if only and only not in name:
            continue
        cells, cause = [], PLANTED[name][0] if name in PLANTED else ""
        for way in WAYS:
            uses, codes, who = apart("told", name, way) or ([], ["no answer"], "")
            first = uses[0][0] if uses else "nothing"
            right[way] += first == cause
            blamed[way] += not cause and bool(codes)
            cells.append(first if cause else ", ".join(codes) or "nothing")
            said.append(f"{name}, {way} ({who}): {'; '.join(text for _, text in uses)}")
        print(f"| {name} | {cause or 'healthy'} | {' | '.join(cells)} |", flush=True)
    rows = [f"{right[way]} right, {blamed[way]} blamed" for way in WAYS]
    print(f"| of {len(PLANTED)} and {len(HEALTHY)} | | {' | '.join(rows)} |\n")
    print("\n".join(said))


# -- what share() saves ----------------------------------------------------------------------------


def annotated(n):
    boxes = [
        {
            "bbox": [n + 0.5, 2.5, 3.5, 4.5],
            "category_id": (n + k) % 80,
            "area": n * 1.5,
            "id": n * 10 + k,
        }
        for k in range(7)
    ]
    return {
        "file_name": f"train2017/{n:012d}.jpg",
        "height": 480,
        "width": 640,
        "id": n,
        "annotations": boxes,
    }


def as_arrays(items):
    boxes = [box for item in items for box in item["annotations"]]
    return {
        "names": np.array([item["file_name"] for item in items]),
        "boxes": np.array([box["bbox"] for box in boxes]),
        "labels": np.array([box["category_id"] for box in boxes]),
        "starts": np.arange(0, len(boxes) + 1, 7),
    }


def read_arrays(held, n):
    start, stop = held["starts"][n : n + 2]
    return held["names"][n], held["boxes"][start:stop], held["labels"][start:stop]


def hugging_face(items):
    import datasets

    return datasets.Dataset.from_list(items)


def read_item(held, n):
    item = held[n]
    return item["file_name"], [(box["bbox"], box["category_id"]) for box in item["annotations"]]


FORMS = {
    "a list": (lambda items: items, read_item),
    "share": (share, read_item),
    "NumPy arrays": (as_arrays, read_arrays),
    "datasets": (hugging_face, read_item),
}


class Held(Dataset):
    def __init__(self, held, read, length):
        self.held, self.read, self.length = held, read, length

    def __len__(self):
        return self.length

    def __getitem__(self, n):
        self.read(self.held, n)
        return n


def read_us(read, held, order):
    began = time.process_time()
    for n in order:
        read(held, n)
    return (time.process_time() - began) / len(order) * 1e6


def saved(form, count, workers):
    """Return what a form takes.

    CPU seconds to build it, CPU us to read an item in random order and the next one, and MiB: of
    the objects, and of all processes.
    """
    torch.set_num_threads(1)
    make, read = FORMS[form]
    own = [os.getpid()]
    empty = sum(map(pss_bytes, own))
    items = [annotated(n) for n in range(count)]
    began = time.process_time()
    held = make(items)
    built_s = time.process_time() - began
    del items
    gc.collect()
    alone = sum(map(pss_bytes, own)) - empty
    each_us = read_us(read, held, torch.randperm(count)[:20_000].tolist())
    next_us = read_us(read, held, range(min(count, 20_000)))
    loader = DataLoader(
        Held(held, read, count), 500, shuffle=True, num_workers=workers, persistent_workers=True
    )
    for _ in loader:
        pass
    pids = worker_processes()
    together = sum(map(pss_bytes, own + pids)) - empty
    return built_s, each_us, next_us, alone / 2**20, together / 2**20


def sharing(count, workers):
    """Print a table of what each form of the objects takes."""
    print(f"{count:,} COCO-like dicts; MiB beyond an empty program")
    heads = [
        "built, million a minute",
        "read, us",
        "the next, us",
        "alone",
        *(f"{n} workers" for n in workers),
    ]
    print(f"| form | {' | '.join(heads)} | most : fewest |")
    print(f"| --- |{' ---: |' * (len(heads) + 1)}")
    for form in FORMS:
        if form == "datasets" and importlib.util.find_spec("datasets") is None:
            print("| datasets | not installed |")
            continue
        rows = [apart("saved", form, count, number) for number in workers]
        if None in rows:
            print(f"| {form} | could not be measured |")
            continue
        built_s, *_, alone, _ = rows[0]
        rate = count / max(built_s, 1e-9) * 60 / 1e6
        sizes = [f"{row[-1]:.0f}" for row in rows]
        cells = [
            "" if form == "a list" else f"{rate:.1f}",
            f"{min(row[1] for row in rows):.1f}",
            f"{min(row[2] for row in rows):.1f}",
            f"{alone:.0f}",
            *sizes,
            f"{rows[-1][-1] / rows[0][-1]:.2f}",
        ]
        print(f"| {form} | {' | '.join(cells)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=50_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--causes", nargs="?", const="", help="of those with this in their name")
    parser.add_argument("--share", nargs="?", type=int, const=200_000, help="so many dicts")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.causes is not None:
        causes(arguments.causes)
    if arguments.share is not None:
        sharing(arguments.share, (1, 2, 4, 8))
    for case in CASES if arguments.causes is None is arguments.share else ():
        before, after, us = run(case, arguments.batches, arguments.workers)
        print(f"{case}: {arguments.batches} batches, {us:.0f} us each")
        for name in before:
            grown = after[name] - before[name]
            print(f"  {name:14} {before[name]:12,.1f} -> {after[name]:12,.1f}  ({grown:+,.1f})")


if __name__ == "__main__":
    main()

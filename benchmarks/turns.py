"""What the benchmarks share: contenders in turn, medians of ratios, the machine, memory, JSON."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_fastdata.host.machine import describe_machine, read_versions

_STEADY = 1.2
"""Ratio of the longest to the shortest time of known work in a round that counts as steady."""


def arguments(what: str, *, rounds: int = 5) -> argparse.ArgumentParser:
    """Return a parser with ``--rounds`` and ``--json``."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--rounds", type=int, default=rounds, help="rounds after a warm-up")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser


def machine() -> dict[str, Any]:
    """Return the machine, its load and the versions."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    load = [round(number, 2) for number in os.getloadavg()]
    about = {"cpu": _cpu_name(), "kernel": platform.release(), "load_average": load}
    return {**describe_machine(device), **about, **read_versions()}


def in_turn(
    contenders: Mapping[str, Callable[[], float]],
    *,
    rounds: int,
    warm: bool = True,
    pace_s: Callable[[], float] | None = None,
) -> dict[str, list[float]]:
    """Run the contenders one after the other, round by round, so that noise hits all of them.

    The order is turned around every other round. What each returns is collected, apart from a first
    round if ``warm``. A virtual machine that shares its CPUs with others may be at half its pace
    for a minute, which hits some contenders of a round alone. So with ``pace_s``, which returns the
    seconds of some known work, that work is timed before and after each run, and there are up to
    three times as many rounds until in enough of them it never took over 1.2 times its shortest
    time. These count; too few: the steadiest ones.
    """
    found: list[dict[str, float]] = []
    paces_s: list[float] = []
    for number in range(rounds * (3 if pace_s else 1) + warm):
        order = list(contenders) if number % 2 else list(reversed(contenders))
        values, slowest_s = {}, pace_s() if pace_s else 0.0
        for name in order:
            values[name] = contenders[name]()
            slowest_s = max(slowest_s, pace_s() if pace_s else 0.0)
        if number >= warm:
            found.append(values)
            paces_s.append(slowest_s)
        even = [each <= _STEADY * min(paces_s) for each in paces_s]
        if sum(even) == rounds:
            break
    if pace_s:
        shown = ", ".join(f"{each / min(paces_s):.2f}" for each in paces_s)
        print(f"known work in each round, over its shortest time: {shown}; {rounds} rounds count")
    counted = sorted(sorted(range(len(found)), key=paces_s.__getitem__)[:rounds])
    return {name: [found[number][name] for number in counted] for name in contenders}


def known_work_s() -> float:
    """Return how long known work takes on all CPUs at once."""
    cpus = len(os.sched_getaffinity(0))
    began_s, data = time.perf_counter(), bytes(2**25)
    with ThreadPoolExecutor(cpus) as pool:  # it digests without the lock of the interpreter
        list(pool.map(lambda _: hashlib.sha256(data).digest(), range(9 * cpus)))
    return time.perf_counter() - began_s


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Return the median of the ratios round by round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def spread(values: list[float]) -> str:
    """Return lowest, median and highest."""
    middle = statistics.median(values)
    return f"{min(values):.4g} / {middle:.4g} / {max(values):.4g}"


@contextmanager
def hogs(count: int, *, apart: bool = False) -> Iterator[None]:
    """Burn so many CPUs meanwhile, by programs of this session, or each of a session of its own."""
    command = [sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(command, start_new_session=apart) for _ in range(count)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


def write(file: Path | None, name: str, results: Any) -> None:
    """Print the machine, and write everything to the file if there is one."""
    about = machine()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    if file is not None:
        text = json.dumps({"benchmark": name, "machine": about, "results": results}, indent=1)
        file.write_text(text + "\n")


def tree_pss_bytes(root: int | None = None) -> int:
    """Return the memory of a process and of all below it, shared pages divided among them (PSS)."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            )
        except OSError:
            continue
    tree, new = set(), {os.getpid() if root is None else root}
    while new:
        tree |= new
        new = {pid for pid, parent in parents.items() if parent in tree} - tree
    total = 0
    for pid in tree:
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(
            int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")
        )
    return total * 1024


def shm_bytes() -> int:
    """Return what is used of ``/dev/shm``; memory without a name there is in the PSS alone."""
    stat = os.statvfs("/dev/shm")
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "?")

"""Several ways to do the same work, timed in turn, so that a noisy machine troubles them alike."""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lightning_fastdata.host.machine import describe_machine, read_versions


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One way's result in one round."""

    per_s: float
    """Samples per second of wall time."""
    cpu_us: float
    """Microseconds of CPU time of this process per sample; side processes are not counted."""
    faults: int
    """Pages that were touched for the first time."""


def take_turn(work: Callable[[], int]) -> Turn:
    """Run work that returns how many samples it went through."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    count = work()
    wall_s, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Turn(
        per_s=count / wall_s,
        cpu_us=cpu_s / count * 1e6,
        faults=after.ru_minflt - before.ru_minflt,
    )


def compare(ways: dict[str, Callable[[], int]], rounds: int) -> dict[str, list[Turn]]:
    """Run each way once to warm up, then all of them in turn, round after round."""
    turns: dict[str, list[Turn]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, work in ways.items():
            turn = take_turn(work)
            if number:
                turns[name].append(turn)
    return turns


def summary(turns: dict[str, list[Turn]], base: str) -> dict[str, dict[str, float]]:
    """Return the medians of each way, with the median ratio to the base way's rate."""
    rows = {}
    for name, found in turns.items():
        pairs = zip(found, turns[base], strict=True)
        rows[name] = {
            "ratio": statistics.median(one.per_s / other.per_s for one, other in pairs),
            **{key: statistics.median(asdict(t)[key] for t in found) for key in asdict(found[0])},
        }
    return rows


def show(title: str, unit: str, rows: dict[str, dict[str, float]]) -> None:
    """Print one table."""
    print(f"\n{title}")
    print(f"{'':38s} {unit + '/s':>14s} {'ratio':>8s} {'CPU us':>9s} {'faults':>8s}")
    for name, row in rows.items():
        print(
            f"{name:38s} {row['per_s']:14,.0f} {row['ratio']:7.2f}x {row['cpu_us']:9.3f} "
            f"{row['faults']:8,.0f}"
        )


def argument_parser(description: str) -> argparse.ArgumentParser:
    """Return the arguments that all comparisons have."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way (7)")
    parser.add_argument("--json", type=Path, help="write all turns and the machine there")
    return parser


def machine() -> dict[str, object]:
    """Return where this runs, and print it."""
    about: dict[str, object] = {
        "machine": describe_machine(torch.device("cpu")),
        "versions": read_versions(),
        "load_before": os.getloadavg()[0],
    }
    for name, value in about.items():
        print(f"{name}: {value}")
    return about


def write(path: Path | None, about: dict[str, object], tables: dict[str, object]) -> None:
    """Write the results as JSON, if a place was given."""
    if path is not None:
        path.write_text(json.dumps({**about, "tables": tables}, indent=2, default=str) + "\n")

"""Rates of several ways to do the same work in this process, with its CPU time and page faults."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass


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

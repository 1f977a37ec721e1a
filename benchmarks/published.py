"""Ratios that are published: over the best of torch's DataLoader, in wall time, from one file.

    python benchmarks/published.py            # writes the table of README from the file
    python benchmarks/published.py --commands # what is to be run on a quiet machine

A benchmark with ``--publish`` notes its ratios in ``benchmarks/results/published.json``, and the
tables of README and of ``benchmarks/results/two-cores.md`` are written from there; a test compares.
torch reads with 0, 1, 2 and 4 workers. Which of them is the best is decided, for each round, by the
medians of the other rounds: the best of a round itself would be chosen by its luck.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "benchmarks/results/published.json"
TORCH_WORKERS = (0, 1, 2, 4)
BEGIN, END = "<!-- published -->", "<!-- /published -->"
NOT_MEASURED = "not measured yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How many times as fast as the best of torch's loaders, in wall time."""

    median: float
    lowest: float
    highest: float
    rounds: int
    torch_workers: list[int]
    """With so many workers torch was the best, in the rounds that were not compared."""

    @property
    def text(self) -> str:
        """Two digits where the first is 1 to 9; a loss is never rounded away."""
        return f"{self.median:.2f}" if self.median < 2 else f"{self.median:.1f}"


def over_best(seconds: Sequence[float], torchs: Mapping[int, Sequence[float]]) -> Ratio:
    """Return the ratio of torch's best time to ours.

    Args:
        seconds: Ours in each round, for the same work.
        torchs: Number of workers -> torch's in each round.

    Raises:
        ValueError: There are fewer than two rounds, or torch's numbers of workers are others.
    """
    if set(torchs) != set(TORCH_WORKERS):
        raise ValueError(f"torch was run with {sorted(torchs)} workers, not with {TORCH_WORKERS}.")
    rounds = len(seconds)
    if rounds < 2 or any(len(each) != rounds for each in torchs.values()):
        raise ValueError(f"{rounds} rounds: two are needed, and as many of each.")
    ratios, chosen = [], []
    for number, ours in enumerate(seconds):
        others = {
            workers: statistics.median([*each[:number], *each[number + 1 :]])
            for workers, each in torchs.items()
        }
        best = min(others, key=others.__getitem__)
        chosen.append(best)
        ratios.append(torchs[best][number] / ours)
    return Ratio(
        median=statistics.median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
        rounds=rounds,
        torch_workers=sorted(set(chosen)),
    )


def add_publish(parser: argparse.ArgumentParser) -> None:
    """Add ``--publish`` to the options of a benchmark."""
    parser.add_argument("--publish", action="store_true", help=f"note the ratios in {FILE.name}")


def publish(found: Mapping[str, Ratio], about: Mapping[str, Any], *, asked: bool) -> None:
    """Print ratios, and note them if that is asked for; the machine and the versions with them."""
    for name, ratio in found.items():
        print(
            f"{name}: {ratio.text} times the best of torch's with 0, 1, 2 and 4 workers "
            f"({ratio.lowest:.2f} to {ratio.highest:.2f} in {ratio.rounds} rounds; "
            f"the best had {ratio.torch_workers} workers)"
        )
    if not asked:
        return
    noted = read()
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    for name, ratio in found.items():
        noted[name] = {**asdict(ratio), "date": date, "about": dict(about)}
    FILE.write_text(json.dumps(dict(sorted(noted.items())), indent=1) + "\n")
    write_tables(noted)


def read(file: Path = FILE) -> dict[str, Any]:
    """Return what is noted: name -> ratio, date, machine."""
    return json.loads(file.read_text()) if file.exists() else {}


class Row(NamedTuple):
    """A row of README."""

    what: str
    names: Mapping[str, str]
    """Name of a ratio -> what is written behind it."""
    command: str


ROWS = (
    Row(
        "training on JPEG photographs, no GPU, the whole run",
        {
            "train/same dataset": "with the very same dataset",
            "train/augment": "`ImageFolder` and `augment=`",
            "train/FastImageFolder": "`FastImageFolder` and `augment=`",
        },
        "train.py",
    ),
    Row(
        "JPEG files to uint8",
        {
            "jpeg/uint8 ImageFolder": "`ImageFolder` with PIL",
            "jpeg/uint8": "`FastImageFolder` (extra `jpeg`)",
            "jpeg/uint8 LitData": "LitData",
            "jpeg/uint8 FFCV": "FFCV",
            "jpeg/uint8 DALI": "DALI",
        },
        "jpeg_folder.py",
    ),
    Row(
        "the same to float32",
        {
            "jpeg/float32 ImageFolder": "`ImageFolder`",
            "jpeg/float32": "`FastImageFolder`",
            "jpeg/float32 LitData": "LitData",
            "jpeg/float32 FFCV": "FFCV",
            "jpeg/float32 DALI": "DALI",
        },
        "jpeg_folder.py",
    ),
    Row(
        "images in a memory map",
        {
            "cached/workers": "as a dataset",
            "cached/gather": "as arrays",
            "cached/gather ahead": "as arrays, ahead",
            "cached/FFCV": "FFCV",
        },
        "cached.py",
    ),
    Row(
        "steps with the number of workers chosen by itself, 18 workloads",
        {"tune/median": "median", "tune/worst": "worst"},
        "tune.py",
    ),
    Row(
        "the data set of PyTorch's data loading tutorial, unchanged",
        {"ladder/FastDataLoader": "`FastDataLoader`", "ladder/FastDataModule": "`FastDataModule`"},
        "ladder.py",
    ),
)
NAMES = tuple(name for row in ROWS for name in row.names)
OPTIONAL = re.compile(r"LitData|FFCV|DALI")
"""Others, which are not installed everywhere: left out where they were not measured."""


def ratio_of(noted: Mapping[str, Any], name: str) -> Ratio | None:
    """Return a noted ratio; None: it was not measured."""
    one = noted.get(name)
    return one and Ratio(**{key: one[key] for key in Ratio.__dataclass_fields__})


def readme_table(noted: Mapping[str, Any]) -> list[str]:
    """Return the lines of README's table."""
    lines = ["| what | over torch's best | command |", "| --- | --- | --- |"]
    for row in ROWS:
        cells = []
        for name, words in row.names.items():
            ratio = ratio_of(noted, name)
            if ratio is not None or not OPTIONAL.search(name):
                cells.append(f"{ratio.text if ratio else NOT_MEASURED} {words}")
        shown = "; ".join(cells)
        if all(ratio_of(noted, name) is None for name in row.names):
            shown = NOT_MEASURED
        lines.append(f"| {row.what} | {shown} | `python benchmarks/{row.command}` |")
    return lines


def results_table(noted: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table in the results: each ratio with its spread."""
    lines = [
        "| ratio | median | lowest-highest | rounds | torch's best | date | torch, CPUs |",
        "| --- | ---: | ---: | ---: | --- | --- | --- |",
    ]
    for name in NAMES:
        ratio = ratio_of(noted, name)
        if ratio is None:
            lines.append(f"| {name} | {NOT_MEASURED} | | | | | |")
            continue
        about = noted[name]["about"]
        workers = " or ".join(map(str, ratio.torch_workers))
        lines.append(
            f"| {name} | {ratio.median:.2f} | {ratio.lowest:.2f}-{ratio.highest:.2f} | "
            f"{ratio.rounds} | {workers} workers | {noted[name]['date']} | "
            f"{about.get('torch', '?')}, {about.get('usable_cpus', '?')} |"
        )
    return lines


PAGES = {"README.md": readme_table, "benchmarks/results/two-cores.md": results_table}


def between(text: str, lines: Iterable[str]) -> str:
    """Return a page with these lines between its two marks."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return "\n".join([f"{head}{BEGIN}", *lines, f"{END}{tail}"])


def write_tables(noted: Mapping[str, Any]) -> None:
    """Write the tables of all pages."""
    for page, table in PAGES.items():
        path = ROOT / page
        path.write_text(between(path.read_text(), table(noted)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commands", action="store_true", help="print what makes the figures")
    if parser.parse_args().commands:
        print("\n".join(dict.fromkeys(f"python benchmarks/{r.command} --publish" for r in ROWS)))
        return
    write_tables(read())


if __name__ == "__main__":
    main()

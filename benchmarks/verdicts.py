"""How often the verdict on a real training is what one would tell whoever wrote it.

    python benchmarks/verdicts.py [--json verdicts.json] [--only NAME ...] [--quick] [--peers]

Each training of ``benchmarks/trainings`` is code as users write it, fitted by a real ``Trainer`` in
a process of its own, with a ``DataThroughputCallback``; read is the ``report.json`` that it left.
The accepted answers stand beside the trainings. Some trainings are healthy: their data must not be
blamed, and nothing be called severe.

Where the first remedy is a setting of the loader, it is followed: the same training runs with it,
and what was predicted of a step is compared with what it then takes. In each run the parts of the
wall time have to add up to the whole, and the whole to what a clock around ``trainer.fit`` shows.

A run during which other processes took more than 0.3 of a CPU is repeated once, and the one that
was disturbed less counts. That is decided before its verdict is looked at.

``--quick`` takes one magnitude of each cause and six healthy trainings. ``--peers`` asks
Lightning's SimpleProfiler, and TraceML where ``--traceml-python`` has it, in runs of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainings.followed import Prediction, predicted, setting_of, unlawful
from trainings.machine_load import undisturbed
from trainings.parts import Healthy, Training
from trainings.registry import TRAININGS
from trainings.tools import INSTALL_TRACEML, Opinion, simple_profiler, told, traceml
from turns import hogs, write

HERE = Path(__file__).parent
TIME_LIMIT_S = 180
MOST_OTHERS = 0.3
"""Of one CPU, what other processes may take on average while a training runs."""
WALL_SHARE, WALL_S = 0.01, 0.05
"""By how much the wall time of the report may differ from a clock around ``fit``."""


def environment() -> dict[str, str]:
    """Return the environment of a training."""
    paths = [str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1",
        "NO_ALBUMENTATIONS_UPDATE": "1",
    }  # fmt: skip


def run(name: str, *, changed: dict[str, Any] | None = None, watch: str = "fastdata") -> Any:
    """Run a training in a process of its own; return its report, and what is known from outside.

    Without a report where it failed: ``error`` then says why.
    """
    with tempfile.TemporaryDirectory() as out, hogs(TRAININGS[name].hogs):
        command = [sys.executable, "-m", "trainings", name, "--out", out, "--watch", watch]
        command += ["--changed", json.dumps(changed or {})]
        try:
            done = subprocess.run(
                command,
                env=environment(),
                capture_output=True,
                text=True,
                timeout=TIME_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"took more than {TIME_LIMIT_S} s"}
        file = Path(out) / "run.json"
        if done.returncode or not file.exists():
            return {"error": done.stderr[-2000:]}
        known = json.loads(file.read_text())
        if watch == "fastdata":
            known["report"] = json.loads((Path(out) / "report.json").read_text())
    return known


def wall_error(known: dict[str, Any]) -> str:
    """Return what is wrong with the wall time of a report; empty if it is as it should be."""
    wall, fit_s = known["report"]["wall"], known["fit_s"]
    parts_s = sum(wall["parts_s"].values())
    wrong = []
    if abs(parts_s - wall["total_s"]) > WALL_SHARE * wall["total_s"]:
        wrong.append(f"parts {parts_s:.3f} s of {wall['total_s']:.3f} s")
    if abs(fit_s - wall["total_s"]) > max(WALL_S, WALL_SHARE * fit_s):
        wrong.append(f"total {wall['total_s']:.3f} s of {fit_s:.3f} s")
    return ", ".join(wrong)


def row_of(name: str, tries: int) -> dict[str, Any]:
    """Run a training and return a row of the table."""
    training = TRAININGS[name]
    tried = undisturbed(lambda: run(name), tries=tries, most_others=MOST_OTHERS)
    known = tried.result
    row: dict[str, Any] = {
        "name": name, "cause": training.cause, "healthy": isinstance(training.accepted, Healthy),
        "others_cpus": round(tried.others_cpus, 2), "right": False, "kind_right": False, **known,
    }  # fmt: skip
    if "error" in known:
        print(f"ERROR {name}\n{known['error']}", flush=True)
        return row
    verdict = known["report"]["verdict"]
    row |= {
        "right": training.accepted.is_right(verdict),
        "kind_right": training.accepted.kind_is_right(verdict),
        "kind": verdict["kind"],
        "found": [each["code"] for each in verdict["findings"]],
        "wall_error": wall_error(known),
        "unlawful": unlawful(verdict),
    }
    print(line_of(row, training), flush=True)
    return row


def line_of(row: dict[str, Any], training: Training) -> str:
    """Return what is printed of a run."""
    mark = "right" if row["right"] else ("class" if row["kind_right"] else "WRONG")
    wanted = "" if row["right"] else f"; accepted: {training.accepted}"
    first = row["report"]["verdict"]["findings"][0]
    notes = [f"wall: {row['wall_error']}"] if row["wall_error"] else []
    notes += [f"unlawful: {each}" for each in row["unlawful"]]
    notes += [] if row["same_report"] else ["callback.report differs from the file"]
    if row["others_cpus"] > MOST_OTHERS:
        notes.append(f"others took {row['others_cpus']:.2f} CPUs")
    told = f"{row['kind']}, {' '.join(row['found'])}: {first['cause']}; try: {first['remedy']}"
    return " | ".join([f"{mark:5} {row['name']}", told + wanted, *notes])


def followed_row(row: dict[str, Any], tries: int) -> dict[str, Any] | None:
    """Follow the first remedy, if it is a setting of the loader with a predicted gain."""
    if "error" in row:
        return None
    first = row["report"]["verdict"]["findings"][0]
    changed = setting_of(first["remedy"])
    if not changed or first["gain"] is None:
        return None
    name = row["name"]
    tried = undisturbed(lambda: run(name, changed=changed), tries=tries, most_others=MOST_OTHERS)
    if "error" in tried.result:
        print(f"ERROR {name} with {changed}\n{tried.result['error']}", flush=True)
        return {"name": name, "changed": changed, **tried.result}
    found: Prediction = predicted(first["gain"], row["report"], tried.result["report"])
    print(f"      {name} with {changed}: {found}", flush=True)
    return {
        "name": name, "code": first["code"], "changed": changed, "basis": found.basis,
        "before_ms": found.before_ms, "predicted_ms": found.predicted_ms,
        "measured_ms": found.measured_ms, "holds": found.holds,
        "others_cpus": round(tried.others_cpus, 2),
    }  # fmt: skip


def opinions_on(name: str, traceml_python: Path | None) -> dict[str, Opinion]:
    """Return what other tools say of a training; those that fail on it say so, and are wrong."""
    training, said = TRAININGS[name], {}
    known = run(name, watch="profiler")
    if "error" not in known:
        said["SimpleProfiler"] = simple_profiler(known["seconds"])
    if traceml_python is not None:
        with tempfile.TemporaryDirectory() as out, hogs(training.hogs):
            try:
                said["TraceML"] = traceml(name, traceml_python, Path(out), environment())
            except (subprocess.SubprocessError, OSError, KeyError) as error:
                said["TraceML"] = ("?", repr(error))
    return {
        tool: Opinion(cause=training.cause, right=cost == training.accepted.cost, verdict=verdict)
        for tool, (cost, verdict) in said.items()
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Return what was found first of each cause, as markdown."""
    lines = ["| cause | right | class right | found first |", "| --- | ---: | ---: | --- |"]
    for cause in dict.fromkeys(row["cause"] for row in rows):
        same = [row for row in rows if row["cause"] == cause]
        first = Counter(row["found"][0] if "found" in row else "error" for row in same)
        told = ", ".join(f"{name} ({count})" for name, count in first.most_common())
        right, kind = (sum(row[key] for row in same) for key in ("right", "kind_right"))
        lines.append(f"| {cause} | {right} of {len(same)} | {kind} of {len(same)} | {told} |")
    return "\n".join(lines)


def predictions(rows: list[dict[str, Any]]) -> str:
    """Return how well followed remedies were predicted, by the basis of the prediction."""
    lines = [
        "| basis | followed | held | median error | worst |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    good = [row for row in rows if "error" not in row]
    for basis in sorted({row["basis"] for row in good}):
        same = [row for row in good if row["basis"] == basis]
        errors = [abs(row["predicted_ms"] / row["measured_ms"] - 1) for row in same]
        held = sum(row["holds"] for row in same)
        lines.append(
            f"| {basis} | {len(same)} | {held} | {statistics.median(errors):.0%} | "
            f"{max(errors):.0%} |"
        )
    return "\n".join(lines)


def peers_table(rows: list[dict[str, Any]], opinions: dict[str, dict[str, Opinion]]) -> str:
    """Return how often each tool names the kind of cost, and how often the cause."""
    right, kind = (sum(row[key] for row in rows) for key in ("right", "kind_right"))
    lines = ["| tool | class right | cause told |", "| --- | ---: | ---: |"]
    lines.append(f"| this package | {kind} of {len(rows)} | {right} of {len(rows)} |")
    for tool in sorted({tool for said in opinions.values() for tool in said}):
        same = [said[tool] for said in opinions.values() if tool in said]
        right = sum(each.right for each in same)
        lines.append(f"| {tool} | {right} of {len(same)} | {told(same)} of {len(same)} |")
    return "\n".join(lines)


def chosen_names(only: list[str] | None, *, quick: bool) -> list[str]:
    """Return the names of the trainings to run; ``only`` are causes or names, or begin them."""
    names = list(TRAININGS)
    if only:
        names = [name for name in names if any(name.startswith(each) for each in only)]
    if quick:
        first = {TRAININGS[name].cause: name for name in reversed(names)}
        ill = [n for n in names if first[TRAININGS[n].cause] == n and not is_healthy(n)]
        names = ill + [name for name in names if is_healthy(name)][:12:2]
    return names


def is_healthy(name: str) -> bool:
    return isinstance(TRAININGS[name].accepted, Healthy)


def main() -> None:
    """Run everything, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="file for the figures, with all reports")
    parser.add_argument("--only", nargs="+", help="causes or names, or how they begin")
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    parser.add_argument("--once", action="store_true", help="do not repeat disturbed runs")
    parser.add_argument("--no-follow", action="store_true", help="do not follow remedies")
    parser.add_argument("--peers", action="store_true", help="ask other tools, too")
    parser.add_argument(
        "--traceml-python", type=Path, help=f"interpreter with TraceML, {INSTALL_TRACEML}"
    )
    options = parser.parse_args()
    tries = 1 if options.once else 2
    began_s = time.perf_counter()
    rows, followed = [], []
    opinions: dict[str, dict[str, Opinion]] = {}
    for name in chosen_names(options.only, quick=options.quick):
        rows.append(row_of(name, tries))
        if not options.no_follow and not is_healthy(name):
            done = followed_row(rows[-1], tries)
            followed += [] if done is None else [done]
        if options.peers:
            opinions[name] = opinions_on(name, options.traceml_python)
            for tool, each in opinions[name].items():
                print(
                    f"      {tool}: {'right' if each.right else 'wrong'}, {each.verdict}",
                    flush=True,
                )
    print("\n" + table(rows))
    if opinions:
        print("\n" + peers_table(rows, opinions))
    if followed:
        print("\n" + predictions(followed))
    ill, fine = ([row for row in rows if row["healthy"] is same] for same in (False, True))
    summary = {
        "trainings": len(ill), "right": sum(row["right"] for row in ill),
        "class_right": sum(row["kind_right"] for row in ill),
        "healthy": len(fine), "blamed": sum(not row["right"] for row in fine),
        "errors": sum("error" in row for row in rows),
        "unlawful": sum(bool(row.get("unlawful")) for row in rows),
        "wall_wrong": sum(bool(row.get("wall_error")) for row in rows),
        "disturbed": sum(row["others_cpus"] > MOST_OTHERS for row in rows),
        "seconds": round(time.perf_counter() - began_s),
    }  # fmt: skip
    print("\n" + ", ".join(f"{key} {value}" for key, value in summary.items()))
    others = {
        name: {tool: asdict(each) for tool, each in said.items()} for name, said in opinions.items()
    }
    results = {"summary": summary, "runs": rows, "followed": followed, "others": others}
    write(options.json, "verdicts", results)


if __name__ == "__main__":
    main()

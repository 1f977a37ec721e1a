"""How often the first finding of a run is the cause that was planted in it.

    python benchmarks/verdicts.py [--json verdicts.json] [--only FD303 FD305] [--quick]

19 causes in five magnitudes each are planted for real, apart from what
``tests/verdicts/planted_costs.py`` says of devices; 50 runs are healthy and must not be called
input-bound; and where remedies are options of the loader, they are followed, and the predicted step
is compared with the measured one.

A run during which other processes took more than 0.15 of a CPU is repeated, at most twice, and the
least disturbed one counts. That is decided before its verdict is looked at. Processes that a run
starts itself, its own busy neighbours among them, are not others.

``--quick`` takes one magnitude of each cause, and ten healthy runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from turns import write
from verdicts.followed import FOLLOWED, Followed, follow
from verdicts.healthy import HEALTHY, blames_data, healthy
from verdicts.machine_load import MOST_OTHERS, MOST_TRIES, Undisturbed, undisturbed
from verdicts.planted import LOADING, Plant
from verdicts.planted_costs import COSTS
from verdicts.workloads import train

from lightning_fastdata.insight.evidence import Evidence
from lightning_fastdata.insight.finding import gain_text
from lightning_fastdata.insight.findings import findings

PLANTS = tuple(sorted(LOADING + COSTS, key=lambda plant: plant.code))


def how(run: Undisturbed[Any]) -> dict[str, Any]:
    """Return under which conditions something was measured."""
    return {"others_cpus": round(run.others_cpus, 3), "tries": run.tries, "quiet": run.quiet}


def planted_row(plant: Plant, magnitude: Any) -> tuple[dict[str, Any], Evidence]:
    """Plant a cause and return a row of the table, and what was measured."""
    run = undisturbed(lambda: plant.run(magnitude))
    found = findings(run.result)
    codes = [each.code for each in found]
    row = {
        "planted": plant.code,
        "magnitude": magnitude,
        "found": codes,
        "right": codes[:1] == [plant.code],
        "step_ms": run.result.step_ms,
        "stall_share": run.result.stall_share,
        **how(run),
    }
    if found:
        gain = found[0].gain
        row |= {"cause": found[0].cause, "remedy": found[0].remedy}
        row["gain"] = None if gain is None else gain_text(gain)
    mark = "" if row["right"] else "   <- not the planted one"
    print(f"{plant.code}  {plant.what} = {magnitude}: {', '.join(codes) or '-'}{mark}", flush=True)
    return row, run.result


def followed_row(plant: Plant, magnitude: Any, evidence: Evidence) -> dict[str, Any] | None:
    """Follow the remedy for what was planted; None where it was not found or changes no option."""
    found = next((each for each in findings(evidence) if each.code == plant.code), None)
    if found is None or plant.training is None:
        return None
    training = plant.training(magnitude)
    run: Undisturbed[Followed | None] = undisturbed(lambda: follow(found, training))
    done = run.result
    if done is None:
        return None
    print(
        f"       {done.options}: {done.before_ms:.1f} ms a step, "
        f"predicted {done.predicted_ms:.1f}, measured {done.measured_ms:.1f}, {done.error:+.1%}",
        flush=True,
    )
    return {
        "code": plant.code,
        "magnitude": magnitude,
        "options": {name: str(value) for name, value in done.options.items()},
        "before_ms": done.before_ms,
        "predicted_ms": done.predicted_ms,
        "measured_ms": done.measured_ms,
        "error": done.error,
        **how(run),
    }


def healthy_row(number: int) -> dict[str, Any]:
    """Run a healthy training and return a row of the table."""
    training = healthy(number)
    run = undisturbed(lambda: train(training))
    evidence = run.result
    row = {
        "number": number,
        "dataset": type(training.dataset).__name__,
        "batch_size": training.batch_size,
        "loader": {name: str(value) for name, value in training.loader.items()},
        "step_ms": evidence.step_ms,
        "stall_share": evidence.stall_share,
        "found": [each.code for each in findings(evidence)],
        "blamed": blames_data(evidence),
        **how(run),
    }
    if row["blamed"]:
        print(f"healthy run blamed: {row}", flush=True)
    return row


def confusion(rows: list[dict[str, Any]]) -> str:
    """Return a markdown table of what was planted and what was found first."""
    lines = ["| planted | right | found first |", "|---|---|---|"]
    for code in sorted({row["planted"] for row in rows}):
        same = [row for row in rows if row["planted"] == code]
        first = Counter(row["found"][0] if row["found"] else "nothing" for row in same)
        right = sum(row["right"] for row in same)
        told = ", ".join(f"{name} ({count})" for name, count in first.most_common())
        lines.append(f"| {code} | {right} of {len(same)} | {told} |")
    return "\n".join(lines)


def remedies(rows: list[dict[str, Any]]) -> str:
    """Return a markdown table of how well followed remedies were predicted."""
    lines = ["| finding | followed | median error | worst |", "|---|---|---|---|"]
    for code in sorted({row["code"] for row in rows}):
        errors = [abs(row["error"]) for row in rows if row["code"] == code]
        median, worst = statistics.median(errors), max(errors)
        lines.append(f"| {code} | {len(errors)} | {median:.1%} | {worst:.1%} |")
    return "\n".join(lines)


def main() -> None:
    """Run everything, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--only", nargs="*", help="codes to plant; no healthy runs then")
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    began_s = time.perf_counter()
    planted, followed = [], []
    for plant in PLANTS:
        if options.only and plant.code not in options.only:
            continue
        for magnitude in plant.magnitudes[2:3] if options.quick else plant.magnitudes:
            row, evidence = planted_row(plant, magnitude)
            planted.append(row)
            if plant.code in FOLLOWED:
                done = followed_row(plant, magnitude, evidence)
                followed += [] if done is None else [done]
    fine = [] if options.only else [healthy_row(n) for n in range(10 if options.quick else HEALTHY)]
    print("\n" + confusion(planted))
    right, blamed = sum(row["right"] for row in planted), sum(row["blamed"] for row in fine)
    noisy = sum(not row["quiet"] for row in (*planted, *followed, *fine))
    summary: dict[str, Any] = {
        "planted": len(planted), "right": right, "accuracy": right / max(1, len(planted)),
        "healthy": len(fine), "blamed": blamed, "disturbed": noisy,
        "others_most": MOST_OTHERS, "most_tries": MOST_TRIES,
        "seconds": round(time.perf_counter() - began_s),
    }  # fmt: skip
    print(f"\nright: {right} of {len(planted)}; healthy runs blamed: {blamed} of {len(fine)}")
    quiet = [row for row in planted if row["quiet"]]
    summary |= {"quiet": len(quiet), "right_of_quiet": sum(row["right"] for row in quiet)}
    print(f"of runs that others left alone: {summary['right_of_quiet']} of {len(quiet)} right")
    if followed:
        summary["median_error"] = statistics.median(abs(row["error"]) for row in followed)
        print(f"\n{remedies(followed)}\n\nremedies followed: {len(followed)}, ", end="")
        print(f"median error of the predicted step {summary['median_error']:.1%}")
    print(
        f"others took more than {MOST_OTHERS} CPUs in {noisy} runs, after {MOST_TRIES} tries each"
    )
    results = {"summary": summary, "planted": planted, "healthy": fine, "followed": followed}
    write(options.json, "verdicts", results)


if __name__ == "__main__":
    main()

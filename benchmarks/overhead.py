"""What this package costs where it has nothing to do, beside others that measure training.

    python benchmarks/overhead.py [--rounds 7] [--traceml venv/bin/traceml] [--json figures.json]

Each round trains once with each case of ``overhead_run.py``, in an order that turns from round to
round; what a case costs is its difference to plain Lightning in the same round. Differences are of
the process's CPU time, so that other programs on the machine matter little, except for a step of
5 ms, of which they are wall time in per cent. TraceML starts the script itself, and is compared
with a plain run in a process of its own; the process that collects its figures is not counted.
Import times are wall times of fresh interpreters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from overhead_run import CASES, quiet, train

from lightning_fastdata.host.machine import describe_machine, read_versions

_TARGET_PERCENT = 1.0
_STEP_MS = 5.0
_LONG_CASES = (
    "plain",
    "plain, 2 workers",
    "everything",
    "everything, 2 workers",
    "ThroughputMonitor",
    "DeviceStatsMonitor",
    "SimpleProfiler",
)
_RUN = str(Path(__file__).with_name("overhead_run.py"))


def rounds_of(names, rounds, folder, **arguments):
    """Return the figures of each round: name of a case -> what ``train`` returned."""
    return [
        {
            name: train(CASES[name], folder, **arguments)
            for name in (*names[i % len(names) :], *names[: i % len(names)])
        }
        for i in range(rounds)
    ]


def differences(rounds, figure):
    """Return name of a case -> what it costs more than the one it is compared with, per round."""
    return {
        name: [each[name][figure] - each[CASES[name].against][figure] for each in rounds]
        for name in sorted(rounds[0], key=list(CASES).index)
        if CASES[name].against is not None
    }


def traceml_differences(traceml, pairs, folder):
    """Return what TraceML adds to the CPU time of a step, in microseconds, for each pair."""
    found = []
    for i in range(pairs):
        out = Path(folder) / f"traceml-{i}.json"
        script = ["plain", "--out", str(out)]
        told = ["run", "--mode", "summary", "--logs-dir", folder, _RUN, "--args", *script]
        both = []
        for command in ([sys.executable, _RUN, *script], [traceml, *told]):
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            both.append(json.loads(out.read_text(encoding="utf-8"))["cpu_us"])
            out.unlink()
        found.append(both[1] - both[0])
    return found


def import_ms(before, statement, times=7):
    """Return the median wall time of an import in fresh interpreters, in milliseconds."""
    code = (
        f"{before}; import time; t = time.perf_counter(); {statement}; "
        "print(1e3 * (time.perf_counter() - t))"
    )
    found = [
        float(subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1])
        for _ in range(times)
    ]
    return statistics.median(found)


def verdict(value, target):
    return "" if target is None else f"target {target:g}: {'met' if value < target else 'MISSED'}"


def row(name, values, target=None):
    """Print the median and the quartiles of some differences, and return them."""
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    print(
        f"{name:30} {median:8.2f} {f'{low:.2f} .. {high:.2f}':>20}   {verdict(median, target)}",
        flush=True,
    )
    return {"median": median, "quartiles": [low, high], "target": target}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--traceml", help="the program of TraceML, to be measured, too")
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    quiet()
    facts = describe_machine(torch.device("cpu")) | read_versions()
    found = {"facts": facts}
    print("  ".join(f"{name} {value}" for name, value in facts.items()))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        train(CASES["everything"], folder, steps=300, block=50)  # imports
        heading = f"{'':30} {'median':>8} {'quartiles':>20}"

        print(f"\nCPU time per step over plain Lightning, us; {arguments.rounds} rounds\n{heading}")
        rounds = rounds_of(tuple(CASES), arguments.rounds, folder, steps=arguments.steps)
        found["cpu_us"] = {
            name: row(name, values, CASES[name].target_us)
            for name, values in differences(rounds, "cpu_us").items()
        }
        if arguments.traceml is not None:
            pairs = max(3, arguments.rounds // 2)
            values = traceml_differences(arguments.traceml, pairs, folder)
            found["cpu_us"]["TraceML"] = row("TraceML", values)
        plain_us = statistics.median(each["plain"]["cpu_us"] for each in rounds)
        found["plain_us"] = plain_us
        print(f"{'plain Lightning itself':30} {plain_us:8.2f}")

        print(f"\nCPU time after the last step of an epoch, over plain Lightning, ms\n{heading}")
        found["epoch_end_ms"] = {
            name: row(name, values)
            for name, values in differences(rounds, "epoch_end_ms").items()
            if CASES[name].callback is not None
        }

        print(f"\nwall time of a step of {_STEP_MS:g} ms over plain Lightning, %\n{heading}")
        rounds = rounds_of(
            _LONG_CASES,
            arguments.rounds,
            folder,
            steps=201,
            block=50,
            step_ms=_STEP_MS,
        )
        found["wall_percent"] = {
            name: row(
                name,
                [value / _STEP_MS / 10 for value in values],
                None if CASES[name].target_us is None else _TARGET_PERCENT,
            )
            for name, values in differences(rounds, "wall_us").items()
        }
    print("\nimport, ms")
    light = import_ms("import torch", "import lightning_fastdata")
    print(f"{'lightning_fastdata':30} {light:8.1f}   over torch             {verdict(light, 50)}")
    names = "from lightning_fastdata import FastDataModule, DataThroughputCallback"
    heavy = import_ms("import torch, lightning.pytorch", names)
    print(f"{'its public classes':30} {heavy:8.1f}   over torch, lightning")
    found["import_ms"] = {"package": light, "public classes": heavy}
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()

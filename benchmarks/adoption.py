"""What adopting this package takes and changes, in eight styles of projects.

    python benchmarks/adoption.py [--styles hparams,stream]

Each script of benchmarks/styles is run in a process of its own: as it is; under ``fastdata run``;
with the callback in its code ("two lines"); and with its loaders given to a FastDataModule. The
table says whether a summary was printed, whether the training saw the same samples in the same
order, and whether it came to the same weights as the script alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

STYLES = Path(__file__).parent / "styles"
NAMES = (
    "hparams",
    "lightning_cli",
    "hydra_app",
    "stream",
    "combined",
    "objects",
    "manual",
    "fabric",
)
RUN = ("-m", "lightning_fastdata", "run")
WAYS = {
    "as it is": ((), "plain"),
    "fastdata run": (RUN, "plain"),
    "two lines": ((), "callback"),
    "FastDataModule": ((), "module"),
}


class Result(NamedTuple):
    """What a script came to."""

    samples: str
    seen: str
    weights: str
    summary: bool
    seconds: float
    error: str


def run(name: str, before: tuple[str, ...], how: str) -> Result:
    root = str(Path(__file__).parents[1])
    environ = {**os.environ, "STYLE": how, "NO_ALBUMENTATIONS_UPDATE": "1", "PYTHONPATH": root}
    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *before, str(STYLES / f"{name}.py")],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=folder,
            env=environ,
            check=False,
        )
    took_s = time.perf_counter() - began_s
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("RESULT")]
    error = "" if done.returncode == 0 and found else done.stderr[-1500:]
    samples, seen, weights = found[0] if found else ("?", "?", "?")
    return Result(samples, seen, weights, "samples/s in a step" in done.stdout, took_s, error)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--styles", default=",".join(NAMES))
    errors = []
    print(f"{'style':14s} {'way':15s} summary  samples  same order  same weights  seconds")
    for name in parser.parse_args().styles.split(","):
        alone = None
        for way, (before, how) in WAYS.items():
            found = run(name, before, how)
            alone = alone or found
            if found.error:
                errors.append(f"{name}, {way}:\n{found.error}")
            same = ["yes" if a == b else "no" for a, b in zip(found[1:3], alone[1:3], strict=True)]
            summary = "yes" if found.summary else "no"
            row = f"{name:14s} {way:15s} {summary:7s}  {found.samples:>7s}  {same[0]:10s}  "
            failed = "  FAILED" if found.error else ""
            print(f"{row}{same[1]:12s}  {found.seconds:7.1f}{failed}", flush=True)
    sys.exit("\n".join(errors) or None)


if __name__ == "__main__":
    main()

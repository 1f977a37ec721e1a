"""All that needs a GPU, one section after the other: what each decides, and what came of it.

make gpu                          all sections, the decisive ones first
make gpu SECTION=races            one of them
python tools/gpu.py bytes races   the same without make

Each section takes less than eight minutes, in a process of its own. It prints a table, and writes
it to ``benchmarks/results/<device>.md`` in the place of what it wrote there before. Packages that
are missing are installed from the wheels in ``wheels/``, if there are any. Exits with 2 where torch
finds no CUDA device, and with 1 if something failed. ``--device cpu --quick`` only tries the
sections' own code, and writes nothing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
LIMIT_S = 470


class Section(NamedTuple):
    """What is measured, and why."""

    measure: str
    """Module and function, which takes a `Run`."""
    decides: str


SECTIONS = {
    "running": Section("gpu_first:try_everything", "whether anything runs on this device at all"),
    "bytes": Section(
        "gpu_first:compare_bytes", "whether the kernels make the bytes of Albumentations here"
    ),
    "races": Section(
        "gpu_first:look_for_races", "whether kernels race, read what nobody wrote, or leave memory"
    ),
    "tests": Section("gpu_first:run_tests", "whether the laws that need a device hold"),
    "waiting": Section(
        "gpu_prefetch:measure_prefetch",
        "what prefetch= should be under a host that waits in each step, and under one that does "
        "not; whether pinned batches of this loader arrive as fast as those of torch's",
    ),
    "memory": Section(
        "gpu_training:measure_guard",
        "whether the steps that the guard tries take what a training that prefetches does",
    ),
    "errors": Section("gpu_first:provoke_errors", "whether the guard knows memory errors as such"),
    "start": Section("gpu_training:measure_start", "what comes before the first step, and why"),
    "augment": Section(
        "gpu_augment:measure_augment", "whether augmentation is within its goals, beside others"
    ),
    "overhead": Section("gpu_training:measure_overhead", "what watching a step costs it"),
    "training": Section("gpu_training:measure_training", "images a second of a whole training"),
}

PACKAGES = {
    **{name: name for name in ("albumentations", "hypothesis", "lightning", "psutil", "pytest")},
    **{name: name for name in ("torchvision", "triton", "xxhash")},
    "cv2": "opencv-python-headless",
    "pytest_timeout": "pytest-timeout",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
}
"""What sections import, beside torch, and the name of its wheel."""


def install_missing(wheels):
    """Install packages that are missing from a folder of wheels, if it has any; ask no network."""
    missing = [wheel for name, wheel in PACKAGES.items() if find_spec(name) is None]
    if missing and any(wheels.glob("*.whl")):
        local = ["--no-index", "--find-links", str(wheels)]
        subprocess.run([sys.executable, "-m", "pip", "install", *local, *missing], check=False)


def versions():
    """Return the versions that a result rests on."""
    import torch

    found = {"Python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "lightning", "albumentations", "torchvision"):
        if find_spec(name) is not None:
            found[name] = importlib.metadata.version(name)
    return ", ".join(f"{name} {number}" for name, number in found.items())


def part_of(name, rows, where):
    """Return the part of a section in a report, as Markdown."""
    lines = [f"## {name}", "", f"Decides {SECTIONS[name].decides}.", "", where, ""]
    lines += ["| case | what | value | unit | note |", "| --- | --- | ---: | --- | --- |"]
    for row in rows:
        value = row["value"]
        shown = "-" if value is None else f"{value:.4g}" if isinstance(value, float) else value
        told = [str(one).replace("|", "/").replace("\n", " ") for one in (shown, row["note"])]
        lines.append(
            f"| {row['section']} | {row['what']} | {told[0]} | {row['unit']} | {told[1]} |"
        )
    return "\n".join(lines) + "\n"


def put_part(report, name, part, title):
    """Return a report with the part of a section in it, in the order of the sections."""
    parts = report.split("\n## ")[1:]
    known = {text.split("\n", 1)[0]: f"## {text}".rstrip("\n") for text in parts}
    known[name] = part.rstrip("\n")
    ordered = [known[each] for each in SECTIONS if each in known]
    return "\n\n".join([f"# {title}", *ordered]) + "\n"


def run_apart(name, given):
    """Return what a process of its own found of a section, and whether it succeeded."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        command = [sys.executable, __file__, name, "--device", given.device, "--rows", str(rows)]
        command += ["--quick"] if given.quick else []
        try:
            code = subprocess.run(command, check=False, timeout=LIMIT_S + 10).returncode
            ended = f"ended with {code}"
        except subprocess.TimeoutExpired:
            code, ended = 1, f"took longer than {LIMIT_S} s"
        found = (
            [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []
        )
    if code != 0:
        found.append({"section": name, "what": ended, "value": None, "unit": "", "note": ""})
    return found, code == 0


def run_here(name, given):
    """Run a section in this process, each row written to a file as soon as it is found."""
    import torch
    from gpu_run import Run, Skipped, failure

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    run = Run(given.device, quick=given.quick, budget_s=LIMIT_S, rows_file=given.rows)
    if run.cuda:
        torch.cuda.set_device(run.device)
    else:
        torch.set_num_threads(1)
    try:
        measure_of(name)(run)
    except Skipped as why:
        run.add(name, "all", None, "", f"skipped: {why}")
    except Exception as error:
        run.add(name, "all", None, "", failure(error))
        return 1
    return 0


def measure_of(name):
    """Return the function of a section."""
    module, function = SECTIONS[name].measure.split(":")
    return getattr(importlib.import_module(module), function)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", help=f"default: all of {', '.join(SECTIONS)}")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu to try the program")
    parser.add_argument("--quick", action="store_true", help="small sizes; numbers mean nothing")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if unknown := set(given.sections) - SECTIONS.keys():
        parser.error(f"there is no section {', '.join(sorted(unknown))}")
    if given.rows is not None:
        return run_here(given.sections[0], given)
    install_missing(ROOT / "wheels")
    import torch

    from lightning_fastdata.host.machine import read_gpus

    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("This needs a CUDA device, and torch finds none here.", file=sys.stderr)
        return 2
    title = read_gpus()[device.index or 0][0] if device.type == "cuda" else "No GPU"
    where = f"{time.strftime('%Y-%m-%d', time.gmtime())}; {title}; {versions()}"
    out = ROOT / "benchmarks" / "results" / f"{re.sub('[^a-z0-9]+', '-', title.lower())}.md"
    succeeded = True
    for name in given.sections or SECTIONS:
        rows, good = run_apart(name, given)
        succeeded = succeeded and good
        part = part_of(name, rows, where)
        print(part, flush=True)
        if device.type == "cuda" and not given.quick:
            report = out.read_text() if out.exists() else ""
            out.write_text(put_part(report, name, part, title))
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    sys.exit(main())

"""What the package does on a GPU, measured: augmentation, overhead, the guard, a whole training.

python benchmarks/gpu.py --out benchmarks/results/gpu.json

Takes less than eight minutes, prints a Markdown table, and writes JSON and that table beside it.
What is missing or fails says so in its row, and the rest is measured. Exits with 2 where there is
no CUDA device. ``--device cpu --quick`` only tries the program itself: its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import torch
from gpu_augment import measure_augment
from gpu_prefetch import measure_prefetch
from gpu_run import Run, Skipped, failure, new_trainer
from gpu_training import measure_guard, measure_training
from torch import nn


def measure_overhead(run):
    from lightning_fastdata.insight.measure.timeline import EventClock, StepTimeline

    name, steps = "overhead", 100 if run.quick else 2000
    timeline = StepTimeline(device=EventClock() if run.cuda else None)

    def one_step():
        timeline.wait_began()
        timeline.wait_ended()
        timeline.transfer_began()
        timeline.augment_began()
        timeline.augment_ended()
        timeline.transfer_ended()
        timeline.compute_ended(32)

    for _ in range(100):
        one_step()
    run.settle()
    at = time.perf_counter()
    for _ in range(steps):
        one_step()
    took_us = (time.perf_counter() - at) * 1e6 / steps
    run.add(name, "all marks of a step, host time", took_us, "us")
    run.add(name, "steps without figures", timeline.dropped_steps, "", "the clock was full")

    pairs = [
        [_trainer_step_us(run, watched, steps // 2) for watched in (False, True)]
        for _ in range(1 if run.quick else 5)
    ]
    plain, watched = (min(times) for times in zip(*pairs, strict=True))
    run.add(name, "a step of a tiny model", plain, "us", "Trainer alone, best run")
    run.add(name, "the same with the callback", watched, "us", "best run")
    run.add(name, "the callback adds", watched - plain, "us", f"{len(pairs)} runs each")


def _trainer_step_us(run, watched, steps):
    import lightning.pytorch as pl

    from lightning_fastdata import DataThroughputCallback

    class Tiny(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)

    class Clock(pl.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            run.settle()
            self.began = time.perf_counter()

        def on_train_epoch_end(self, trainer, pl_module):
            run.settle()
            self.took_us = (time.perf_counter() - self.began) * 1e6 / steps

    clock = Clock()
    watching = [DataThroughputCallback(summary=False, report=False)] if watched else []
    batches = torch.utils.data.DataLoader(torch.randn(steps, 8, 64), batch_size=None)
    # Of two epochs the second is kept.
    with tempfile.TemporaryDirectory() as folder:
        new_trainer(run, folder, max_epochs=2, callbacks=[clock, *watching]).fit(Tiny(), batches)
    return clock.took_us


SECTIONS = {
    "augment": (measure_augment, 120),
    "overhead": (measure_overhead, 60),
    "prefetch": (measure_prefetch, 40),
    "training": (measure_training, 150),
    "guard": (measure_guard, 60),
}


PACKAGES = ("triton", "torchvision", "lightning", "albumentations", "opencv-python-headless")


def markdown(report):
    """Return the report as a Markdown table, marked if it was not measured on a GPU."""
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    lines = [f"{report['device']}; {versions}; {report['date']}", ""]
    if not report["cuda"]:
        lines = ["**Not measured on a GPU: these numbers mean nothing.**", "", *lines]
    lines += ["| section | what | value | unit | note |", "| --- | --- | ---: | --- | --- |"]
    for row in report["rows"]:
        value = row["value"]
        shown = "-" if value is None else f"{value:.4g}" if isinstance(value, float) else value
        lines.append(
            f"| {row['section']} | {row['what']} | {shown} | {row['unit']} | {row['note']} |"
        )
    return "\n".join(lines)


def version_of(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def report_of(run):
    device = torch.cuda.get_device_name(run.device) if run.cuda else f"CPU ({platform.machine()})"
    return {
        "device": device,
        "cuda": run.cuda,
        "quick": run.quick,
        "versions": {
            "Python": platform.python_version(),
            "torch": torch.__version__,
            **{name: version_of(name) for name in PACKAGES},
        },
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "rows": run.rows,
    }


def write(run, out):
    """Write the report as JSON, and as a table beside it."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        report = report_of(run)
        out.write_text(json.dumps(report, indent=1) + "\n")
        out.with_suffix(".md").write_text(markdown(report) + "\n")


def rows_of_another_process(given, sections, left_s):
    """Return what a process of its own finds of sections."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--device", given.device, "--out", str(out)]
        command += ["--budget-s", str(left_s), "--only", *sections]
        command += ["--quick"] if given.quick else []
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if out.exists():
            return json.loads(out.read_text())["rows"]
    told = "the process that was to measure it has ended"
    return [
        {"section": name, "what": "all", "value": None, "unit": "", "note": told}
        for name in sections
    ]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu to try the program")
    parser.add_argument("--quick", action="store_true", help="small sizes; numbers mean nothing")
    parser.add_argument("--budget-s", type=float, default=440, help="seconds to take at most")
    parser.add_argument("--only", choices=SECTIONS, nargs="+", default=list(SECTIONS))
    given = parser.parse_args(arguments)
    if torch.device(given.device).type == "cuda" and not torch.cuda.is_available():
        print("This needs a CUDA device, and torch finds none here.", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    run, failed = Run(given.device, quick=given.quick, budget_s=given.budget_s), False
    if run.cuda:
        torch.cuda.set_device(run.device)
    else:
        torch.set_num_threads(1)
    for number, name in enumerate(given.only):
        measure, needs_s = SECTIONS[name]
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            if run.left_s() < needs_s and not run.quick:
                raise Skipped(f"needs {needs_s} s, {run.left_s():.0f} s were left")
            measure(run)
        except Skipped as why:
            run.add(name, "all", None, "", f"skipped: {why}")
        except Exception as error:  # the other sections are still worth their time
            failed = True
            run.add(name, "all", None, "", failure(error))
            rest = given.only[number + 1 :]
            if run.cuda and rest:
                # A kernel that reads where it must not leaves nothing of CUDA in its process.
                write(run, given.out)
                run.rows += rows_of_another_process(given, rest, run.left_s())
                break
        # After each section: what stops the program must not lose what was found.
        write(run, given.out)
    write(run, given.out)
    print(markdown(report_of(run)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

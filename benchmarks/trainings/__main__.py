"""Run one training in this process: ``python -m trainings NAME --out FOLDER``.

It writes what it knows from outside to ``run.json``; the callback writes ``report.json`` beside it.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch

from lightning_fastdata import DataThroughputCallback
from trainings import registry
from trainings.parts import Load, Made


def arguments_of_fit(made: Made, changed: dict[str, Any], *, plain: bool) -> dict[str, Any]:
    """Return what ``trainer.fit`` is given.

    Args:
        made: The training.
        changed: Options of its training loaders that are to be others.
        plain: Whether torch's DataLoader stands in the place of ours.
    """

    def of(load: Load) -> Load:
        load = load.with_options(changed)
        return load.plain() if plain else load

    if isinstance(made.load, dict):
        return {"train_dataloaders": {key: of(load).loader() for key, load in made.load.items()}}
    load = of(made.load)
    if load.form == "module":
        return {"datamodule": load.module()}
    loaders = {} if made.val is None else {"val_dataloaders": made.val.loader()}
    if load.form == "own":
        made.model.train_dataloader = load.loader  # type: ignore[method-assign]
        return loaders
    return {"train_dataloaders": load.loader(), **loaders}


def fit(made: Made, changed: dict[str, Any], out: Path, watch: str) -> dict[str, Any]:
    """Fit, and return what is known of it from outside."""
    callbacks, profiler = list(made.callbacks), None
    throughput = DataThroughputCallback(report=out / "report.json", summary=False)
    if watch == "fastdata":
        callbacks.append(throughput)
    elif watch == "profiler":
        from lightning.pytorch.profilers import SimpleProfiler

        profiler = SimpleProfiler()
    options = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "default_root_dir": out, **made.trainer,
    }  # fmt: skip
    trainer = lightning.Trainer(**options, callbacks=callbacks, profiler=profiler)
    given = arguments_of_fit(made, changed, plain=watch == "none")
    began = time.perf_counter()
    trainer.fit(made.model, **given)
    known: dict[str, Any] = {"fit_s": time.perf_counter() - began, "steps": trainer.global_step}
    if profiler is not None:
        known["seconds"] = {name: sum(each) for name, each in profiler.recorded_durations.items()}
    if watch == "fastdata" and trainer.is_global_zero:
        assert throughput.report is not None
        written = json.loads((out / "report.json").read_text())
        known["same_report"] = written == json.loads(json.dumps(throughput.report.as_dict()))
    return known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=tuple(registry.TRAININGS))
    parser.add_argument("--out", type=Path, required=True, help="folder for what is written")
    parser.add_argument("--watch", choices=("fastdata", "profiler", "none"), default="fastdata")
    parser.add_argument("--changed", type=json.loads, default={}, help="loader options, as JSON")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    training = registry.TRAININGS[chosen.name]
    torch.set_num_threads(training.threads)
    torch.manual_seed(0)
    folder = chosen.out / f"data-{os.environ.get('LOCAL_RANK', '0')}"
    folder.mkdir()
    made = training.make(folder)
    try:
        known = fit(made, chosen.changed, chosen.out, chosen.watch)
    finally:
        made.close()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        (chosen.out / "run.json").write_text(json.dumps(known))


if __name__ == "__main__":
    main()

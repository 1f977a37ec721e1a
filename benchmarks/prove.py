"""Whether what ``fastdata prove`` promises comes true when it is written into the script.

    python benchmarks/prove.py --folder FOLDER [--only NAME ...] [--budget 75s] [--got 4]
    python benchmarks/prove.py --folder FOLDER --table

Each training of ``provable.py`` is proved as a user does it. What was recommended is then written
into the script, which fits as it was and with the change in turn (A B B A A B B A), everything made
anew each time. Compared are the wall times of an epoch with its start and validation, without the
first, and with this package's loader without those of the first 200 steps, in which the number of
workers follows the training. Healthy trainings, some beside a program that burns a CPU, must get no
recommendation.

A training leaves one JSON in the folder, and is not run again while it is there: the benchmark may
be interrupted and continued. ``--table`` prints what is there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from provable import REAL
from turns import hogs, machine
from verdicts import environment

from lightning_fastdata.prove.trials import AS_IS, FREE, Trial, bound_of, conclude, of_dict

HERE = Path(__file__).parent
MEASURED_S = 3.0
"""Of epochs that are measured in one run, about."""
SETTLED_STEPS = 200
"""Behind so many steps of a fit, the number of workers of this package's loader has settled."""
TIME_LIMIT_S = 240
PLANTED = (
    # Called healthy where they come from, but of short steps a twentieth can be gained.
    "healthy: 10 ms, our worker",
    "healthy: 20 ms, torch's worker",
    "healthy, mapped file: 20 ms",
    "healthy, slow Python in training_step: 10 + 20 ms",
    "healthy on a device: 20 ms, torch's DataLoader",
    "healthy beside a hog: 20 ms, torch's worker",
    "latency: 4 ms a sample, 1 worker",
    "latency, torch's loader: 6 ms, 2 workers, module's own",
    "latency, no workers: 2 ms, torch's DataLoader",
    "lock between workers: 3 ms, 4 workers",
    "file lock: 3 ms, 2 workers",
    "bandwidth: 20 MB/s, 2 workers",
    "one slow sample in 160: 300 ms",
    "sqlite opened anew: 1 worker",
    "zip opened anew: 500 members, 1 worker",
    "npz unpacked for a row: 1000 rows, 1 worker",
    "decoding in Python: 4000 fields, 1 worker",
    "decoding in Python, no workers: 6000 fields",
    "decoding in Python, torch's loader: 4000 fields, no workers, module's own",
    "JPEG decoding: 640 px, 1 worker",
    "huge PNGs: 1500 px, module's own loader",
    "elastic transform: 1 worker",
    "tokenizer in Python: 1500 words, 1 worker",
    "collate_fn that mixes: 8 rounds, 1 worker",
    "padding in collate_fn: 400 numbers, 1 worker",
    "batches of 25 and 50 MB: 25 MB, 2 workers",
    "too many workers: 10 workers",
    "model takes all CPUs: 2 workers",
    "sampler in Python: 20000 weights, 2 workers",
    "annotations to unpickle: 300 boxes, 2 workers",
    "slow callback: 10 ms in on_train_batch_end",
    "validation without workers: 2 ms, torch's DataLoader",
    "short epochs, workers start anew: 10 steps, 2 workers",
    "short epochs, workers start anew: 6 steps, torch's DataLoader, 4 workers",
    "spawned workers, big dataset: 1 worker, torch's DataLoader",
    "stream that opens an index: 300 ms, torch's DataLoader",
)
HEALTHY = (
    "healthy: 50 ms, records",
    "healthy: 100 ms, torch's DataLoader",
    "healthy: 200 ms, store",
    "healthy, mapped file: 50 ms, no workers",
    "healthy, slow Python in training_step: 30 + 20 ms, tensors",
    "real: Transformer of Lightning, no workers",
    "real: lraspp of torchvision, no workers",
    "healthy beside a hog: 50 ms, records",
    "healthy beside a hog: 100 ms, torch's DataLoader",
    "healthy beside a hog: 200 ms, store",
)
"""Steps of 50 ms or more, of which data takes less than 3 %."""


def is_healthy(name: str) -> bool:
    return name in HEALTHY


def proved(name: str, budget: str) -> dict[str, Any]:
    """Prove a training as a user does; return what was found."""
    with tempfile.TemporaryDirectory() as folder, hogs("hog" in name):
        file = Path(folder) / "found.json"
        command = [sys.executable, "-m", "lightning_fastdata", "prove", "--budget", budget]
        command += ["--json", str(file), str(HERE / "provable.py"), name]
        began = time.perf_counter()
        done = subprocess.run(
            command, env=environment(), cwd=folder, capture_output=True, text=True, check=False
        )
        if not file.exists():
            return {"error": done.stderr[-2000:]}
        left = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*"))
        return {
            **known_of(of_dict(json.loads(file.read_text()))),
            "text": done.stdout, "said": done.stderr[-1500:],
            "seconds": time.perf_counter() - began, "left": left,
        }  # fmt: skip


def known_of(trial: Trial) -> dict[str, Any]:
    """Return what a trial says, as plain JSON types."""
    found = conclude(trial)
    arms = {block.arm for block in trial.blocks}
    known: dict[str, Any] = {
        "outcome": found.outcome, "verdict": found.verdict, "blocks": [*map(asdict, trial.blocks)],
        "batches": trial.facts.get("batches"),
        "epoch_s": {
            arm: statistics.fmean(b.epoch_s for b in trial.blocks if b.arm == arm) for arm in arms
        },
        "free": bound_of(trial).factor if FREE in arms else None,
    }  # fmt: skip
    if found.remedy is not None and found.gain is not None:
        known["recommended"] = {
            "name": found.remedy, "gain": asdict(found.gain),
            "change": asdict(trial.remedies[found.remedy].change),
        }  # fmt: skip
    return known


def got(name: str, found: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Fit as it was and changed, in turn; return how many times as fast an epoch is."""
    change = found["recommended"]["change"]
    epoch_s = (found["epoch_s"][key] for key in (AS_IS, found["recommended"]["name"]))
    settling = math.ceil(SETTLED_STEPS / (found["batches"] or SETTLED_STEPS))
    slow, fast = (
        (what, before, before + min(40, max(2, math.ceil(MEASURED_S / each_s))))
        for what, before, each_s in zip(
            ({}, change), (1, settling if change.get("fast") else 1), epoch_s, strict=True
        )
    )
    turns = [turn for n in range(rounds) for turn in ((slow, fast) if n % 2 == 0 else (fast, slow))]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "epochs.json"
        command = [sys.executable, str(HERE / "provable.py"), name]
        fits = [(what, epochs) for what, _, epochs in turns]
        command += ["--turns", json.dumps(fits), "--out", str(file)]
        own = {**environment(), "LIGHTNING_FASTDATA_CACHE": str(Path(folder) / "cache")}
        subprocess.run(
            command, env=own, cwd=folder, capture_output=True, check=True, timeout=TIME_LIMIT_S
        )
        epochs_s = json.loads(file.read_text())
    spent = [
        statistics.fmean(each[before:])
        for each, (_, before, _) in zip(epochs_s, turns, strict=True)
    ]
    pairs = [spent[2 * n : 2 * n + 2][:: 1 if n % 2 == 0 else -1] for n in range(rounds)]
    logs = [math.log(before / after) for before, after in pairs]
    return {"factor": math.exp(statistics.fmean(logs)), "epochs_s": pairs}


def row_of(name: str, budget: str, rounds: int, found: dict[str, Any] | None) -> dict[str, Any]:
    """Prove one training, if that was not done, and try what was recommended."""
    load = os.getloadavg()[0]
    found = found or proved(name, budget)
    row: dict[str, Any] = {"name": name, "found": found}
    if found.get("recommended"):
        try:
            row["got"] = got(name, found, rounds)
        except subprocess.SubprocessError as error:
            output = getattr(error, "stderr", None) or b""
            row["got_error"] = f"{error} {output[-800:].decode()}"
    others = [block["others_cpus"] for block in found.get("blocks", [])]
    row["others_cpus"] = statistics.fmean(others) if others else None
    row |= {"load_average": (load, os.getloadavg()[0]), "at": time.strftime("%Y-%m-%d %H:%M")}
    return row


def judged(row: dict[str, Any]) -> dict[str, Any] | None:
    """Return how the gain that was promised compares with the one that came; None: none was."""
    recommended = row["found"].get("recommended")
    if not recommended or "got" not in row:
        return None
    promised, came = recommended["gain"], row["got"]["factor"]
    high = promised["high"]
    return {
        "promised": promised["factor"], "low": promised["low"], "high": high, "got": came,
        "error": came / promised["factor"] - 1, "inside": promised["low"] <= came <= high,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Return what was found, as markdown, and the summary."""
    lines = [
        "| training | free data | recommended | promised | interval | got | error |",
        "| --- | ---: | --- | ---: | --- | ---: | ---: |",
    ]
    for row in rows:
        found = row["found"]
        free = found.get("free")
        cells = [row["name"], "-" if free is None else f"{free:.2f}"]
        how = judged(row)
        if how is None:
            cells += [found.get("outcome", "error"), "", "", row.get("got_error", "")[:40], ""]
        else:
            cells += [
                found["recommended"]["name"], f"{how['promised']:.2f}",
                f"{how['low']:.2f} to {how['high']:.2f}", f"{how['got']:.2f}",
                f"{how['error']:+.0%}",
            ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", summary(rows)])


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the figures that count."""
    ill = [row for row in rows if not is_healthy(row["name"])]
    fine = [row for row in rows if is_healthy(row["name"])]
    known = [how for row in ill if (how := judged(row)) is not None]
    errors = sorted(abs(how["error"]) for how in known) or [math.nan]
    p95 = errors[min(len(errors) - 1, int(0.95 * len(errors)))]
    inside = sum(how["inside"] for how in known)
    near = sum(how["inside"] or abs(how["error"]) <= 0.05 for how in known)
    loses = [row["name"] for row in rows if (how := judged(row)) and how["got"] < 1.0]
    blamed = [row["name"] for row in fine if row["found"].get("recommended")]
    unknown = [
        r["name"] for r in rows if r["found"].get("outcome", "error") in ("not known", "error")
    ]
    return (
        f"{len(ill)} trainings, {len(known)} recommendations: promised against got, median "
        f"{statistics.median(errors):.1%}, 95th percentile {p95:.1%}; {inside} within their "
        f"interval, {near} within it or 5 %. Recommendations that lose: {len(loses)} {loses or ''}."
        f" {len(fine)} healthy ones, {len(blamed)} of them with a recommendation {blamed or ''}. "
        f"Not known: {len(unknown)} {unknown or ''}."
    )


def file_of(folder: Path, name: str) -> Path:
    kept = "".join(sign if sign.isalnum() else "-" for sign in name)
    return folder / f"{kept}.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="one JSON for each training")
    parser.add_argument("--only", nargs="+", help="names, or how they begin")
    parser.add_argument("--budget", default="75s")
    parser.add_argument("--got", type=int, default=4, help="pairs of runs of what is recommended")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    # Real, planted and healthy ones in turn, so that an early end leaves some of each.
    groups = [[name for name in REAL if not is_healthy(name)], list(PLANTED), list(HEALTHY)]
    names = [
        group[at] for at in range(max(map(len, groups))) for group in groups if at < len(group)
    ]
    if options.only:
        names = [name for name in names if any(name.startswith(each) for each in options.only)]
    for name in names if not options.table else ():
        file = file_of(options.folder, name)
        known = json.loads(file.read_text()) if file.exists() else {}
        if known and ("got" in known or not known["found"].get("recommended")):
            continue
        row = row_of(name, options.budget, options.got, known.get("found"))
        file.write_text(json.dumps(row, indent=1))
        how = judged(row)
        told = row["found"].get("verdict", row["found"].get("error", "?")[-300:])
        came = "" if how is None else f" GOT {how['got']:.2f} ({how['error']:+.0%})"
        print(f"{name}: {told}{came}{row.get('got_error', '')}", flush=True)
    there = [file_of(options.folder, name) for name in names]
    print(table([json.loads(file.read_text()) for file in there if file.exists()]))
    print(", ".join(f"{key} {value}" for key, value in machine().items()))


if __name__ == "__main__":
    main()

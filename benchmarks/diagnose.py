"""What tools say about trainings that are slow for one known reason each, side by side.

Every workload of ``slow_trainings.py`` trains once for each tool, in a process of its own, with the
same samples, network, batch size and number of workers::

    python benchmarks/diagnose.py --traceml-python ~/traceml/bin/python --json diagnose.json

The tools: this package's callback with ``FastDataLoader`` in the place of torch's ``DataLoader``
(torch's own workers either way), the callback alone beside torch's ``DataLoader``, TraceML 0.5 as
its README tells (``traceml run script.py``; it attaches itself to Lightning and wraps torch's
``DataLoader``), and Lightning's ``SimpleProfiler``. TraceML is looked for beside this interpreter,
or beside the one of ``--traceml-python``; without it, its column says how to install it.

Two things are counted for each tool. *Class right*: it names the kind of cost (data, something
between steps, computing) that was planted. *Cause told*: besides, what it says, without its
figures, is said of no other workload; from this package also the code that belongs to the cause,
fixed in ``KEY`` below.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from slow_trainings import WORKLOADS
from turns import write

SCRIPT = Path(__file__).with_name("slow_trainings.py")
TIME_LIMIT_S = 180
INSTALL_TRACEML = (
    "not installed: python -m venv traceml; traceml/bin/pip install traceml-ai==0.5.0 "
    "lightning; --traceml-python traceml/bin/python"
)

Class: TypeAlias = Literal["data", "between steps", "computing", "?"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """What is slow in a workload."""

    kind: Class
    """What a tool that tells no more than that has to name."""
    codes: frozenset[str]
    """This package's codes of the cause; any of them counts."""
    truth: str
    """In words."""


KEY = {
    "storage": Planted(
        kind="data", codes=frozenset({"FD303"}), truth="reads block: 3 ms a sample, 2 workers"
    ),
    "transform": Planted(
        kind="data",
        codes=frozenset({"FD305"}),
        truth="samples take 1.5 ms of a CPU, 1 worker for 2 CPUs or more",
    ),
    "collate": Planted(
        kind="data", codes=frozenset({"FD307"}), truth="collate_fn takes 30 ms of a CPU"
    ),
    "slow-sample": Planted(
        kind="data", codes=frozenset({"FD302"}), truth="one sample in 160 takes 301 ms, others 1 ms"
    ),
    "too-many-workers": Planted(
        kind="data",
        codes=frozenset({"FD306"}),
        truth="4 workers for each CPU, and samples that keep all CPUs busy",
    ),
    "epoch-starts": Planted(
        kind="data",
        codes=frozenset({"FD310", "FD106"}),
        truth="workers start anew every 10 steps and take 250 ms",
    ),
    "slow-callback": Planted(
        kind="between steps",
        codes=frozenset({"FD314"}),
        truth="a callback takes 10 ms of a CPU after each step",
    ),
    "healthy": Planted(
        kind="computing",
        codes=frozenset({"FD319", "FD001", "FD301"}),
        truth="nothing: the network takes the time",
    ),
}

_OUR_CLASSES: dict[str, Class] = {
    **dict.fromkeys(("FD001", "FD301", "FD319"), "computing"),
    "FD314": "between steps",
    **{f"FD{number}": "data" for number in (*range(101, 107), *range(302, 312), 315, 318)},
}
_TRACEML_CLASSES: dict[str, Class] = {
    "INPUT_BOUND": "data",
    "RESIDUAL_HEAVY": "between steps",
    "COMPUTE_BOUND": "computing",
    "NO_CLEAR_PERFORMANCE_BOTTLENECK": "computing",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What a tool said of a workload."""

    kind: Class
    """The class of its verdict."""
    verdict: str
    """Its verdict, with figures."""
    advice: str
    """What it would have changed."""
    code: str = ""
    """Its code for the verdict, where it has one."""
    more: str = ""
    """What else it says beside the verdict."""
    text: str = ""
    """Everything it printed."""
    fit_s: float | None = None
    """What the training took."""

    @property
    def words(self) -> str:
        """Verdict and advice without figures."""
        return re.sub(r"\d[\d.,]*", "#", f"{self.verdict} {self.advice}")


def run(command: list[str]) -> str:
    """Run, and return what was printed; raise if it fails."""
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIME_LIMIT_S, env=one_thread, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def train(workload: str, watch: str, out: Path) -> tuple[str, dict[str, Any]]:
    """Train in a process of its own; return what was printed, and what is known of the run."""
    text = run([sys.executable, str(SCRIPT), workload, "--watch", watch, "--out", str(out)])
    return text, json.loads((out / "run.json").read_text())


def ours(workload: str, out: Path, *, watch: str) -> Diagnosis:
    """Ask this package's callback."""
    text, known = train(workload, watch, out)
    verdict = json.loads((out / "report.json").read_text())["verdict"]
    first, *others = verdict["findings"]
    gain = first["gain"]
    advice = first["remedy"] or "nothing"
    said = dict.fromkeys((verdict["sentence"], first["cause"]))
    if gain is not None:
        advice += f" ({gain['before_ms']:.1f} -> {gain['after_ms']:.1f} ms, {gain['basis']})"
    return Diagnosis(
        kind=_OUR_CLASSES.get(first["code"], "?"),
        code=first["code"],
        verdict="; ".join(said),
        advice=advice,
        more=", ".join(other["code"] for other in others),
        text=text,
        fit_s=known["fit_s"],
    )


def traceml(workload: str, out: Path, *, python: Path) -> Diagnosis:
    """Ask TraceML, whose summary holds one primary diagnosis and one per kind of resource."""
    text = run(
        [
            str(python.with_name("traceml")), "run", str(SCRIPT), "--logs-dir", str(out),
            "--run-name", "run", "--args", workload, "--out", str(out),
        ]
    )  # fmt: skip
    summary = json.loads((out / "run" / "final_summary.json").read_text())
    primary = summary["primary_diagnosis"]
    quiet = ("NORMAL", "NO GPU", "NO DATA", "BALANCED")
    more = [summary[part]["diagnosis"] for part in ("system", "process")]
    return Diagnosis(
        kind=_TRACEML_CLASSES.get(primary["kind"], "?"),
        code=primary["kind"],
        verdict=f"{primary['status']}: {primary['summary']}",
        advice=primary["action"],
        more=", ".join(
            f"{each['status']}: {each['action']}" for each in more if each["status"] not in quiet
        ),
        text=text[text.find("+--") :],
        fit_s=json.loads((out / "run.json").read_text())["fit_s"],
    )


def profiler(workload: str, out: Path) -> Diagnosis:
    """Ask SimpleProfiler: a table of times, of which the largest that contains no other is read."""
    text, known = train(workload, "profiler", out)
    # These contain the ones below them in the table.
    outer = ("run_training_epoch", "run_training_batch", "optimizer_step")
    seconds = {
        action: each
        for action, each in known["seconds"].items()
        if not any(action.endswith(name) for name in outer)
    }
    top = max(seconds, key=seconds.__getitem__)
    kind: Class = "computing"
    if "dataloader_next" in top:
        kind = "data"
    elif "[Callback]" in top:
        kind = "between steps"
    share = seconds[top] / known["seconds"]["run_training_epoch"]
    return Diagnosis(
        kind=kind, verdict=f"{top} ({share:.0%} of the epochs)", advice="none", text=text,
        fit_s=known["fit_s"],
    )  # fmt: skip


def told(
    found: dict[str, Diagnosis], *, own_codes: bool, key: dict[str, Planted] = KEY
) -> dict[str, tuple[bool, bool]]:
    """Return for each workload whether the class is right, and whether the cause is told.

    Args:
        found: What one tool said of each workload.
        own_codes: It uses this package's codes, which then have to be right.
        key: What was planted.
    """
    said = Counter(each.words for each in found.values())
    rows = {}
    for name, each in found.items():
        right = each.kind == key[name].kind
        named = each.code in key[name].codes if own_codes else said[each.words] == 1
        rows[name] = right, right and named
    return rows


def traceml_version(python: Path) -> str | None:
    """Return the version beside that interpreter, None without TraceML."""
    if not python.with_name("traceml").exists():
        return None
    asked = "import importlib.metadata as m; print(m.version('traceml-ai'))"
    return run([str(python), "-c", asked]).strip()


def table(results: dict[str, dict[str, Diagnosis]], missing: dict[str, str]) -> str:
    """Return everything as markdown: a section per workload, and the counts."""
    lines: list[str] = []
    marks = {tool: told(found, own_codes="fastdata" in tool) for tool, found in results.items()}
    workloads = list(next(iter(results.values())))
    for workload in workloads:
        planted = KEY[workload]
        codes = ", ".join(sorted(planted.codes))
        what = f"Planted: {planted.truth} (class: {planted.kind}; codes: {codes})."
        head = "| tool | class | cause | says | advises | also |"
        lines += [f"### {workload}", "", what, "", head, "| --- " * 6 + "|"]
        for tool, found in results.items():
            each = found[workload]
            right, cause = ("yes" if mark else "no" for mark in marks[tool][workload])
            says = f"{each.code}: {each.verdict}" if "fastdata" in tool else each.verdict
            row = (tool, right, cause, says, each.advice, each.more)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
        lines.append("")
    lines += [
        "| tool | class right | cause told | different diagnoses |",
        "| --- | --- | --- | --- |",
    ]
    for tool, found in results.items():
        right = sum(mark[0] for mark in marks[tool].values())
        cause = sum(mark[1] for mark in marks[tool].values())
        kinds = len({each.code or each.words for each in found.values()})
        lines.append(f"| {tool} | {right} of {len(found)} | {cause} of {len(found)} | {kinds} |")
    lines += [f"| {tool} | {why} | | |" for tool, why in missing.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=tuple(WORKLOADS), default=tuple(WORKLOADS))
    parser.add_argument(
        "--traceml-python", type=Path, default=Path(sys.executable),
        help="interpreter that has TraceML, Lightning and torch",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="file for everything that was said")
    parser.add_argument("--texts", action="store_true", help="print what each tool printed")
    chosen = parser.parse_args()
    version = traceml_version(chosen.traceml_python)
    tools: dict[str, Any] = {
        "fastdata": lambda name, out: ours(name, out, watch="fastdata"),
        "fastdata, torch's DataLoader": lambda name, out: ours(name, out, watch="fastdata-torch"),
        "SimpleProfiler": profiler,
    }
    missing = {}
    if version is None:
        missing["TraceML"] = INSTALL_TRACEML
    else:
        tools[f"TraceML {version}"] = lambda name, out: traceml(
            name, out, python=chosen.traceml_python
        )
    results: dict[str, dict[str, Diagnosis]] = {tool: {} for tool in tools}
    for name in chosen.only:
        for tool, ask in tools.items():
            with tempfile.TemporaryDirectory() as out:
                each = results[tool][name] = ask(name, Path(out))
            print(f"{name}, {tool}: {each.code} {each.verdict}", file=sys.stderr, flush=True)
            if chosen.texts:
                print(each.text, file=sys.stderr, flush=True)
    print(table(results, missing))
    rows = {
        tool: {name: asdict(each) for name, each in found.items()}
        for tool, found in results.items()
    }
    write(chosen.json, "diagnose", {"said": rows, "missing": missing})


if __name__ == "__main__":
    main()

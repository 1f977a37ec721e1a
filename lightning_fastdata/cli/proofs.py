"""The command ``prove``: whether a change of the loader makes a script's training faster."""

from __future__ import annotations

import json as json_lines
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.cli.commands import check_found_by_lightning, program_of, takes_command
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.host import clock
from lightning_fastdata.prove.settings import VARIABLE, ProveSettings

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from lightning_fastdata.prove.trials import Trial

_UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_LEAST_S: Final = 10.0
_LOOK_EVERY_S: Final = 0.5
_GRACE_S: Final = 20.0
"""A script that was told to stop has so long to do it."""
_OVER_S: Final = 300.0
"""So long behind its budget a script is stopped: a step, or a validation, may take long."""
_BEFORE_S: Final = 30.0
_NOT_YET: Final = (
    f"fastdata: no training has begun within {_BEFORE_S:.0f} s. It is waited for; Ctrl-C ends it.\n"
)
_SHOWN_LINES: Final = 15
_INTERRUPTED: Final = 130


def prove(
    command: Sequence[str], *, module: bool = False, budget: str = "10m", json: str | None = None
) -> None:
    """Try on a script's own training, as a trial, which change of the loader makes it faster.

    Exit codes: 0 if nothing is to be changed, 1 if a change is recommended, 2 if it is not known
    or the arguments cannot be used, 130 if it was interrupted.
    """
    check_found_by_lightning()
    budget_s = seconds_of(budget)
    program = program_of(command, "prove", module=module)
    if json is not None:
        try:
            Path(json).open("ab").close()
        except OSError as error:  # before minutes went into what it gets
            raise OptionsError(f"{json} cannot be written: {error.strerror or error}.") from error
    script = " ".join(command)
    with tempfile.TemporaryDirectory(prefix="fastdata-prove-") as folder, _ended_as_by_ctrl_c():
        file = Path(folder, "trial.json")
        settings = ProveSettings(script=script, file=str(file), budget_s=budget_s)
        sys.stderr.write(
            f"fastdata: {script} is run as a trial, which ends at most {budget} after its training "
            "has begun. It logs nowhere and saves nothing; what it prints is kept from the "
            "terminal.\n"
        )
        code, interrupted = _run(program, _environment(settings, folder), folder, settings)
        trial = _read(file, script)
        _sweep(trial.facts.get("logs", []))
        if not trial.blocks and not trial.stopped and not interrupted:
            trial.stopped = (
                f"the script ended with code {code} before a training began"
                if code
                else "the script made no Lightning Trainer that fits. A loop of its own is tried "
                "if it reads its batches through StepTimer().batches(loader)"
            )
        if interrupted and not trial.ended:
            trial.stopped = "it was interrupted"
        printed = Path(folder, "script.log").read_text("utf-8", "replace").splitlines()
    from lightning_fastdata.prove.text import conclude

    found = conclude(trial)
    sys.stdout.write(f"{found.text()}\n")
    if found.outcome == "not known" and not interrupted and printed:
        sys.stderr.write("\nThe script printed at last:\n")
        sys.stderr.writelines(f"  {line}\n" for line in printed[-_SHOWN_LINES:])
    if json is not None:
        Path(json).write_text(json_lines.dumps(asdict(trial)), "utf-8")
    if interrupted or found.exit_code:
        raise SystemExit(_INTERRUPTED if interrupted else found.exit_code)


def seconds_of(text: str) -> float:
    """Return a length of time that is written as ``90s``, ``10m``, ``1h`` or in seconds.

    Raises:
        OptionsError: It is none, or below ten seconds.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", text)
    if found is None:
        raise OptionsError(f"budget is {text!r}; write seconds, or a number with s, m or h: 10m.")
    seconds = float(found[1]) * _UNITS_S[found[2]]
    if seconds < _LEAST_S:
        raise OptionsError(f"budget is {text!r}; below {_LEAST_S:.0f} s nothing can be compared.")
    return seconds


@contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """Have the ways in which a shell or a scheduler ends a program do what Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    # What is ignored, as under nohup, stays so.
    numbers = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _environment(settings: ProveSettings, folder: str) -> dict[str, str]:
    """Return the environment of the script: its loggers' defaults are in a folder of the trial."""
    return {
        **os.environ,
        VARIABLE: settings.as_text(),
        "PL_TRAINER_DEFAULT_ROOT_DIR": str(Path(folder, "logs")),
        "WANDB_MODE": "disabled",
        "MLFLOW_TRACKING_URI": Path(folder, "mlruns").as_uri(),
        "LIGHTNING_FASTDATA_CACHE": str(Path(folder, "cache")),
    }


def _run(
    program: list[str], environ: dict[str, str], folder: str, settings: ProveSettings
) -> tuple[int, bool]:
    """Run the script to its end; return its code, and whether somebody has interrupted it."""
    with Path(folder, "script.log").open("wb") as log:
        child = subprocess.Popen(program, env=environ, stdout=log, stderr=subprocess.STDOUT)
        interrupted, said = False, ""
        started_s, began_s = clock.monotonic(), math.inf
        told = False
        try:
            file = Path(settings.file)
            while child.poll() is None:
                now_s = clock.monotonic()
                if file.exists():
                    began_s = min(began_s, now_s)
                    if now_s > began_s + settings.budget_s + _OVER_S:
                        _stop(child)
                elif not told and now_s > started_s + _BEFORE_S:
                    told = True
                    sys.stderr.write(_NOT_YET)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_LOOK_EVERY_S)
                said = _say(settings.file, said)
        except KeyboardInterrupt:
            interrupted = True
            _stop(child)
    return child.returncode or 0, interrupted


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Have the script end; it may take the time that ending takes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with suppress(KeyboardInterrupt):  # a second one of an impatient user
            child.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE_S)
                return
    child.wait()


def _say(file: str, said: str) -> str:
    """Tell a terminal what is tried now, and return it."""
    with suppress(OSError, ValueError):
        now = str(json_lines.loads(Path(file).read_text())["facts"].get("now", ""))
        if now and now != said and sys.stderr.isatty():
            sys.stderr.write(f"fastdata: {now}\n")
        return now
    return said


def _read(file: Path, script: str) -> Trial:
    from lightning_fastdata.prove.trials import Trial, of_dict

    try:
        known: Any = json_lines.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return Trial(script=script)
    return of_dict(known)


def _sweep(folders: Sequence[str]) -> None:
    """Remove log folders in which there is nothing: a file may be that of another training."""
    for folder in map(Path, folders):
        with suppress(OSError):
            for inside in sorted(folder.rglob("*"), reverse=True):
                inside.rmdir()  # which fails for a file, and for what holds one
            folder.rmdir()
            folder.parent.rmdir()


def takes_prove(parser: ArgumentParser) -> None:
    """Add the arguments of ``prove``."""
    parser.add_argument(
        "--budget",
        default="10m",
        help="How long it may take, from when the training begins: 90s, 10m, 1h, or seconds. "
        "Exit codes: 0 if nothing is to be changed, 1 if a change is recommended, 2 if it is not "
        "known or the arguments cannot be used, 130 if it was interrupted.",
    )
    parser.add_argument("--json", help="File for the trial: its blocks, remedies and facts.")
    takes_command(parser, "A Python file and its arguments.")

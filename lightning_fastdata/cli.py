"""The command line: ``fastdata run``, ``prove``, ``report``, ``compare``, ``doctor``, ``replay``.

What loads torch or Lightning is imported in the command that needs it.
"""

from __future__ import annotations

import errno
import importlib.util
import json as json_lines
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata import __version__
from lightning_fastdata.errors import FastDataError, OptionsError, printable
from lightning_fastdata.host import clock
from lightning_fastdata.prove import PROVE_VARIABLE, ProveSettings
from lightning_fastdata.zero_code import RUN_VARIABLE

if TYPE_CHECKING:
    from types import ModuleType

    from lightning_fastdata.plugin.replay import ReplayedBatch
    from lightning_fastdata.prove.trials import Trial

_UNUSABLE: Final = 2
"""Exit code if arguments cannot be used, as argparse's; `prove` uses 1 to recommend a change."""
_GROUP: Final = "lightning.pytorch.callbacks_factory"
_UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_LEAST_S: Final = 10.0
_LOOK_EVERY_S: Final = 0.5
_GRACE_S: Final = 20.0
"""Seconds that a script has to end after each signal to stop."""
_OVER_S: Final = 300.0
"""Seconds beyond the budget until a script is stopped: a step or a validation may take long."""
_BEFORE_S: Final = 30.0
_NOT_YET: Final = (
    f"fastdata: no training has begun within {_BEFORE_S:.0f} s. It is waited for; Ctrl-C ends it.\n"
)
_SHOWN_LINES: Final = 15
_SHOWN_BYTES: Final = 4096
_INTERRUPTED: Final = 130
_BY_CTRL_C: Final = "it was interrupted"


def main(arguments: list[str] | None = None) -> None:
    """Run the command line.

    The exit code is that of the command; 2 if its arguments, or files they name, cannot be used.

    Args:
        arguments: Arguments of the program; None: those of the command line.
    """
    given: dict[str, Any] = vars(_parser().parse_args(arguments))
    del given["subcommand"]
    if given.get("command", [])[:1] == ["--"]:  # the end of our own options, as elsewhere
        del given["command"][0]
    try:
        given.pop("call")(**given)
    except FastDataError as error:
        # The message says what to do; a traceback would not help.
        sys.stderr.write(f"fastdata: {error}\n")
        raise SystemExit(_UNUSABLE) from error


def _parser() -> ArgumentParser:
    about = "Data loading, measured and explained."
    parser = ArgumentParser(prog="fastdata", description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"fastdata {__version__}")
    commands = parser.add_subparsers(dest="subcommand", required=True)

    def command(call: Callable[..., None]) -> Callable[..., object]:
        """Add a command, described by its docstring; return the function that adds an argument."""
        does = " ".join((call.__doc__ or "").partition("\n\n")[0].split())
        own = commands.add_parser(call.__name__, help=does, description=does, allow_abbrev=False)
        own.set_defaults(call=call)
        return own.add_argument

    def add_script(add: Callable[..., object], what: str) -> None:
        """Add the script to run, with its own arguments after it."""
        module = "COMMAND is a module, as for python -m."
        add("-m", dest="module", action="store_true", help=module)
        add("command", nargs="...", help=what)

    add = command(run)
    add(
        "--report",
        help="Where the report is written. Default: report.json in the Trainer's log folder.",
    )
    add_script(
        add, "A Python file and its arguments; or a program, such as torchrun, and its arguments."
    )
    add = command(prove)
    add(
        "--budget",
        default="10m",
        help="How long it may take, from when the training begins: 90s, 10m, 1h, or seconds. "
        "Exit codes: 0 if nothing is to be changed, 1 if a change is recommended, 2 if it is not "
        "known or the arguments cannot be used, 130 if it was interrupted.",
    )
    add("--json", help="File for the trial: its blocks, remedies and facts.")
    add_script(add, "A Python file and its arguments.")
    add = command(report)
    add("run", help="The folder of a run, or its report.json.")
    add("--open", action="store_true", help="Open its page in the browser.")
    add = command(compare)
    add("a", help="The folder or the report.json of the run to compare with.")
    add("b", help="The same of the run that is compared.")
    command(doctor)
    add = command(replay)
    where = "module:name, or path/to/file.py:name."
    add("named", help=f"Where the data module is: {where} Or a checkpoint, with --datamodule.")
    add("--datamodule", help=f"Of a checkpoint, which tells seed and ranks: {where}")
    add("--epoch", type=int, help="Counted from 0, as trainer.current_epoch.")
    add("--batch", type=int, help="Of the epoch, from 0, as batch_idx.")
    add("--step", type=int, help="Instead of both: of all training batches of a rank, from 0.")
    add(
        "--batches-per-epoch",
        type=int,
        help="For --step: that a rank took in each epoch, as with limit_train_batches. Default: "
        "as the checkpoint says, or all.",
    )
    add("--rank", type=int, default=0, help="Whose batch.")
    add("--ranks", type=int, help="That trained together. Default: the checkpoint's, or 1.")
    add("--seed", type=int, help="Default: that of the checkpoint, or of the data module.")
    add("--save", help="File to write it to, for torch.load(weights_only=True).")
    return parser


# -- commands about this machine, and about reports ------------------------------------------------


def doctor() -> None:
    """Print what this machine allows, and what of it limits data loading."""
    from lightning_fastdata.host.cpu import read_cpu_limit
    from lightning_fastdata.host.machine import doctor_text, read_gpus, read_versions
    from lightning_fastdata.host.memory import read_host_memory
    from lightning_fastdata.insight.report import print_lines

    cpu, memory, versions = read_cpu_limit(), read_host_memory(), read_versions()
    print_lines([doctor_text(cpu=cpu, memory=memory, gpus=read_gpus(), versions=versions)])


def report(run: str, *, open: bool = False) -> None:  # noqa: A002
    """Print the summary of a run again."""
    from lightning_fastdata.insight.report import page_line, print_lines, read_report

    file = _report_file(Path(run))
    page = file.with_suffix(".html")
    where = [page_line(page)] if page.is_file() else []
    print_lines([*(printable(line, keep="") for line in read_report(file)["summary"]), *where])
    if open:
        import webbrowser

        if not page.is_file():
            raise OptionsError(f"There is no page beside {file}.")
        webbrowser.open(page.resolve().as_uri())


def _report_file(run: Path) -> Path:
    """Return the report at a path; in a folder it is ``report.json``, or the only other report.

    Raises:
        OptionsError: There is no report, or several.
    """
    if not run.is_dir():
        return run
    if (run / "report.json").is_file():
        return run / "report.json"
    found = sorted(run.glob("report-*.json")) or sorted(run.rglob("report.json"))
    if len(found) == 1:
        return found[0]
    listed = f" There are: {', '.join(map(str, found[:10]))}." if found else ""
    raise OptionsError(f"{run} has no report.json.{listed} Name a folder of a run, or its report.")


def compare(a: str, b: str) -> None:
    """Print two runs side by side, and what differs."""
    from lightning_fastdata.insight.report import print_lines, side_by_side

    print_lines([side_by_side(_report_file(Path(a)), _report_file(Path(b)))])


# -- commands that run scripts ---------------------------------------------------------------------


def run(command: Sequence[str], *, module: bool = False, report: str | None = None) -> None:
    """Run a script; each Lightning Trainer that it makes gets a DataThroughputCallback.

    This process becomes that of the script: signals, exit code and output are its own.
    """
    _check_found_by_lightning()
    if report is not None:
        from lightning_fastdata.host.system_calls import check_replaceable
        from lightning_fastdata.insight.report import report_file

        check_replaceable(report_file(report, ".json"))
        report = str(Path(report).resolve())
    program = _program_of(command, "run", module=module)
    settings = {"report": report}
    sys.stderr.write(
        f"fastdata: each Trainer of {command[0]} gets a DataThroughputCallback. A loop without "
        "Lightning's Trainer is measured by StepTimer.\n"
    )
    _become(program, {**os.environ, RUN_VARIABLE: json_lines.dumps(settings)})


def _check_found_by_lightning() -> None:
    """Raise OptionsError unless Lightning finds the callback that this package adds to Trainers."""
    if not any(each.value.startswith("lightning_fastdata.") for each in entry_points(group=_GROUP)):
        raise OptionsError(
            "Lightning cannot find this package, since it is only on the path, or was installed "
            "before it had `fastdata run`. Install it: pip install lightning-fastdata."
        )


def _program_of(command: Sequence[str], asked: str, *, module: bool) -> list[str]:
    """Return the program that a user's command means, with its arguments.

    ``asked``: the subcommand of ``fastdata``; ``module``: it is a module, as for ``python -m``.

    Raises:
        OptionsError: There is no such file or program.
    """
    if not command:
        raise OptionsError(
            f"There is nothing to run. Write: fastdata {asked} train.py [arguments]."
        )
    first, *rest = command
    if module:
        return [sys.executable, "-m", first, *rest]
    if Path(first).is_file() and first.endswith(".py"):
        return [sys.executable, first, *rest]
    found = shutil.which(first)
    if found is None or first.endswith(".py"):
        raise OptionsError(f"{first!r} is no Python file here, and no program that can be found.")
    return [found, *rest]


@contextmanager
def _told_if_it_cannot_start(program: str) -> Iterator[None]:
    """Raise OptionsError if the system cannot start a program in the block."""
    try:
        yield
    except OSError as error:
        shell = " A script needs a first line such as #!/bin/sh." * (error.errno == errno.ENOEXEC)
        raise OptionsError(
            f"{program} cannot be started: {error.strerror or error}.{shell}"
        ) from error


def _become(program: list[str], environ: Mapping[str, str]) -> None:
    sys.stderr.flush()
    sys.stdout.flush()
    if os.name == "posix":
        with _told_if_it_cannot_start(program[0]):
            os.execve(program[0], program, environ)
    # Elsewhere the shell would take the end of this process for the end of the script.
    raise SystemExit(subprocess.run(program, env=dict(environ), check=False).returncode)


def prove(
    command: Sequence[str], *, module: bool = False, budget: str = "10m", json: str | None = None
) -> None:
    """Try on a script's own training, as a trial, which change of the loader makes it faster.

    Exit codes: 0 if nothing is to be changed, 1 if a change is recommended, 2 if it is not known
    or the arguments cannot be used, 130 if it was interrupted.
    """
    _check_found_by_lightning()
    budget_s = _seconds_of(budget)
    program = _program_of(command, "prove", module=module)
    _check_can_be_written(json)
    script = " ".join(command)
    with tempfile.TemporaryDirectory(prefix="fastdata-prove-") as folder, _ended_as_by_ctrl_c():
        file = Path(folder, "trial.json")
        settings = ProveSettings(script=script, file=str(file), budget_s=budget_s)
        within = f"{budget} s" if budget.strip()[-1].isdigit() else budget
        sys.stderr.write(
            f"fastdata: {script} is run as a trial, which ends at most {within} after its training "
            "has begun. It logs nowhere and saves nothing; what it prints is kept from the "
            "terminal.\n"
        )
        code, stopped = _run_trial(program, _environment(settings, folder), folder, settings)
        trial = _read_trial(file, script)
        _sweep(trial.facts.get("logs", []))
        if not trial.ended and (stopped or not trial.stopped):
            trial.stopped = stopped or _ended_itself(code, began=file.exists())
        interrupted = stopped == _BY_CTRL_C
        printed = _last_lines(Path(folder, "script.log"))
    from lightning_fastdata.insight.report import print_lines
    from lightning_fastdata.prove.trials import conclude

    found = conclude(trial)
    print_lines([found.text()])
    if found.outcome == "not known" and not interrupted and printed:
        sys.stderr.write("\nThe script printed at last:\n")
        sys.stderr.writelines(f"  {line}\n" for line in printed)
    if json is not None:
        Path(json).write_text(json_lines.dumps(asdict(trial)), "utf-8")
    if interrupted or found.exit_code:
        raise SystemExit(_INTERRUPTED if interrupted else found.exit_code)


def _check_can_be_written(file: str | None) -> None:
    """Raise OptionsError unless a file can be written, before time is spent on what it will hold.

    A file that is not there is not left behind, as there may be nothing to write to it.
    """
    if file is None:
        return
    new = not os.path.lexists(file)
    try:
        Path(file).open("ab").close()
    except OSError as error:
        raise OptionsError(f"{file} cannot be written: {error.strerror or error}.") from error
    if new:
        Path(file).unlink()


def _ended_itself(code: int, *, began: bool) -> str:
    """Return how a script ended that nothing stopped; ``began``: its training had begun."""
    if code or began:
        before = "the trial did" if began else "a training began"
        return f"the script ended with code {code} before {before}"
    return (
        "the script made no Lightning Trainer that fits, or none without fast_dev_run. A loop of "
        "its own is tried if it reads its batches through StepTimer().batches(loader)"
    )


def _seconds_of(text: str) -> float:
    """Return the seconds of a duration that is written as ``90s``, ``10m``, ``1h`` or in seconds.

    Raises:
        OptionsError: The text is no duration, or is below ten seconds.
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
    """Have SIGTERM and SIGHUP, by which schedulers and shells end programs, act as Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    # A signal that is ignored, as under nohup, stays ignored.
    numbers = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _environment(settings: ProveSettings, folder: str) -> dict[str, str]:
    """Return the environment of the script; by default its loggers write to the trial's folder."""
    return {
        **os.environ,
        PROVE_VARIABLE: settings.as_text(),
        "PL_TRAINER_DEFAULT_ROOT_DIR": str(Path(folder, "logs")),
        "WANDB_MODE": "disabled",
        "MLFLOW_TRACKING_URI": Path(folder, "mlruns").as_uri(),
        "LIGHTNING_FASTDATA_CACHE": str(Path(folder, "cache")),
    }


def _run_trial(
    program: list[str], environ: dict[str, str], folder: str, settings: ProveSettings
) -> tuple[int, str]:
    """Run the script to its end; return its exit code, and why it was stopped; empty: not."""
    with Path(folder, "script.log").open("wb") as log:
        with _told_if_it_cannot_start(program[0]):
            child = subprocess.Popen(program, env=environ, stdout=log, stderr=subprocess.STDOUT)
        stopped = said = ""
        started_s, began_s = clock.monotonic(), math.inf
        told = False
        try:
            file = Path(settings.file)
            while child.poll() is None:
                now_s = clock.monotonic()
                if file.exists():
                    began_s = min(began_s, now_s)
                    if now_s > began_s + settings.budget_s + _OVER_S:
                        stopped = f"it went on for {_OVER_S:.0f} s beyond its budget"
                        _stop(child)
                elif not told and now_s > started_s + _BEFORE_S:
                    told = True
                    sys.stderr.write(_NOT_YET)
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_LOOK_EVERY_S)
                said = _say(settings.file, said)
        except KeyboardInterrupt:
            stopped = _BY_CTRL_C
            _stop(child)
    return child.returncode or 0, stopped


def _last_lines(log: Path) -> list[str]:
    """Return the last lines of what a script printed, which may be anything, and any number."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _SHOWN_BYTES))
        return file.read().decode("utf-8", "replace").splitlines()[-_SHOWN_LINES:]


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Stop the script, by stronger signals if it does not end in time."""
    ways: list[Callable[[], None]] = [child.terminate, child.kill]
    if os.name == "posix":  # elsewhere Ctrl-C cannot be sent to a single program
        ways.insert(0, partial(child.send_signal, signal.SIGINT))
    for end in ways:
        with suppress(KeyboardInterrupt):  # an impatient user may press Ctrl-C again
            end()
            with suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE_S)
                return
    child.wait()


def _say(file: str, said: str) -> str:
    """Return the name of the block that runs now; print it on a terminal if it is another one."""
    with suppress(OSError, ValueError):
        now = str(json_lines.loads(Path(file).read_text())["facts"].get("now", ""))
        if now and now != said and sys.stderr.isatty():
            sys.stderr.write(f"fastdata: {now}\n")
        return now
    return said


def _read_trial(file: Path, script: str) -> Trial:
    from lightning_fastdata.prove.trials import Trial, of_dict

    try:
        known: Any = json_lines.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return Trial(script=script)
    return of_dict(known)


def _sweep(folders: Sequence[str]) -> None:
    """Remove log folders that hold no files: a file may belong to another training."""
    for folder in map(Path, folders):
        with suppress(OSError):
            for inside in sorted(folder.rglob("*"), reverse=True):
                inside.rmdir()  # fails for a file, and for a folder that holds one
            folder.rmdir()
            folder.parent.rmdir()


# -- making batches again --------------------------------------------------------------------------


def replay(
    named: str,
    *,
    datamodule: str | None = None,
    epoch: int | None = None,
    batch: int | None = None,
    step: int | None = None,
    batches_per_epoch: int | None = None,
    rank: int = 0,
    ranks: int | None = None,
    seed: int | None = None,
    save: str | None = None,
) -> None:
    """Print what a training step got, made again without training."""
    import torch

    from lightning_fastdata.plugin.replay import replayed

    number = batch if step is None else step
    given = [each is not None for each in (epoch, batch, step)]
    if number is None or given not in ([True, True, False], [False, False, True]):
        raise OptionsError("Say which batch: --epoch and --batch, or --step alone.")
    _check_can_be_written(save)
    saved, per_epoch = ({}, None) if datamodule is None else _saved_loader(named)
    found = replayed(
        _open_datamodule(named if datamodule is None else datamodule),
        epoch,
        number,
        rank=rank,
        ranks=saved.get("world_size", 1) if ranks is None else ranks,
        seed=saved.get("seed") if seed is None else seed,
        saved=saved,
        per_epoch=per_epoch if batches_per_epoch is None else batches_per_epoch,
    )
    sys.stdout.writelines(f"{line}\n" for line in _batch_lines(found))
    if save is not None:
        plain = {field.name: _as_plain(getattr(found, field.name)) for field in fields(found)}
        try:
            torch.save(plain, save)
        except (OSError, RuntimeError) as error:  # torch raises the latter, as of a full disk
            raise OptionsError(f"{save} cannot be written: {error}") from error
        sys.stdout.write(f"{save} written.\n")


def _saved_loader(checkpoint: str) -> tuple[Mapping[str, Any], int | None]:
    """Return the state in a checkpoint of the training loader whose batches are made again.

    The second value is how many batches a rank takes in each epoch; None: all, or not known.

    Raises:
        OptionsError: It cannot be read, or is of a training without FastDataModule.
    """
    import torch

    from lightning_fastdata.plugin.module import KEY

    alone = "Name the data module alone instead, with --seed and --ranks of its training."
    try:
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the file holds
        raise OptionsError(f"{checkpoint} cannot be read: {error}. {alone}") from error
    parts = saved.values() if isinstance(saved, dict) else ()
    states = [part[KEY] for part in parts if isinstance(part, dict) and KEY in part]
    found: list[tuple[Mapping[str, Any], int | None]] = [
        (loader, state.get("batches_per_epoch"))
        for state in states
        for loader in state["loaders"].values()
    ]
    if not found:
        raise OptionsError(f"{checkpoint} is of no training with a FastDataModule. {alone}")
    return found[0]


def _open_datamodule(spec: str) -> Any:
    """Return the data module that a user named as ``MODULE:NAME``, with its datasets.

    The name is that of a data module, or of a class or function that makes one without arguments.

    Raises:
        OptionsError: The text names no data module, or it cannot be made.
    """
    from lightning_fastdata.plugin.module import DataModule
    from lightning_fastdata.tree import name_of

    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise OptionsError(
            f"{spec!r} does not say where the data module is. Write MODULE:NAME, for example "
            "train:Data for `class Data(FastDataModule)` in train.py."
        )
    with _called_without_arguments(where):
        known = vars(_imported(where))
        if name not in known:
            raise OptionsError(f"{where} has no {name!r}.")
        made: Any = known[name]
        if callable(made) and not isinstance(made, DataModule):
            try:
                made = made()
            except TypeError as error:
                raise OptionsError(
                    f"{name_of(known[name])} cannot be called without arguments: {error}. Name a "
                    "function that returns the data module of the training."
                ) from error
        if not isinstance(made, DataModule):
            raise OptionsError(
                f"{made!r:.200} is no FastDataModule. Name one, its class, or a function that "
                "returns it."
            )
        made.prepare_data()  # type: ignore[attr-defined]  # Lightning's
        made.setup("fit")  # type: ignore[attr-defined]
    return made


@contextmanager
def _called_without_arguments(name: str) -> Iterator[None]:
    """Run the block, in which a user's module sees none of our arguments on the command line.

    Raises:
        OptionsError: The module ended the program, as a script does that misses its arguments.
    """
    ours, sys.argv = sys.argv, [name]
    try:
        yield
    except SystemExit as error:
        raise OptionsError(
            f"{name} ended the program (SystemExit: {error.code}). It gets no arguments here; what "
            'needs them has to stand under `if __name__ == "__main__":`.'
        ) from error
    finally:
        sys.argv = ours


def _imported(name: str) -> ModuleType:
    """Return a module by its name, or by the path of its file; it can import its neighbours."""
    path = Path(name)
    by_file = path.suffix == ".py"
    # As in Python, the folder of a script comes first, or the current folder for a module.
    folder = str(path.parent.resolve()) if by_file else ""
    if folder not in sys.path[:1]:
        sys.path.insert(0, folder)
    try:
        spec = importlib.util.spec_from_file_location(path.stem, path) if by_file else None
        if spec is None or spec.loader is None:
            return importlib.import_module(name)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except Exception as error:
        raise OptionsError(
            f"{name} cannot be imported: {type(error).__name__}: {error}. Call this from the "
            "folder that holds it, or give the path of the file: path/to/file.py:NAME."
        ) from error
    return module


def _batch_lines(found: ReplayedBatch) -> Iterator[str]:
    """Yield lines: which batch it is, and for each row its sample and a summary of its tensors."""
    from lightning_fastdata.tree import spelled, with_paths

    rows = len(found.indices)
    place = f"epoch {found.epoch}, batch {found.number}, rank {found.rank}"
    yield f"{place}: {rows} samples"
    for row, index in enumerate(found.indices):
        file = "" if found.files is None else f"  {printable(found.files[row], keep='')}"
        yield f"row {row}: sample {index}{file}"
        for path, leaf in with_paths(found.batch):
            if getattr(leaf, "ndim", 0) and len(leaf) == rows:
                yield f"    {spelled(path)} {_in_words(leaf[row])}"


def _in_words(one: Any) -> str:
    """Return a single number as text; for several, their range, mean, and counts of NaN and inf."""
    if one.ndim == 0 or not one.numel() or one.is_complex():
        return str(one.tolist())
    values = one.double()
    finite, spread = values[values.isfinite()], ""
    if finite.numel():
        numbers = finite.min(), finite.max(), finite.mean(), finite.std(correction=0)
        spread = "min {:.4g}, max {:.4g}, mean {:.4g}, std {:.4g}, ".format(*map(float, numbers))
    nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
    dtype = str(one.dtype).removeprefix("torch.")
    return f"{dtype} {list(one.shape)}: {spread}{nan} NaN, {inf} inf"


def _as_plain(value: Any) -> Any:
    """Return a batch as plain tensors, numbers, texts, dicts, lists and tuples, as a copy.

    Dataclasses become dicts, named tuples tuples, and anything else its ``repr``.
    """
    import torch

    from lightning_fastdata.tree import children

    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(torch.Tensor).clone()
    parts = children(value)
    if parts is None:
        plain = type(value) in (bool, int, float, str, bytes, type(None))
        return value if plain else repr(value)
    each = {key if isinstance(key, int) else str(key): _as_plain(part) for key, part in parts}
    if not isinstance(value, Sequence):
        return each
    return list(each.values()) if isinstance(value, list) else tuple(each.values())

"""All commands but ``prove``: they run scripts, show trainings, make batches again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.errors import OptionsError, printable
from lightning_fastdata.zero_code import VARIABLE, RunSettings

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Mapping, Sequence

GROUP: Final = "lightning.pytorch.callbacks_factory"


def doctor() -> None:
    """Print what this machine allows, and what of it limits data loading."""
    from lightning_fastdata.host.cpu import read_cpu_limit
    from lightning_fastdata.host.machine import doctor_text, read_gpus, read_versions
    from lightning_fastdata.host.memory import read_host_memory

    cpu, memory, versions = read_cpu_limit(), read_host_memory(), read_versions()
    text = doctor_text(cpu=cpu, memory=memory, gpus=read_gpus(), versions=versions)
    sys.stdout.write(f"{text}\n")


def replay(
    named: str,
    *,
    datamodule: str | None = None,
    epoch: int | None = None,
    batch: int | None = None,
    step: int | None = None,
    rank: int = 0,
    ranks: int | None = None,
    seed: int | None = None,
    save: str | None = None,
) -> None:
    """Print what a training step got, made again without training."""
    import torch

    from lightning_fastdata.plugin.data.replay import replayed

    number = batch if step is None else step
    given = [each is not None for each in (epoch, batch, step)]
    if number is None or given not in ([True, True, False], [False, False, True]):
        raise OptionsError("Say which batch: --epoch and --batch, or --step alone.")
    saved = {} if datamodule is None else _saved_loader(named)
    module = open_datamodule(named if datamodule is None else datamodule)
    found = replayed(
        module,
        epoch,
        number,
        rank=rank,
        ranks=saved.get("world_size", 1) if ranks is None else ranks,
        seed=saved.get("seed") if seed is None else seed,
        saved=saved,
    )
    sys.stdout.write(f"{found.text()}\n")
    if save is not None:
        try:
            torch.save(found.saved(), save)
        except (OSError, RuntimeError) as error:  # torch's of a folder that is missing
            raise OptionsError(f"{save} cannot be written: {error}.") from error
        sys.stdout.write(f"{save} written.\n")


def takes_replay(parser: ArgumentParser) -> None:
    """Add the arguments of ``replay``."""
    add = parser.add_argument
    where = "module:name, or path/to/file.py:name."
    add("named", help=f"Where the data module is: {where} Or a checkpoint, with --datamodule.")
    add("--datamodule", help=f"Of a checkpoint, which tells seed and ranks: {where}")
    add("--epoch", type=int, help="Counted from 0, as trainer.current_epoch.")
    add("--batch", type=int, help="Of the epoch, from 0, as batch_idx.")
    add("--step", type=int, help="Instead of both: of all training batches of a rank, from 0.")
    add("--rank", type=int, default=0, help="Whose batch.")
    add("--ranks", type=int, help="That trained together. Default: the checkpoint's, or 1.")
    add("--seed", type=int, help="Default: that of the checkpoint, or of the data module.")
    add("--save", help="File to write it to, for torch.load(weights_only=True).")


def _saved_loader(checkpoint: str) -> Mapping[str, Any]:
    """Return what a checkpoint tells of the training loader whose batches are made again.

    Raises:
        OptionsError: It cannot be read, or FastDataModule had no part in it.
    """
    import torch

    from lightning_fastdata.plugin.data.training_run import KEY

    alone = "Name the data module alone instead, with --seed and --ranks of its training."
    try:
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the file holds
        raise OptionsError(f"{checkpoint} cannot be read: {error}. {alone}") from error
    parts = saved.values() if isinstance(saved, dict) else ()
    states = [part[KEY] for part in parts if isinstance(part, dict) and KEY in part]
    loaders = [loader for state in states for loader in state["loaders"].values()]
    if not loaders:
        raise OptionsError(f"{checkpoint} is of no training with a FastDataModule. {alone}")
    found: Mapping[str, Any] = loaders[0]
    return found


def open_datamodule(spec: str) -> Any:
    """Return the data module that a user named as ``MODULE:NAME``, with its datasets.

    It is a data module, or a class or function that makes one without arguments.

    Raises:
        OptionsError: The text does not name one, or it cannot be made.
    """
    from lightning_fastdata.host.machine import import_by_name
    from lightning_fastdata.plugin.data.datamodule import DataModuleHooks
    from lightning_fastdata.tree import name_of

    module_name, _, name = spec.rpartition(":")
    if not module_name or not name:
        raise OptionsError(
            f"{spec!r} does not say where the data module is. Write MODULE:NAME, for example "
            "train:Data for `class Data(FastDataModule)` in train.py."
        )
    known = vars(import_by_name(module_name, "the data module"))
    if name not in known:
        raise OptionsError(f"{module_name} has no {name!r}.")
    made: Any = known[name]
    if callable(made) and not isinstance(made, DataModuleHooks):
        try:
            made = made()
        except TypeError as error:
            raise OptionsError(
                f"{name_of(known[name])} cannot be called without arguments: {error}. Name a "
                "function that returns the data module of the training."
            ) from error
    if not isinstance(made, DataModuleHooks):
        raise OptionsError(
            f"{made!r:.200} is no FastDataModule. Name one, its class, or a function that returns "
            "it."
        )
    made.prepare_data()
    made.setup("fit")
    return made


def run(command: Sequence[str], *, module: bool = False, report: str | None = None) -> None:
    """Run a script; each Lightning Trainer that it makes gets a DataThroughputCallback.

    This process becomes that of the script: signals, exit code and output are its own.
    """
    check_found_by_lightning()
    program = program_of(command, "run", module=module)
    settings = RunSettings(report=None if report is None else str(Path(report).resolve()))
    sys.stderr.write(
        f"fastdata: each Trainer of {command[0]} gets a DataThroughputCallback. A loop without "
        "Lightning's Trainer is measured by StepTimer.\n"
    )
    _become(program, {**os.environ, VARIABLE: settings.as_text()})


def check_found_by_lightning() -> None:
    """Raise OptionsError unless Lightning finds what this package adds to a Trainer."""
    if not any(each.value.startswith("lightning_fastdata.") for each in entry_points(group=GROUP)):
        raise OptionsError(
            "Lightning cannot find this package, since it is only on the path, or was installed "
            "before it had `fastdata run`. Install it: pip install lightning-fastdata."
        )


def program_of(command: Sequence[str], asked: str, *, module: bool) -> list[str]:
    """Return the program and its arguments that a command stands for.

    Args:
        command: What the user wrote behind the options.
        asked: The command of ours that was asked for.
        module: It is a module, as of ``python -m``.

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


def _become(program: list[str], environ: Mapping[str, str]) -> None:
    sys.stderr.flush()
    sys.stdout.flush()
    if os.name == "posix":
        os.execve(program[0], program, environ)
    # Elsewhere the shell would take the end of this process for the end of the script.
    raise SystemExit(subprocess.run(program, env=dict(environ), check=False).returncode)


def report(run: str, *, open: bool = False) -> None:  # noqa: A002
    """Print the summary of a run again."""
    from lightning_fastdata.insight.report.compare import read_report
    from lightning_fastdata.insight.report.run_report import page_line, print_lines

    file = report_file(Path(run))
    print_lines(printable(line, keep="") for line in read_report(file)["summary"])
    page = file.with_suffix(".html")
    if page.is_file():
        sys.stdout.write(f"{page_line(page)}\n")
    if open:
        import webbrowser

        if not page.is_file():
            raise OptionsError(f"There is no page beside {file}.")
        webbrowser.open(page.resolve().as_uri())


def report_file(run: Path) -> Path:
    """Return the report that a path means: of a folder its ``report.json``, or the only other one.

    Raises:
        OptionsError: There is none, or it is not clear which.
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


def takes_report(parser: ArgumentParser) -> None:
    """Add the arguments of ``report``."""
    parser.add_argument("run", help="The folder of a run, or its report.json.")
    parser.add_argument("--open", action="store_true", help="Open its page in the browser.")


def compare(a: str, b: str) -> None:
    """Print two runs side by side, and what differs."""
    from lightning_fastdata.insight.report.compare import side_by_side

    sys.stdout.write(f"{side_by_side(report_file(Path(a)), report_file(Path(b)))}\n")


def takes_run(parser: ArgumentParser) -> None:
    """Add the arguments of ``run``; what follows the script is the script's own."""
    parser.add_argument(
        "--report",
        help="Where the report is written. Default: report.json in the Trainer's log folder.",
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="COMMAND is a module, as of python -m."
    )
    parser.add_argument(
        "command",
        nargs="...",
        help="A Python file and its arguments; or a program, such as torchrun, and its arguments.",
    )


def takes_compare(parser: ArgumentParser) -> None:
    """Add the arguments of ``compare``."""
    parser.add_argument("a", help="The folder or the report.json of the run to compare with.")
    parser.add_argument("b", help="The same of the run that is compared.")

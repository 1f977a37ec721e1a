"""The command line: ``fastdata demo``, ``doctor``, ``compare``, ``tune``, ``cache``..."""

from __future__ import annotations

import io
import os
import sys
from functools import partial
from json import dumps as dump_json
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_fastdata.errors import FastDataError, OptionsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jsonargparse import ArgumentParser

    from lightning_fastdata.host.memory import DeviceMemory


def demo(
    data: str = "demo_data/photos", logs: str = "demo_logs", epochs: int = 3, crops: int = 192
) -> None:
    """Train on real photographs without and with FastDataModule, and compare.

    Args:
        data: Folder for the photographs; they are cut once and reused.
        logs: Folder for the TensorBoard files and the reports.
        epochs: Epochs of each of the two trainings.
        crops: Training crops of each photograph.
    """
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    from lightning_fastdata.demo.training import run_demo

    run_demo(data=data, logs=logs, epochs=epochs, crops=crops)


def show_augment(
    compose: str,
    image: str | None = None,
    mask: str | None = None,
    out: str = "augmented.png",
    seed: int = 0,
    draws: int = 4,
) -> None:
    """Draw a picture of a pipeline: original, Albumentations', ours, and their difference.

    Args:
        compose: Where the pipeline is: module:name, or path/to/file.py:name.
        image: Image file to transform; a photograph of a cat if there is none.
        mask: Image file of the image's mask; its values are classes. None if there is none.
        out: PNG file to write.
        seed: Of the draws.
        draws: Rows of the picture, one draw each.
    """
    from lightning_fastdata.augment import show_pipeline
    from lightning_fastdata.demo.photos import photograph_path
    from lightning_fastdata.host.system_calls import write_atomically

    shown = show_pipeline(
        compose, photograph_path("cat") if image is None else image, mask, seed=seed, draws=draws
    )
    page = io.BytesIO()
    shown.page.save(page, "PNG")
    try:
        # A folder that is not there is misspelled rather than wanted.
        write_atomically(Path(out).parent.resolve(strict=True) / Path(out).name, page.getvalue())
    except OSError as error:
        raise OptionsError(f"The picture cannot be written to {out}: {error}.") from error
    head, *places = shown.explained.splitlines()
    _print_lines([(head, "bold"), *((line, "") for line in [*places, "", *shown.captions])])
    _print_lines([(f"{out} written.", "dim")])


def doctor() -> None:
    """Print what this machine allows, and what of it limits data loading."""
    from lightning_fastdata.host.cpu import read_cpu_limit
    from lightning_fastdata.host.machine import doctor_text, read_versions
    from lightning_fastdata.host.memory import read_host_memory

    cpu, memory, versions = read_cpu_limit(), read_host_memory(), read_versions()
    text = doctor_text(cpu=cpu, memory=memory, gpus=_read_gpus(), versions=versions)
    sys.stdout.write(f"{text}\n")


def compare(a: str, b: str, fail_if: Sequence[str] = (), json: bool = False) -> None:
    """Print what differs between two runs, and whether a condition on that holds.

    Args:
        a: The report.json of the run to compare with.
        b: The report.json of the run that is compared.
        fail_if: Conditions that must not hold, e.g. ``step_ms > +10%``.
        json: Print JSON instead of a table.

    Raises:
        SystemExit: With code 1 if a condition holds, with code 2 if a report or a condition cannot
            be read, or a condition cannot be decided.
    """
    from lightning_fastdata.insight.report.compare import compare_files

    try:
        comparison = compare_files(a, b, fail_if)
    except FastDataError as error:
        # 1 says that the comparison was made.
        sys.stderr.write(f"fastdata: {error}\n")
        raise SystemExit(2) from error
    if not json and sys.stdout.isatty():
        from rich.console import Console

        Console(highlight=False).print(comparison)
    else:
        text = dump_json(comparison.as_dict(), indent=2) if json else comparison.text()
        sys.stdout.write(f"{text}\n")
    if comparison.failed:
        raise SystemExit(1)


def replay(
    run: str,
    step: int,
    datamodule: str,
    rank: int = 0,
    save: str | None = None,
    out: str | None = None,
) -> None:
    """Print the batches that a training step got, made again without training.

    Args:
        run: A checkpoint of Lightning, or the report.json of a run.
        step: The trainer's global_step in that training step, from 0.
        datamodule: Where the data module is: module:name, or path/to/file.py:name.
        rank: Whose batches.
        save: File to write them to, for ``torch.load(weights_only=True)``; None: none.
        out: PNG file for their pictures; None: none.
    """
    import torch

    from lightning_fastdata.plugin.data.commands import open_datamodule
    from lightning_fastdata.plugin.data.run_record import read_run
    from lightning_fastdata.plugin.loggers.pictures import draw_batch

    record, hyperparameters = read_run(run)
    numbers = record.batches_of_step(step)
    module = open_datamodule(datamodule, hyperparameters)
    batches = [module.batch_at(number, rank=rank, run=record) for number in numbers]
    for batch in batches:
        _print_lines([(line, "") for line in batch.text().splitlines()])
    if numbers[-1] >= record.batches:
        _print_lines([(f"The run has taken {record.batches} batches so far: no step had it.", "")])
    if save is not None:
        kept = {"global_step": step, "batches": [batch.saved() for batch in batches]}
        _write(save, lambda: torch.save(kept, save))
    for batch in batches if out is not None else ():
        path = Path(str(out))
        if len(batches) > 1:
            path = path.with_stem(f"{path.stem}-{batch.step}")
        picture = draw_batch(module, batch.batch, epoch=batch.epoch, step=step)
        _write(str(path), partial(picture.save, path, "PNG"))


def which(run: str, index: int, datamodule: str | None = None) -> None:
    """Print the training steps so far that got a sample.

    Args:
        run: A checkpoint of Lightning, or the report.json of a run.
        index: Of the sample in the training dataset, from 0.
        datamodule: Where the data module is, to print what was drawn for the sample; None: nowhere.
    """
    from lightning_fastdata.plugin.data.commands import open_datamodule
    from lightning_fastdata.plugin.data.run_record import read_run

    record, hyperparameters = read_run(run)
    module = None if datamodule is None else open_datamodule(datamodule, hyperparameters)
    count = 0
    for seen in record.seen(index):
        count += 1
        place = f"epoch {seen.epoch}, batch {seen.number} ({seen.batch} of the run)"
        text = f"step {seen.step}: {place}, rank {seen.rank}, row {seen.row}"
        _print_lines([(text, "bold")])
        if module is not None:
            for row in module.draws_of(index, seen.epoch, run=record):
                _print_lines([(f"    {words}", "") for words in row])
    left_out = [span.epoch for span in record.spans if span.partly]
    if left_out:
        _print_lines([(f"Not known of epochs {left_out}, which were cut anew amid.", "")])
    times = f"{count} time" + ("" if count == 1 else "s")
    _print_lines([(f"Sample {index} was seen {times} in {record.batches} batches.", "dim")])


def tune(
    datamodule: str, step_ms: float = 0.0, seconds: float = 2.0, out: str | None = None
) -> None:
    """Read the training loaders with one number of workers after the other, and print the best.

    Args:
        datamodule: Where the data module is: module:name, or path/to/file.py:name.
        step_ms: What a training step takes besides waiting for its batch; it is slept.
        seconds: That each number of workers is measured.
        out: PNG file for the curve; None: none. Of several loaders, each one's has its number.
    """
    from lightning_fastdata.loading.loader import FastDataLoader
    from lightning_fastdata.plugin.data.commands import open_datamodule
    from lightning_fastdata.plugin.seams.loaders import flattened
    from lightning_fastdata.tuning.sweep import sweep

    if step_ms < 0 or seconds <= 0:
        raise OptionsError(f"step_ms is {step_ms} and seconds {seconds}; give 0 ms, 2 s or more.")
    module = open_datamodule(datamodule, {})
    loaders = list(flattened(module.train_dataloader()))
    for number, loader in enumerate(loaders):
        if not isinstance(loader, FastDataLoader):
            continue
        found = sweep(
            loader,
            name=f"{datamodule}, {type(loader.dataset).__name__}",
            batch_size=loader.batch_size,
            seconds=seconds,
            step_ms=step_ms,
            tell=lambda line: _print_lines([(line, "dim")]),
        )
        _print_lines([("", ""), *((line, "") for line in found.text().splitlines())])
        if out is not None:
            path = Path(out)
            if len(loaders) > 1:
                path = path.with_stem(f"{path.stem}-{number}")
            found.write_curve(path)
            _print_lines([(f"{path} written.", "dim")])


def cache(datamodule: str, folder: str = "disk", *, dry_run: bool = False) -> None:
    """Fill the caches of the training and validation datasets before a training.

    Args:
        datamodule: Where the data module is: module:name, or path/to/file.py:name.
        folder: Where caches are kept, as for ``FastDataModule(cache=...)``.
        dry_run: Only measure, on 32 samples, what a cache would take, cost and gain.
    """
    from lightning_fastdata.plugin.data.commands import fill_caches, forecast, open_datamodule

    if folder == "ram":
        raise OptionsError("What is in memory ends with this command; give a folder, or 'disk'.")
    module = open_datamodule(datamodule, {})

    def tell(line: str) -> None:
        _print_lines([(line, "")])

    if dry_run:
        forecast(module, tell)
    else:
        fill_caches(module, folder, tell)


def _write(path: str, write: Callable[[], object]) -> None:
    try:
        write()
    except (OSError, RuntimeError) as error:  # torch's of a folder that is missing
        raise OptionsError(f"{path} cannot be written: {error}.") from error
    _print_lines([(f"{path} written.", "dim")])


def main(arguments: list[str] | None = None) -> None:
    """Run the command line.

    Args:
        arguments: What follows the program's name; None takes it from the shell.
    """
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog="fastdata", description="Data loading, measured and explained.")
    commands = parser.add_subcommands(dest="command")
    functions: dict[str, Callable[..., None]] = {
        "demo": demo,
        "doctor": doctor,
        "show-augment": show_augment,
        "tune": tune,
        "cache": cache,
    }
    for name, function in functions.items():
        summary = (function.__doc__ or "").partition("\n")[0]
        command = ArgumentParser(description=summary)
        command.add_function_arguments(function, as_positional=True)
        commands.add_subcommand(name, command, help=summary)
    commands.add_subcommand(
        "compare", _compare_parser(), help="Print what differs between two runs."
    )
    for name, function in (("replay", replay), ("which", which)):
        functions[name] = function
        summary = (function.__doc__ or "").partition("\n")[0]
        command = ArgumentParser(description=summary)
        command.add_argument("run", help="A checkpoint of Lightning, or the report.json of a run.")
        command.add_function_arguments(function, skip={"run"})
        commands.add_subcommand(name, command, help=summary)
    chosen = parser.parse_args(arguments)
    options = chosen[chosen.command].as_dict()
    try:
        functions.get(chosen.command, compare)(**options)
    except FastDataError as error:
        # The message says what to do; our stack would not help.
        raise SystemExit(f"fastdata: {error}") from error


def _compare_parser() -> ArgumentParser:
    """Return the parser of ``compare``, whose condition may be given several times."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        description="Print what differs between two runs. Exit codes: 0, 1 if a condition holds, "
        "2 if a report or a condition cannot be read."
    )
    parser.add_argument("a", help="The report.json of the run to compare with.")
    parser.add_argument("b", help="The report.json of the run that is compared.")
    parser.add_argument(
        "--fail-if",
        action="append",
        default=[],
        metavar="CONDITION",
        help="What must not be, any number of times: 'step_ms > +10%' is a change of b over a in "
        "percent, 'stall_share > +0.02' a change, 'stall_percent > 5' the value of b; with "
        "'val.' before the name, of validation.",
    )
    parser.add_argument("--json", action="store_true", help="Print JSON instead of a table.")
    return parser


def _print_lines(lines: Sequence[tuple[str, str]]) -> None:
    """Print lines of text, in their rich style on a terminal and plain in a pipe."""
    if not sys.stdout.isatty():
        sys.stdout.writelines(f"{text}\n" for text, _ in lines)
        return
    from rich.console import Console
    from rich.text import Text

    for text, style in lines:
        Console(soft_wrap=True).print(Text(text, style=style))


def _read_gpus() -> list[tuple[str, DeviceMemory]]:
    import torch

    from lightning_fastdata.host.memory import read_device_memory

    held = {index: read_device_memory(index) for index in range(torch.cuda.device_count())}
    return [(torch.cuda.get_device_name(i), one) for i, one in held.items() if one is not None]


if __name__ == "__main__":
    main()

"""Commands that look at a machine, a pipeline or a data module, and what commands print."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lightning_fastdata.errors import OptionsError, has_package

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jsonargparse import ArgumentParser

    from lightning_fastdata.host.memory import DeviceMemory


def doctor(*, ray: bool = False) -> None:
    """Print what this machine allows, and what of it limits data loading; or what a cluster does.

    Args:
        ray: Look at the Ray cluster in the place of this machine: its nodes, and what a batch from
            each costs.
    """
    if ray:
        from lightning_fastdata.executors.ray.cluster_seen import look_at_cluster

        print_lines([(look_at_cluster().text(), "")])
        return
    from lightning_fastdata.host.cpu import read_cpu_limit
    from lightning_fastdata.host.machine import doctor_text, read_versions
    from lightning_fastdata.host.memory import read_host_memory

    cpu, memory, versions = read_cpu_limit(), read_host_memory(), read_versions()
    text = doctor_text(cpu=cpu, memory=memory, gpus=_read_gpus(), versions=versions)
    sys.stdout.write(f"{text}\n")


def doctor_parser() -> ArgumentParser:
    """Return the parser of ``doctor``."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        description="Print what this machine allows, and what of it limits data loading; or what a "
        "Ray cluster does."
    )
    parser.add_argument(
        "--ray",
        action="store_true",
        help="Look at the Ray cluster in the place of this machine: its nodes, and what a batch "
        "from each costs.",
    )
    return parser


def replay_parser() -> ArgumentParser:
    """Return the parser of ``replay``."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(description=(replay.__doc__ or "").partition("\n")[0])
    parser.add_argument("run", help="A checkpoint of Lightning, or the report.json of a run.")
    parser.add_function_arguments(replay, skip={"run"})
    return parser


def _read_gpus() -> list[tuple[str, DeviceMemory]]:
    import torch

    from lightning_fastdata.host.memory import read_device_memory

    held = {index: read_device_memory(index) for index in range(torch.cuda.device_count())}
    return [(torch.cuda.get_device_name(i), one) for i, one in held.items() if one is not None]


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

    from lightning_fastdata.cli.data_modules import open_datamodule
    from lightning_fastdata.plugin.data.training_run import read_run
    from lightning_fastdata.plugin.loggers.pictures import draw_batch

    record, hyperparameters = read_run(run)
    numbers = record.batches_of_step(step)
    module = open_datamodule(datamodule, hyperparameters)
    batches = [module.batch_at(number, rank=rank, run=record) for number in numbers]
    for batch in batches:
        print_lines([(line, "") for line in batch.text().splitlines()])
    if numbers[-1] >= record.batches:
        print_lines([(f"The run has taken {record.batches} batches so far: no step had it.", "")])
    if save is not None:
        kept = {"global_step": step, "batches": [batch.saved() for batch in batches]}
        write_file(save, lambda: torch.save(kept, save))
    for batch in batches if out is not None else ():
        path = Path(str(out))
        if len(batches) > 1:
            path = path.with_stem(f"{path.stem}-{batch.step}")
        picture = draw_batch(module, batch.batch, epoch=batch.epoch, step=step)
        write_file(str(path), partial(picture.save, path, "PNG"))


class Found(Protocol):
    """What rich prints in colours."""

    def text(self) -> str:
        """Return it as plain text."""


def print_lines(lines: Sequence[tuple[str, str]]) -> None:
    """Print lines of text, in their rich style on a terminal and plain in a pipe."""
    if not (sys.stdout.isatty() and has_package("rich")):
        sys.stdout.writelines(f"{text}\n" for text, _ in lines)
        return
    from rich.console import Console
    from rich.text import Text

    for text, style in lines:
        Console(soft_wrap=True).print(Text(text, style=style))


def print_found(found: Found) -> None:
    """Print what a command has found, in colours on a terminal and plain in a pipe."""
    if not (sys.stdout.isatty() and has_package("rich")):
        sys.stdout.write(f"{found.text()}\n")
        return
    from rich.console import Console

    Console(highlight=False).print(found)


def write_file(path: str, write: Callable[[], object]) -> None:
    """Have a file written, and say so; a file that cannot be written is an OptionsError."""
    try:
        write()
    except (OSError, RuntimeError) as error:  # torch's of a folder that is missing
        raise OptionsError(f"{path} cannot be written: {error}.") from error
    print_lines([(f"{path} written.", "dim")])

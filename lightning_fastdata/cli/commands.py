"""Commands that look at a machine, a pipeline or a data module, and what commands print."""

from __future__ import annotations

import io
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lightning_fastdata.errors import OptionsError, has_package

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
    print_lines([(head, "bold"), *((line, "") for line in [*places, "", *shown.captions])])
    print_lines([(f"{out} written.", "dim")])


def doctor(*, ray: bool = False, datamodule: str | None = None, step_ms: float = 0.0) -> None:
    """Print what this machine allows, and what of it limits data loading; or what a cluster does.

    Args:
        ray: Look at the Ray cluster in the place of this machine: its nodes, and what a batch from
            each costs.
        datamodule: With ``ray``, where a data module is, to tell how many actors would feed it:
            module:name, or path/to/file.py:name.
        step_ms: What a training step takes besides waiting for its batch.
    """
    if ray:
        from lightning_fastdata.executors.ray.cluster_seen import look_at_cluster

        offer = look_at_cluster()
        print_lines([(offer.text(), "")])
        if datamodule is not None:
            from lightning_fastdata.cli.data_modules import plan_actors

            plan_actors(datamodule, offer, step_ms, lambda text: print_lines([(text, "")]))
        return
    if datamodule is not None or step_ms:
        raise OptionsError("A data module and step_ms are for --ray; `fastdata tune` takes them.")
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
    parser.add_argument(
        "--datamodule",
        default=None,
        help="With --ray, where a data module is, to tell how many actors would feed it: "
        "module:name, or path/to/file.py:name.",
    )
    parser.add_argument(
        "--step_ms",
        type=float,
        default=0.0,
        help="What a training step takes besides waiting for its batch.",
    )
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


def which(run: str, index: int, datamodule: str | None = None) -> None:
    """Print the training steps so far that got a sample.

    Args:
        run: A checkpoint of Lightning, or the report.json of a run.
        index: Of the sample in the training dataset, from 0.
        datamodule: Where the data module is, to print what was drawn for the sample; None: nowhere.
    """
    from lightning_fastdata.cli.data_modules import open_datamodule
    from lightning_fastdata.plugin.data.training_run import read_run

    record, hyperparameters = read_run(run)
    module = None if datamodule is None else open_datamodule(datamodule, hyperparameters)
    count = 0
    for seen in record.seen(index):
        count += 1
        place = f"epoch {seen.epoch}, batch {seen.number} ({seen.batch} of the run)"
        text = f"step {seen.step}: {place}, rank {seen.rank}, row {seen.row}"
        print_lines([(text, "bold")])
        if module is not None:
            for row in module.draws_of(index, seen.epoch, run=record):
                print_lines([(f"    {words}", "") for words in row])
    left_out = [span.epoch for span in record.spans if span.partly]
    if left_out:
        print_lines([(f"Not known of epochs {left_out}, which were cut anew amid.", "")])
    times = f"{count} time" + ("" if count == 1 else "s")
    print_lines([(f"Sample {index} was seen {times} in {record.batches} batches.", "dim")])


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
    from lightning_fastdata.cli.data_modules import open_datamodule
    from lightning_fastdata.loading.loader import FastDataLoader
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
            tell=lambda line: print_lines([(line, "dim")]),
        )
        print_lines([("", ""), *((line, "") for line in found.text().splitlines())])
        if out is not None:
            path = Path(out)
            if len(loaders) > 1:
                path = path.with_stem(f"{path.stem}-{number}")
            found.write_curve(path)
            print_lines([(f"{path} written.", "dim")])


def cache(datamodule: str, folder: str = "disk", *, dry_run: bool = False) -> None:
    """Fill the caches of the training and validation datasets before a training.

    Args:
        datamodule: Where the data module is: module:name, or path/to/file.py:name.
        folder: Where caches are kept, as for ``FastDataModule(cache=...)``.
        dry_run: Only measure, on 32 samples, what a cache would take, cost and gain.
    """
    from lightning_fastdata.cli.data_modules import fill_caches, forecast, open_datamodule

    if folder == "ram":
        raise OptionsError("What is in memory ends with this command; give a folder, or 'disk'.")
    module = open_datamodule(datamodule, {})

    def tell(line: str) -> None:
        print_lines([(line, "")])

    if dry_run:
        forecast(module, tell)
    else:
        fill_caches(module, folder, tell)


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

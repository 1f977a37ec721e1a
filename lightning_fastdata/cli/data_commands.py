"""The commands that take a data module of the user's: ``replay``, ``which``, ``tune``, ``cache``.

What they take is read from their signatures, also for ``--help``: torch is imported within them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from lightning_fastdata.cli.output import print_lines, write_file
from lightning_fastdata.errors import OptionsError


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
    from lightning_fastdata.plugin.data.run_record import read_run
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
    from lightning_fastdata.plugin.data.run_record import read_run

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

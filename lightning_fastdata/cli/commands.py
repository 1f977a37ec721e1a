"""The commands that look at this machine, at a pipeline or at reports of runs."""

from __future__ import annotations

import io
import os
import sys
from json import dumps as dump_json
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_fastdata.cli.output import print_found, print_lines
from lightning_fastdata.errors import FastDataError, OptionsError

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    if json:
        sys.stdout.write(f"{dump_json(comparison.as_dict(), indent=2)}\n")
    else:
        print_found(comparison)
    if comparison.failed:
        raise SystemExit(1)


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

"""Commands that look at a machine, and that make a batch of a data module again."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from lightning_fastdata.errors import OptionsError

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Callable

    from lightning_fastdata.host.memory import DeviceMemory


def doctor(*, ray: bool = False) -> None:
    """Print what this machine, or a Ray cluster, allows, and what of it limits data loading."""
    if ray:
        from lightning_fastdata.executors.ray.cluster_seen import look_at_cluster

        sys.stdout.write(f"{look_at_cluster().text()}\n")
        return
    from lightning_fastdata.host.cpu import read_cpu_limit
    from lightning_fastdata.host.machine import doctor_text, read_versions
    from lightning_fastdata.host.memory import read_host_memory

    cpu, memory, versions = read_cpu_limit(), read_host_memory(), read_versions()
    text = doctor_text(cpu=cpu, memory=memory, gpus=_read_gpus(), versions=versions)
    sys.stdout.write(f"{text}\n")


def takes_doctor(parser: ArgumentParser) -> None:
    """Add the arguments of ``doctor``."""
    parser.add_argument(
        "--ray",
        action="store_true",
        help="Look at the Ray cluster in the place of this machine: its nodes, and what a batch "
        "from each costs.",
    )


def _read_gpus() -> list[tuple[str, DeviceMemory]]:
    import torch

    from lightning_fastdata.host.memory import read_device_memory

    held = {index: read_device_memory(index) for index in range(torch.cuda.device_count())}
    return [(torch.cuda.get_device_name(i), one) for i, one in held.items() if one is not None]


def replay(
    datamodule: str,
    *,
    epoch: int,
    batch: int,
    rank: int = 0,
    ranks: int = 1,
    seed: int | None = None,
    save: str | None = None,
    out: str | None = None,
) -> None:
    """Print what a training step got, made again without training."""
    import torch

    from lightning_fastdata.plugin.data.replay import replayed
    from lightning_fastdata.plugin.loggers.pictures import draw_batch

    module = open_datamodule(datamodule)
    found = replayed(module, epoch, batch, rank=rank, ranks=ranks, seed=seed)
    sys.stdout.write(f"{found.text()}\n")
    if save is not None:
        _write(save, lambda: torch.save(found.saved(), save))
    if out is not None:
        picture = draw_batch(module, found.batch, epoch=epoch, number=batch)
        _write(out, lambda: picture.save(out, "PNG"))


def takes_replay(parser: ArgumentParser) -> None:
    """Add the arguments of ``replay``."""
    add = parser.add_argument
    add("datamodule", help="Where the data module is: module:name, or path/to/file.py:name.")
    add("--epoch", type=int, required=True, help="Counted from 0, as trainer.current_epoch.")
    add("--batch", type=int, required=True, help="Of the epoch, from 0, as batch_idx.")
    add("--rank", type=int, default=0, help="Whose batch.")
    add("--ranks", type=int, default=1, help="That trained together.")
    add("--seed", type=int, help="Of the training. Default: the data module's.")
    add("--save", help="File to write it to, for torch.load(weights_only=True).")
    add("--out", help="PNG file for its picture.")


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


def _write(path: str, write: Callable[[], object]) -> None:
    """Have a file written, and say so; a file that cannot be written is an OptionsError."""
    try:
        write()
    except (OSError, RuntimeError) as error:  # torch's of a folder that is missing
        raise OptionsError(f"{path} cannot be written: {error}.") from error
    sys.stdout.write(f"{path} written.\n")

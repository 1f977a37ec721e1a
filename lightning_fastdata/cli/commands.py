"""Commands that look at a machine, and that make a batch of a data module again."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from lightning_fastdata.errors import OptionsError

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Callable, Mapping


def doctor() -> None:
    """Print what this machine allows, and what of it limits data loading."""
    from lightning_fastdata.host.cpu import read_cpu_limit
    from lightning_fastdata.host.gpus import read_gpus
    from lightning_fastdata.host.machine import doctor_text, read_versions
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
    out: str | None = None,
) -> None:
    """Print what a training step got, made again without training."""
    import torch

    from lightning_fastdata.plugin.data.replay import replayed
    from lightning_fastdata.plugin.loggers.pictures import draw_batch

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
        _write(save, lambda: torch.save(found.saved(), save))
    if out is not None:
        picture = draw_batch(module, found.batch, epoch=found.epoch, number=found.number)
        _write(out, lambda: picture.save(out, "PNG"))


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
    add("--out", help="PNG file for its picture.")


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


def _write(path: str, write: Callable[[], object]) -> None:
    """Have a file written, and say so; a file that cannot be written is an OptionsError."""
    try:
        write()
    except (OSError, RuntimeError) as error:  # torch's of a folder that is missing
        raise OptionsError(f"{path} cannot be written: {error}.") from error
    sys.stdout.write(f"{path} written.\n")

"""``fastdata replay``: what a training step got, made again without training."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fastdata.errors import OptionsError, printable

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from types import ModuleType

    from lightning_fastdata.plugin.replay import ReplayedBatch


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

    from lightning_fastdata.plugin.replay import replayed

    number = batch if step is None else step
    given = [each is not None for each in (epoch, batch, step)]
    if number is None or given not in ([True, True, False], [False, False, True]):
        raise OptionsError("Say which batch: --epoch and --batch, or --step alone.")
    saved = {} if datamodule is None else _saved_loader(named)
    found = replayed(
        open_datamodule(named if datamodule is None else datamodule),
        epoch,
        number,
        rank=rank,
        ranks=saved.get("world_size", 1) if ranks is None else ranks,
        seed=saved.get("seed") if seed is None else seed,
        saved=saved,
    )
    sys.stdout.writelines(f"{line}\n" for line in _lines(found))
    if save is not None:
        plain = {field.name: _as_plain(getattr(found, field.name)) for field in fields(found)}
        try:
            torch.save(plain, save)
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

    from lightning_fastdata.plugin.module import KEY

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
    from lightning_fastdata.plugin.module import DataModule
    from lightning_fastdata.tree import name_of

    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise OptionsError(
            f"{spec!r} does not say where the data module is. Write MODULE:NAME, for example "
            "train:Data for `class Data(FastDataModule)` in train.py."
        )
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
            f"{made!r:.200} is no FastDataModule. Name one, its class, or a function that returns "
            "it."
        )
    made.prepare_data()  # type: ignore[attr-defined]  # Lightning's
    made.setup("fit")  # type: ignore[attr-defined]
    return made


def _imported(name: str) -> ModuleType:
    """Return a module by its name, or by the path of its file, which finds its neighbours."""
    path = Path(name)
    by_file = path.suffix == ".py"
    # As Python has it: first the folder of a script, and of a module that in which it is called.
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


def _lines(found: ReplayedBatch) -> Iterator[str]:
    """Yield which batch it is, and for each row its sample and what is in its tensors."""
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
    """Return one number as it is; of several their range and mean, and how many are none."""
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
    """Return a batch as plain tensors, numbers, texts, dicts, lists and tuples, in own memory.

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

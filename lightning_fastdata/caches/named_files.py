"""The files that a dataset lists or names, as far as that can be told without reading a sample."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import numpy as np
import torch

from lightning_fastdata.images.folder import files_of
from lightning_fastdata.images.packed import PackedStrings
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.tree import has_method, held_by

_MOST_FILES: Final = 20_000
"""Whose size and time are looked at; of more, so many from all over the list."""
_LONGEST_NAME: Final = 255
_DEPTH: Final = 4
_FEW: Final = 16


@runtime_checkable
class _GivesBytes(Protocol):
    """A source of records."""

    def get_bytes(self, indices: Sequence[int]) -> object: ...


def named_files(dataset: object) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files that a dataset lists or names, with what the system says of them.

    A name may be a path, or a path in a folder that the dataset names, too, or the name of a file
    in such a folder or one level below, with or without its extension: ``root="photos"`` and
    ``names=["0001", ...]``. Of a folder alone no file counts: others may write there.
    """
    for part in _parts(dataset):
        listed = _listed(part)
        if listed is not None:
            yield from _regular(listed)
            continue
        groups = [list(_texts(value, _DEPTH)) for value in held_by(part).values()]
        single = [text for group in groups if len(group) <= _FEW for text in group]
        folders = [text for text in dict.fromkeys(single) if _is_folder(text)]
        names: dict[str, None] = {}
        for group in groups:
            paths = _existing(group)
            yield from _regular(paths)
            if not paths:
                names |= dict.fromkeys(group)
        yield from _regular(_in_folders(folders, [name for name in names if name not in folders]))


def _parts(dataset: object) -> Iterator[object]:
    """Yield a dataset and those within it."""
    waiting, seen = [dataset], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen or has_method(one, "recognised_by"):
            continue
        seen.add(id(one))
        yield one
        for value in held_by(one).values():
            several = value if isinstance(value, list | tuple) else [value]
            waiting += [
                each
                for each in islice(several, _MOST_FILES)
                if isinstance(each, torch.utils.data.Dataset | _GivesBytes)
            ]


def _listed(dataset: object) -> tuple[str, ...] | None:
    try:
        length = dataset_length(dataset) or 0
        return files_of(dataset, range(0, length, max(1, -(-length // _MOST_FILES))))
    except Exception:  # a dataset of another kind; what it holds still counts
        return None


def _texts(value: object, depth: int) -> Iterator[str]:
    """Yield the paths and short strings in nested containers, arrays and tables."""
    if isinstance(value, str | os.PathLike):
        text = os.fsdecode(value)
        if 0 < len(text) <= 4 * _LONGEST_NAME:
            yield text
    elif isinstance(value, PackedStrings):
        yield from (value[number] for number in _evenly(len(value)))
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "OUS":
            flat = value.reshape(-1)
            yield from _texts([flat[number] for number in _evenly(len(flat))], depth)
    elif isinstance(value, bytes):
        yield from _texts(os.fsdecode(value), depth)
    elif depth and isinstance(value, Mapping):
        yield from _texts(
            [*islice(value, _MOST_FILES), *islice(value.values(), _MOST_FILES)], depth
        )
    elif depth and isinstance(value, list | tuple):
        for number in _evenly(len(value)):
            yield from _texts(value[number], depth - 1)
    elif type(value).__module__.partition(".")[0] in ("pandas", "polars"):
        yield from _texts(np.asarray(value), depth)


def _evenly(length: int) -> range:
    return range(0, length, max(1, -(-length // _MOST_FILES)))


def _existing(paths: list[str]) -> list[str]:
    """Return paths if some of them are files: those of captions or labels are not all looked for.

    A look at a file that is not there takes a millisecond where folders are on a network.
    """
    some = paths[:: max(1, len(paths) // _FEW)]
    return paths if next(_regular(some), None) else []


def _is_folder(path: str) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # a name too long; a NUL in it
        return False


def _in_folders(folders: list[str], names: list[str]) -> list[str]:
    """Return the files in folders that have one of the names."""
    named = [
        path
        for folder in folders
        for path in _existing([os.path.join(folder, name) for name in names])  # noqa: PTH118
    ]
    if named:
        return named
    known = {Path(name).name for name in names}
    for folder in folders:
        for entry in _entries(folder):
            below = _entries(entry.path) if entry.is_dir() else [entry]
            named += [each.path for each in below if {each.name, Path(each.name).stem} & known]
    return [named[number] for number in _evenly(len(named))]


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except OSError:
        return []


def _regular(paths: Iterable[str]) -> Iterator[tuple[str, os.stat_result]]:
    for path in paths:
        try:
            status = Path(path).stat()
        except (OSError, ValueError):
            continue  # a text that names no file
        # A folder changes with anything that is written to it.
        if stat.S_ISREG(status.st_mode):
            yield path, status

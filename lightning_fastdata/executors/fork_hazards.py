"""What a dataset holds that forked processes must not share, found before they are forked."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import warnings
import zipfile
from typing import Any, Final

import torch

from lightning_fastdata.batches.keyed import own_dataset
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.randomness.search import find_instances, loaded_classes

_FILES: Final = (io.BufferedIOBase, io.RawIOBase, io.TextIOWrapper)
_STANDARD: Final = 2
"""Descriptors up to this one are the terminal's."""


def open_handles(dataset: object) -> list[str]:
    """Return in words what a dataset holds open that two processes cannot both use.

    Files that are read by a position, archives, connections of sqlite3, files of h5py,
    environments of LMDB, tensors of CUDA. What is closed, and what is only written to, is no
    hazard. Looks where :func:`~lightning_fastdata.randomness.search.find_instances` looks, imports
    nothing, and runs no code of the user.
    """
    databases = (
        *loaded_classes("sqlite3", "Connection"),
        *loaded_classes("h5py", "File", "Dataset"),
        *loaded_classes("lmdb", "Environment"),
    )
    kinds = (*_FILES, tarfile.TarFile, zipfile.ZipFile, torch.Tensor, *databases)
    found = [_told(each) for each in find_instances(dataset, kinds)]
    return list(dict.fromkeys(text for text in found if text))


def warn_before_fork(dataset: object) -> None:
    """Warn of what forked processes would share."""
    handles = open_handles(dataset)
    if handles:
        warnings.warn(
            f"The dataset {type(own_dataset(dataset)).__name__} holds {', '.join(handles)}, opened "
            "in the training process. Workers that are forked share it, and may move each other's "
            "position, read wrong samples, or hang. Open it on first use in __getitem__ and not in "
            '__init__, or set multiprocessing_context="forkserver", which opens it in each worker.',
            FastDataWarning,
            stacklevel=2,
        )


def _told(handle: Any) -> str:
    """Return what a handle is; empty: nothing that must not be shared."""
    package = type(handle).__module__.partition(".")[0].replace("builtins", "lmdb")
    kind = f"{package}.{type(handle).__qualname__}"
    if isinstance(handle, torch.Tensor):
        return f"tensors on {handle.device}" if handle.device.type == "cuda" else ""
    try:
        if isinstance(handle, _FILES):
            name = getattr(handle, "name", kind)  # of what stands for a file, as a pipe's end
            return f"the open file {name!r}" if _is_read_by_position(handle) else ""
        if isinstance(handle, zipfile.ZipFile):
            return f"an open {kind}" if handle.fp is not None else ""
        if isinstance(handle, tarfile.TarFile):
            closed: bool = handle.closed  # type: ignore[attr-defined]
            return "" if closed else f"an open {kind}"
        if package == "sqlite3":
            _ = handle.total_changes  # raises if it is closed
        elif package == "h5py" and not handle:
            return ""
    except Exception:  # closed, or no file of the system's
        return ""
    return f"an open {kind}"


def _is_read_by_position(file: Any) -> bool:
    if file.closed or file.writable():
        return False
    number = file.fileno()  # raises io.UnsupportedOperation where it is memory
    return number > _STANDARD and stat.S_ISREG(os.fstat(number).st_mode)

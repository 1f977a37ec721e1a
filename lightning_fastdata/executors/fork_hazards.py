"""What a dataset holds that forked processes must not share, found before they are forked."""

from __future__ import annotations

import multiprocessing
import socket
import warnings
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any

import torch

from lightning_fastdata.batches.keyed import own_dataset
from lightning_fastdata.errors import FastDataWarning, WorkerError
from lightning_fastdata.tree import find_instances, loaded_classes

if TYPE_CHECKING:
    from lightning_fastdata.executors.fetch import FetchPlan


def open_handles(dataset: object) -> list[str]:
    """Return in words what a dataset holds open that two processes cannot both use.

    Connections to other programs, those of sqlite3, files of h5py, environments of LMDB, tensors of
    CUDA. What is closed is no hazard, nor are files and archives, which each worker opens anew
    (:func:`~lightning_fastdata.host.system_calls.open_anew`). Looks where
    :func:`~lightning_fastdata.tree.find_instances` looks, imports nothing, and runs no
    code of the user.
    """
    databases = (
        *loaded_classes("sqlite3", "Connection"),
        *loaded_classes("h5py", "File", "Dataset"),
        *loaded_classes("lmdb", "Environment"),
    )
    kinds = (socket.socket, torch.Tensor, *databases)
    found = [_told(each) for each in find_instances(dataset, kinds)]
    return list(dict.fromkeys(text for text in found if text))


def warn_before_fork(plan: FetchPlan) -> None:
    """Warn of what workers would share, if they are forked."""
    handles = open_handles(plan.dataset) if forks(plan.context) else []
    if handles:
        warnings.warn(
            f"The dataset {type(own_dataset(plan.dataset)).__name__} holds {', '.join(handles)}, "
            "opened in the training process. Workers that are forked share it, and may read wrong "
            "samples, or hang. Open it on first use in __getitem__ and not in __init__, or set "
            'multiprocessing_context="forkserver", which opens it in each worker.',
            FastDataWarning,
            stacklevel=2,
        )


def refuse_late_fork(plan: FetchPlan) -> None:
    """Raise an error if more workers, forked now, would share something with this process.

    Raises:
        WorkerError: The dataset holds it; it may be open only since the training process, too, has
            read a sample.
    """
    handles = open_handles(plan.dataset) if forks(plan.context) else []
    if handles:
        raise WorkerError(
            f"the dataset holds {', '.join(handles)}, opened in the training process, which "
            "workers that are forked now would share. Read the dataset in workers alone, or set "
            'multiprocessing_context="forkserver".'
        )


def forks(context: BaseContext | str | None) -> bool:
    """Return whether a context, or one of that name, forks processes; None: Python's own."""
    if not isinstance(context, BaseContext):
        context = multiprocessing.get_context(context)
    return bool(context.get_start_method() == "fork")


def _told(handle: Any) -> str:
    """Return what a handle is; empty: nothing that must not be shared."""
    package = type(handle).__module__.partition(".")[0].replace("builtins", "lmdb")
    kind = f"{package}.{type(handle).__qualname__}"
    if isinstance(handle, torch.Tensor):
        return f"tensors on {handle.device}" if handle.device.type == "cuda" else ""
    try:
        if isinstance(handle, socket.socket):
            return "an open connection" if handle.fileno() >= 0 else ""
        if package == "sqlite3":
            _ = handle.total_changes  # raises if it is closed
        elif package == "h5py" and not handle:
            return ""
    except Exception:  # closed, or no file of the system's
        return ""
    return f"an open {kind}"

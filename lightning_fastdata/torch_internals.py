"""The only place that uses private names of torch; ``docs/seams.md`` says what for.

``torch.utils.data._utils``: ``worker.WorkerInfo``, ``worker._worker_info``, ``collate.collate``,
``collate.collate_tensor_fn``, ``collate.default_collate_fn_map``, ``pin_memory.pin_memory``; of
``DataLoader`` ``_get_iterator`` and ``_iterator``; of its iterator over workers ``_task_info``,
``_rcvd_idx``, ``_send_idx``, ``_data_queue``; of its ``fetch`` the variables ``idx``,
``possibly_batched_index`` and ``data``; ``torch.distributed.distributed_c10d``:
``_get_default_store``; ``torch._dynamo``.

``tests/test_torch_internals.py`` pins each of them against the installed torch.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch.utils.data._utils import worker
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

if TYPE_CHECKING:
    from torch.utils.data import Dataset

__all__ = [
    "collate",
    "collate_tensor_fn",
    "default_collate_fn_map",
]

_Value = TypeVar("_Value")
MAKES_BATCHES: Final = ("__iter__", "_get_iterator")
"""Methods that a subclass of DataLoader overrides if it makes batches in its own way."""


def set_worker_info(*, number: int, workers: int, seed: int, dataset: Dataset[Any]) -> None:
    """Set what ``torch.utils.data.get_worker_info()`` returns in this process."""
    worker._worker_info = worker.WorkerInfo(
        id=number, num_workers=workers, seed=seed, dataset=dataset
    )


@contextmanager
def unsplit_stream() -> Iterator[None]:
    """Have ``get_worker_info()`` return None in the block, so that a stream is not split."""
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info


def watch_worker_info(
    note: Callable[[str], None], *, number: int, workers: int, dataset: Dataset[Any]
) -> None:
    """Set the worker info as :func:`set_worker_info`, and note the name of each attribute read."""

    class Watched(worker.WorkerInfo):
        def __getattribute__(self, name: str) -> Any:
            note(name)
            return super().__getattribute__(name)

    worker._worker_info = Watched(id=number, num_workers=workers, seed=0, dataset=dataset)


def pinned(value: _Value, device: str | None) -> _Value:
    """Return a nested structure with its tensors copied into page-locked memory."""
    from torch.utils.data._utils.pin_memory import pin_memory

    copied: _Value = pin_memory(value, device)  # type: ignore[no-untyped-call]
    return copied


def under_way(iterator: Any) -> tuple[int, tuple[int, ...]] | None:
    """Return how many batches torch's iterator over workers has begun, and those not given yet.

    None: there are no workers.
    """
    tasks = getattr(iterator, "_task_info", None)
    return None if tasks is None else (iterator._send_idx, tuple(tasks))


def being_read(error: BaseException) -> Any:
    """Return the index that torch's iterator without workers was reading as an error was raised.

    If the batch is read in one call, and from Python 3.12 on, these are all indices of the batch.
    None: it is not known, or the iterator was not reading.
    """
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") == "torch.utils.data._utils.fetch":
            seen = frame.f_locals
            found = seen.get("idx", seen.get("possibly_batched_index"))
            if "data" in seen:
                return None  # it was collating
        elif found is not None:
            break
    return found


def next_has_arrived(iterator: Any) -> bool | None:
    """Return whether torch's iterator over workers has its next batch, or the end, already.

    None: it has no workers.
    """
    try:
        arrived = iterator._task_info.get(iterator._rcvd_idx, ())
        if len(arrived) == 2 or iterator._rcvd_idx >= iterator._send_idx:
            return True
        return not iterator._data_queue.empty()
    except AttributeError:
        return None


def default_store() -> Any:
    """Return the key-value store of this process's default process group; None: not known."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    find = getattr(dist.distributed_c10d, "_get_default_store", None)
    return None if find is None else find()


def not_compiled() -> AbstractContextManager[object]:
    """Return a context in which functions given to ``torch.compile`` run uncompiled."""
    # The compiler takes a second to load.
    loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if loaded else nullcontext()

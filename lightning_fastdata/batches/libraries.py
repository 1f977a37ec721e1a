"""Streams of other libraries: what each is told of the epoch and of the ranks.

All that is read of LitData, WebDataset and Hugging Face datasets beyond torch's protocol is read
here, without importing any of them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from functools import partial
from types import FunctionType
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch.utils.data import Dataset, IterableDataset

from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.order.epoch_order import Counted, Rank, rank_now
from lightning_fastdata.tree import datasets_in, has_method, held, held_by, is_a

_SHARED_OUT: Final = ("split_by_node", "single_node_only")  # the second one raises in the workers
_EACH_READS_ALL: Final = (
    "{name} is not shared out among the {ranks} ranks: each reads the whole of it, so that each "
    "sample comes {ranks} times in an epoch. {remedy}"
)
_LITDATA: Final = "It was made before the ranks were known: make it in train_dataset()."
_HUGGING_FACE: Final = (
    "Use datasets.distributed.split_dataset_by_node(dataset, rank, world_size) in train_dataset()."
)
_WEB_DATASET: Final = "Give WebDataset nodesplitter=webdataset.split_by_node."
_SHUFFLE_BUFFER: Final = "BufferShuffledExamplesIterable"


def tell_rank(rank: Rank) -> None:
    """Say in the environment which rank a side process reads for, unless it knows that.

    A forked process has torch's process group of its parent. A process that was started anew has
    none, and a stream that asks for its rank there, as WebDataset does, would read the parts of all
    ranks.
    """
    if rank.ranks > 1 and rank_now().ranks == 1:
        os.environ.setdefault("RANK", str(rank.number))
        os.environ.setdefault("WORLD_SIZE", str(rank.ranks))


_WITH_EPOCHS: Final = (__name__.partition(".")[0], "datasets", "litdata")
"""Packages whose datasets draw by the epoch that they are told."""
_TOLD: Final[WeakKeyDictionary[Any, object]] = WeakKeyDictionary()
"""Epoch of each of Hugging Face's datasets since a loader told it one; ours keep it as Counted."""


def tell_epoch(dataset: Dataset[Any], epoch: int) -> bool:
    """Tell a dataset the epoch, also below datasets that wrap it; return whether one was told.

    ``set_epoch`` of datasets of this package and of libraries is called: :class:`FastImageFolder`
    and Hugging Face's iterable datasets draw by it. That of the user's own classes is the user's to
    call, as torch does not call it either. Streams that count epochs themselves count from this one
    on, so that a training that goes on in another process reads them in the order in which it
    began. Only what wrappers hold themselves is looked at: a property may open what is to be opened
    in the workers.
    """
    told = False
    for one in datasets_in(dataset, _has_epochs):
        if is_a(one, "webdataset", "DataPipeline"):
            for stage in held(one, "pipeline") or ():
                if any(
                    is_a(stage, "webdataset", kind) for kind in ("detshuffle", "ResampledShards")
                ):
                    stage.epoch = epoch - 1  # it adds one when it is begun
        elif _has_epochs(one):
            # LitData's own loader counts its epochs from 1.
            one.set_epoch(epoch + 1 if is_a(one, "litdata") else Counted(epoch))
            if is_a(one, "datasets"):
                _TOLD[one] = getattr(one, "epoch", None)
            told = True
    return told


def _has_epochs(one: Any) -> bool:
    return has_method(one, "set_epoch") and any(is_a(one, each) for each in _WITH_EPOCHS)


def epoch_set_on(dataset: Dataset[Any]) -> int | None:
    """Return the epoch that the program set on a dataset since a loader told it one; None: none.

    On Hugging Face's datasets it is seen if it is another one than they were told.
    """
    for one in filter(_has_epochs, datasets_in(dataset, _has_epochs)):
        epoch = getattr(one, "epoch", None)
        theirs = is_a(one, "datasets")
        told = epoch == _TOLD.get(one, 0) if theirs else isinstance(epoch, Counted)
        if isinstance(epoch, int) and epoch >= 0 and not told:
            return epoch
    return None


def settle_ranks(dataset: object) -> None:
    """Warn where each rank would read the whole of a stream of a known library.

    Nothing is known of streams of a user, which share themselves out on their own.
    """
    rank = rank_now()
    for one in datasets_in(dataset) if rank.ranks > 1 else ():
        remedy = ""
        if is_a(one, "litdata", "StreamingDataset"):
            env = held(one, "distributed_env")
            if env is not None and (env.global_rank, env.world_size) != rank:
                remedy = _LITDATA
        elif is_a(one, "datasets", "IterableDataset"):
            if held(one, "_distributed") is None and "_distributed" in held_by(one):
                remedy = _HUGGING_FACE
        elif is_a(one, "webdataset", "WebDataset") and not _splits_by_node(one):
            remedy = _WEB_DATASET
        if remedy:
            text = _EACH_READS_ALL.format(name=type(one).__name__, ranks=rank.ranks, remedy=remedy)
            warnings.warn(text, FastDataWarning, stacklevel=2)


def _splits_by_node(stream: object) -> bool:
    """Return whether a stage of a WebDataset, or one of the user's own, may share it out."""
    stages = list(held(stream, "pipeline") or ())
    names = {stage.__name__ for stage in stages if isinstance(stage, FunctionType)}
    return (
        bool(names.intersection(_SHARED_OUT))
        or any(is_a(stage, "webdataset", "ResampledShards") for stage in stages)
        or not all(_home_of(stage).startswith("webdataset") for stage in stages)
    )


def _home_of(stage: object) -> str:
    """Return the module of a stage's function or class; empty: it is not known."""
    made = stage.func if isinstance(stage, partial) else stage
    return str(getattr(made, "__module__", ""))


def why_state_is_lost(stream: object) -> str:
    """Return why ``state_dict()`` of a stream leaves out part of its state; empty: it does not.

    The text follows ``state_dict()``. A shuffle of Hugging Face's holds samples in a buffer, which
    its state leaves out.
    """
    parts = datasets_in(stream, parts=_parts_of_stream)
    buffers = any(type(one).__name__ == _SHUFFLE_BUFFER for one in parts)
    return "leaves out the samples in its shuffle buffer, which would be lost" if buffers else ""


def _parts_of_stream(one: object) -> Iterable[object]:
    if isinstance(one, list | tuple):
        return one
    known = isinstance(one, IterableDataset) or type(one).__module__.startswith("datasets.")
    return held_by(one).values() if known else ()

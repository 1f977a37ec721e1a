"""Documents packed together, as attention over sequences of different lengths takes them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_fastdata.errors import DatasetError
from lightning_fastdata.order.buckets import (
    check_fits,
    check_whole,
    checked_lengths,
    shuffled_within,
)
from lightning_fastdata.order.epoch_order import dataset_length, epoch_permutation
from lightning_fastdata.types import has_own_order

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lightning_fastdata.order.buckets import Ints

IGNORED: Final = -100
"""A label that no loss counts: ``ignore_index`` of ``torch.nn.functional.cross_entropy``."""


_ROWS: Final = ("input_ids", "position_ids", "labels")
Packed: TypeAlias = dict[str, torch.Tensor]
"""Documents one behind the other, see :class:`PackedDataset`."""


def pack(
    dataset: Dataset[Any],
    tokens: int = 8192,
    *,
    lengths: Sequence[int] | NDArray[Any] | torch.Tensor | None = None,
    split: bool = True,
    seed: int = 0,
) -> PackedDataset:
    """Return a dataset whose samples are packs of the documents of another one.

    Attention stays within a document by ``cu_seqlens``, and the loss is that of the documents one
    by one: nothing is padded, and no label is predicted across documents.

    Args:
        dataset: Map-style; a sample is the ids of a document, or a mapping with ``"input_ids"`` and
            maybe ``"labels"`` of the same length, not shifted.
        tokens: Tokens of a pack at most.
        lengths: Length of each document [documents]. Default: each document is read once to know.
        split: Put the documents one behind the other, in an order that each epoch draws, and cut
            every ``tokens``, so that all packs but the last are full. A part of a document is like
            a document of its own. False: keep documents whole, each in the fullest pack in which
            there is room, the longest first (best fit decreasing); each epoch draws which of the
            documents of one length goes where.
        seed: Seed of the run.

    Raises:
        DatasetError: ``dataset`` is a :class:`Mixture`, there is no length, lengths do not fit the
            dataset, or, with ``split=False``, a document is longer than a pack.
        OptionsError: ``tokens`` is below 1.

    Example:
        >>> packs = pack([[5, 6, 7], [8, 9]], tokens=8, split=False)
        >>> packs[0]["labels"].tolist(), packs[0]["cu_seqlens"].tolist()
        ([-100, 6, 7, -100, 9], [0, 3, 5])
    """
    check_whole(tokens=tokens)
    if has_own_order(dataset):
        raise DatasetError(
            f"A {type(dataset).__name__} has other samples at each index in each epoch, and what "
            "is packed together is known by their lengths. Pack its parts, and mix the packs: "
            "Mixture({'a': pack(a), ...})."
        )
    count = dataset_length(dataset)
    if count is None:
        raise DatasetError(
            f"{type(dataset).__name__} has no length, so that it is not known what there is to "
            "pack. Give a map-style dataset with a __len__()."
        )
    if lengths is None:
        lengths = [len(_ids_and_labels(dataset[at], at)[0]) for at in range(count)]
    found = checked_lengths(lengths)
    if len(found) != count:
        raise DatasetError(f"lengths has {len(found)} numbers for {count} documents.")
    if not split:
        check_fits(found, tokens, "Cut such documents, use split=True, or give more tokens.")
    return PackedDataset(dataset, (_Cut if split else _Fitted)(found, tokens, seed))


class PackedDataset(Dataset[Packed]):
    """The packs of :func:`pack`: sample ``i`` is pack ``i`` of the epoch that was set.

    A pack is a dict of four tensors. ``input_ids``: int64 [tokens]. ``position_ids``: int64
    [tokens], from 0 in each document, or part of one. ``labels``: int64 [tokens], not shifted,
    -100 where nothing is to be predicted: at least the first token of each document.
    ``cu_seqlens``: int32 [documents + 1], where each begins, and the last one ends.

    There are as many in each epoch, in an order that is drawn, too: a data module does not shuffle
    them. Loaders of this package set the epoch; with torch's own, call :meth:`set_epoch` before
    each one, and do not keep workers.
    """

    has_own_order = True

    def __init__(self, dataset: Dataset[Any], plan: _Cut | _Fitted) -> None:
        self.dataset = dataset
        self._plan: Any = plan
        self._epoch = 0
        self._drawn: tuple[int, tuple[Ints, ...]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_drawn": None}

    def set_epoch(self, epoch: int) -> None:
        """Choose what is packed together in ``epoch``, counted from 0."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Packs."""
        packs: int = self._plan.packs
        return packs

    @property
    def waste(self) -> float:
        """Share of the tokens that the packs could hold, but do not, 0 to 1."""
        plan = self._plan
        held = int(plan.lengths.sum())
        return 1 - held / (plan.packs * plan.tokens) if plan.packs else 0.0

    def __getitem__(self, index: int) -> Packed:
        """Return a pack of the epoch that was set.

        Raises:
            IndexError: There is none of this number.
            DatasetError: A document is not as long as its length says, or is no row of ids.
        """
        return self.of_epoch(index, self._epoch)

    def of_epoch(self, index: int, epoch: int) -> Packed:
        """Return a pack of any epoch, as ``self[index]`` does of the one that was set."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"There is no pack {index} of {len(self)}.")
        drawn = self._drawn  # once, as other threads may draw another epoch
        if drawn is None or drawn[0] != epoch:
            self._drawn = drawn = epoch, self._plan.drawn(epoch)
        pieces = self._plan.pieces(index % len(self), *drawn[1])
        ids, labels = [], []
        for at, begin, end in zip(*map(np.ndarray.tolist, pieces), strict=True):
            own_ids, own_labels = _ids_and_labels(self.dataset[at], at)
            if len(own_ids) != self._plan.lengths[at]:
                raise DatasetError(
                    f"Document {at} has {len(own_ids)} tokens, and lengths says "
                    f"{self._plan.lengths[at]}. Give the lengths that the dataset returns."
                )
            ids.append(own_ids[begin:end])
            labels.append(own_labels[begin:end].clone())
            labels[-1][:1] = IGNORED
        return _joined(ids, labels)

    @staticmethod
    def collate(packs: Sequence[Packed]) -> dict[str, torch.Tensor | int]:
        """Return a batch: the documents of all packs one behind the other, in one row.

        It is for ``collate_fn``. ``input_ids``, ``position_ids`` and ``labels`` are int64
        [1, tokens], ``cu_seqlens`` is int32 [documents + 1], and ``max_seqlen``, an int, the length
        of the longest.
        """
        sizes = np.concatenate([np.diff(one["cu_seqlens"].numpy()) for one in packs])
        ends = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        return {
            **{name: torch.cat([one[name] for one in packs])[None] for name in _ROWS},
            "cu_seqlens": torch.from_numpy(ends),
            "max_seqlen": int(sizes.max(initial=0)),
        }


def _ids_and_labels(document: Any, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids and labels of a document, int64 [tokens] both."""
    keyed = isinstance(document, Mapping)
    if keyed and "input_ids" not in document:
        keys = ", ".join(map(repr, document))
        raise DatasetError(f'Document {at} has the keys {keys}; its ids are to be in "input_ids".')
    ids = _tensor(document["input_ids"] if keyed else document, "input_ids", at)
    given = document.get("labels") if keyed else None
    labels = ids if given is None else _tensor(given, "labels", at)
    for name, row in (("input_ids", ids), ("labels", labels)):
        whole = not row.is_floating_point() or not row.numel()  # an empty list has no type
        if row.ndim != 1 or not whole or len(row) != len(ids):
            raise DatasetError(
                f"{name} of document {at} has the shape {list(row.shape)} and numbers of type "
                f"{row.dtype}; ids and labels are whole numbers in a row, as many of both."
            )
    return ids.long(), labels.long()


def _tensor(row: Any, name: str, at: int) -> torch.Tensor:
    try:
        if not isinstance(row, bytes | bytearray | str):
            return torch.as_tensor(row)
        why = "text, which is to be tokenized first"
    except (TypeError, ValueError, RuntimeError) as error:
        why = f"a {type(row).__name__} of which torch makes no tensor ({error})"
    raise DatasetError(f"{name} of document {at} is {why}; give whole numbers in a row.")


def _joined(ids: Sequence[torch.Tensor], labels: Sequence[torch.Tensor]) -> Packed:
    sizes = np.array([len(row) for row in ids])
    ends = np.concatenate([[0], np.cumsum(sizes)])
    positions = np.arange(ends[-1]) - np.repeat(ends[:-1], sizes)
    return {
        "input_ids": torch.cat([*ids]),
        "position_ids": torch.from_numpy(positions),
        "labels": torch.cat([*labels]),
        "cu_seqlens": torch.from_numpy(ends.astype(np.int32)),
    }


class _Pieces(NamedTuple):
    """What is in a pack: of each of these documents the tokens from ``begin`` to ``end``."""

    documents: Ints
    begin: Ints
    end: Ints


class _Cut:
    """Documents one behind the other, cut every so many tokens."""

    def __init__(self, lengths: Ints, tokens: int, seed: int) -> None:
        self.lengths, self.tokens, self.seed = lengths, tokens, seed
        self.packs = -(-int(lengths.sum()) // tokens)

    def drawn(self, epoch: int) -> tuple[Ints, Ints]:
        """Return the order of an epoch, and where each document ends in it."""
        order = epoch_permutation(len(self.lengths), self.seed, epoch)[:]
        return order, np.cumsum(self.lengths[order])

    def pieces(self, number: int, order: Ints, ends: Ints) -> _Pieces:
        """Return what is in a pack."""
        begin = number * self.tokens
        stop = min(begin + self.tokens, int(ends[-1]))
        first = int(np.searchsorted(ends, begin, side="right"))
        last = int(np.searchsorted(ends, stop))
        documents = order[first : last + 1]
        starts = ends[first : last + 1] - self.lengths[documents]
        held = self.lengths[documents] > 0
        end = np.minimum(stop - starts, self.lengths[documents])
        return _Pieces(documents[held], np.maximum(begin - starts, 0)[held], end[held])


class _Fitted:
    """Whole documents, each in the fullest pack in which there is room."""

    def __init__(self, lengths: Ints, tokens: int, seed: int) -> None:
        self.lengths, self.tokens, self.seed = lengths, tokens, seed
        self._documents = np.flatnonzero(lengths)  # an empty one is in no pack
        lengths = lengths[self._documents]
        # Sorting numbers of 16 bits takes a tenth of the time.
        self._classes = np.unique(-lengths, return_inverse=True)[1]
        if not len(lengths) or self._classes.max() < 2**16:
            self._classes = self._classes.astype(np.uint16)
        packs = best_fit(lengths[np.argsort(self._classes, kind="stable")], tokens)
        self._places = np.argsort(packs, kind="stable")
        self._ends = np.cumsum(np.bincount(packs))
        self.packs = len(self._ends)

    def drawn(self, epoch: int) -> tuple[Ints, Ints]:
        """Return the documents of an epoch, the longest first, and the order of the packs."""
        order = shuffled_within(self._classes, self.seed, epoch)
        return order, epoch_permutation(self.packs, self.seed, epoch)[:]

    def pieces(self, number: int, order: Ints, packs: Ints) -> _Pieces:
        """Return what is in a pack."""
        number = packs[number]
        begin = self._ends[number - 1] if number else 0
        places = self._places[begin : self._ends[number]]
        documents = self._documents[order[places]]
        return _Pieces(documents, np.zeros_like(documents), self.lengths[documents])


def best_fit(lengths: Ints, tokens: int) -> Ints:
    """Return the number of the pack of each document, int64 [documents].

    Best fit decreasing: documents come the longest first, and each goes where the least room is
    left that suffices. All documents of one length are placed at once: a pack that is the best for
    one of them is so for the next, until it has no room.

    Args:
        lengths: Of the documents, the longest first, from 1 to ``tokens``.
        tokens: Tokens of a pack.
    """
    numbers, packs = np.empty(len(lengths), np.int64), 0
    open_with: defaultdict[int, list[Ints]] = defaultdict(list)  # room left -> packs that have it
    rooms: list[int] = []  # its keys, in order

    def put_back(room: int, left: Ints) -> None:
        if room and len(left):
            if room not in open_with:
                insort(rooms, room)
            open_with[room].append(left)

    begins = np.flatnonzero(np.diff(lengths, prepend=-1)).tolist()
    for begin, end in zip(begins, [*begins[1:], len(lengths)], strict=False):
        at, length = begin, int(lengths[begin])
        while at < end:
            place = bisect_left(rooms, length)
            if place < len(rooms):
                room = rooms.pop(place)
                opened = np.concatenate(open_with.pop(room))
            else:
                room, more = tokens, -(-(end - at) // (tokens // length))
                opened = np.arange(packs, packs + more)
                packs += more
            each = room // length
            whole, rest = divmod(end - at, each)
            full = opened[:whole]
            numbers[at : at + len(full) * each] = np.repeat(full, each)
            at += len(full) * each
            put_back(room - each * length, full)
            if len(full) < len(opened):
                last = opened[whole : whole + 1]
                numbers[at:end] = last
                at = end
                put_back(room - rest * length, last)
                put_back(room, opened[whole + 1 :])
    return numbers

"""Documents packed together, as attention over sequences of different lengths takes them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_fastdata.errors import DatasetError
from lightning_fastdata.order.epoch_order import (
    KeepsEpochs,
    Lengths,
    check_whole,
    checked_lengths,
    dataset_length,
    edges_of,
    epoch_permutation,
    reordered,
    shuffled_within,
)
from lightning_fastdata.types import has_own_order

if TYPE_CHECKING:
    from lightning_fastdata.order.epoch_order import Ints

IGNORED: Final = -100
"""A label that no loss counts: ``ignore_index`` of ``torch.nn.functional.cross_entropy``."""
Packed: TypeAlias = dict[str, torch.Tensor]
"""Documents one behind the other, see :class:`PackedDataset`."""


def pack(
    dataset: Dataset[Any],
    tokens: int = 8192,
    *,
    lengths: Lengths | None = None,
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
    remedy = "Cut such documents, use split=True, or give more tokens."
    found = checked_lengths(lengths, None if split else tokens, remedy)
    if len(found) != count:
        raise DatasetError(f"lengths has {len(found)} numbers for {count} documents.")
    return (PackedDataset if split else _WholeDocuments)(dataset, found, tokens, seed)


class PackedDataset(KeepsEpochs, Dataset[Packed]):
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

    def __init__(self, dataset: Dataset[Any], lengths: Ints, tokens: int, seed: int) -> None:
        self.dataset = dataset
        self._lengths, self._tokens, self._seed, self._epoch = lengths, tokens, seed, 0
        self._packs = -(-int(lengths.sum()) // tokens)

    def _draw(self, *epoch: int) -> tuple[Ints, Ints, Ints]:
        """Return documents in the order of an epoch, and the edges of these, and of the packs."""
        documents = epoch_permutation(len(self._lengths), self._seed, *epoch)[:]
        edges = edges_of(self._lengths[documents])
        return documents, edges, np.minimum(np.arange(self._packs + 1) * self._tokens, edges[-1])

    def set_epoch(self, epoch: int) -> None:
        """Choose what is packed together in ``epoch``, counted from 0."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Packs."""
        return self._packs

    @property
    def waste(self) -> float:
        """Share of the tokens that the packs could hold, but do not, 0 to 1."""
        return 1 - int(self._lengths.sum()) / max(1, self._packs * self._tokens)

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
        ids, labels = [], []
        for at, begin, end in self._pieces(index % len(self), epoch):
            own_ids, own_labels = _ids_and_labels(self.dataset[at], at)
            if len(own_ids) != self._lengths[at]:
                raise DatasetError(
                    f"Document {at} has {len(own_ids)} tokens, and lengths says "
                    f"{self._lengths[at]}. Give the lengths that the dataset returns."
                )
            ids.append(own_ids[begin:end])
            labels.append(own_labels[begin:end])
        positions = torch.cat([torch.arange(len(row)) for row in ids])
        return {
            "input_ids": torch.cat(ids),
            "position_ids": positions,
            "labels": torch.cat(labels).masked_fill(positions == 0, IGNORED),
            "cu_seqlens": _ends(positions),
        }

    def _pieces(self, number: int, epoch: int) -> Iterator[tuple[int, int, int]]:
        """Yield each document of a pack, and from where to where its tokens are in it."""
        documents, edges, packs = self.drawn(epoch)
        first, last = packs[number : number + 2].tolist()
        at = int(np.searchsorted(edges, first, side="right")) - 1
        while (begin := int(edges[at])) < last:
            end = min(last, int(edges[at + 1]))
            yield int(documents[at]), max(first - begin, 0), end - begin
            at += 1

    @staticmethod
    def collate(packs: Sequence[Packed]) -> dict[str, torch.Tensor | int]:
        """Return a batch: the documents of all packs one behind the other, in one row.

        It is for ``collate_fn``. ``input_ids``, ``position_ids`` and ``labels`` are int64
        [1, tokens], ``cu_seqlens`` is int32 [documents + 1], and ``max_seqlen``, an int, the length
        of the longest.
        """
        rows = ("input_ids", "position_ids", "labels")
        batch = {name: torch.cat([one[name] for one in packs])[None] for name in rows}
        ends = _ends(batch["position_ids"][0])
        return {**batch, "cu_seqlens": ends, "max_seqlen": int(ends.diff().max())}


class _WholeDocuments(PackedDataset):
    """Packs of whole documents, each in the fullest pack in which there is room."""

    def __init__(self, dataset: Dataset[Any], lengths: Ints, tokens: int, seed: int) -> None:
        super().__init__(dataset, lengths, tokens, seed)
        # The longest is first. Numbers of 16 bits are sorted in a tenth of the time.
        self._classes = (tokens - lengths).astype(np.min_scalar_type(tokens))
        packs = best_fit(np.sort(lengths[lengths > 0])[::-1], tokens)
        self._places = np.argsort(packs, kind="stable")
        self._edges = edges_of(np.bincount(packs))
        self._packs = len(self._edges) - 1

    def _draw(self, *epoch: int) -> tuple[Ints, Ints, Ints]:
        order = epoch_permutation(self._packs, self._seed, *epoch)[:]
        places, packs = reordered(self._edges, order)
        documents = shuffled_within(self._classes, self._seed, *epoch)[self._places[places]]
        edges = edges_of(self._lengths[documents])
        return documents, edges, edges[packs]


def _ends(positions: torch.Tensor) -> torch.Tensor:
    begins = (positions == 0).nonzero()[:, 0]
    return torch.cat([begins, torch.tensor([len(positions)])]).int()


def _ids_and_labels(document: Any, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids and labels of a document, int64 [tokens] both."""
    named = document if isinstance(document, Mapping) else {"input_ids": document}
    if "input_ids" not in named:
        keys = ", ".join(map(repr, named))
        raise DatasetError(f'Document {at} has the keys {keys}; its ids are to be in "input_ids".')
    ids = labels = _row(named["input_ids"], f"input_ids of document {at}")
    if named.get("labels") is not None:
        labels = _row(named["labels"], f"labels of document {at}")
    if len(ids) != len(labels):
        raise DatasetError(
            f"labels of document {at} are {len(labels)} for {len(ids)} ids; give as many of both."
        )
    return ids, labels


def _row(given: Any, name: str) -> torch.Tensor:
    why = "text, which is to be tokenized first"
    try:
        if not isinstance(given, bytes | bytearray | str):
            row = torch.as_tensor(given)
            if row.ndim == 1 and not (row.is_floating_point() and len(row)):  # [] has such a type
                return row.long()
            why = f"of the shape {list(row.shape)} and of numbers of type {row.dtype}"
    except (TypeError, ValueError, RuntimeError) as error:
        why = f"a {type(given).__name__} of which torch makes no tensor ({error})"
    raise DatasetError(f"{name} is {why}; give whole numbers in a row.")


def best_fit(lengths: Ints, tokens: int) -> Ints:
    """Return the number of the pack of each document, int64 [documents].

    Best fit decreasing: documents, of 1 to ``tokens`` tokens, come the longest first, and each goes
    where the least room is left that suffices.
    """
    numbers, packs = [], 0
    rooms: list[int] = []  # that packs have left, in order
    having: defaultdict[int, list[int]] = defaultdict(list)  # room -> packs
    for length in lengths.tolist():
        place = bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms[place]
            pack = having[room].pop()
            if not having[room]:
                del rooms[place]
        else:
            room, pack, packs = tokens, packs, packs + 1
        numbers.append(pack)
        if room > length:
            if not having[room - length]:
                insort(rooms, room - length)
            having[room - length].append(pack)
    return np.array(numbers, np.int64)

"""What a step costs apart from waiting: the copy to the device, augmentation there, and padding.

A few batches show how much of all is padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_fastdata.batches.staged import StagedBatch
from lightning_fastdata.insight.finding import (
    AUGMENT_HIGH,
    PIN,
    TRANSFER_HIGH,
    Advice,
    Finding,
    Rule,
    make_finding,
    may_be_given,
)
from lightning_fastdata.insight.steps import PhaseSummary, mean_ms
from lightning_fastdata.tree import Path, replace_leaves
from lightning_fastdata.types import Batch

if TYPE_CHECKING:
    from lightning_fastdata.insight.evidence import Evidence

Numbers: TypeAlias = dict[Path, NDArray[Any]]
Tensors: TypeAlias = dict[Path, torch.Tensor]
_LOOKED_AT: Final = 24
"""Number of batches that are looked at; they show the padding of all to a few percent of it."""
_FEWEST: Final = 4
_MOST_BYTES: Final = 2**24
"""Bytes of the largest tensor that is looked at; a larger one would take too many milliseconds."""
_LENGTHS: Final = ("length", "lengths", "lens", "seqlens")
"""Last words of names of tensors that hold lengths."""
_OTHERS: Final = 0.1
"""Ratio up to which batches may show something else, as a last one of a single sample does."""
_PADDING_HIGH: Final = 0.10
_LOOKING_MS: Final = 1.0
"""Milliseconds below which looking for tensors in a batch is no finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """How much of the batches that were looked at is padding."""

    share: float
    """Share of padding in the tokens of these batches, 0 to 1."""
    least_share: float
    """Share of padding, 0 to 1, if each batch were padded to its longest sample only; where each is
    already, if samples of like length were put together in batches as large."""
    one_width: bool = False
    """Whether all batches are padded to one width, above the longest sample of some."""
    shown_by: str
    """What shows the padding, in words, e.g. ``attention_mask of 24 batches``."""
    tokens: int
    """Mean number of tokens of a batch, padding included."""


class _Seen(NamedTuple):
    """What one batch shows."""

    where: Path
    """Path of the tensor [samples, places, ...] whose places are tokens or padding."""
    shown_by: str
    lengths: NDArray[np.int64]
    """Number of tokens of each sample, without padding: [samples]."""
    places: int
    """Number of places of each sample, padding included."""
    named: bool
    """Whether a name says what the tensor is; else batches of several widths have to agree."""


class PaddingMeter:
    """Looks at the first batches of a stage, in host memory.

    It tells nothing where batches do not agree, as then they may show something else.
    """

    def __init__(self) -> None:
        self._seen: list[_Seen] = []
        self._others = 0
        """Number of batches that showed nothing, or something else than the first."""

    @property
    def looks(self) -> bool:
        """Whether one more batch is worth a look."""
        return len(self._seen) + self._others < _LOOKED_AT

    def look(self, batch: Batch) -> None:
        """Look at a batch as its loader gave it, if it is worth a look."""
        if not self.looks:
            return
        seen = None
        with suppress(Exception):  # a batch may be anything, and its own methods may raise
            seen = next(_shown(tensors_in(batch)), None)
        if seen is None or (self._seen and seen[:2] != self._seen[0][:2]):
            self._others += 1
        else:
            self._seen.append(seen)

    def padding(self) -> Padding | None:
        """Return how much of the batches is padding; None: they do not show it."""
        agree = len(self._seen) >= _FEWEST and self._others <= _OTHERS * len(self._seen)
        return _summed(self._seen) if agree else None


def _summed(seen: list[_Seen]) -> Padding | None:
    widths = {one.places for one in seen}
    lengths = np.sort(np.concatenate([one.lengths for one in seen]))
    agree = seen[0].named or len(widths) > 1
    if not agree or len(lengths) < len(seen) or not lengths.all():
        return None
    tokens, places = int(lengths.sum()), sum(len(one.lengths) * one.places for one in seen)
    least = sum(len(one.lengths) * int(one.lengths.max()) for one in seen)
    one_width = len(widths) == 1 and least < places
    if not one_width:
        least = sum(len(part) * int(part[-1]) for part in np.array_split(lengths, len(seen)))
    return Padding(
        share=1 - tokens / places,
        least_share=1 - tokens / least,
        one_width=one_width,
        shown_by=f"{seen[0].shown_by} of {len(seen)} batches",
        tokens=places // len(seen),
    )


def tensors_in(batch: Batch) -> Tensors:
    """Return the tensors of a batch, as its loader gave it, by their paths."""
    if isinstance(batch, StagedBatch):
        return tensors_in(batch.batch if batch.crossing is None else batch.crossing.source)
    found: dict[Path, Any] = {}
    replace_leaves(batch, found.setdefault, depth=3)
    return {
        path: leaf
        for path, leaf in found.items()
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    }


def _shown(tensors: Tensors) -> Iterator[_Seen]:
    """Yield what the whole numbers of a batch in host memory show, the surest first."""
    numbers = {
        path: tensor.numpy()
        for path, tensor in tensors.items()
        if not (tensor.is_floating_point() or tensor.is_complex())
        and tensor.device.type == "cpu"
        and tensor.nbytes <= _MOST_BYTES
    }
    for path, found in numbers.items():
        name = str(path[-1]) if path else ""
        holds = {"attention_mask": 1, "padding_mask": 0}.get("_".join(name.split("_")[-2:]))
        marks = holds is not None and found.ndim == 2 and found.size > 0
        if marks and found.min() >= 0 and found.max() <= 1:
            yield _Seen(path, name, (found == holds).sum(1), found.shape[1], named=True)
    yield from _by_lengths(numbers, tensors)
    yield from _by_pad_ids(numbers)


def _by_lengths(numbers: Numbers, tensors: Tensors) -> Iterator[_Seen]:
    """Yield what rows of lengths show; without a telling name, the largest must be the width."""
    for path, lengths in numbers.items():
        if lengths.ndim != 1 or len(lengths) < 2 or lengths.dtype == bool or lengths.min() < 1:
            continue
        name = path[-1] if path and isinstance(path[-1], str) else ""
        named = name.lower().rpartition("_")[2] in _LENGTHS
        for where, tensor in tensors.items():
            if where[:-1] == path[:-1] and tensor.ndim > 1 and len(tensor) == len(lengths):
                width = tensor.shape[1]
                if lengths.max() == width or (named and lengths.max() < width):
                    yield _Seen(where, name or "lengths", lengths.astype(np.int64), width, named)


def _by_pad_ids(numbers: Numbers) -> Iterator[_Seen]:
    """Yield what ids show if one stands only at the ends, or only at the starts, of rows."""
    for path, ids in numbers.items():
        if ids.ndim != 2 or ids.dtype == bool or min(ids.shape) < 2:
            continue
        for inwards in (ids[:, ::-1], ids):
            values, counts = np.unique(inwards[:, 0], return_counts=True)
            pad = values[counts.argmax()]
            is_pad = inwards == pad
            inside = (is_pad[:, 1:] & ~is_pad[:, :-1]).any()
            runs = np.logical_and.accumulate(is_pad, axis=1).sum(1)
            runs -= runs.min() > 0  # a pad id that ends each row also marks the end of the text
            if not inside and runs.min() == 0 and (runs > 1).any():
                yield _Seen(path, f"pad id {pad}", ids.shape[1] - runs, ids.shape[1], named=False)


def _phase(
    e: Evidence,
    phase: PhaseSummary | None,
    high: float,
    what: str,
    remedy: str | tuple[Advice, ...],
    leave: str,
) -> Finding | None:
    """Return the finding that a phase takes this share of a step, ``high``, or more."""
    ms = mean_ms(phase)
    share = e.step_times.share(ms)
    if ms is None or share is None or share < high:
        return None
    cause = f"{what} takes {ms:.1f} ms, {e.of_step(ms):.0%} of a step"
    return make_finding(share, cause, remedy, e.step_times.without(ms), leave)


def _transfer(e: Evidence) -> Finding | None:
    what = "copying a batch to the device"
    small = Advice(text="send uint8 and normalize on the device", joins=True)
    remedy: str | tuple[Advice, ...] = (small,) if e.loader.pinned else (PIN, small)
    if e.before_hook or e.transfer_hook:
        moves = e.transfer_hook or ("" if e.summary.device == "cpu" else "the copy to the device")
        what = " with ".join(filter(None, (e.before_hook, moves)))
        hooks = " and ".join(filter(None, (e.before_hook, e.transfer_hook)))
        remedy = f"make {hooks} cheaper, or do in the workers what needs no device: in the "
        remedy += "dataset or in collate_fn"
    elif e.summary.device == "cpu":  # where nothing is copied
        looked = e.summary.transfer
        if looked is None or min(looked.mean_ms, looked.p50_ms) < _LOOKING_MS:
            return None  # a few long ones are those in which the process had no CPU
        what = "looking for tensors in the many objects of a batch"
        remedy = "batches of few tensors, or lists of objects within a class of your own, into "
        remedy += "which Lightning does not look"
    leave = "" if e.step_times.stalls else "the number of workers"
    return _phase(e, e.summary.transfer, TRANSFER_HIGH, what, remedy, leave)


def _augmentation(e: Evidence) -> Finding | None:
    what = e.augment_hook or "augmenting on the device"
    where = f"in {e.augment_hook}" if e.augment_hook else "on the device, or on uint8"
    fewer = Advice(text=f"fewer or cheaper transforms {where}", joins=True)
    elsewhere = Advice(
        text="FastDataModule(augment_on='cpu') if the workers keep up with the whole pipeline",
        changes=("augment_on",),
    )
    # Which place is faster was not known before there were steps.
    idle = e.settings_in == "LoaderOptions" and not e.augment_hook and not e.step_times.stalls
    remedy = (elsewhere, fewer) if idle else (fewer,)
    leave = "" if e.step_times.stalls else "the loader"
    return _phase(e, e.summary.augment, AUGMENT_HIGH, what, remedy, leave)


def _padding(e: Evidence) -> Finding | None:
    """Return the finding that steps compute on padding, if there is a remedy that pays.

    None while steps wait for data, which is to be mended first.
    """
    padding, compute = e.padding, e.summary.compute
    if padding is None or padding.share < _PADDING_HIGH or compute is None or e.step_times.stalls:
        return None
    then = f"{padding.least_share:.0%} would be padding"
    advice = Advice(
        text="batches of samples of like length, batch_sampler=BucketBatchSampler(lengths, "
        f"tokens={padding.tokens}), of which {then}; or pack() for a language model",
        changes=("batch_sampler",),
    )
    if padding.one_width:
        text = "pad to the longest sample of each batch in collate_fn, and not all to one width"
        advice = Advice(text=f"{text}: {then}", changes=("collate_fn",))
    left = (1 - padding.share) / (1 - padding.least_share)  # share of the tokens that is left
    saved_ms = (1 - left) * compute.mean_ms
    gain = e.step_times.without(saved_ms)
    if not may_be_given(advice, gain, e.loader.closed):
        return None
    return make_finding(
        e.step_times.share(saved_ms),
        f"{padding.share:.0%} of the tokens of your batches are padding ({padding.shown_by})",
        advice,
        gain,
        "the loader's workers",
    )


RULES: Final = (
    Rule("FD312", "the copy to the device takes long", _transfer),
    Rule("FD313", "augmentation on the device takes long", _augmentation),
    Rule("FD337", "batches are padded", _padding, after="FD313"),
)

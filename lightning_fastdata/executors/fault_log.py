"""What the training process knows of bad samples: counted, written down, warned of, and limited."""

from __future__ import annotations

import json
import math
import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from torch.utils.data import IterableDataset, MapDataPipe

from lightning_fastdata.batches.bad_samples import (
    BadSamplePolicy,
    BadSamples,
    Fault,
    SampleGuard,
    described,
    plain_index,
)
from lightning_fastdata.errors import DatasetError, FastDataWarning, OptionsError
from lightning_fastdata.host.system_calls import append_privately
from lightning_fastdata.order.epoch_order import dataset_length

_ALWAYS_ALLOWED: Final = 10
_MOST_LISTED: Final = 20
_BEFORE: Final = ("Bad", "found before the training was resumed")
_KILLS: Final = "It is in quarantine, as whoever read it died or got stuck."


class FaultLog:
    """The bad samples of one loader, over all its epochs.

    Args:
        rule: What is done about them.
        length: Samples of the dataset, which the budget is a share of; None: not known.
    """

    def __init__(self, rule: BadSamples | None = None, length: int | None = None) -> None:
        self.rule = BadSamples() if rule is None else rule
        self.allowed = max(_ALWAYS_ALLOWED, math.ceil(self.rule.budget_share * (length or 0)))
        """How many samples of the dataset may be bad."""
        self.samples = 0
        """Times that a sample was replaced or left out."""
        self.retries = 0
        """Times that a sample was read again."""
        self.deaths = 0
        """Side processes that died and were replaced."""
        self.quarantine: set[Any] = set()
        """Indices that are not read again, as they kill whoever reads them."""
        self._bad: dict[Any, Fault] = {}
        self._counts: Counter[Any] = Counter()
        self._kinds: set[tuple[str, str]] = set()
        self._unwritable = False

    @classmethod
    def of(cls, given: BadSamplePolicy | BadSamples, dataset: object) -> FaultLog:
        """Return the log of a loader.

        Raises:
            OptionsError: There is no such policy, or it is not possible with this dataset.
        """
        rule = BadSamples.of(given)
        if rule.policy != "raise" and isinstance(dataset, IterableDataset | MapDataPipe):
            raise OptionsError(
                f"on_bad_sample is {rule.policy!r}, but {type(dataset).__name__} is a stream, or "
                "one of torch's pipes: after an error it cannot be asked for another sample, as it "
                "has no index. Handle errors in the stream itself, or use 'raise'."
            )
        return cls(rule, dataset_length(dataset))

    @property
    def is_asked(self) -> bool:
        """Whether anything but an error was asked for, so that torch's loader is to tell, too."""
        return self.rule.policy != "raise" or self.rule.quarantine_file is not None

    @property
    def bad(self) -> list[int | str]:
        """Indices of the samples that count against the budget."""
        return list(self._bad)

    def count_in(self, bad: Iterable[int | str]) -> None:
        """Count samples that were bad before a training was saved that goes on now."""
        for index in bad:
            self._bad.setdefault(index, Fault(0, index, 0, None, "read", *_BEFORE, 0, "raised"))

    def take(self, faults: Iterable[Fault]) -> None:
        """Take in what happened to the samples of a batch that is handed over, or has failed.

        Raises:
            DatasetError: More samples of the dataset are bad than the budget allows.
        """
        for fault in faults:
            self.retries += fault.retries
            if fault.outcome == "read":
                continue
            self._counts[fault.index] += 1
            self._write(fault)
            if fault.outcome == "raised":
                continue
            self.samples += 1
            self._bad.setdefault(fault.index, fault)
            if (fault.stage, fault.error) not in self._kinds:
                self._kinds.add((fault.stage, fault.error))
                self._warn(fault)
        if len(self._bad) > self.allowed:
            raise self._over_budget()

    def left_out(
        self, guard: SampleGuard, indices: Any, epoch: int, *, batched: bool
    ) -> tuple[Any, list[Fault]]:
        """Return the indices of a batch without those in quarantine, and what became of these.

        If it is not ``batched`` it is a single index.
        """
        if not self.quarantine or guard.policy == "raise":
            return indices, []
        kept, faults = list(indices) if batched else [indices], list[Fault]()
        for position, index in enumerate(kept):
            number = plain_index(index)
            if number in self.quarantine:
                kept[position] = guard.in_place_of(index, epoch, self.quarantine)
                known = self._bad.get(number)
                where = position, number, epoch, None if known is None else known.path
                faults.append(Fault(*where, "read", "WorkerError", _KILLS, 0, guard.outcome))
        return kept if batched else kept[0], faults

    def _warn(self, fault: Fault) -> None:
        done = "replaced by another one" if fault.outcome == "replaced" else "left out"
        written = self.rule.quarantine_file
        where = "" if written is None else f" All of them are listed in {written}."
        warnings.warn(
            f"Sample {_named(fault)} is bad and was {done}: {fault.error}: {fault.text} Further "
            f"samples with {fault.error} ({fault.stage}) are counted, and not warned of.{where} "
            f"More than {self.allowed} bad samples are an error (BadSamples.budget_share).",
            FastDataWarning,
            stacklevel=2,
        )

    def _over_budget(self) -> DatasetError:
        listed = [f"{_named(fault)}: {fault.error}: {fault.text}" for fault in self._bad.values()]
        more = len(listed) - _MOST_LISTED
        lines = [*listed[:_MOST_LISTED], *([f"and {more} more"] if more > 0 else [])]
        return DatasetError(
            f"{len(listed)} samples of the dataset are bad, and {self.allowed} may be. Repair them "
            "or leave them out, or allow a larger share "
            "(on_bad_sample=BadSamples(..., budget_share=...)). These are bad:\n" + "\n".join(lines)
        )

    def _write(self, fault: Fault) -> None:
        path = self.rule.quarantine_file
        if path is None or self._unwritable:
            return
        line = json.dumps(
            {
                "index": fault.index,
                "path": fault.path,
                "stage": fault.stage,
                "error": f"{fault.error}: {fault.text}",
                "count": self._counts[fault.index],
                "epoch": fault.epoch,
            }
        )
        try:
            append_privately(path, f"{line}\n")
        except OSError as error:
            self._unwritable = True
            warnings.warn(
                f"The bad samples are not written to {path}: {error}. They are still counted, and "
                "the training goes on. Give another quarantine_file.",
                FastDataWarning,
                stacklevel=2,
            )


def _named(fault: Fault) -> str:
    return f"{fault.index}{described(fault)}"

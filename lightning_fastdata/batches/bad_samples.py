"""Samples that cannot be read: what becomes of them, decided in one place for every executor.

Who reads a sample and gets an exception calls :meth:`SampleGuard.rescue`, in whichever process it
is. What happened travels to the training process as :class:`Fault`, with the batch. There it is
counted, written down, warned of, and limited (:class:`FaultLog`).
"""

from __future__ import annotations

import errno
import json
import math
import operator
import os
import random
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from torch.utils.data import Dataset, IterableDataset, MapDataPipe, SubsetRandomSampler

from lightning_fastdata.batches.keyed import own_dataset
from lightning_fastdata.errors import (
    DatasetError,
    FastDataWarning,
    OptionsError,
    add_note,
    check,
    check_among,
    is_number,
    printable,
    text_of,
)
from lightning_fastdata.host import clock
from lightning_fastdata.host.system_calls import append_privately
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.randomness.seeds import derived_seed
from lightning_fastdata.sources.files import files_of
from lightning_fastdata.types import Batch

BadSamplePolicy: TypeAlias = Literal["raise", "replace", "skip"]
POLICIES: Final[tuple[BadSamplePolicy, ...]] = ("raise", "replace", "skip")
FaultStage: TypeAlias = Literal["read", "transform", "collate"]
Outcome: TypeAlias = Literal["read", "raised", "replaced", "skipped"]

STAND_INS: Final = 8
"""Most other samples that are read in place of one; it is an error if all of them fail."""
_RETRY_AFTER_S: Final = (0.02, 0.2, 0.8)
_RETRY_WITHIN_S: Final = 2.0
"""Seconds after the first failure from which a sample is not read again."""
_JITTER: Final = random.Random()
"""Random generator of pauses; the global one belongs to the samples."""
_TRANSIENT: Final = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EBUSY}
)
_TRANSFORMS: Final = ("albumentations.", "torchvision.transforms.", "lightning_fastdata.augment.")
_MOST_TEXT: Final = 300
_ALWAYS_ALLOWED: Final = 10
_MOST_LISTED: Final = 20
_BEFORE: Final = ("Bad", "found before the training was resumed")
_KILLS: Final = "It is in quarantine, as whoever read it died or got stuck."
_OUTCOME_OF: Final[Mapping[BadSamplePolicy, Outcome]] = {
    "raise": "raised",
    "replace": "replaced",
    "skip": "skipped",
}


@dataclass(frozen=True, slots=True)
class BadSamples:
    """What to do about samples that cannot be read, transformed or collated.

    Raises:
        OptionsError: A value is impossible.
    """

    policy: BadSamplePolicy = "raise"
    """What is done: ``"raise"`` an error that names the sample; ``"replace"`` it by another one,
    which follows from seed, epoch and index; ``"skip"`` it, which shortens its batch."""
    budget_share: float = 0.001
    """Share of the dataset's samples that may be bad; 10 samples always may. More are an error."""
    quarantine_file: str | os.PathLike[str] | None = None
    """File to which bad samples are written, one JSON object a line; None: none."""

    def __post_init__(self) -> None:
        check_among("on_bad_sample", self.policy, POLICIES)
        share, file = self.budget_share, self.quarantine_file
        fine = is_number(share) and not isinstance(share, bool) and 0 <= share <= 1
        check("budget_share", share, fine, "shares from 0 to 1")
        fine = isinstance(file, str | os.PathLike | None) and file != ""
        check("quarantine_file", file, fine, "None and a path")

    @classmethod
    def of(cls, given: BadSamplePolicy | BadSamples) -> BadSamples:
        """Return the rule that a policy's name stands for, or the rule itself."""
        return given if isinstance(given, BadSamples) else cls(given)


class Fault(NamedTuple):
    """A sample that could not be read at once."""

    position: int
    """Position of the sample in its batch."""
    index: int | str  # type: ignore[assignment]  # the field's name matters more than tuple.index
    """Index of the sample, or of one that was to replace another; a ``repr`` if it is no number."""
    epoch: int
    path: str | None
    """Path of the sample's file, where the dataset or the error shows one; None: not known."""
    stage: FaultStage
    error: str
    """Name of the class of the error."""
    text: str
    """Text of the error, in one line."""
    retries: int
    """Number of times that the sample was read again."""
    outcome: Outcome
    """What became of the sample; ``"read"``: a later attempt could read it."""


@dataclass(slots=True, eq=False)
class Gone:
    """Stands for the index of a sample that is left out of its batch and must not be read."""

    index: object

    def __repr__(self) -> str:
        return repr(self.index)


SKIPPED: Final = object()
"""Stands for a sample that is left out of its batch."""
NO_SAMPLES: Final = object()
"""Stands for a batch, all of whose samples are left out."""


@dataclass(frozen=True, slots=True)
class SampleGuard:
    """Reads on where a sample failed; plain data, which goes to every process that reads."""

    policy: BadSamplePolicy = "raise"
    seed: int = 0
    candidates: Sequence[int] = ()
    """Indices of the samples that may replace another."""

    @classmethod
    def of(cls, rule: BadSamples, dataset: Dataset[Any], sampler: object, seed: int) -> SampleGuard:
        """Return the guard of a loader.

        A sample is replaced by any other of the dataset, or of a ``SubsetRandomSampler``.

        Raises:
            OptionsError: Samples are to be replaced, and it is not known by which.
        """
        if rule.policy == "raise":
            return cls()
        if isinstance(sampler, SubsetRandomSampler):
            return cls(rule.policy, seed, sampler.indices)
        length = dataset_length(dataset)
        if length is None and rule.policy == "replace":
            raise OptionsError(
                f"on_bad_sample is 'replace', but {type(dataset).__name__} has no length, so that "
                "it is not known what could replace a sample. Give it a __len__(), or use 'skip'."
            )
        return cls(rule.policy, seed, range(length or 0))

    @property
    def outcome(self) -> Outcome:
        """What becomes of a sample that is bad."""
        return _OUTCOME_OF[self.policy]

    def stand_in(self, index: object, epoch: int, attempt: int = 1) -> int:
        """Return the index to read in place of a sample; not its own, if there are others."""
        at = derived_seed(self.seed, epoch, plain_index(index), attempt) % len(self.candidates)
        if self.candidates[at] == index:
            at = (at + 1) % len(self.candidates)
        return self.candidates[at]

    def in_place_of(self, index: object, epoch: int, without: Collection[object]) -> int | Gone:
        """Return what takes the place of an index that must not be read; none of ``without``."""
        if self.policy == "replace":
            for attempt in range(1, 1 + 10 * STAND_INS):
                other = self.stand_in(index, epoch, attempt)
                if other not in without:
                    return other
        return Gone(index)

    def rescue(
        self,
        error: Exception,
        read: Callable[[Any], Batch],
        index: object,
        epoch: int,
        *,
        dataset: object,
        position: int,
        faults: list[Fault],
    ) -> Batch:
        """Return a sample where reading one has failed, or :data:`SKIPPED`.

        ``read`` reads a sample by its index, under its own key; ``dataset`` tells its path, and
        ``faults`` takes what happened.

        Raises:
            Exception: The error, if that is the policy, or if the samples in its place fail, too.
        """
        if isinstance(index, Gone):
            return SKIPPED
        first, asked, begin = error, index, len(faults)
        for attempt in range(1, STAND_INS + 2):
            left, sample, retries = _read_again(error, read, asked)
            outcome: Outcome = "read" if left is None else self.outcome
            shown = left or error
            fault = fault_of(shown, dataset, position, asked, epoch, outcome, retries=retries)
            faults.append(fault)
            if left is None:
                return sample
            if outcome == "skipped":
                return SKIPPED
            if outcome == "raised":
                raise left
            if attempt > STAND_INS:
                break
            asked = self.stand_in(index, epoch, attempt)
            try:
                return read(asked)
            except Exception as other:
                error = other
        faults[begin] = faults[begin]._replace(outcome="raised")
        add_note(
            first,
            f"{STAND_INS} other samples were read in its place, and failed, too; the last one, "
            f"sample {asked!r}, with {type(error).__name__}: {_line(error)}",
        )
        raise first

    def all_read_alone(self, error: Exception, dataset: object, first: object, epoch: int) -> Fault:
        """Return the fault of samples that can be read alone, or raise why they cannot together."""
        if self.policy == "raise" and not is_transient(error):
            raise error
        return fault_of(error, dataset, 0, first, epoch, "read", retries=1)


def fault_of(
    error: BaseException,
    dataset: object,
    position: int,
    index: object,
    epoch: int,
    outcome: Outcome,
    *,
    retries: int = 0,
) -> Fault:
    """Return what is worth knowing of a sample that failed."""
    path, stage, kind = path_of(dataset, index, error), stage_of(error), type(error).__name__
    return Fault(
        position, plain_index(index), epoch, path, stage, kind, _line(error), retries, outcome
    )


def _line(error: BaseException) -> str:
    return printable(" ".join(text_of(error).split())[:_MOST_TEXT])


def plain_index(index: object) -> int | str:
    """Return an index as a number of Python, or its ``repr`` if it is none."""
    try:
        return operator.index(index)  # type: ignore[arg-type]
    except TypeError:
        return repr(index)


def _read_again(
    error: Exception, read: Callable[[Any], Batch], index: object
) -> tuple[Exception | None, Batch, int]:
    """Read a sample again while its error may pass; return the error that stays, or the sample."""
    began_s, retries = clock.monotonic(), 0
    for pause_s in _RETRY_AFTER_S:
        if not is_transient(error) or clock.monotonic() - began_s > _RETRY_WITHIN_S:
            break
        clock.sleep(pause_s * _JITTER.uniform(0.5, 1.5))
        retries += 1
        try:
            return None, read(index), retries
        except Exception as other:
            error = other
    return error, None, retries


def is_transient(error: BaseException) -> bool:
    """Return whether reading again may help: a network or a disk that had a bad moment.

    A file that is missing, forbidden or damaged stays so.
    """
    for each in _chain(error):
        if isinstance(each, TimeoutError | ConnectionError):
            return True
        if isinstance(each, OSError) and isinstance(each.errno, int):
            return each.errno in _TRANSIENT
    return False


def stage_of(error: BaseException) -> FaultStage:
    """Return where a sample failed: in a transform that is known as one, or else in the dataset."""
    for frame, _ in walk_tb(error.__traceback__):
        if f"{frame.f_globals.get('__name__', '')}.".startswith(_TRANSFORMS):
            return "transform"
    return "read"


def path_of(dataset: object, index: Any, error: BaseException) -> str | None:
    """Return the file of a sample, if its dataset or the error shows one."""
    with suppress(LookupError, TypeError, ValueError):  # no such sample, or one of another kind
        listed = files_of(own_dataset(dataset), [index])
        if listed is not None:
            return listed[0]
    for each in _chain(error):
        if isinstance(each, OSError) and isinstance(each.filename, str | bytes | os.PathLike):
            return os.fsdecode(each.filename)
    return None


def _chain(error: BaseException) -> list[BaseException]:
    """Return an error and what it came from, as a traceback shows them."""
    found: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in found:
        found.append(each)
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return found


def described(fault: Fault | None) -> str:
    """Return what is known of a sample that failed beside its index, for the text of an error."""
    if fault is None:
        return ""
    stage = ", in its transform" if fault.stage == "transform" else ""
    path = "" if fault.path is None else f" (file {printable(fault.path)})"
    return stage + path


class FaultLog:
    """The bad samples of one loader, over all its epochs.

    Args:
        rule: What is done about bad samples.
        length: Samples of the dataset, which the budget is a share of; None: not known.
    """

    def __init__(self, rule: BadSamples | None = None, length: int | None = None) -> None:
        self.rule = BadSamples() if rule is None else rule
        self.allowed = max(_ALWAYS_ALLOWED, math.ceil(self.rule.budget_share * (length or 0)))
        """Number of samples of the dataset that may be bad."""
        self.samples = 0
        """Number of times that a sample was replaced or left out."""
        self.retries = 0
        """Number of times that a sample was read again."""
        self.deaths = 0
        """Number of side processes that died and were replaced."""
        self.quarantine: set[Any] = set()
        """Indices that are not read again, as they kill whoever reads them."""
        self._bad: dict[Any, Fault] = {}
        self._counts: Counter[Any] = Counter()
        self._kinds: set[tuple[str, str]] = set()
        self._unwritable = False

    @classmethod
    def of(cls, given: BadSamplePolicy | BadSamples, kind: type, length: int | None) -> FaultLog:
        """Return the log of a loader of a dataset of some class and length (None: it has none).

        Raises:
            OptionsError: There is no such policy, or it is not possible with this dataset.
        """
        rule = BadSamples.of(given)
        if rule.policy != "raise" and issubclass(kind, IterableDataset | MapDataPipe):
            raise OptionsError(
                f"on_bad_sample is {rule.policy!r}, but {kind.__name__} is a stream, or "
                "one of torch's pipes: after an error it cannot be asked for another sample, as it "
                "has no index. Handle errors in the stream itself, or use 'raise'."
            )
        return cls(rule, length)

    @property
    def is_asked(self) -> bool:
        """Whether bad samples are not just to raise an error, but to be passed over or listed."""
        return self.rule.policy != "raise" or self.rule.quarantine_file is not None

    @property
    def bad(self) -> list[int | str]:
        """Indices of the samples that count against the budget."""
        return list(self._bad)

    def count_in(self, bad: Iterable[int | str]) -> None:
        """Count samples that were bad before the training, which now goes on, was saved."""
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

        If not ``batched``, ``indices`` is a single index.
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

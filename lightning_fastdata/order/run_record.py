"""What is needed to make the batches of a run again: plain data, kept in checkpoints and reports.

The content of a sample is a function of (seed, epoch, index), and the order of an epoch one of
(length, seed, epoch). What else decides which samples a step got is here.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final, Literal, NamedTuple

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.order.epoch_order import EpochOrder

_Place = Literal["device", "workers"]
_MOST_SPANS: Final = 4096
_LARGEST: Final = 2**65
_LONGEST_TEXT: Final = 1000
_ORDERS: Final = {"ShuffleSampler": True, "RankSampler": True, "SequentialSampler": False}
"""Samplers whose order is a function of (length, seed, epoch), and whether they shuffle."""


class BatchNumber(NamedTuple):
    """A batch of a run."""

    epoch: int
    """Counted from 0."""
    number: int
    """Within its epoch, from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpan:
    """How batches are made from one epoch of a run on, up to the next span."""

    batch_size: int
    """Of one rank."""
    batches_per_epoch: int
    """Batches that each rank trains on in an epoch, at most."""
    world_size: int = 1
    accumulate_grad_batches: int = 1
    place: _Place = "workers"
    """Where the pixels of an Albumentations pipeline are computed."""
    epoch: int = 0
    """The first epoch that it holds for, from its start."""
    batch: int = 0
    """Batches of the run before it."""
    step: int = 0
    """Optimizer steps of the run before it."""
    partly: bool = False
    """Whether its first epoch began under the span before: how many batches that epoch has is then
    known only behind it, and no batch of this span can be found again."""

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch; its last batch always ends one."""
        return -(-self.batches_per_epoch // self.accumulate_grad_batches)

    def follows(self, other: RunSpan) -> bool:
        """Return whether batches are made otherwise than in the span before."""
        return self._settings() != other._settings()

    def _settings(self) -> tuple[object, ...]:
        steps = self.batches_per_epoch, self.world_size, self.accumulate_grad_batches
        return self.batch_size, *steps, self.place


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What decides which samples each training step of a run got."""

    datamodule: str
    """Class of the data module; never imported."""
    seed: int
    length: int
    """Samples in the training dataset."""
    order: str
    """Who decides the order: the class of the sampler."""
    drop_last: bool
    batches: int
    """Batches that the training took so far, of each rank."""
    spans: tuple[RunSpan, ...]
    """By epoch; another one begins where something has changed."""
    package: str = ""
    """Version of this package."""
    version: int = 1
    """Of this form."""

    def __post_init__(self) -> None:
        if not self.spans or self.version != 1:
            raise OptionsError(
                f"The record of the run has version {self.version!r} and {len(self.spans)} spans; "
                "this package reads version 1 with at least one. Use the version that wrote it: "
                f"{self.package or 'unknown'}."
            )

    def as_dict(self) -> dict[str, Any]:
        """Return plain data that :meth:`from_dict` takes."""
        return {**asdict(self), "spans": [asdict(span) for span in self.spans]}

    @classmethod
    def from_dict(cls, values: object) -> RunRecord:
        """Return a record from plain data.

        Raises:
            OptionsError: Something is missing, unknown or impossible; it is named.
        """
        given = _checked(cls, values, "the record of the run")
        spans = given["spans"]
        if not isinstance(spans, list) or not 0 < len(spans) <= _MOST_SPANS:
            raise OptionsError(f"The record of the run has no list of spans: {spans!r:.100}.")
        made = [RunSpan(**_checked(RunSpan, span, "a span of the record")) for span in spans]
        record = cls(**{**given, "spans": tuple(made)})
        starts = [(span.epoch, span.batch, span.step) for span in made]
        if any(n < 0 for n in (*starts[0], record.batches)) or starts != sorted(set(starts)):
            raise OptionsError(
                f"The spans of the record begin at {starts} (epoch, batch, step), which is no "
                "order. The file was damaged or changed."
            )
        return record

    def continued(self, now: RunRecord) -> RunRecord:
        """Return the record of a run that goes on as ``now`` says, whose span is the present one.

        A span that begins in the present epoch takes the place of what was said of that.
        """
        same = replace(self, batches=0, spans=now.spans, package="")
        if same != replace(now, batches=0, package=""):
            return now  # other data or another order: the batches before cannot be made again
        newest = now.spans[-1]
        spans = tuple(span for span in self.spans if span.epoch <= newest.epoch)
        last = spans[-1] if spans else None
        # How many batches an epoch had in which something changed is known behind it.
        ended = last is not None and last.partly and last.epoch < newest.epoch
        if last is None or ended or newest.follows(last):
            if last is not None and not ended:
                newest = self._begun_under(last, newest)
            spans = (*(span for span in spans if span.epoch < newest.epoch), newest)
        return replace(now, spans=spans)

    def _begun_under(self, last: RunSpan, newest: RunSpan) -> RunSpan:
        """Return a span that says so if its epoch began under the span before."""
        epochs = newest.epoch - last.epoch
        start = last.batch + epochs * last.batches_per_epoch
        if self.batches <= start:
            return newest
        # Where Lightning counts from is not where the epoch began: batches have another size.
        step = last.step + epochs * last.steps_per_epoch
        return replace(newest, batch=start, step=step, partly=True)

    def locate(self, batch: int) -> BatchNumber:
        """Return the epoch of a batch of the run, and its number in it.

        Raises:
            OptionsError: It was not recorded.
        """
        span = self._span("batch", batch, whole=True)
        epochs, number = divmod(batch - span.batch, span.batches_per_epoch)
        return BatchNumber(span.epoch + epochs, number)

    def batches_of_step(self, step: int) -> range:
        """Return the batches that an optimizer step, counted from 0, was made of.

        Raises:
            OptionsError: It was not recorded.
        """
        span = self._span("step", step, whole=True)
        epochs, within = divmod(step - span.step, span.steps_per_epoch)
        first = within * span.accumulate_grad_batches
        stop = min(first + span.accumulate_grad_batches, span.batches_per_epoch)
        begin = span.batch + epochs * span.batches_per_epoch
        return range(begin + first, begin + stop)

    def order_of(self, epoch: int, *, rank: int = 0) -> EpochOrder:
        """Return which samples the batches of an epoch hold.

        Raises:
            OptionsError: The order is no function of (seed, epoch), or there is no such rank.
        """
        span = self._span("epoch", epoch)
        if self.order not in _ORDERS or (span.world_size > 1 and self.order != "RankSampler"):
            raise OptionsError(
                f"The order of the run is that of {self.order}"
                + (f" on {span.world_size} ranks" if span.world_size > 1 else "")
                + ", which does not follow from seed and epoch alone here, so that its batches "
                'cannot be found again. Leave out sampler, batch_sampler and shuffle="blocks".'
            )
        return EpochOrder(
            length=self.length,
            batch_size=span.batch_size,
            seed=self.seed,
            epoch=epoch,
            shuffle=_ORDERS[self.order],
            drop_last=self.drop_last,
            equal_counts=self.order == "RankSampler",
            rank=rank,
            world_size=span.world_size,
        )

    def _span(
        self, name: Literal["batch", "step", "epoch"], value: int, *, whole: bool = False
    ) -> RunSpan:
        starts = [getattr(span, name) for span in self.spans]
        if value < starts[0]:
            raise OptionsError(
                f"{name} is {value}, and what is known of the run begins with {name} {starts[0]}."
            )
        span = self.spans[bisect.bisect_right(starts, value) - 1]
        if whole and span.partly:
            raise OptionsError(
                f"{name} {value} belongs to epoch {span.epoch}, in which the run was stopped and "
                "went on with batches of another size or on other ranks: which they were is not "
                "recorded. Ask for one of another epoch."
            )
        return span


def _checked(kind: type[RunRecord | RunSpan], values: object, what: str) -> dict[str, Any]:
    """Return the fields of a record from plain data; OptionsError if one is not of its type."""
    types = {field.name: str(field.type) for field in fields(kind)}
    if not isinstance(values, Mapping) or values.keys() != types.keys():
        has = ", ".join(map(str, values)) if isinstance(values, Mapping) else repr(values)
        raise OptionsError(f"In {what} {has:.300} was found, and {', '.join(types)} expected.")
    for name, value in values.items():
        if not _FITS.get(types[name], _fits_any)(value) or (name in _FROM_ONE and value < 1):
            raise OptionsError(
                f"In {what} {name}={value!r:.100} was found, which is no value for it. The file "
                "was damaged or changed."
            )
    return dict(values)


def _fits_any(_: object) -> bool:
    return True


_FITS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "int": lambda value: type(value) is int and abs(value) < _LARGEST,
    "str": lambda value: isinstance(value, str) and len(value) < _LONGEST_TEXT,
    "bool": lambda value: isinstance(value, bool),
    "_Place": lambda value: value in ("device", "workers"),
}
_FROM_ONE: Final = frozenset(
    ("batch_size", "batches_per_epoch", "world_size", "accumulate_grad_batches", "length")
)

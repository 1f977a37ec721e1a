"""Transforms of a batch and their part in the workers: what each has to offer; plain callables."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, TypeAlias

import torch

from lightning_fastdata import registry
from lightning_fastdata.augment.fields import (
    Fields,
    find_fields,
    first_device,
    get_field,
    has_field,
    put_fields,
)
from lightning_fastdata.augment.ops.operation import Tape
from lightning_fastdata.augment.replay.program import Draws, compile_tapes
from lightning_fastdata.errors import BatchError
from lightning_fastdata.fingerprint import Fingerprint, fingerprint
from lightning_fastdata.tree import name_of
from lightning_fastdata.types import Batch, SampleKey

if TYPE_CHECKING:
    import numpy as np


Where: TypeAlias = Literal["worker", "device", "either"]


class OpPlacement(NamedTuple):
    """Where one operation runs."""

    name: str
    """Class name of the transform."""
    where: Where
    """Place where it runs. ``worker``: by its own library on the CPU. ``device``: on the batch.
    ``either``: on the device, except in samples in which a later operation needs real pixels."""
    why: str
    """Reason for this place, in a few words."""

    @property
    def on_device(self) -> bool:
        """Whether it may run on the device."""
        return self.where != "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placements:
    """Where every operation of one pipeline runs, whatever library it is of."""

    placements: tuple[OpPlacement, ...]
    """One placement for each leaf transform, in the order in which they are written."""

    @property
    def defers(self) -> bool:
        """Whether any operation may run on the device."""
        return any(placement.on_device for placement in self.placements)


class WorkerTransform:
    """The part of a stage transform that runs on each sample in the side process; picklable.

    It notes on a tape what a device has still to do; this one leaves samples as they are. The state
    that each thread keeps in ``_local`` is not pickled.
    """

    needs_batches = False
    """Whether something is left to do once samples are collated, even if no device takes part."""
    fuses_steps = False
    """Whether there are kernels that carry out several of its operations together."""

    def __init__(self) -> None:
        self._local = threading.local()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_local"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, _local=threading.local())

    def __call__(self, sample: Batch, key: SampleKey) -> tuple[Any, Any]:  # noqa: ARG002
        """Return the sample as the worker leaves it, and what was drawn for it."""
        return sample, None

    def pipelines(self) -> tuple[object, ...]:
        """Return what of a pipeline runs on samples in this process, and may keep a state."""
        return ()

    def waiting(self, sample: Batch, names: Collection[Any]) -> Mapping[Any, torch.Tensor]:
        """Return the tensors of a sample that tapes know by these names."""
        raise NotImplementedError

    def finished(self, sample: Batch, tape: Tape) -> Batch:  # noqa: ARG002
        """Return a sample after the operations on its tape."""
        return sample

    def collate(
        self, drawn: Sequence[Any], beside: Mapping[str, np.ndarray] | None = None
    ) -> Draws:
        """Return what was drawn for a batch, packed in the order of its samples, and ``beside``."""
        fuse = registry.fuse() if self.fuses_steps else None
        return compile_tapes([tape or {} for tape in drawn], beside, fuse)

    def stacks(
        self, samples: Sequence[Batch], drawn: Sequence[Any], listed: Collection[Any] = ()
    ) -> bool:
        """Return whether the tensors that wait for the device can be stacked.

        They cannot if some samples lack one, or have it in another shape or dtype, or in a field
        that is ``listed`` in the batch.
        """
        fields = ((one, name) for one in samples for name in listed if has_field(one, name))
        lists = {id(one[name]) for one, name in fields}
        names = {name: None for tape in drawn for name in tape or ()}
        each = [self.waiting(sample, names) for sample in samples] if names else []
        rows = ([one[name] for one in each if name in one] for name in names)
        return all(
            len(row) == len(samples)
            and len({(one.shape, one.dtype) for one in row}) == 1
            and lists.isdisjoint(map(id, row))
            for row in rows
        )

    def finish_each(
        self, samples: Sequence[Batch], drawn: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Finish in each sample what waits for the device; return the samples, and other draws."""
        with plain_tensors():
            done = [
                self.finished(sample, tape or {})
                for sample, tape in zip(samples, drawn, strict=True)
            ]
        return done, [{} for _ in done]

    def finish(self, batch: Batch, drawn: Sequence[Any]) -> Batch:  # noqa: ARG002
        """Complete a collated batch and return it; used where no device takes part."""
        return batch


class StageTransform:
    """What a data module runs on a batch once it is on the device.

    If a part of it runs in the workers, :meth:`in_worker` returns that part.
    """

    name: str
    """Name of the transform in messages and reports."""
    library = ""
    """Name of the library that computes its pixels in the workers, for texts; empty: none does."""
    starts_in_worker = True
    """Whether it has a part that runs on each sample in the side process."""

    @property
    def defers(self) -> bool:
        """Whether a device can do any part of it."""
        return True

    def for_samples(self, samples: Iterable[Batch]) -> Self:  # noqa: ARG002
        """Return the transform for a dataset, given samples from all over it.

        The result may do less in the workers, and has to be right for any other sample, too.
        """
        return self

    def behind(self) -> StageTransform:
        """Return what runs on batches behind another transform; itself if it has to be first."""
        return self

    def made_of(self) -> tuple[object, ...]:
        """Return what the user gave and may change: a pipeline, say."""
        return ()

    def renewed(self) -> Self:
        """Return the transform for what :meth:`made_of` is now; itself if nothing has changed."""
        return self

    def check_sample(self, sample: Batch) -> None:
        """Raise BatchError if a sample of the dataset lacks what the transform needs."""

    def in_worker(self, *, on_device: bool) -> WorkerTransform | None:  # noqa: ARG002
        """Return the part that runs on each sample: all of it, or what a device cannot do."""
        return None

    def apply(self, batch: Batch, draws: Draws | None) -> Batch:
        """Return the batch, which is already on the device, transformed as was drawn."""
        raise NotImplementedError

    def apply_unprepared(self, batch: Batch, key: SampleKey) -> Batch:
        """Return a batch of another loader, transformed; sample ``i`` has ``key.index + i``."""
        raise NotImplementedError

    def explain(self) -> str:
        """Return where each operation runs and why, as text."""
        raise NotImplementedError


class PipelineTransform(StageTransform):
    """A pipeline that draws for each sample, and that its user may change between epochs.

    Attributes:
        pipeline: the pipeline that the user gave.
    """

    pipeline: Any
    plan: Placements
    """Where the operations run."""
    _unfitted: Self | None = None
    """Transform that was fitted to a dataset to make this, and that runs on the device; or None."""
    _state: Fingerprint | None = None
    """Fingerprint of the pipeline when it was planned; None: it has no fingerprint."""

    def __init__(self, pipeline: Any, fields: Fields) -> None:
        self.name = type(pipeline).__name__
        self.pipeline = pipeline
        self._fields = fields
        self.take_in()

    @property
    def defers(self) -> bool:
        """Whether a device can do any part of it."""
        return self.plan.defers

    def explain(self) -> str:
        """Return a table: operation, where it runs, why."""
        return table(self.plan.placements)

    def for_samples(self, samples: Iterable[Batch]) -> Self:
        """Return the transform for a dataset, given samples from all over it."""
        seen: list[Any] = []
        for sample in samples:
            try:
                seen.append(self._look_at(sample))
            except BatchError:
                if not seen:
                    raise
                break  # Training reports it, if it reads that sample.
        if not seen:
            return self
        fitted = copy.copy(self)
        fitted._unfitted = self
        fitted._fit(seen)
        fitted.take_in()
        return fitted

    def _look_at(self, sample: Batch) -> Any:
        """Return what of a sample decides what a device can do; BatchError if it holds no image."""
        raise NotImplementedError

    def _fit(self, seen: Sequence[Any]) -> None:
        """Note what is known of a dataset, before it is planned for."""
        raise NotImplementedError

    def made_of(self) -> tuple[object, ...]:
        """Return the pipeline."""
        return (self.pipeline,)

    def renewed(self) -> Self:
        """Return the transform for the pipeline as it is now; itself if that has not changed."""
        if not self._has_changed():
            return self
        twin = copy.copy(self)
        twin.take_in()
        if self._unfitted is not None:
            self._unfitted.take_in()
        return twin

    def take_in(self) -> None:
        """Plan for the pipeline as it is now."""
        self._state = self.state()

    def state(self) -> Fingerprint | None:
        """Return the fingerprint of the pipeline as it is now; None: it has none."""
        return fingerprint(self.pipeline, with_globals=False)

    def _has_changed(self) -> bool:
        state = self.state()
        return state is None or state != self._state


class CallableTransform(StageTransform):
    """A callable or ``nn.Module`` that runs on the batch on the device.

    A module whose parameters or buffers are elsewhere is moved to the batch's device. The callable
    draws its own random numbers.
    """

    starts_in_worker = False

    def __init__(self, function: Callable[[Any], Any], fields: Fields) -> None:
        self.name = name_of(function)
        self.spelled = self.name if hasattr(function, "__name__") else f"{self.name}(...)"
        """The callable as it is written in code, for messages."""
        self._function = function
        self._fields = fields

    def apply(self, batch: Batch, draws: Draws | None = None) -> Batch:  # noqa: ARG002
        """Call it on the image field if one was named, else on the whole batch."""
        with plain_tensors():
            if isinstance(self._function, torch.nn.Module):
                follow(self._function, first_device(batch))
            if self._fields.image is None:
                return self._called(batch)
            location = find_fields(batch, self._fields, batched=True).image
            return put_fields(batch, {location: self._called(get_field(batch, location))})

    def _called(self, given: Batch) -> Batch:
        result = self._function(given)
        if result is None and given is not None:
            raise BatchError(
                f"The transform {self.name} returned None. It has to return what it was given, "
                "transformed; a transform that changes it in place has to return it too."
            )
        return result

    def apply_unprepared(self, batch: Batch, key: SampleKey) -> Batch:  # noqa: ARG002
        """Do the same as :meth:`apply`; the callable draws its own random numbers."""
        return self.apply(batch)

    def explain(self) -> str:
        """Return one line."""
        field = self._fields.image
        what = "the whole batch" if field is None else f"the field {field!r}"
        return table([(self.name, "device", f"a callable on {what}")])


def follow(module: torch.nn.Module, device: torch.device | None) -> None:
    """Move a module whose parameters or buffers are elsewhere to a device, if there is one."""
    # Checked each time, as others may move the module; only its first tensor is looked at.
    own = next(itertools.chain(module.parameters(), module.buffers()), None)
    if own is not None and device is not None and own.device != device:
        module.to(device)


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Create ordinary tensors without gradients, also when Lightning is in inference mode.

    A constant or batch created in inference mode during ``validate`` could not be used in a later
    ``fit``.
    """
    # Leaving a mode that is not on costs a microsecond in each step.
    ordinary = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
    with ordinary, torch.no_grad():
        yield


def table(rows: Iterable[tuple[str, str, str]]) -> str:
    """Return rows of operation, place and reason as text in columns."""
    rows = [("operation", "where", "why"), *rows]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{a:<{first}}  {b:<{second}}  {c}".rstrip() for a, b, c in rows)

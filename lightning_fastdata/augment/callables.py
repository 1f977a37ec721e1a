"""Transforms of a batch that are plain callables or modules."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from lightning_fastdata.augment.pipeline.fields import (
    Fields,
    find_fields,
    first_device,
    get_field,
    put_fields,
)
from lightning_fastdata.errors import BatchError

if TYPE_CHECKING:
    from lightning_fastdata.augment.replay.program import Draws
    from lightning_fastdata.types import Batch, SampleKey


class CallableTransform:
    """A callable or ``nn.Module`` that runs on the batch on the device.

    A module whose parameters or buffers are elsewhere is moved to the batch's device, once.
    """

    def __init__(self, function: Callable[[Any], Any], fields: Fields) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        self.starts_in_worker = False
        self._function = function
        self._fields = fields

    def check_sample(self, sample: Any) -> None:
        """Accept every sample: only the callable knows what it needs."""

    def in_worker(self, *, on_device: bool) -> None:  # noqa: ARG002 - the contract's signature
        """Return None: nothing runs in the side process."""
        return

    def apply(self, batch: Batch, draws: Draws | None = None) -> Batch:  # noqa: ARG002
        """Call it on the image field if one was named, else on the whole batch."""
        with plain_tensors():
            self._follow(batch)
            if self._fields.image is None:
                return self._checked(batch, self._function(batch))
            location = find_fields(batch, self._fields, batched=True).image
            image = get_field(batch, location)
            return put_fields(batch, {location: self._checked(image, self._function(image))})

    def _follow(self, batch: Batch) -> None:
        module = self._function
        if not isinstance(module, torch.nn.Module):
            return
        # Looked up each time, as somebody else may move the module; it ends at the first tensor.
        own = next(itertools.chain(module.parameters(), module.buffers()), None)
        device = None if own is None else first_device(batch)
        if own is not None and device is not None and own.device != device:
            module.to(device)

    def _checked(self, given: Any, result: Any) -> Any:
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


def table(rows: list[tuple[str, str, str]]) -> str:
    """Return rows of operation, place and reason as text in columns."""
    rows = [("operation", "where", "why"), *rows]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{a:<{first}}  {b:<{second}}  {c}".rstrip() for a, b, c in rows)

"""Tensors that were drawn but not computed: what a dataset's own pipeline returns when recorded.

A dataset that ends its pipeline in ``ToTensorV2`` gets, in place of the tensor, a
:class:`DeferredTensor`. It has the shape and dtype of that tensor, and instead of values it knows
the pixels that it is made of and what was drawn for them. As long as it is only handed on,
stacked, or changed in ways that can be noted (:mod:`~lightning_fastdata.augment.record.tail`), it
stays what it is, and the device computes it with the whole batch. Whatever else is done with it
computes it on the spot, by Albumentations, so that the result is the one without recording.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from lightning_fastdata.augment.record.tail import OUT_OF_PLACE, Form, Function, TailStep, note
from lightning_fastdata.torch_internals import (
    make_wrapper_tensor,
    throw_on_pointer,
    without_torch_function,
)

if TYPE_CHECKING:
    import numpy as np

    from lightning_fastdata.augment.ops.operation import Track
    from lightning_fastdata.types import Batch

_TELLS_FORM: Final = frozenset(
    {
        torch.Tensor.__len__,
        torch.Tensor.device.__get__,
        torch.Tensor.dim,
        torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
        torch.Tensor.element_size,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_nested.__get__,  # type: ignore[attr-defined]
        torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
        torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
        torch.Tensor.nelement,
        torch.Tensor.numel,
        torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
        torch.Tensor.size,
    }
)
"""What can be answered without values."""
_CHANGES_NOTHING: Final = frozenset({torch.Tensor.cpu, torch.Tensor.detach})
"""What gives back a dense tensor on the CPU without gradients as it is."""


class Derived:
    """A tensor that is made of others when it is needed; ``make`` writes to none of them."""

    __slots__ = ("__weakref__", "_make", "_value")

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make = make
        self._value: torch.Tensor | None = None

    @property
    def is_computed(self) -> bool:
        """Whether the values were needed."""
        return self._value is not None

    def value(self) -> torch.Tensor:
        """Return the tensor; the same one each time, since it may have been written to."""
        if self._value is None:
            made = self._make()
            # What it is made of may have asked for it meanwhile.
            self._value = made if self._value is None else self._value
        return self._value


class Waiting(Derived):
    """One image or mask of a sample, with what is still to be done to it.

    Args:
        track: The operations.
        compute: Does them with Albumentations and returns the tensor.
        pixels: The array ``[H, W]`` or ``[H, W, C]`` that they start from.
        pipeline: The classes of the transforms of the pipeline, in order.
    """

    __slots__ = ("derived", "pipeline", "pixels", "track", "use")

    def __init__(
        self,
        track: Track,
        compute: Callable[[], torch.Tensor],
        pixels: np.ndarray,
        pipeline: tuple[type, ...] = (),
    ) -> None:
        super().__init__(compute)
        self.track = track
        self.pixels = pixels
        self.pipeline = pipeline
        self.use: Function | None = None
        """The function of torch that needed the values first; None: none did."""
        self.derived: list[weakref.ref[Derived]] = []
        """What is made of it, as long as that is needed."""

    def value(self) -> torch.Tensor:
        """Return the tensor; all that was made of it is computed before it can be written to."""
        if self._value is not None:
            return self._value
        value = super().value()
        for one in [reference() for reference in self.derived]:
            if one is not None:
                one.value()
        self.derived.clear()
        return value


class DeferredTensor(torch.Tensor):
    """A tensor of which the values wait; see the module.

    Several of them stacked along a new first dimension are one again, ``[..., *shape]``.
    """

    waiting: tuple[Waiting, ...]
    """What it is made of, in order; more than one if it was stacked."""
    stacked: tuple[int, ...]
    """Lengths of the dimensions that stacking has put in front; ``()``: a single tensor."""
    tail: tuple[TailStep, ...]
    """What is done to each part behind its pipeline."""
    source: Derived
    """Computes it on the spot."""
    shares: bool
    """Others may see what is written to it."""

    @classmethod
    def of(
        cls,
        form: torch.Tensor | Form,
        waiting: tuple[Waiting, ...],
        stacked: tuple[int, ...] = (),
        *,
        tail: tuple[TailStep, ...] = (),
        source: Derived | None = None,
        shares: bool = True,
    ) -> DeferredTensor:
        """Return a deferred tensor of parts of this form; without a source, of a single part."""
        deferred: DeferredTensor = make_wrapper_tensor(
            cls, (*stacked, *form.shape), dtype=form.dtype, device=torch.device("cpu")
        )
        throw_on_pointer(deferred)
        deferred.waiting = waiting
        deferred.stacked = stacked
        deferred.tail = tail
        deferred.source = source or waiting[0]
        deferred.shares = shares
        if source is not None:
            for one in waiting:
                one.derived.append(weakref.ref(source))
        return deferred

    @property
    def form(self) -> Form:
        """What is known of each part."""
        with without_torch_function():
            leading = len(self.stacked)
            return Form(tuple(self.shape[leading:]), self.dtype, leading)

    @property
    def is_computed(self) -> bool:
        """Whether some of the values are there, so that the rest may as well be."""
        return any(waiting.is_computed for waiting in self.waiting)

    def computed(self) -> torch.Tensor:
        """Return the ordinary tensor; the same one each time."""
        return self.source.value()

    @staticmethod
    def collate(
        tensors: Sequence[torch.Tensor],
        *,
        collate_fn_map: Mapping[Any, Function] | None = None,  # noqa: ARG004
    ) -> torch.Tensor:
        """Stack the tensors of a batch, for torch's table of collate functions."""
        return torch.stack(list(tensors))

    @classmethod
    def __torch_function__(
        cls,
        func: Function,
        types: Sequence[type],
        args: tuple[Batch, ...] = (),
        kwargs: Mapping[str, Batch] | None = None,
    ) -> Batch:
        """Answer without values where that is possible, else compute them first."""
        kwargs = kwargs or {}
        if func in _TELLS_FORM:
            with without_torch_function():  # as torch's notes on subclasses have it
                return func(*args, **kwargs)
        if func in _CHANGES_NOTHING and len(args) == 1 and not kwargs:
            return args[0]
        answer = None
        if func is torch.stack:
            answer = _stacked(*args, **kwargs)
        elif args and isinstance(args[0], DeferredTensor) and not args[0].is_computed:
            answer = _changed(args[0], func, args[1:], kwargs)
        return _on_values(func, args, kwargs) if answer is None else answer

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Function,
        types: Sequence[type],
        args: tuple[Batch, ...] = (),
        kwargs: Mapping[str, Batch] | None = None,
    ) -> Batch:
        """Compute the values for what asks torch's dispatcher alone, as ``torch.tensor`` does."""
        return _on_values(func, args, kwargs or {})


def _stacked(
    tensors: Sequence[torch.Tensor], dim: int = 0, out: torch.Tensor | None = None, **_: object
) -> DeferredTensor | None:
    """Return deferred tensors stacked, still deferred; None if they cannot be."""
    if dim != 0 or out is not None:
        return None
    parts = [one for one in tensors if isinstance(one, DeferredTensor) and not one.is_computed]
    if not parts or len(parts) != len(tensors):
        return None
    form, tail, stacked = parts[0].form, parts[0].tail, parts[0].stacked
    waiting = tuple(one for part in parts for one in part.waiting)
    if any((part.form, part.tail, part.stacked) != (form, tail, stacked) for part in parts):
        return None
    # One program computes them: it orders operations by their numbers in the pipeline.
    if len({(one.pipeline, one.pixels.shape, one.pixels.dtype) for one in waiting}) > 1:
        return None
    if any(step.kind == "permute" for step in tail):
        # What was turned would lie in memory as it is written.
        tail += (TailStep("contiguous", form.dtype),)
    sources = [part.source for part in parts]
    source = Derived(lambda: torch.stack([one.value() for one in sources]))
    shape = (len(parts), *stacked)
    return DeferredTensor.of(form, waiting, shape, tail=tail, source=source, shares=False)


def _changed(
    tensor: DeferredTensor, func: Function, args: Sequence[Batch], kwargs: Mapping[str, Batch]
) -> DeferredTensor | None:
    """Return what a function makes of a deferred tensor, still deferred; None if it cannot be."""
    noted = note(func, args, kwargs, tensor.form)
    if noted is None or (noted.in_place and tensor.shares):
        return None
    if noted.step is None:
        return tensor
    # Numbers beside it may be written to later.
    kept = [one.clone() if isinstance(one, torch.Tensor) else one for one in args]
    function, source = OUT_OF_PLACE.get(func, func), tensor.source
    made = DeferredTensor.of(
        Form(noted.shape, noted.step.dtype),
        tensor.waiting,
        tensor.stacked,
        tail=(*tensor.tail, noted.step),
        source=Derived(lambda: function(source.value(), *kept, **kwargs)),
        shares=noted.shares,
    )
    if not noted.in_place:
        tensor.shares |= noted.shares
        return made
    tensor.tail, tensor.source = made.tail, made.source
    return tensor


def _on_values(func: Function, args: tuple[Batch, ...], kwargs: Mapping[str, Batch]) -> Batch:
    return func(*_computed(args, func), **_computed(dict(kwargs), func))


def _computed(value: Batch, use: Function) -> Batch:
    if isinstance(value, DeferredTensor):
        for waiting in value.waiting:
            waiting.use = waiting.use or use
        return value.computed()
    if type(value) in (list, tuple):
        return type(value)(_computed(item, use) for item in value)
    if type(value) is dict:
        return {key: _computed(item, use) for key, item in value.items()}
    return value

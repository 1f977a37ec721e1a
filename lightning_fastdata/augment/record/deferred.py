"""Tensors that were drawn but not computed: what a dataset's own pipeline returns when recorded.

A dataset that ends its pipeline in ``ToTensorV2`` gets, in place of the tensor, a
:class:`DeferredTensor`. It has the shape and dtype of that tensor, and instead of values it knows
the pixels that it is made of and what was drawn for them. As long as it is only handed on,
stacked, or changed in ways that can be noted (:mod:`~lightning_fastdata.augment.record.tail`), it
stays what it is, and the device computes it with the whole batch. Whatever else is done with it
computes it on the spot, by Albumentations, so that the result is the one without recording.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any, Final

import torch

from lightning_fastdata.augment.record.tail import OUT_OF_PLACE, Noted, TailStep, note
from lightning_fastdata.torch_internals import (
    make_wrapper_tensor,
    throw_on_pointer,
    without_torch_function,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lightning_fastdata.augment.ops.operation import Track

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


class Waiting:
    """One image or mask of a sample, with what is still to be done to it.

    Args:
        track: The operations.
        compute: Carries them out with Albumentations and returns the tensor.
        pixels: The array ``[H, W]`` or ``[H, W, C]`` that they start from.
        pipeline: The classes of the transforms of the pipeline, in order.
    """

    __slots__ = ("_compute", "_derived", "_value", "pipeline", "pixels", "track", "use")

    def __init__(
        self,
        track: Track,
        compute: Callable[[], torch.Tensor],
        pixels: Any,
        pipeline: tuple[type, ...] = (),
    ) -> None:
        self.track = track
        self.pixels = pixels
        self.pipeline = pipeline
        self.use: Callable[..., Any] | None = None
        """The function of torch that needed the values first; None: none did."""
        self._compute = compute
        self._derived: list[weakref.ref[Derived]] = []
        self._value: torch.Tensor | None = None

    @property
    def is_computed(self) -> bool:
        """Whether somebody has needed the values."""
        return self._value is not None

    def value(self) -> torch.Tensor:
        """Return the tensor; the same one each time, since it may have been written to.

        All that was made of it so far is computed, too, before anybody can write to it.
        """
        if self._value is None:
            self._value = self._compute()
            for one in [reference() for reference in self._derived]:
                if one is not None:
                    one.value()
            self._derived.clear()
        return self._value

    def leads_to(self, derived: Derived) -> None:
        """Note what is made of it, as long as it is needed."""
        self._derived.append(weakref.ref(derived))

    def joins(self, other: Waiting) -> bool:
        """Return whether one program can carry out what waits for both.

        Their operations are put in order by their numbers in the pipeline.
        """
        return (
            self.pipeline == other.pipeline
            and self.pixels.shape == other.pixels.shape
            and self.pixels.dtype == other.pixels.dtype
        )


class Derived:
    """A tensor that is made of others, when it is needed.

    Args:
        make: Makes it, of the values of the others, and writes to none of them.
    """

    __slots__ = ("__weakref__", "_make", "_value")

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make = make
        self._value: torch.Tensor | None = None

    def value(self) -> torch.Tensor:
        """Return the tensor; the same one each time."""
        if self._value is None:
            made = self._make()
            # What it is made of may have asked for it meanwhile.
            self._value = made if self._value is None else self._value
        return self._value


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
    source: Waiting | Derived
    """Computes it on the spot."""
    shares: bool
    """Others may see what is written to it."""

    @classmethod
    def of(
        cls,
        form: torch.Tensor,
        waiting: tuple[Waiting, ...],
        stacked: tuple[int, ...] = (),
        *,
        tail: tuple[TailStep, ...] = (),
        source: Derived | None = None,
        shares: bool = True,
    ) -> DeferredTensor:
        """Return a deferred tensor.

        Args:
            form: A tensor of one part's shape and dtype.
            waiting: The parts.
            stacked: Lengths of the dimensions in front of ``form``'s.
            tail: What is done to each part behind its pipeline.
            source: Computes it on the spot; None: it is the single part.
            shares: Others may see what is written to it.
        """
        shape = (*stacked, *form.shape)
        deferred: DeferredTensor = make_wrapper_tensor(
            cls, shape, dtype=form.dtype, device=torch.device("cpu")
        )
        throw_on_pointer(deferred)
        deferred.waiting = waiting
        deferred.stacked = stacked
        deferred.tail = tail
        deferred.source = source or waiting[0]
        deferred.shares = shares
        if source is not None:
            for one in waiting:
                one.leads_to(source)
        return deferred

    @property
    def is_computed(self) -> bool:
        """Whether some of the values are there, so that the rest may as well be."""
        return any(waiting.is_computed for waiting in self.waiting)

    def computed(self) -> torch.Tensor:
        """Return the ordinary tensor; the same one each time."""
        return self.source.value()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer without values where that is possible, else compute them first."""
        kwargs = kwargs or {}
        if func in _TELLS_FORM:
            with without_torch_function():  # as torch's notes on subclasses have it
                return func(*args, **kwargs)
        if func in _CHANGES_NOTHING and len(args) == 1 and not kwargs:
            return args[0]
        if func is torch.stack:
            joined = _stacked(*args, **kwargs)
            if joined is not None:
                return joined
        elif args and isinstance(args[0], DeferredTensor):
            changed = _changed(args[0], func, args[1:], kwargs)
            if changed is not None:
                return changed
        return func(*_computed(args, func), **_computed(dict(kwargs), func))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute the values for what asks torch's dispatcher alone, as ``torch.tensor`` does."""
        return func(*_computed(args, func), **_computed(dict(kwargs or {}), func))


def _stacked(
    tensors: Any, dim: int = 0, out: torch.Tensor | None = None, **_: Any
) -> DeferredTensor | None:
    """Return deferred tensors stacked, still deferred; None if they cannot be."""
    if dim != 0 or out is not None or not tensors:
        return None
    first = tensors[0]
    for tensor in tensors:
        if not isinstance(tensor, DeferredTensor) or tensor.is_computed:
            return None
        if tensor.shape != first.shape or tensor.dtype != first.dtype or tensor.tail != first.tail:
            return None
        if not all(one.joins(first.waiting[0]) for one in tensor.waiting):
            return None
    tail = first.tail
    # What was turned would lie in memory as it is written.
    tail += (
        (TailStep("contiguous", first.dtype),) if any(one.kind == "permute" for one in tail) else ()
    )
    waiting = tuple(one for tensor in tensors for one in tensor.waiting)
    source = Derived(functools.partial(_stack_values, [tensor.source for tensor in tensors]))
    stacked = (len(tensors), *first.stacked)
    form = _form(_sample_shape(first), first.dtype)
    return DeferredTensor.of(form, waiting, stacked, tail=tail, source=source, shares=False)


def _stack_values(sources: Sequence[Waiting | Derived]) -> torch.Tensor:
    return torch.stack([source.value() for source in sources])


def _sample_shape(tensor: DeferredTensor) -> tuple[int, ...]:
    with without_torch_function():
        return tuple(tensor.shape[len(tensor.stacked) :])


def _form(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _changed(
    tensor: DeferredTensor, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> DeferredTensor | None:
    """Return what a function makes of a deferred tensor, still deferred; None if it cannot be."""
    if tensor.is_computed:
        return None
    noted = note(
        func,
        args,
        kwargs,
        shape=_sample_shape(tensor),
        dtype=tensor.dtype,
        leading=len(tensor.stacked),
    )
    if noted is None or noted.step is None:
        return None if noted is None else tensor
    if noted.in_place and tensor.shares:
        return None
    made = _followed(tensor, noted, func, args, kwargs)
    if not noted.in_place:
        tensor.shares |= noted.shares
        return made
    tensor.tail, tensor.source = made.tail, made.source
    return tensor


def _followed(
    tensor: DeferredTensor,
    noted: Noted,
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> DeferredTensor:
    assert noted.step is not None
    # Numbers beside it may be written to later.
    kept = [one.clone() if isinstance(one, torch.Tensor) else one for one in args]
    function = OUT_OF_PLACE.get(func, func)
    source = tensor.source
    return DeferredTensor.of(
        _form(noted.shape, noted.step.dtype),
        tensor.waiting,
        tensor.stacked,
        tail=(*tensor.tail, noted.step),
        source=Derived(lambda: function(source.value(), *kept, **kwargs)),
        shares=noted.shares,
    )


def _computed(value: Any, use: Callable[..., Any]) -> Any:
    if isinstance(value, DeferredTensor):
        for waiting in value.waiting:
            waiting.use = waiting.use or use
        return value.computed()
    if type(value) in (list, tuple):
        return type(value)(_computed(item, use) for item in value)
    if type(value) is dict:
        return {key: _computed(item, use) for key, item in value.items()}
    return value


def stack_deferred(tensors: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:  # noqa: ARG001
    """Stack the tensors of a batch, for torch's table of collate functions."""
    return torch.stack(list(tensors))

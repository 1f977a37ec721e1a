"""Tensors that were drawn but not computed: what a dataset's own pipeline returns when recorded.

A dataset that ends its pipeline in ``ToTensorV2`` gets, in place of the tensor, a
:class:`DeferredTensor`. It has the shape and dtype of that tensor, and instead of values it knows
the pixels that it is made of and what was drawn for them. As long as it is only handed on and
stacked it stays what it is, and the device computes it with the whole batch. Whatever else is done
with it computes it on the spot, by Albumentations, so that the result is the one without recording.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from lightning_fastdata.augment.tape import Track

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
_CHANGES_NOTHING: Final = frozenset(
    {torch.Tensor.contiguous, torch.Tensor.cpu, torch.Tensor.detach}
)
"""What gives back a dense tensor on the CPU without gradients as it is."""
_throw_on_pointer: Final[Callable[[torch.Tensor], None]] = getattr(
    torch._C, "_set_throw_on_mutable_data_ptr", lambda _: None
)
"""Has an extension that reaches for memory past torch's dispatcher get an error, not a crash."""


class Waiting:
    """One image or mask of a sample, with what is still to be done to it.

    Args:
        track: The operations.
        compute: Carries them out with Albumentations and returns the tensor.
        pixels: The array ``[H, W]`` or ``[H, W, C]`` that they start from.
        pipeline: The classes of the transforms of the pipeline, in order.
    """

    __slots__ = ("_compute", "_value", "pipeline", "pixels", "track", "use")

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
        self._value: torch.Tensor | None = None

    @property
    def is_computed(self) -> bool:
        """Whether somebody has needed the values."""
        return self._value is not None

    def value(self) -> torch.Tensor:
        """Return the tensor; the same one each time, since it may have been written to."""
        if self._value is None:
            self._value = self._compute()
        return self._value

    def joins(self, other: Waiting) -> bool:
        """Return whether one program can carry out what waits for both.

        Their operations are put in order by their numbers in the pipeline.
        """
        return (
            self.pipeline == other.pipeline
            and self.pixels.shape == other.pixels.shape
            and self.pixels.dtype == other.pixels.dtype
        )


class DeferredTensor(torch.Tensor):
    """A tensor of which the values wait; see the module.

    Several of them stacked along a new first dimension are one again, ``[..., *shape]``.
    """

    waiting: tuple[Waiting, ...]
    """What it is made of, in order; more than one if it was stacked."""
    stacked: tuple[int, ...]
    """Lengths of the dimensions that stacking has put in front; ``()``: a single tensor."""

    @classmethod
    def of(
        cls, form: torch.Tensor, waiting: tuple[Waiting, ...], stacked: tuple[int, ...] = ()
    ) -> DeferredTensor:
        """Return a deferred tensor.

        Args:
            form: A tensor of one part's shape and dtype.
            waiting: The parts.
            stacked: Lengths of the dimensions in front of ``form``'s.
        """
        shape = (*stacked, *form.shape)
        deferred: DeferredTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=form.dtype, device=torch.device("cpu")
        )
        _throw_on_pointer(deferred)
        deferred.waiting = waiting
        deferred.stacked = stacked
        return deferred

    @property
    def is_computed(self) -> bool:
        """Whether some of the values are there, so that the rest may as well be."""
        return any(waiting.is_computed for waiting in self.waiting)

    def computed(self) -> torch.Tensor:
        """Return the ordinary tensor."""
        if not self.stacked:
            return self.waiting[0].value()
        values = [waiting.value() for waiting in self.waiting]
        return torch.stack(values).view(*self.stacked, *values[0].shape)

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
            with torch._C.DisableTorchFunctionSubclass():  # as torch's notes on subclasses have it
                return func(*args, **kwargs)
        if func in _CHANGES_NOTHING and len(args) == 1 and not kwargs:
            return args[0]
        if func is torch.Tensor.float and len(args) == 1 and args[0].dtype == torch.float32:
            return args[0]
        if func is torch.stack:
            joined = _stacked(*args, **kwargs)
            if joined is not None:
                return joined
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
        if tensor.shape != first.shape or tensor.dtype != first.dtype:
            return None
        if not all(one.joins(first.waiting[0]) for one in tensor.waiting):
            return None
    with torch._C.DisableTorchFunctionSubclass():
        shape = first.shape[len(first.stacked) :]
        form = torch.empty(shape, dtype=first.dtype, device="meta")
    waiting = tuple(one for tensor in tensors for one in tensor.waiting)
    return DeferredTensor.of(form, waiting, (len(tensors), *first.stacked))


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


Path = tuple[Any, ...]
"""Keys, positions and field names that lead to one leaf of a batch."""


def spelled(path: Path) -> str:
    """Return a path as one would write it in Python."""
    return "".join(f"[{key!r}]" for key in path) or "the batch itself"


def replace_leaves(
    batch: Any, function: Callable[[Path, Any], Any], path: Path = (), depth: int = 8
) -> Any:
    """Return a batch in which a function has had its say on each leaf; structure stays.

    Args:
        batch: Dicts, lists, tuples, named tuples and dataclasses in each other.
        function: Given the path of a leaf and the leaf, returns what takes its place.
        path: Of ``batch`` itself.
        depth: Levels that are looked into.
    """
    if depth == 0 or isinstance(batch, torch.Tensor):
        return function(path, batch)
    if isinstance(batch, Mapping):
        items = {
            key: replace_leaves(value, function, (*path, key), depth - 1)
            for key, value in batch.items()
        }
        if all(items[key] is batch[key] for key in items):
            return batch
        return items if type(batch) is dict else _with_items(batch, items)
    if isinstance(batch, list | tuple):
        values = [
            replace_leaves(value, function, (*path, place), depth - 1)
            for place, value in enumerate(batch)
        ]
        if all(new is old for new, old in zip(values, batch, strict=True)):
            return batch
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if is_dataclass(batch) and not isinstance(batch, type):
        changed = {
            field.name: replace_leaves(
                getattr(batch, field.name), function, (*path, field.name), depth - 1
            )
            for field in fields(batch)
        }
        same = all(value is getattr(batch, name) for name, value in changed.items())
        return batch if same else _with_fields(batch, changed)
    return function(path, batch)


def _with_items(batch: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a mapping of the same class and attributes with other values."""
    if not isinstance(batch, MutableMapping):
        return type(batch)(items)  # type: ignore[call-arg]
    twin = copy.copy(batch)
    twin.update(items)
    return twin


def _with_fields(batch: Any, changed: Mapping[str, Any]) -> Any:
    """Return a dataclass with other fields, without what its constructor would do to them."""
    twin = copy.copy(batch)
    for name, value in changed.items():
        object.__setattr__(twin, name, value)  # it may be frozen
    return twin

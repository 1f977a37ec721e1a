"""What a dataset or collation did to tensors that wait: a small program for the device.

``.float() / 255``, a permutation or a normalisation by means need no values to be written down.
Only functions are noted whose results are the same to the bit on any device: casts, one rounding
per value, and changes of the layout. All others compute the values on the spot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from lightning_fastdata.types import Batch

Function: TypeAlias = Callable[..., Any]
Arithmetic: TypeAlias = Literal["add", "sub", "mul", "div"]
Kind: TypeAlias = Literal[Arithmetic, "cast", "permute", "unsqueeze", "contiguous", "copy"]

_T: Final = torch.Tensor
_CASTS: Final[Mapping[Function, torch.dtype]] = {
    _T.float: torch.float32,
    _T.double: torch.float64,
    _T.half: torch.float16,
    _T.bfloat16: torch.bfloat16,
    _T.long: torch.int64,
    _T.int: torch.int32,
}
_ARITHMETIC: Final[Mapping[Function, Arithmetic]] = {
    **dict.fromkeys((_T.add, torch.add, _T.add_), "add"),
    **dict.fromkeys((_T.sub, torch.sub, _T.sub_, _T.subtract, torch.subtract), "sub"),
    **dict.fromkeys((_T.mul, torch.mul, _T.mul_, _T.multiply, torch.multiply), "mul"),
    **dict.fromkeys((_T.div, torch.div, _T.div_, _T.divide, torch.divide), "div"),
    **dict.fromkeys((_T.true_divide, torch.true_divide), "div"),
}
_BY_KIND: Final[Mapping[str, Function]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
}
OUT_OF_PLACE: Final[Mapping[Function, Function]] = {
    _T.add_: _T.add,
    _T.sub_: _T.sub,
    _T.mul_: _T.mul,
    _T.div_: _T.div,
}
"""What writes to its tensor, and what returns the same in another."""
_VIEWS: Final = frozenset(
    {_T.permute, torch.permute, _T.transpose, torch.transpose, _T.unsqueeze, torch.unsqueeze}
)
_ROUNDED_ONCE: Final = frozenset({torch.float32, torch.float64})
"""Results of arithmetic that are the same on any device. Of half precision a CPU keeps a scalar in
single precision."""
_OPERANDS: Final = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8})
_MOST_NUMBERS: Final = 4096
"""Numbers of an operand: a mean for each channel, not one for each pixel."""


class Operand(NamedTuple):
    """The numbers beside a tensor, in the dtype that is computed in; they can be compared."""

    shape: tuple[int, ...]
    """Of the array; ``()``: a single number."""
    dtype: str
    """NumPy's name of it."""
    values: bytes
    """In C order."""


class TailStep(NamedTuple):
    """One step of a tail."""

    kind: Kind
    dtype: torch.dtype
    """Of the result."""
    dims: tuple[int, ...] = ()
    """``permute``: where each dimension of a sample comes from; ``unsqueeze``: where one is put."""
    operand: Operand | None = None
    """Of arithmetic."""


class Form(NamedTuple):
    """What a step depends on of a tensor."""

    shape: tuple[int, ...]
    """Of a sample."""
    dtype: torch.dtype
    leading: int = 0
    """Dimensions in front of a sample's."""


class Noted(NamedTuple):
    """A call that needs no values."""

    step: TailStep | None
    """What is to be done; None: the tensor is returned as it is."""
    shape: tuple[int, ...] = ()
    """Of a sample of the result."""
    shares: bool = False
    """The result may lie in the memory of the tensor."""
    in_place: bool = False
    """The tensor itself is written to."""


def note(
    func: Function, args: Sequence[object], kwargs: Mapping[str, object], form: Form
) -> Noted | None:
    """Return what a call comes to, or None if it needs the values; ``args``: behind the tensor."""
    if func in _ARITHMETIC:
        return None if len(args) != 1 or kwargs else _arithmetic(func, args[0], form)
    if func in _CASTS:
        return None if args or kwargs else _cast(_CASTS[func], form)
    if func in (_T.to, _T.type):
        return _converted(func, args, kwargs, form)
    if func in _VIEWS:
        return _view(func, args, kwargs, form)
    if func in (_T.contiguous, _T.clone, torch.clone) and not args and not kwargs:
        shares = func is _T.contiguous
        step = TailStep("contiguous" if shares else "copy", form.dtype)
        return Noted(step, form.shape, shares=shares)
    return None


def _converted(
    func: Function, args: Sequence[object], kwargs: Mapping[str, object], form: Form
) -> Noted | None:
    """Return what ``to`` or ``type`` comes to: a dtype, and of ``to`` perhaps the CPU."""
    if kwargs.keys() - {"dtype", "device", "non_blocking"}:
        return None
    given = [*args, *(kwargs[name] for name in ("dtype", "device") if name in kwargs)]
    rest = [one for one in given if func is not _T.to or not _is_cpu(one)]
    if given and not rest:
        return Noted(None)
    wanted = rest[0] if len(rest) == 1 else None
    return _cast(wanted, form) if isinstance(wanted, torch.dtype) else None


def _is_cpu(value: object) -> bool:
    return isinstance(value, str | torch.device) and torch.device(value).type == "cpu"


def _cast(wanted: torch.dtype, form: Form) -> Noted | None:
    if wanted == form.dtype:
        return Noted(None)
    of_numbers = wanted is not torch.bool and not wanted.is_complex
    # What a number that an integer cannot hold becomes depends on the device.
    same = wanted.is_floating_point or not form.dtype.is_floating_point
    return Noted(TailStep("cast", wanted), form.shape) if of_numbers and same else None


def _arithmetic(func: Function, other: Batch, form: Form) -> Noted | None:
    full = (1,) * form.leading + form.shape
    if type(other) is torch.Tensor:
        plain = other.dtype in _OPERANDS and other.is_cpu and not other.requires_grad
        if not plain or other.layout != torch.strided or other.numel() > _MOST_NUMBERS:
            return None
        pairs = zip(reversed(other.shape), reversed(full), strict=False)
        if other.ndim > len(full) or any(one not in (1, length) for one, length in pairs):
            return None
        other = other.reshape(other.shape[max(0, other.ndim - len(form.shape)) :])
    elif type(other) not in (int, float):
        return None
    kind, in_place = _ARITHMETIC[func], func in OUT_OF_PLACE
    like = torch.empty((1,) * len(full), dtype=form.dtype, device="meta")
    result = torch.result_type(like, other)
    if kind == "div" and not result.is_floating_point:
        result = torch.get_default_dtype()
    if result not in _ROUNDED_ONCE or (in_place and result != form.dtype):
        return None
    numbers = torch.as_tensor(other).to(result).numpy()
    operand = Operand(numbers.shape, numbers.dtype.str, numbers.tobytes())
    return Noted(TailStep(kind, result, operand=operand), form.shape, in_place=in_place)


def _view(
    func: Function, args: Sequence[object], kwargs: Mapping[str, object], form: Form
) -> Noted | None:
    shape, dtype, leading = form
    try:
        # Each dimension has a length of its own here, and a new one has 1.
        probe = torch.empty(tuple(range(2, leading + len(shape) + 2)), device="meta")
        lengths = func(probe, *args, **kwargs).shape
    except (IndexError, RuntimeError, TypeError):
        return None  # torch raises it again, with the values
    if lengths[:leading] != probe.shape[:leading]:
        return None
    within = lengths[leading:]
    if 1 in within:
        at = within.index(1)
        longer = (*shape[:at], 1, *shape[at:])
        return Noted(TailStep("unsqueeze", dtype, dims=(at,)), longer, shares=True)
    dims = tuple(length - 2 - leading for length in within)
    turned = tuple(shape[dim] for dim in dims)
    return Noted(TailStep("permute", dtype, dims=dims), turned, shares=True)


def operands(tail: Sequence[TailStep]) -> dict[str, np.ndarray]:
    """Return the numbers of a tail by the names under which :func:`carry_out` is given them."""
    given = {str(place): step.operand for place, step in enumerate(tail)}
    return {
        name: np.frombuffer(one.values, one.dtype).reshape(one.shape).copy()
        for name, one in given.items()
        if one is not None
    }


def carry_out(
    tail: Sequence[TailStep], values: torch.Tensor, numbers: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return samples ``[n, ...]`` after a tail, on their device; they are never written to.

    ``numbers`` is what :func:`operands` returned, there: torch divides by a Python number by way of
    its reciprocal on CUDA, but by a tensor as a CPU does.
    """
    owned = False
    for place, step in enumerate(tail):
        if step.kind == "permute":
            values = values.permute(0, *(dim + 1 for dim in step.dims))
        elif step.kind == "unsqueeze":
            values = values.unsqueeze(step.dims[0] + 1)
        elif step.kind == "contiguous":
            values = values.contiguous()
        elif step.kind != "copy":
            if step.kind == "cast" or values.dtype != step.dtype:
                values, owned = values.to(step.dtype), True
            if step.kind != "cast":
                out = values if owned else None
                values, owned = _BY_KIND[step.kind](values, numbers[str(place)], out=out), True
    return values

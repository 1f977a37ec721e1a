"""What a dataset or collation did to tensors that wait: a small program for the device.

``.float() / 255``, a permutation or a normalisation by means need no values to be written down.
Only functions are noted whose results are the same to the bit on any device: casts, one rounding
per value, and changes of the layout. All others are carried out on the spot, on the values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Kind: TypeAlias = Literal[
    "cast", "add", "sub", "mul", "div", "permute", "unsqueeze", "contiguous", "copy"
]

_T: Final = torch.Tensor
_CASTS: Final[Mapping[Callable[..., Any], torch.dtype]] = {
    _T.float: torch.float32,
    _T.double: torch.float64,
    _T.half: torch.float16,
    _T.bfloat16: torch.bfloat16,
    _T.long: torch.int64,
    _T.int: torch.int32,
}
_ARITHMETIC: Final[Mapping[Callable[..., Any], Kind]] = {
    **dict.fromkeys((_T.add, torch.add, _T.add_), "add"),
    **dict.fromkeys((_T.sub, torch.sub, _T.sub_, _T.subtract, torch.subtract), "sub"),
    **dict.fromkeys((_T.mul, torch.mul, _T.mul_, _T.multiply, torch.multiply), "mul"),
    **dict.fromkeys((_T.div, torch.div, _T.div_, _T.divide, torch.divide), "div"),
    **dict.fromkeys((_T.true_divide, torch.true_divide), "div"),
}
OUT_OF_PLACE: Final[Mapping[Callable[..., Any], Callable[..., Any]]] = {
    _T.add_: _T.add,
    _T.sub_: _T.sub,
    _T.mul_: _T.mul,
    _T.div_: _T.div,
}
"""What writes to its tensor, and what returns the same in another."""
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

    def array(self) -> np.ndarray:
        """Return the numbers."""
        return np.frombuffer(self.values, self.dtype).reshape(self.shape).copy()


class TailStep(NamedTuple):
    """One step of a tail."""

    kind: Kind
    """What is done."""
    dtype: torch.dtype
    """Of the result."""
    dims: tuple[int, ...] = ()
    """``permute``: where each dimension of a sample comes from; ``unsqueeze``: where one is put."""
    operand: Operand | None = None
    """Of arithmetic."""


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
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    leading: int,
) -> Noted | None:
    """Return what a call of a function of torch comes to, or None if it needs the values.

    Args:
        func: The function.
        args: Behind the tensor.
        kwargs: By name.
        shape: Of a sample of the tensor.
        dtype: Of the tensor.
        leading: How many dimensions the tensor has in front of a sample's.
    """
    if func in _ARITHMETIC:
        return _arithmetic(func, args, kwargs, shape, dtype, leading)
    if func is _T.to and len(args) == 1 and not kwargs and _is_cpu(args[0]):
        return Noted(None)
    wanted = _wanted_dtype(func, args, kwargs)
    if wanted is not None:
        return _cast(wanted, shape, dtype)
    if func in {_T.contiguous, _T.clone, torch.clone} and not args and not kwargs:
        if func is _T.contiguous:
            return Noted(TailStep("contiguous", dtype), shape, shares=True)
        return Noted(TailStep("copy", dtype), shape)
    if kwargs:
        return None
    return _layout(func, args, shape, dtype, leading)


def _wanted_dtype(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch.dtype | None:
    if func in _CASTS:
        return None if args or kwargs else _CASTS[func]
    if func not in (_T.to, _T.type):
        return None
    rest = {name: value for name, value in kwargs.items() if name not in ("dtype", "non_blocking")}
    if func is _T.to:
        devices = [one for one in (*args, rest.pop("device", "cpu")) if _is_cpu(one)]
        args = [one for one in args if not any(one is device for device in devices)]
        if len(devices) == 0:
            return None
    named = kwargs.get("dtype")
    dtypes = [*args, *([] if named is None else [named])]
    known = len(dtypes) == 1 and isinstance(dtypes[0], torch.dtype) and not rest
    return dtypes[0] if known else None


def _is_cpu(value: Any) -> bool:
    return isinstance(value, str | torch.device) and torch.device(value).type == "cpu"


def _cast(wanted: torch.dtype, shape: tuple[int, ...], dtype: torch.dtype) -> Noted | None:
    if wanted == dtype:
        return Noted(None)
    of_numbers = wanted is not torch.bool and not wanted.is_complex
    # What a number that an integer cannot hold becomes depends on the device.
    same = wanted.is_floating_point or not dtype.is_floating_point
    return Noted(TailStep("cast", wanted), shape) if of_numbers and same else None


def _arithmetic(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    leading: int,
) -> Noted | None:
    if len(args) != 1 or kwargs:
        return None
    kind, other = _ARITHMETIC[func], args[0]
    if type(other) is torch.Tensor:
        plain = other.dtype in _OPERANDS and other.is_cpu and not other.requires_grad
        if not plain or other.layout != torch.strided or other.numel() > _MOST_NUMBERS:
            return None
        over = max(0, other.ndim - len(shape))
        if over > leading or any(length != 1 for length in other.shape[:over]):
            return None
        other = other.reshape(other.shape[over:])
        behind = shape[len(shape) - other.ndim :]
        if not all(one in (1, length) for one, length in zip(other.shape, behind, strict=True)):
            return None
    elif type(other) not in (int, float):
        return None
    like = torch.empty((1,) * (leading + len(shape)) or (), dtype=dtype, device="meta")
    result = torch.result_type(like, other)
    if kind == "div" and not result.is_floating_point:
        result = torch.get_default_dtype()
    in_place = func in OUT_OF_PLACE
    if result not in _ROUNDED_ONCE or (in_place and result != dtype):
        return None
    numbers = torch.as_tensor(other).to(result).numpy()
    operand = Operand(numbers.shape, numbers.dtype.str, numbers.tobytes())
    return Noted(TailStep(kind, result, operand=operand), shape, in_place=in_place)


def _layout(
    func: Callable[..., Any],
    args: Sequence[Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    leading: int,
) -> Noted | None:
    ndim = leading + len(shape)
    if func in (_T.permute, torch.permute):
        given = args[0] if len(args) == 1 and isinstance(args[0], list | tuple) else args
        dims = [_place(one, ndim) for one in given]
    elif func in (_T.transpose, torch.transpose) and len(args) == 2:
        dims = list(range(ndim))
        one, other = _place(args[0], ndim), _place(args[1], ndim)
        dims[one], dims[other] = other, one
    elif func in (_T.unsqueeze, torch.unsqueeze) and len(args) == 1:
        at = _place(args[0], ndim + 1) - leading
        if at < 0:
            return None
        return Noted(
            TailStep("unsqueeze", dtype, dims=(at,)), (*shape[:at], 1, *shape[at:]), shares=True
        )
    else:
        return None
    within = tuple(dim - leading for dim in dims[leading:])
    if dims[:leading] != list(range(leading)) or sorted(within) != list(range(len(shape))):
        return None
    turned = tuple(shape[dim] for dim in within)
    return Noted(TailStep("permute", dtype, dims=within), turned, shares=True)


def _place(dim: Any, ndim: int) -> int:
    """Return which dimension is meant; one that there is not, if it is none."""
    known = isinstance(dim, int) and -ndim <= dim < ndim
    return dim % ndim if known else 2 * ndim


def operands(tail: Sequence[TailStep]) -> dict[str, np.ndarray]:
    """Return the numbers of a tail by the names under which :func:`carry_out` is given them."""
    given = {str(place): step.operand for place, step in enumerate(tail)}
    return {name: operand.array() for name, operand in given.items() if operand is not None}


def carry_out(
    tail: Sequence[TailStep], values: torch.Tensor, numbers: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return samples ``[n, ...]`` after a tail, on their device.

    Args:
        tail: What is done to each sample.
        values: The samples; never written to.
        numbers: What :func:`operands` returned, on the same device. (Torch divides by a Python
            number by way of its reciprocal on CUDA, but by a tensor as a CPU does.)
    """
    owned = False
    for place, step in enumerate(tail):
        if step.kind == "cast":
            values, owned = values.to(step.dtype), True
        elif step.kind == "permute":
            values = values.permute(0, *(dim + 1 for dim in step.dims))
        elif step.kind == "unsqueeze":
            values = values.unsqueeze(step.dims[0] + 1)
        elif step.kind == "contiguous":
            values = values.contiguous()
        elif step.kind != "copy":
            other = numbers[str(place)]
            if values.dtype != step.dtype:
                values, owned = values.to(step.dtype), True
            function = getattr(torch, step.kind)
            values = function(values, other, out=values) if owned else function(values, other)
            owned = True
    return values

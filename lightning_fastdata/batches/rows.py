"""Arrays and numbers that become a tensor by one call of NumPy, as torch's collation makes it.

Torch makes a tensor of each array first, which takes longer than to copy a small one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch
from torch.utils.data import get_worker_info

from lightning_fastdata.torch_internals import collate, default_collate_fn_map

if TYPE_CHECKING:
    from numpy.typing import NDArray

Stack: TypeAlias = Callable[..., Any]
"""Makes a batch of values of a class; takes torch's table of such functions by ``collate_fn_map``.
"""
CollateMap: TypeAlias = "dict[type | tuple[type, ...], Stack]"
"""Torch's table of the functions that collate the values of a class."""
_ARRAYS: Final = (np.ndarray, np.memmap)
_KINDS_OF_NUMBERS: Final = "biufc"
_LOOKS: Final = attrgetter("dtype", "shape", "strides")
_DTYPES: Final[dict[type, tuple[torch.dtype, type[np.generic]]]] = {
    bool: (torch.bool, np.bool_),
    int: (torch.int64, np.int64),
    float: (torch.float64, np.float64),
    np.bool_: (torch.bool, np.bool_),
    np.uint8: (torch.uint8, np.uint8),
    np.int32: (torch.int32, np.int32),
    np.int64: (torch.int64, np.int64),
    np.float32: (torch.float32, np.float32),
    np.float64: (torch.float64, np.float64),
}
"""Class of a number -> type of the tensor that torch makes of a list of them, and NumPy's of it."""


def dtype_of_rows(arrays: Sequence[Any]) -> torch.dtype | None:
    """Return the type of the tensor of which arrays are the rows; None: torch has to make it.

    The arrays are at least one, and each has a dimension. They are of one type, shape and layout in
    memory, the usual one: torch's result rests on the layout.

    Raises:
        TypeError: Torch has no such type of numbers.
        ValueError: They have another order of bytes than this machine's.
    """
    first = arrays[0]
    if type(first) not in _ARRAYS or not first.shape or not first.flags.c_contiguous:
        return None
    if first.dtype.kind not in _KINDS_OF_NUMBERS:
        return None
    if set(map(type, arrays)) != {type(first)} or set(map(_LOOKS, arrays)) != {_LOOKS(first)}:
        return None
    like = torch.as_tensor(first)  # torch warns of memory that is read-only
    return like.dtype if like.is_cpu else None  # the program may have set another default device


def write_rows(arrays: Sequence[NDArray[Any]], out: torch.Tensor) -> None:
    """Copy arrays [*shape] to a tensor [arrays, *shape] of their type in the usual layout."""
    first = arrays[0]
    joined = (len(arrays) * first.shape[0], *first.shape[1:])
    np.concatenate(arrays, out=_memory_of(out, first.dtype).reshape(joined))


def _memory_of(tensor: torch.Tensor, dtype: Any) -> NDArray[Any]:
    """Return the memory of a tensor on the CPU, in the usual layout, as an array of one axis.

    ``Tensor.numpy()`` would keep the tensor from being resized from then on.
    """
    memory: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    found: NDArray[Any] = np.frombuffer(memory, dtype)
    return found


def in_one_call(tensors: Stack | None = None) -> CollateMap:
    """Return torch's table of collations, with this module's in the place of torch's own ones.

    What the program has put into the table stays, and is asked as before. The result is shared.
    ``tensors`` takes the place of torch's function for tensors; None: that stays.
    """
    return _in_one_call(tuple(default_collate_fn_map.items()), tensors)


@lru_cache(maxsize=2)  # asked for each batch
def _in_one_call(
    torchs: tuple[tuple[type | tuple[type, ...], Stack], ...], tensors: Stack | None
) -> CollateMap:
    table = dict(torchs)
    if _is_torchs(table.get(torch.Tensor)):  # by which torch stacks arrays, too
        table[torch.Tensor] = tensors or table[torch.Tensor]
        for kind, stack in _STACKS.items():
            if _is_torchs(table.get(kind)):
                table[kind] = partial(stack, table[kind])
    return table


def is_extended() -> bool:
    """Return whether the program has put something into torch's table of collations."""
    return not all(map(_is_torchs, default_collate_fn_map.values()))


def _is_torchs(stack: Stack | None) -> bool:
    return getattr(stack, "__module__", None) == collate.__module__


def _stack_arrays(
    otherwise: Stack, arrays: Sequence[Any], *, collate_fn_map: CollateMap | None = None
) -> Any:
    dtype = dtype_of_rows(arrays)
    if dtype is None:
        return otherwise(arrays, collate_fn_map=collate_fn_map)
    batch = torch.empty((len(arrays), *arrays[0].shape), dtype=dtype, device="cpu")
    write_rows(arrays, batch)
    if get_worker_info() is None or collate_fn_map is None:
        return batch
    # In its workers torch stacks tensors in memory that is shared.
    return collate_fn_map[torch.Tensor]([batch], collate_fn_map=collate_fn_map)[0]


def _stack_numbers(
    otherwise: Stack, numbers: Sequence[Any], *, collate_fn_map: CollateMap | None = None
) -> Any:
    kind = type(numbers[0])
    if kind in _DTYPES and set(map(type, numbers)) == {kind}:
        dtype, as_array = _DTYPES[kind]
        batch = torch.empty(len(numbers), dtype=dtype)
        if batch.is_cpu:
            with suppress(OverflowError):  # torch's own error says more
                _memory_of(batch, as_array)[:] = numbers
                return batch
    return otherwise(numbers, collate_fn_map=collate_fn_map)


_STACKS: Final[dict[type | tuple[type, ...], Stack]] = {
    np.ndarray: _stack_arrays,
    (np.bool_, np.number, np.object_): _stack_numbers,
    float: _stack_numbers,
    int: _stack_numbers,
}
"""Key of torch's table -> what takes the place of torch's function, which it gets first."""

"""What comes of some tensors while code of the user's makes a batch of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode

from lightning_fastdata import tree

if TYPE_CHECKING:
    from lightning_fastdata.types import Batch

_OUT_OF_TORCH: Final = {
    *("numpy", "tolist", "item", "__array__", "__dlpack__"),
    *("__bool__", "__int__", "__float__", "__index__"),
}
"""Methods whose results, arrays and numbers, cannot be followed."""


class Descent(TorchFunctionMode):
    """Within its ``with`` block, follows what torch's functions make of some tensors.

    Tensors are known by their memory, so that views and what is written in place count, too. What
    a function is given beside such a tensor counts as made of it.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        # They are kept, as the memory of one that is gone would be used again.
        self._made = list(tensors)
        self._memory = {_memory(tensor) for tensor in self._made}
        self._lost = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, and note what it makes."""
        result, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        if name == "__get__":  # an attribute: a number, or a view of the same memory
            return result
        given = list(_tensors((args, kwargs)))
        if any(map(self._is_made, given)):
            self._lost |= name in _OUT_OF_TORCH
            new = [one for one in (*given, *_tensors(result)) if not self._is_made(one)]
            self._made += new
            self._memory.update(map(_memory, new))
        return result

    def has_only(self, number: int, batch: Batch) -> bool:
        """Return whether so many tensors of a batch, and nothing else in it, are made of them."""
        return not self._lost and sum(map(self._is_made, _tensors(batch))) == number

    def _is_made(self, tensor: torch.Tensor) -> bool:
        return _memory(tensor) in self._memory


def _tensors(value: object) -> Iterator[torch.Tensor]:
    for leaf in tree.leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_nested:
            yield leaf


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

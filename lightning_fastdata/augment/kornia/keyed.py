"""The parameters of Kornia's modules, drawn for each sample under its own key.

A module draws its parameters by ``forward_parameters(batch_shape)`` and takes them as ``params=``.
So they are drawn once for the whole batch, which settles what belongs to the batch: which modules
run, in which order, who is mixed with whom, and what is the same on the batch. Then each module
draws again for each sample as for a batch of one, in the order of the modules, and what has a row
for each sample is put together of these rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Size, Tensor

from lightning_fastdata.augment.batch_draws import key_of_batch
from lightning_fastdata.errors import TransformError
from lightning_fastdata.randomness.seeds import keyed_draws
from lightning_fastdata.types import SampleKey

Params: TypeAlias = Any
"""A dict of tensors, or a list of named items that hold such dicts, lists or None."""

_OF_BATCH: Final = frozenset({"MixAugmentationBaseV2", "OperationBase"})
"""Bases of modules that draw for a batch: mixing, and the policies of AutoAugment and its kin."""


class _Leaf(NamedTuple):
    """A module that draws, and what it has drawn for a batch."""

    module: Any
    drawn: dict[str, Any]


def draw(module: Any, keys: Sequence[SampleKey], shape: Sequence[int]) -> Params:
    """Return the parameters of a module for a batch of images ``[n, C, H, W]``.

    ``keys``: of its samples, which draw for themselves; or of the first one alone, and the batch
    draws as a whole.

    Raises:
        TransformError: what it draws has no row for each sample.
    """
    with keyed_draws(key_of_batch(keys[0]), ("torch",)):
        drawn = module.forward_parameters(Size(shape))
    if len(keys) != shape[0]:
        return drawn
    alone = [leaf for leaf in _leaves(module, drawn) if not is_of_batch(leaf.module)]
    rows: list[list[dict[str, Tensor]]] = [[] for _ in alone]
    for key in keys if alone else ():
        with keyed_draws(key, ("torch",)):
            for leaf, drawn_alone in zip(alone, rows, strict=True):
                drawn_alone.append(leaf.module.forward_parameters(_as_one(leaf)))
    for leaf, drawn_alone in zip(alone, rows, strict=True):
        # Releases before 0.9 have rows for those samples alone that a module is applied to.
        counts = len(keys), int((leaf.drawn["batch_prob"] > 0.5).sum())
        for name, value in leaf.drawn.items():
            if isinstance(value, Tensor):
                what = f"{type(leaf.module).__name__}: {name}"
                ones = [one[name] for one in drawn_alone]
                leaf.drawn[name] = _put_together(value, ones, counts, what)
    return drawn


def is_of_batch(module: Any) -> bool:
    """Return whether what a module draws belongs to the batch and not to its samples."""
    if getattr(module, "same_on_batch", False) or getattr(module, "p_batch", 1.0) < 1:
        return True
    return not _OF_BATCH.isdisjoint(one.__name__ for one in type(module).__mro__)


def _leaves(module: Any, drawn: Params) -> Iterator[_Leaf]:
    """Yield the modules that have drawn, in the order in which they run."""
    if isinstance(drawn, dict):
        yield _Leaf(module, drawn)
    elif drawn is not None:
        for item in drawn:
            yield from _leaves(module.get_submodule(item.name), item.data)


def _as_one(leaf: _Leaf) -> Size:
    shape = leaf.drawn.get("forward_input_shape")
    if shape is None:
        raise TransformError(
            f"Kornia's {type(leaf.module).__name__} does not say for which shape it draws "
            "(forward_input_shape), so that it cannot be drawn for each sample by its key."
        )
    return Size((1, *shape.tolist()[1:]))


def _put_together(
    together: Tensor, ones: Sequence[Tensor], counts: Sequence[int], what: str
) -> Tensor:
    """Return the rows of samples as a batch has them, or what the batch drew if it has no rows.

    ``counts``: how many rows a batch may have.
    """
    form = together.shape[1:]
    rows = together.ndim > 0 and all(len(one) <= 1 and one.shape[1:] == form for one in ones)
    if rows and len(together) in counts:
        return torch.cat(list(ones))
    if all(one.shape == together.shape for one in ones):
        return together
    raise TransformError(
        f"Kornia's {what} is {tuple(together.shape)} for a batch of {len(ones)}, and no row for "
        "each sample, so that it cannot be drawn by the sample's key. Give the module "
        "same_on_batch=True, or call it in a function: augment=lambda batch: ..."
    )

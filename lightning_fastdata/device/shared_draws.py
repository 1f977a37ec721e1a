"""Whether a callable gives a whole batch to a transform of torchvision, which draws once for it.

Such a transform flips all of a batch or nothing, where in a dataset it flips one sample in two. The
first calls of each callable are watched: which transforms of torchvision get the batch? What one
does is then seen on copies of one sample. Only torchvision's own code runs again, which keeps no
state, and what it draws is put back: the training is left as it was.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from lightning_fastdata.augment import StageTransform
from lightning_fastdata.batches.staged import batch_samples
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.randomness.global_generators import DrawWatch, snapshot_random_states
from lightning_fastdata.tree import children, leaves, rebuilt
from lightning_fastdata.types import Batch

_LOG = logging.getLogger(__name__)
_COPIES: Final = 8
"""Number of copies of a sample: with draws of their own all flip, or none, once in 128 times."""
_TRIES: Final = 32
_SEED: Final = 1
_ROUNDING: Final = 0.01
"""Share of the largest value by which two results may differ, as mixtures of equal images do."""
_WATCHED: Final = 8
"""Number of watched calls: one that happens to draw nothing, as one in two may, shows nothing."""
_calls: WeakKeyDictionary[StageTransform, int] = WeakKeyDictionary()
"""Transform -> number of its calls that were watched; ``_WATCHED`` where something was found."""


@contextmanager
def told_of_shared_draws(transform: StageTransform, batch: Batch) -> Iterator[None]:
    """Run the block, which calls a transform with a batch, and warn if it draws once for all."""
    samples = batch_samples(batch)
    calls = _calls.get(transform, 0)
    if transform.starts_in_worker or calls == _WATCHED or samples < 2:
        yield
        return
    _calls[transform] = calls + 1
    deepest = max((leaf.ndim for leaf in leaves(batch) if _has_rows(leaf, samples)), default=0)
    called: list[tuple[torch.nn.Module, Any]] = []
    compiled: list[bool] = []

    def note(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            compiled.append(True)
        # A single sample has fewer dimensions, however many channels or frames it has.
        whole = any(_has_rows(leaf, samples) and leaf.ndim >= deepest for leaf in leaves(given))
        if whole and _is_torchvisions(module):
            called.append((module, _copies(given, samples)))

    hook = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        hook.remove()
        if compiled:  # each hook makes torch compile anew, which it gives up after some times
            _calls[transform] = _WATCHED
    sharing = (type(module).__name__ for module, copies in called if _draws_once(module, copies))
    once = next(sharing, None)
    if once is not None:
        _calls[transform] = _WATCHED
        spelled = getattr(transform, "spelled", transform.name)
        warnings.warn(
            f"The transform {transform.name} draws once for a whole batch: it gives the batch to "
            f"torchvision's {once}, by which copies of one sample came out alike, and all of them "
            "changed with the numbers drawn. So the images of a "
            "batch are flipped, cropped or coloured alike. Call it in the dataset's __getitem__, "
            "where it draws for each sample, or give an albumentations Compose or a torchvision "
            "v2.Compose itself in its place, which draw for each sample, too; what is written for "
            f"one image goes into the latter: v2.Compose([{spelled}]). If a batch is to share its "
            "draws, filter this warning.",
            FastDataWarning,
            stacklevel=3,
        )


def _is_torchvisions(transform: object) -> bool:
    """Return whether a transform is torchvision's, without any code of the user's."""
    own = type(transform).__module__.startswith("torchvision.transforms")
    inside = getattr(transform, "transforms", ())
    return own and type(transform).__name__ != "Lambda" and all(map(_is_torchvisions, inside))


def _draws_once(module: torch.nn.Module, copies: tuple[Any, ...]) -> bool:
    """Return whether a transform was seen to do the same to all samples, whatever it draws."""
    put_back = snapshot_random_states()
    try:
        torch.manual_seed(_SEED)
        with torch.no_grad():
            return _seen_to_share(module, copies)
    except Exception as error:  # the transform may not take copies, as without boxes
        _LOG.info("%s was not tried: %s: %s", type(module).__name__, type(error).__name__, error)
        return False
    finally:
        put_back()


def _seen_to_share(module: torch.nn.Module, copies: tuple[Any, ...]) -> bool:
    seen: list[list[torch.Tensor]] = []
    watch = DrawWatch()
    for _ in range(_TRIES):
        made = module(*_copies(copies, _COPIES))
        rows = [one for one in leaves(made) if _has_rows(one, _COPIES)]
        alike = all(_same(one, one[:1].expand_as(one)) for one in rows)
        if not rows or not alike or not watch.drew():
            return False
        firsts = [one[0] for one in rows]
        if any(_differ(firsts, others) for others in seen):
            return True
        seen.append(firsts)
    return False


def _differ(these: Sequence[torch.Tensor], those: Sequence[torch.Tensor]) -> bool:
    """Return whether two results of one sample differ; results of different sizes do not count."""
    if [one.shape for one in these] != [one.shape for one in those]:
        return False
    return not all(map(_same, these, those))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.double(), other.double()
    return not one.numel() or bool((one - other).abs().max() <= _ROUNDING * other.abs().max())


def _has_rows(value: object, samples: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == samples


def _copies(batch: Batch, samples: int) -> Batch:
    """Return a batch, or what a transform was called with, of copies of the first sample."""
    if isinstance(batch, torch.Tensor):
        if not _has_rows(batch, samples):
            return batch
        return batch[:1].repeat(_COPIES, *[1] * (batch.ndim - 1))
    parts = children(batch)
    if parts is None:
        return batch
    # A list with a tensor of the batch in it is the batch itself, or a part of it. A tuple as long
    # as the batch may be arguments, or a size.
    holds_rows = any(_has_rows(part, samples) for _, part in parts)
    if isinstance(batch, list) and len(batch) == samples and not holds_rows:
        return [batch[0]] * _COPIES
    return rebuilt(batch, [_copies(part, samples) for _, part in parts])

"""Callables that draw once for a whole batch, found by what they do.

A transform of torchvision that is given a batch flips all of it or nothing, where in a dataset it
flips one sample in two. What it does is seen on copies of one sample, once for each callable, when
it first draws from a global generator. The copies go through it in a forked process that is thrown
away: there it may count, fill buffers and draw from generators of its own, and the training is left
as it was. Where no process can be forked, or it cannot run on the CPU there, nothing is said.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

import torch

from lightning_fastdata.batches.staged import batch_samples
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.planning.facts.probe_process import Tell, try_apart
from lightning_fastdata.randomness.global_generators import DrawWatch
from lightning_fastdata.randomness.seeds import seed_global_generators
from lightning_fastdata.tree import children, leaves, rebuilt

if TYPE_CHECKING:
    from lightning_fastdata.augment import StageTransform
    from lightning_fastdata.types import Batch

_LOG = logging.getLogger(__name__)
_COPIES: Final = 8
"""With draws of their own, all of them come out flipped, or not, once in 128 times."""
_TRIES: Final = 16
_DEADLINE_S: Final = 5.0
_ROUNDING: Final = 0.01
"""Share of the largest value by which two results may differ, as mixtures of equal images do."""
_looked_at: WeakSet[StageTransform] = WeakSet()


@contextlib.contextmanager
def told_of_shared_draws(transform: StageTransform, batch: Batch) -> Iterator[None]:
    """Run the block, which calls a transform with a batch, and warn if it draws once for all."""
    if transform.starts_in_worker or transform in _looked_at or batch_samples(batch) < 2:
        yield
        return
    watch = DrawWatch()
    yield
    if not watch.drew():
        return
    _looked_at.add(transform)
    if draws_once(transform, batch):
        spelled = getattr(transform, "spelled", transform.name)
        warnings.warn(
            f"The transform {transform.name} draws once for a whole batch: copies of one sample "
            "came out alike, and all of them changed with the numbers drawn. So the images of a "
            "batch are flipped, cropped or coloured alike. Call it in the dataset's __getitem__, "
            "where it draws for each sample, or give augment= an albumentations Compose or a "
            "torchvision v2.Compose itself, which draw for each sample, too; what is written for "
            f"one image goes into the latter: v2.Compose([{spelled}]). If a batch is to share its "
            "draws, filter this warning.",
            FastDataWarning,
            stacklevel=3,
        )


def draws_once(transform: StageTransform, batch: Batch) -> bool:
    """Return whether a transform was seen to draw once for all samples of a batch."""
    if sys.platform != "linux":  # elsewhere libraries do not survive a fork
        return False
    try:
        copies = _copies(batch, batch_samples(batch))
    except Exception as error:  # a batch of things that cannot be cut
        _LOG.info("%s was not tried: %s: %s", transform.name, type(error).__name__, error)
        return False
    found = try_apart(_try, transform, copies, start_method="fork", deadline_s=_DEADLINE_S)
    if found.failure is not None:
        _LOG.info("%s was not tried: it %s", transform.name, found.failure.what)
    return bool(found.values.get("shared"))


def _try(transform: StageTransform, copies: Batch, tell: Tell) -> None:
    seen: list[list[torch.Tensor]] = []
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for number in range(_TRIES):
            seed_global_generators(number, 0, "copies")
            made = transform.apply(_copies(copies, _COPIES), None)
            rows = [one for one in leaves(made) if _has_rows(one, _COPIES)]
            if not rows or any(not _same(one, one[:1].expand_as(one)) for one in rows):
                return
            firsts = [one[0] for one in rows]
            if any(_differ(firsts, others) for others in seen):
                tell("shared", True)
                return
            seen.append(firsts)


def _differ(these: Sequence[torch.Tensor], those: Sequence[torch.Tensor]) -> bool:
    """Return whether two results of one sample differ; a batch has one size, drawn or not."""
    if [one.shape for one in these] != [one.shape for one in those]:
        return False
    return not all(map(_same, these, those))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.double(), other.double()
    return not one.numel() or bool((one - other).abs().max() <= _ROUNDING * other.abs().max())


def _has_rows(value: object, samples: int) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == samples


def _copies(batch: Batch, samples: int) -> Batch:
    """Return a batch of new copies, on the CPU, of the first sample of a batch."""
    if isinstance(batch, torch.Tensor):
        if not _has_rows(batch, samples):
            return batch.cpu()
        return batch[:1].cpu().repeat(_COPIES, *[1] * (batch.ndim - 1))
    parts = children(batch)
    if parts is None:
        return batch
    # A list with a tensor of the batch in it is the batch itself, or a part of it.
    holds_rows = any(_has_rows(part, samples) for _, part in parts)
    if isinstance(batch, list) and len(batch) == samples and not holds_rows:
        return [batch[0]] * _COPIES
    return rebuilt(batch, [_copies(part, samples) for _, part in parts])

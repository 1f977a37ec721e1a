"""A v2 pipeline, with torchvision's own ``v2.CutMix`` and ``v2.MixUp`` at its end or alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torchvision import tv_tensors
from torchvision.transforms import v2

from lightning_fastdata.augment.fields import Fields, find_fields, get_field, put_fields
from lightning_fastdata.augment.mixing import MixedTransform, Mixer
from lightning_fastdata.augment.replay.program import BatchDraws, key_of_batch
from lightning_fastdata.augment.stage_transform import CallableTransform, plain_tensors
from lightning_fastdata.augment.torchvision.plan import (
    MIXES,
    Leaf,
    children_of,
    is_v1,
    is_v2,
    leaves_of,
    may_draw,
)
from lightning_fastdata.augment.torchvision.rewrite import rewritten
from lightning_fastdata.augment.torchvision.transform import TorchvisionTransform
from lightning_fastdata.errors import TransformError
from lightning_fastdata.randomness.seeds import keyed_draws

if TYPE_CHECKING:
    from lightning_fastdata.augment.replay.program import Draws
    from lightning_fastdata.augment.stage_transform import StageTransform, WorkerTransform
    from lightning_fastdata.types import Batch, SampleKey


def stage_transform(transform: object, fields: Fields) -> StageTransform | None:
    """Return the transform of batches of a v2 pipeline, whose end may mix them; None: it is none.

    Raises:
        TransformError: what is drawn for each sample stands behind or beside what mixes, or it is a
            pipeline of torchvision's first interface.
    """
    steps = _flat(transform)
    before = list(takewhile(lambda step: not any(map(_mixes, leaves_of(step))), steps))
    mixing = steps[len(before) :]
    if is_v1(transform):
        raise TransformError(
            f"{type(transform).__name__} is of torchvision's first interface "
            "(torchvision.transforms), which draws once for a whole batch. Its form in v2, which "
            f"augment= runs with draws for each sample, is\n\n{rewritten(transform)}\n\nIts pixels "
            "are those of tensors, which differ a little from those of PIL images. To keep the "
            "latter, leave the pipeline in the dataset."
        )
    if not mixing:
        return TorchvisionTransform(transform, fields) if is_v2(transform) else None
    for leaf in (leaf for step in mixing for leaf in leaves_of(step)):
        if not _mixes(leaf) and may_draw(leaf):
            raise TransformError(
                f"{leaf.name} stands behind or beside what mixes the samples of a batch "
                f"({mixing[0]!r}), where it would draw once for all of them. Put it before."
            )
    pipeline = TorchvisionTransform(v2.Compose(before), fields) if before else None
    return _OwnMixes(pipeline, _OwnMixer(mixing, fields))


def _mixes(leaf: Leaf) -> bool:
    return isinstance(leaf.transform, MIXES)


def _flat(transform: Any) -> list[Any]:
    if type(transform) not in {v2.Compose, nn.Sequential}:
        return [transform]
    return [step for child in children_of(transform) or () for step in _flat(child)]


class _OwnMixes(MixedTransform):
    def behind(self) -> StageTransform:
        """Return what mixes behind another transform, by the number of the batch."""
        if self.pipeline is not None:
            return self
        return CallableTransform(v2.Compose(self._mixer.steps), self._mixer.fields)


class _OwnMixer(Mixer):
    """Has torchvision mix whole batches, with what it draws under the key of the batch."""

    library = "torchvision"

    def __init__(self, steps: Sequence[Any], fields: Fields) -> None:
        self.steps = tuple(steps)
        self.fields = fields

    def check_classes(self, sample: Batch) -> None:
        """Leave it to torchvision."""

    def draw(self, key: SampleKey) -> SampleKey:
        """Return the key: the first one of a batch is that of the batch."""
        return key

    def pack(
        self, drawn: Sequence[SampleKey], inner: WorkerTransform | None, tapes: Sequence[Any]
    ) -> Draws:
        """Return the key of the batch, and what was drawn for a pipeline before."""
        before = None if inner is None else inner.collate(tapes)
        return BatchDraws(len(drawn), key_of_batch(drawn[0]), before)

    def carry_out(self, batch: Batch, draws: Draws) -> Batch:
        """Return a collated batch as torchvision mixes it."""
        place = find_fields(batch, self.fields, batched=True).image
        images = get_field(batch, place)
        assert isinstance(draws, BatchDraws)  # what pack() makes
        self._check_beside(batch, {place}, images)
        # So called, it is found beside other tensors, whatever their order.
        made = put_fields(batch, {place: tv_tensors.Image(images)})
        with plain_tensors(), keyed_draws(draws.values, ("torch",)):
            for step in cast("tuple[Any, ...]", self.steps):
                made = step(made)
        return put_fields(made, {place: get_field(made, place).as_subclass(torch.Tensor)})

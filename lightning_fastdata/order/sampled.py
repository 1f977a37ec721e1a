"""The indices of a sampler as arrays, where they can be had without asking for each one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_fastdata.order.epoch_order import EvaluationBatchSampler, ShuffleSampler
from lightning_fastdata.order.permutation import (
    Order,
    cut,
    drawn_permutation,
    epoch_permutation,
    parts_of,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


def index_batches(batch_sampler: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of a batch sampler; as int64 arrays where that gives the same indices.

    Python integers cost more than the gather of a row does. For torch's own samplers and for those
    of this module the same indices are had as one array; every other sampler is asked as usual.
    """
    sampler = getattr(batch_sampler, "sampler", None)
    if type(batch_sampler) is EvaluationBatchSampler and batch_sampler.order is not None:
        yield from batch_sampler.order.batches()
        return
    order = _sampled_order(sampler) if type(batch_sampler) is BatchSampler else None
    if order is None:
        yield from batch_sampler
        return
    size: int = batch_sampler.batch_size  # type: ignore[attr-defined]
    drop_last: bool = batch_sampler.drop_last  # type: ignore[attr-defined]
    stop = len(order) - len(order) % size if drop_last else len(order)
    yield from parts_of(order, cut(stop, size))
    if type(sampler) is RandomSampler and sampler.generator is not None:
        # torch draws a second permutation for the remainder, of which it then takes nothing.
        drawn_permutation(len(order), sampler.generator)


def _sampled_order(sampler: Any) -> Order | None:
    kind = type(sampler)
    if kind is SequentialSampler:
        return range(len(sampler.data_source))
    if kind is ShuffleSampler:
        return epoch_permutation(len(sampler.data_source), sampler.seed, sampler.epoch)
    if kind is RandomSampler and not sampler.replacement:
        return _random_order(sampler)
    if kind is SubsetRandomSampler:
        indices = np.asarray(sampler.indices)
        if indices.ndim != 1 or indices.dtype.kind != "i":
            return None
        order = drawn_permutation(len(indices), sampler.generator)
        return indices.astype(np.int64, copy=False)[order]
    if kind is WeightedRandomSampler:
        drawn = torch.multinomial(
            sampler.weights, sampler.num_samples, sampler.replacement, generator=sampler.generator
        )
        return drawn.numpy()
    return _rank_order(sampler) if kind is DistributedSampler else None


def _random_order(sampler: RandomSampler) -> NDArray[np.int64] | None:
    length = len(sampler.data_source)
    if sampler.num_samples != length:
        return None
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    return drawn_permutation(length, generator)


def _rank_order(sampler: DistributedSampler[Any]) -> NDArray[np.int64] | None:
    length = len(cast("Sized", sampler.dataset))
    if (sampler.total_size > length) if sampler.drop_last else (sampler.total_size < length):
        return None  # the dataset has changed, which the sampler itself is to say
    order = np.arange(length)
    if sampler.shuffle:
        generator = torch.Generator()
        generator.manual_seed(sampler.seed + sampler.epoch)
        order = drawn_permutation(length, generator)
    # Short of samples it begins again with the first ones, as resize does.
    everyone = np.resize(order, sampler.total_size)
    return everyone[sampler.rank : sampler.total_size : sampler.num_replicas]

"""The one thing that is changed in a strategy so that means over unequal shares are right."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from conformance.pieces import RowsModule, make_trainer
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from torch.utils.data import BatchSampler, SequentialSampler

from lightning_fastdata.order.samplers import EvaluationBatchSampler, RankBatchSampler
from lightning_fastdata.plugin.seams.loaders import average_exactly


def ranks_of(tmp_path, **arguments):
    return make_trainer(tmp_path, strategy="ddp", devices=2, **arguments)


@pytest.mark.parametrize(
    "copied", [lambda s: s, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]
)
def test_means_of_integers_are_not_rounded_and_others_are_left_alone(tmp_path, copied):
    trainer = ranks_of(tmp_path)
    average_exactly(trainer)
    average_exactly(trainer)
    strategy = copied(trainer.strategy)
    assert vars(strategy)["reduce"].args[0].__self__ is strategy
    assert strategy.reduce(torch.tensor(5), reduce_op="mean").dtype == torch.float32
    assert strategy.reduce(torch.tensor(5)).dtype == torch.float32
    assert strategy.reduce(torch.tensor(5), reduce_op="sum").dtype == torch.int64
    assert strategy.reduce(torch.tensor(5.0).double(), None, "avg").dtype == torch.float64
    assert strategy.reduce("unchanged", reduce_op="mean") == "unchanged"


def test_ranks_have_batches_of_our_own(tmp_path):
    def kinds(trainer):
        module = RowsModule()
        module.trainer = trainer
        loaders = (
            getattr(module, f"{s}_dataloader")() for s in ("train", "val", "test", "predict")
        )
        return [type(loader.batch_sampler) for loader in loaders]

    ours, theirs = EvaluationBatchSampler, BatchSampler
    assert kinds(ranks_of(tmp_path)) == [RankBatchSampler, ours, ours, ours]
    assert kinds(make_trainer(tmp_path)) == [theirs] * 4
    assert kinds(ranks_of(tmp_path, use_distributed_sampler=False)) == [theirs] * 4
    assert kinds(None) == [theirs] * 4


def test_a_users_order_wins(tmp_path):
    module = RowsModule(batch_size=4)
    module.trainer = ranks_of(tmp_path)
    rows = module.val_dataset()
    orders = [
        {"shuffle": True},
        {"sampler": [1, 0]},
        {"batch_sampler": BatchSampler([2, 1, 0], 2, drop_last=False)},
        {"batch_size": None},
    ]
    for order in orders:
        loader = module.make_loader(rows, stage="val", **order)
        assert not isinstance(loader.batch_sampler, EvaluationBatchSampler)
    loader = module.make_loader(rows, stage="val", batch_size=3, drop_last=True)
    assert isinstance(loader.batch_sampler, EvaluationBatchSampler)
    assert isinstance(loader.sampler, SequentialSampler)
    assert (loader.batch_sampler.batch_size, loader.batch_sampler.drop_last) == (3, True)
    assert "reduce" in vars(module.trainer.strategy)


@pytest.mark.parametrize("rank", [0, 1])
def test_batches_of_one_that_do_not_come_out_even_are_predicted_once_and_a_warning_says_the_risk(
    rank,
):
    """The sampler is the one that Lightning puts into loaders for prediction."""

    def share(length):
        whole = SequentialSampler(range(length))
        return UnrepeatedDistributedSamplerWrapper(whole, num_replicas=2, rank=rank, shuffle=False)

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = list(EvaluationBatchSampler(share(5), 1))
    assert found == [[[0], [2], [4]], [[1], [3]]][rank]
    assert ["a batch less than others" in str(w.message) for w in heard] == [True] * (rank == 0)
    assert list(EvaluationBatchSampler(share(5), 2)) == [[[0, 1], [3]], [[2], [4]]][rank]

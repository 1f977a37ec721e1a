"""The one thing that is changed in a strategy so that means over unequal shares are right."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from conformance.pieces import RowsModule, make_trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _Sync
from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_fastdata import FastDataLoader, FastDataModule
from lightning_fastdata.order.samplers import RankBatchSampler
from lightning_fastdata.plugin.seams import average_exactly


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
    assert vars(strategy)["reduce"].reduce.__self__ is strategy
    assert strategy.reduce(torch.tensor(5), reduce_op="mean").dtype == torch.float32
    assert strategy.reduce(torch.tensor(5)).dtype == torch.float32
    assert strategy.reduce(torch.tensor(5), reduce_op="sum").dtype == torch.int64
    assert strategy.reduce(torch.tensor(5.0).double(), None, "avg").dtype == torch.float64
    assert strategy.reduce("unchanged", reduce_op="mean") == "unchanged"


def test_lightning_copies_no_strategy_with_a_logged_value(tmp_path):
    trainer = ranks_of(tmp_path)
    average_exactly(trainer)
    reduce = trainer.strategy.reduce
    logged = _Sync(fn=reduce, _should=True)
    copied = apply_to_collection(logged, torch.Tensor, torch.clone)
    assert copied is not logged
    assert copied._fn.func is reduce


def test_ranks_have_batches_of_our_own(tmp_path):
    def kinds(trainer):
        module = RowsModule()
        module.trainer = trainer
        loaders = (
            getattr(module, f"{s}_dataloader")() for s in ("train", "val", "test", "predict")
        )
        return [type(loader.batch_sampler) for loader in loaders]

    ours, theirs = [RankBatchSampler] * 4, [BatchSampler] * 4
    assert kinds(ranks_of(tmp_path)) == ours
    assert kinds(ranks_of(tmp_path, overfit_batches=2)) == [*ours[:1], *theirs[:3]]
    unshared = ranks_of(tmp_path, use_distributed_sampler=False)
    for trainer in (make_trainer(tmp_path), unshared, None):
        assert kinds(trainer) == theirs


def test_ranks_take_over_another_size_of_a_given_loaders_batches(tmp_path):
    given = DataLoader(torch.arange(12), 2)
    data = FastDataModule.from_loaders(given, num_workers=0)
    data.trainer = ranks_of(tmp_path)
    loader = data.train_dataloader()
    for size, own in ((2, [[0, 1], [4, 5], [8, 9]]), (3, [[0, 1, 2], [6, 7, 8]])):
        given.batch_sampler.batch_size = size
        assert [batch.tolist() for batch in loader] == own


class Split:
    """A sampler, or a batch sampler, that splits itself, as in many projects."""

    rank, num_replicas = 1, 2

    def __init__(self, given):
        self.given, self.epochs = given, []

    def __iter__(self):
        return iter(self.given)

    def __len__(self):
        return len(self.given)

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class PairsOf:
    """A batch sampler whose sampler splits itself."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return iter(PAIRS)

    def __len__(self):
        return len(PAIRS)


ODD, PAIRS = [1, 3, 5, 7], [[1, 3], [5, 7]]


def halved():
    return DistributedSampler(range(8), 2, 1, shuffle=False)


SPLIT = {
    "sampler": lambda: {"sampler": Split(ODD)},
    "torch's batches of one": lambda: {"batch_sampler": BatchSampler(Split(ODD), 2, False)},
    "torch's batches of torch's": lambda: {"batch_sampler": BatchSampler(halved(), 2, False)},
    "own batches of one": lambda: {"batch_sampler": PairsOf(Split(ODD))},
    "own batches of torch's": lambda: {"batch_sampler": PairsOf(halved())},
    "own batches": lambda: {"batch_sampler": Split(PAIRS)},
    "ready batches": lambda: {"sampler": Split(PAIRS), "batch_size": None},
}


def user_samplers(how):
    given = how.get("sampler") or how["batch_sampler"]
    return [one for one in (given, getattr(given, "sampler", None)) if type(one) is Split]


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("module", [True, False])
def test_what_splits_itself_is_read_as_it_is_and_told_the_epoch(tmp_path, name, module):
    how, rows = SPLIT[name](), torch.arange(8)
    if module:
        data = RowsModule(batch_size=2, length=8, guard="off")
        data.trainer = ranks_of(tmp_path)
        loader = data.make_loader(rows, stage="train", **how)
    else:
        loader = FastDataLoader(rows, **{"batch_size": 1 + ("sampler" in how), **how})
    found = [batch.tolist() for batch in loader]
    assert found == PAIRS
    assert len(loader) == 2
    assert isinstance(loader.sampler, DistributedSampler)  # Lightning leaves it alone
    assert (loader.sampler.rank, loader.sampler.num_replicas) == (1, 2)
    loader.sampler.set_epoch(7)  # as Lightning does
    assert all(one.epochs[-1] == 7 for one in user_samplers(how))
    again = [batch.tolist() for batch in FastDataModule.from_loaders(loader).train_dataloader()]
    assert again == found


READ = {
    "sampler": (
        {"sampler": [4, 2, 6, 0, 7]},
        [[4, 2], [0]],
        "of list, whose steps are of 4, are too few for 2 ranks: the step before gives up",
    ),
    "sampler, the rest left out": (
        {"sampler": [4, 2, 6, 0, 7], "drop_last": True},
        [[4, 2]],
        "the last 1 samples of each epoch of list, whose steps are of 4, are left out",
    ),
    "torch's batch sampler": (
        {"batch_sampler": BatchSampler([7, 6, 5, 4, 3, 2], 2, drop_last=True)},
        [[7, 6]],
        "the last 1 batches of each epoch of BatchSampler, whose steps are of 2, are left",
    ),
    "batch sampler": (
        {"batch_sampler": [[0, 1], [2, 3], [4, 5], [6, 7], [8]]},
        [[0, 1], [4, 5], [8]],
        "the last 1 batches of each epoch of list, whose steps are of 2, are cut into 2",
    ),
    "ready batches": ({"sampler": [5, 3, 1, 0], "batch_size": None}, [5, 1], ""),
    "in order": ({"shuffle": False}, [[0, 1], [4, 5]], ""),
    "split already": ({"sampler": halved()}, None, ""),
}


@pytest.mark.parametrize("stage", ["train", "val"])
@pytest.mark.parametrize("name", READ)
@pytest.mark.filterwarnings("ignore:The last 1 of an epoch")
def test_a_rank_reads_its_part_of_any_order_and_none_is_split_twice(tmp_path, name, stage, capsys):
    how, expected, told = READ[name]
    module = RowsModule(batch_size=2, length=8, guard="off")
    module.trainer = ranks_of(tmp_path)
    rows = list(range(9))
    loader = module.make_loader(rows[: 9 if "batch_sampler" in how else 8], stage=stage, **how)
    assert isinstance(loader.sampler, DistributedSampler)  # Lightning leaves it alone
    found = [batch.tolist() if hasattr(batch, "tolist") else batch for batch in loader]
    assert found == (expected or PAIRS)
    assert len(loader) == len(found)
    averaged = stage == "val" and name != "split already"
    assert ("reduce" in vars(module.trainer.strategy)) == averaged
    said = capsys.readouterr().out
    assert told in said if told else "of each epoch" not in said

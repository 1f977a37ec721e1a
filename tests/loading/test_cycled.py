"""A loader that is read several times within an epoch is shuffled and drawn anew each time."""

from __future__ import annotations

import albumentations as A
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import CombinedLoader
from misses import each
from resilience.runs import warned
from torch.utils.data import Dataset, IterableDataset, SequentialSampler
from trainers import Learner, quiet_trainer

from lightning_fastdata import FastDataModule, LoaderOptions
from lightning_fastdata.order.indices import EpochIndices
from lightning_fastdata.order.lengths import BucketBatchSampler
from lightning_fastdata.order.samplers import (
    BlockShuffleSampler,
    RankBatchSampler,
    SharedSampler,
    ShuffleSampler,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SHORT, PASSES, SIZE, EPOCHS = 8, 4, 4, 2
STEPS = SHORT // SIZE * PASSES


class Drawing(Dataset):
    """Its index, a crop, and a number that it draws."""

    def __init__(self, length):
        self.length, self.compose = length, A.Compose([A.RandomCrop(2, 2)])

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        ramp = np.arange(4096, dtype=np.float32).reshape(64, 64, 1)
        return index, self.compose(image=ramp)["image"][0, 0, 0], torch.rand(())


class Numbers(IterableDataset):
    """Numbers, of which Lightning reads one more than it has trained on: they have no length."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


class Drawn:
    """A sampler of the user's own that draws from a global generator."""

    def __iter__(self):
        return iter(np.random.permutation(SHORT).tolist())

    def __len__(self):
        return SHORT


ORDERS = {
    "shuffle": lambda data: {},
    "blocks": lambda data: {"sampler": BlockShuffleSampler(data, 4, blocks_at_once=1, seed=3)},
    "one block": lambda data: {"sampler": BlockShuffleSampler(data, 8, blocks_at_once=1, seed=3)},
    "own": lambda data: {"sampler": Drawn()},
    "buckets": lambda data: {"batch_sampler": BucketBatchSampler([1] * SHORT, batch_size=SIZE)},
    "in order": lambda data: {"sampler": SequentialSampler(data)},
}


class Module(FastDataModule):
    def __init__(self, order="shuffle", executor="inline", *, long=Drawing, **options):
        how = LoaderOptions(executor=executor, num_workers=0 if executor == "inline" else 2)
        super().__init__(SIZE, seed=3, options=how, **options)
        self.order, self.long = order, long

    def train_dataloader(self):
        short, long = Drawing(SHORT), self.long(SHORT * PASSES)
        short = self.make_loader(short, stage="train", **ORDERS[self.order](short))
        long = self.make_loader(long, stage="train")
        return CombinedLoader({"short": short, "long": long}, "max_size_cycle")


def rows(batch):
    return [*zip(*(column.tolist() for column in batch["short"]), strict=True)]


class Saves(Callback):
    """Saves as a step begins, when the batch that follows is read already."""

    def __init__(self, folder, at):
        self.folder, self.at = folder, at

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step in self.at:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def trained(folder, *, resume=None, save=(), **about):
    """The samples of the short loader, step by step."""
    model = Learner(rows)
    trainer = quiet_trainer(folder, max_epochs=EPOCHS, callbacks=[Saves(folder, save)])
    trainer.fit(model, Module(**about), ckpt_path=resume)
    return model.seen


@each("order", ORDERS)
def test_each_pass_has_an_order_and_draws_of_its_own(tmp_path, order):
    seen = trained(tmp_path, order=order)
    passes = [[*one, *other] for one, other in zip(seen[::2], seen[1::2], strict=True)]
    assert len(passes) == PASSES * EPOCHS
    orders = {tuple(index for index, *_ in one) for one in passes}
    assert len(orders) == (1 if order == "in order" else len(passes))
    assert all(sorted(order) == [*range(SHORT)] for order in orders)
    for sample in range(SHORT):
        of = [next(drawn for index, *drawn in one if index == sample) for one in passes]
        for kind in zip(*of, strict=True):
            assert len(set(kind)) == len(passes)


@each("executor", ["workers", "torch"])
@each("order", ["shuffle", "own"])
def test_every_executor_reads_the_same_passes(tmp_path, order, executor):
    kinds = 2 if executor == "torch" else 3  # torch's own workers key Albumentations' draws alone
    expected = trained(tmp_path, order=order)
    found = trained(tmp_path, order=order, executor=executor)
    assert [[row[:kinds] for row in step] for step in found] == [
        [row[:kinds] for row in step] for step in expected
    ]


@pytest.mark.parametrize("long", [Drawing, Numbers])
@pytest.mark.parametrize("order", ["shuffle", "own"])
def test_a_training_goes_on_within_a_pass(tmp_path, order, long):
    how = {"order": order, "long": long}
    straight = trained(tmp_path, **how, save=range(STEPS + 3))
    for taken in (1, 2, 3, 4, STEPS - 1, STEPS, STEPS + 2):
        with warned() as told:
            rest = trained(tmp_path, **how, resume=tmp_path / f"{taken}.ckpt")
        assert rest == straight[taken:], taken
        assert all(text.startswith("To go on where") for text in told)  # of Numbers


def test_so_has_an_order_that_ranks_cannot_share_evenly():
    orders = []
    for earlier in range(PASSES):
        share = SharedSampler(
            ShuffleSampler(range(13), 3), batch_size=SIZE, num_replicas=3, rank=0, seed=3
        )
        indices = EpochIndices(RankBatchSampler(share, SIZE, drop_last=False))
        indices.earlier = earlier
        orders.append(tuple(map(tuple, indices)))
    assert len(set(orders)) == PASSES

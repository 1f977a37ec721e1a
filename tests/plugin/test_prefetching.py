"""Moving batches beside the computing changes when they move, and nothing else."""

from __future__ import annotations

import copy
import pickle

import albumentations as A
import pytest
import torch
from albumentations.pytorch import ToTensorV2
from alike import alike
from conformance.pieces import Images, Linear, Rows, make_trainer
from device.host_streams import HostStreams, OnStreams
from lightning.fabric import Fabric
from lightning.pytorch import seed_everything
from misses import each
from torch import nn

from lightning_fastdata import (
    DataThroughputCallback,
    FastDataLoader,
    FastDataModule,
    LoaderOptions,
    prefetch,
)
from lightning_fastdata.errors import OptionsError

torch.set_num_threads(1)
WAYS = ("off", "auto")


class Learns(Linear):
    """Learns on rows or images, draws while it trains, and remembers what it saw."""

    def __init__(self):
        super().__init__()
        self.layer = None  # of the parent, not used here
        self.scale = nn.Parameter(torch.ones(()))
        self.losses = []

    def _step(self, stage, batch):
        parts = batch.values() if isinstance(batch, dict) else [batch]
        x = [p[0] if isinstance(p, list | tuple) else p for p in parts]
        self.seen[stage].append([one.detach().clone() for one in x])
        total = sum(one.float().mean() for one in x)
        loss = (self.scale.float() * (1 + nn.functional.dropout(total))).pow(2) * 1e-3
        self.losses.append(loss.detach())
        return loss


class Stacked(Rows):
    """Rows of double precision, which Lightning converts."""

    def __getitem__(self, i):
        return torch.full((4,), float(i), dtype=torch.float64), i


def noise(batch):
    """Draws from the generator that the model's dropout draws from."""
    return [batch[0] + torch.rand(batch[0].shape), batch[1]]


def loading(way, executor="torch", workers=0):
    options = LoaderOptions(num_workers=workers, executor=executor, timeout=60, probe=False)
    return {"batch_size": 4, "options": options, "prefetch": way}


def rows(*how):
    module = OnStreams.from_datasets(Stacked(20), Stacked(8), Rows(8), Rows(6), **loading(*how))
    module.register_transform(noise)
    return module


class Draws(Rows):
    """Rows with noise of their own, drawn where they are read."""

    def __getitem__(self, i):
        return torch.full((4,), float(i)) + torch.rand(4), i


def draws(*how):
    return OnStreams.from_datasets(Draws(20), Draws(8), **loading(*how))


def pictures(*how):
    augment = A.Compose([A.RandomCrop(8, 8), A.RandomBrightnessContrast(p=0.8), ToTensorV2()])
    module = OnStreams.from_datasets(
        Images(24),
        Images(8),
        augment={"train": augment, "val": A.Compose([A.CenterCrop(8, 8), ToTensorV2()])},
        augment_on="gpu",
        seed=2,
        **loading(*how),
    )
    module.register_transform(lambda b: [b[0].float() + torch.rand(()), b[1]])
    return module


def several(*how):
    return OnStreams.from_datasets({"one": Rows(12), "other": Stacked(20)}, **loading(*how))


def trained(tmp_path, module, model=None, **about):
    seed_everything(7, verbose=False)
    model = Learns() if model is None else model
    trainer = make_trainer(tmp_path, max_epochs=2, **about)
    trainer.fit(model, datamodule=module)
    return model


def assert_same(ours, theirs):
    assert alike([ours.seen, ours.losses, ours.scale], [theirs.seen, theirs.losses, theirs.scale])


@pytest.mark.cases(3)
@pytest.mark.parametrize("make", [rows, draws, pictures, several])
@pytest.mark.parametrize(
    ("executor", "workers", "precision"),
    [
        ("torch", 0, "32-true"),
        ("torch", 2, "32-true"),
        ("workers", 2, "bf16-true"),
        ("inline", 0, "bf16-true"),
    ],
)
def test_row_44_a_training_is_bitwise_the_same_whatever_the_prefetching(
    tmp_path, make, executor, workers, precision
):
    expected = trained(tmp_path, make("off", executor, workers), precision=precision)
    module = make("auto", executor, workers)
    assert_same(trained(tmp_path, module, precision=precision), expected)
    assert module.streams.sent >= len(expected.seen["train"]) >= 6
    assert module.streams.landed


@each("make,way", [(make, way) for make in (rows, pictures) for way in WAYS])
def test_behind_a_run_loaders_give_what_they_give_before_it(tmp_path, make, way):
    module, model, trainer = make(way), Learns(), make_trainer(tmp_path)
    before = [x for x, _ in module.val_dataloader()]
    trainer.fit(model, datamodule=module)
    for ask in (module.val_dataloader, lambda: trainer.val_dataloaders):
        assert all(map(torch.equal, [x for x, _ in ask()], before))
        model.seen["val"].clear()
        trainer.validate(model, ask(), verbose=False)
        assert all(map(torch.equal, [x for (x,) in model.seen["val"]], before))
        trainer.validate(model, datamodule=module, verbose=False)
    assert len(before) == 2


def test_other_stages_are_the_same_too(tmp_path):
    plain, ahead = Learns(), Learns()
    for model, way in ((plain, "off"), (ahead, "auto")):
        seed_everything(7, verbose=False)
        module, trainer = rows(way), make_trainer(tmp_path)
        trainer.validate(model, datamodule=module, verbose=False)
        trainer.test(model, datamodule=module, verbose=False)
        trainer.predict(model, datamodule=module)
        assert [len(model.seen[stage]) for stage in ("val", "test", "predict")] == [2, 2, 2]
    assert_same(ahead, plain)


class Writes(Learns):
    """Writes what a rank has seen."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_train_end(self):
        sent = self.trainer.datamodule.streams.sent if self.trainer.datamodule.streams else 0
        torch.save((self.seen["train"], self.losses, sent), self.path / f"{self.global_rank}")


def test_on_several_ranks_each_sees_the_same(tmp_path):
    found = {}
    for way in ("off", "auto"):
        path = tmp_path / way
        path.mkdir()
        module = rows(way)
        trained(path, module, Writes(path), strategy="ddp_fork", devices=2, limit_val_batches=0)
        found[way] = [torch.load(path / f"{rank}", weights_only=False) for rank in range(2)]
    for plain, ahead in zip(found["off"], found["auto"], strict=True):
        assert plain[2] == 0
        assert ahead[2] == len(plain[0]) == 6
        assert all(torch.equal(x, y) for [x], [y] in zip(plain[0], ahead[0], strict=True))
        assert torch.equal(torch.stack(plain[1]), torch.stack(ahead[1]))
    assert not torch.equal(found["auto"][0][0][0][0], found["auto"][1][0][0][0])


class BeforeAndAfter(Learns):
    """Has hooks that look at the state of the training."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + self.trainer.global_step, batch[1]]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] * 2, batch[1]]


class MovesItself(Learns):
    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return [batch[0].to(device) + 1, batch[1].to(device)]


class OwnHook(OnStreams):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        batch = super().on_before_batch_transfer(batch, dataloader_idx)
        return [batch[0] + self.trainer.global_step, batch[1]]


@each(("kind", "model"), [(OnStreams, BeforeAndAfter), (OnStreams, MovesItself), (OwnHook, Learns)])
def test_hooks_before_the_transfer_see_what_they_would_see(tmp_path, kind, model):
    def module(way):
        made = kind.from_datasets(Stacked(20), None, batch_size=4, prefetch=way, num_workers=0)
        if kind is OnStreams:
            made.register_transform(noise)
        return made

    expected, ahead = trained(tmp_path, module("off"), model()), module("auto")
    assert_same(trained(tmp_path, ahead, model()), expected)
    assert "of yours runs in the batch's own step" in ahead.explain()


def test_a_hook_that_only_follows_the_transfer_is_no_reason_against_looking_ahead(tmp_path):
    class After(Learns):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [batch[0] * 2 + self.trainer.global_step, batch[1]]

    expected = trained(tmp_path, rows("off"), After())
    module = rows("auto")
    assert_same(trained(tmp_path, module, After()), expected)
    assert "one batch ahead" in module.explain()


def test_limits_measuring_and_copies_go_on_as_before(tmp_path):
    class Copies(Learns):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                copy.deepcopy(self.trainer.train_dataloader)
                pickle.dumps(self.trainer.datamodule._prefetching)
            return super().training_step(batch, batch_idx)

    found = []
    for way in WAYS:
        callback = DataThroughputCallback(summary=False, report=False)
        module = rows(way)
        model = trained(tmp_path, module, Copies(), limit_train_batches=3, callbacks=[callback])
        assert callback.report.stages[0].steps == 6
        copy.deepcopy(module)
        found.append(model)
    for other in found[1:]:
        assert_same(other, found[0])


class Breaks(Rows):
    def __getitem__(self, i):
        if i == 9:
            raise KeyError("sample 9")
        return super().__getitem__(i)


def test_an_error_comes_at_its_own_step(tmp_path):
    for way in WAYS:
        module = OnStreams.from_datasets(Breaks(20), None, batch_size=4, prefetch=way)
        model = Learns()
        with pytest.raises(KeyError):
            trained(tmp_path, module, model, overfit_batches=5)
        assert len(model.seen["train"]) == 2


def test_without_streams_nothing_changes_and_explain_says_so(tmp_path):
    expected = trained(tmp_path, rows("off"))
    module = FastDataModule.from_datasets(
        Stacked(20), Stacked(8), batch_size=4, options=LoaderOptions(num_workers=0), prefetch="auto"
    )
    module.register_transform(noise)
    assert_same(trained(tmp_path, module), expected)
    assert "prefetch  off  this type of device" in module.explain()


def test_an_unknown_way_is_refused():
    with pytest.raises(OptionsError, match="allowed are 'auto', 'off'"):
        FastDataModule(prefetch="lookahead")


def test_fabric_takes_our_loader_and_what_prefetch_makes_of_it():
    fabric = Fabric(accelerator="cpu", devices=1)

    def loader():
        return FastDataLoader(Stacked(20), 4, shuffle=True, seed=1, num_workers=0)

    torch.manual_seed(3)
    plain = [[x.clone() for x in batch] for batch in loader()]
    torch.manual_seed(3)
    ready = fabric.setup_dataloaders(loader())
    through = [[x.clone() for x in batch] for batch in ready]
    torch.manual_seed(3)
    ready = fabric.setup_dataloaders(loader(), move_to_device=False)
    ahead = list(prefetch(ready, fabric.device, streams=lambda _: HostStreams()))
    assert len(plain) == len(through) == len(ahead) == 5
    for one, other, third in zip(plain, through, ahead, strict=True):
        assert all(map(torch.equal, one, other))
        assert all(map(torch.equal, one, third))

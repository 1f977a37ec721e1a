"""Where pixels are computed under real trainers, and what is measured to decide it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import albumentations as A
import numpy as np
import pytest
import torch
from albumentations.pytorch import ToTensorV2
from conformance.forked_ranks import launched
from conformance.pieces import Images, Pixels, make_trainer
from lightning.pytorch import Callback
from loading.planned import Stream
from torch import nn
from torch.utils.data import default_collate

from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions
from lightning_fastdata.augment.stage_transform import StageTransform
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.batches.staged import StagedBatch
from lightning_fastdata.host.clock import Clocks
from lightning_fastdata.loading.plan_for import LoaderSpec
from lightning_fastdata.plugin.placing import (
    PlaceCosts,
    Placing,
    SampleCosts,
    choose_place,
    read_place_costs,
    time_on_device,
)
from lightning_fastdata.plugin.recording import Recording
from lightning_fastdata.plugin.throughput import MeasuredRun

torch.set_num_threads(1)
CPU = torch.device("cpu")
EPOCHS = 4
LOG = "lightning_fastdata.plugin.placing.trial"


def pipeline():
    return A.Compose(
        [A.RandomCrop(8, 8), A.RandomBrightnessContrast(p=0.8), A.HorizontalFlip(), ToTensorV2()]
    )


class Keeps(Pixels):
    """Learns on images of any size and remembers them with their labels, by epoch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.images, self.labels = {}, {}

    def training_step(self, batch, batch_idx):
        self.images.setdefault(self.current_epoch, []).append(batch[0].clone())
        self.labels.setdefault(self.current_epoch, []).append(torch.as_tensor(batch[1]).clone())
        return self.layer(batch[0].float().mean().reshape(1, 1)).sum()


class Looks(FastDataModule):
    """Remembers for each batch of an epoch whether anything was left to the device."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        if self.trainer.training and isinstance(batch, StagedBatch):
            left = "workers" if batch.draws is None else "device"
            vars(self).setdefault("places", {}).setdefault(self.trainer.current_epoch, []).append(
                left
            )
        return super().on_before_batch_transfer(batch, dataloader_idx)


COSTS = PlaceCosts(
    accelerator=True,
    batch_size=4,
    workers=2,
    cpus=2,
    sample=SampleCosts(whole_ms=8.0, deferred_ms=1.0, read_ms=0.5, samples=7),
    device_ms=3.0,
)
DEAR_DEVICE = replace(COSTS, device_ms=15.0)


on_cuda = partial(Placing, "auto", accelerator=lambda trainer: "cuda")


def placed(costs=COSTS):
    return on_cuda(costs=lambda *_, **__: costs)


def train(
    tmp_path,
    *,
    augment=None,
    place="auto",
    placing=None,
    workers=2,
    trainer=None,
    collate_fn=None,
    **how,
):
    """Train on the CPU; ``placing`` stands for the measurements."""
    model = Keeps()
    module = Looks.from_datasets(
        Images(24),
        batch_size=4,
        augment=augment or pipeline(),
        augment_on=place,
        collate_fn=collate_fn,
        options=LoaderOptions(num_workers=workers, timeout=60 if workers else 0, **how),
        seed=3,
    )
    if placing is not None:
        module.placing = placing
    arguments = {"max_epochs": EPOCHS, "num_sanity_val_steps": 0, **(trainer or {})}
    make_trainer(tmp_path, **arguments).fit(model, datamodule=module)
    return model, module


def all_equal(one, other):
    assert one.keys() == other.keys()
    for epoch, batches in one.items():
        assert len(batches) == len(other[epoch])
        assert all(map(torch.equal, batches, other[epoch]))


LOADERS = [
    ("torch", 2, True),
    ("torch", 2, False),
    ("torch", 0, False),
    ("workers", 2, True),
    ("workers", 2, False),
    ("inline", 0, False),
]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("executor", "workers", "persistent"), LOADERS)
@pytest.mark.parametrize("place", ["device", "workers"])
def test_the_place_that_is_chosen_holds_for_the_run_and_changes_no_batch(
    tmp_path, caplog, executor, workers, persistent, place
):
    how = {"executor": executor, "persistent_workers": persistent}
    expected, _ = train(tmp_path, place="cpu", workers=0)
    caplog.set_level(logging.INFO, LOG)
    placing = placed(COSTS if place == "device" else DEAR_DEVICE)
    model, module = train(tmp_path, placing=placing, workers=workers, **how)
    left = {epoch: 6 * ["device"] for epoch in range(EPOCHS)} if place == "device" else {}
    assert getattr(module, "places", {}) == left
    all_equal(model.images, expected.images)
    all_equal(model.labels, expected.labels)
    for labels in model.labels.values():
        assert sorted(torch.cat(labels).tolist()) == list(range(24))
    logged = [record.getMessage() for record in caplog.records if record.name == LOG]
    where = "on the device" if place == "device" else "all in the workers"
    assert len(logged) == 1
    assert f"train: {where}: a batch of 4 takes 2 workers 16 ms" in logged[0]


def test_a_collate_fn_of_the_users_has_the_workers_compute_everything(tmp_path):
    def collated(samples):
        return default_collate(samples)

    model, module = train(tmp_path, placing=on_cuda(), workers=0, collate_fn=collated)
    expected, _ = train(tmp_path, place="cpu", workers=0)
    all_equal(model.images, expected.images)
    assert not hasattr(module, "places")
    choice = module.placing.choice("train")
    assert choice.place == "workers"
    assert "collate_fn of yours" in choice.reason


class Single(FastDataModule):
    """Trains on samples that are no batches."""

    def train_dataloader(self):
        return self.make_loader(Images(4), stage="train", batch_size=None)


@pytest.mark.filterwarnings("ignore:.*does nothing for")
@pytest.mark.parametrize("asked", ["gpu", "auto"])
@pytest.mark.parametrize("how", ["collate_fn", "batch_size=None"])
def test_what_a_device_cannot_be_given_the_workers_finish_and_explain_says_so(tmp_path, asked, how):
    placing = Placing(asked, accelerator=lambda trainer: "cuda")
    if how == "collate_fn":
        model, module = train(tmp_path, placing=placing, workers=0, collate_fn=lambda s: s[0])
    else:
        model = Keeps()
        module = Single(augment=pipeline(), augment_on=asked, num_workers=0)
        module.placing = placing
        make_trainer(tmp_path, max_epochs=1).fit(model, datamodule=module)
    assert model.images[0][0].shape == (3, 8, 8)
    assert not hasattr(module, "places")
    assert f"all of it in the workers, by Albumentations itself: {_WHY[how]}" in module.explain()


_WHY = {
    "collate_fn": "a collate_fn of yours gets finished images",
    "batch_size=None": "batch_size=None makes no batches",
}


def test_whatever_is_measured_changes_no_batch(tmp_path):
    expected, _ = train(tmp_path, place="cpu", workers=0)
    model, module = train(tmp_path, placing=on_cuda(), workers=2, executor="workers")
    choice = module.placing.choice("train")
    assert "a batch of 4 takes 2 workers" in choice.reason
    assert choice.reason in module.explain()
    all_equal(model.images, expected.images)


def test_what_was_chosen_is_explained_with_its_numbers(tmp_path):
    _, module = train(tmp_path, placing=placed(DEAR_DEVICE), trainer={"max_epochs": 1})
    text = module.explain()
    for number in ("takes 2 workers 16 ms", "2 ms without", "needs 15 ms", "7 measured"):
        assert number in text
    assert "all of it in the workers" in text
    module.placing = placed()
    assert "unless a trial before the training" in module.explain()


def test_loaders_made_anew_go_on_in_the_place_that_was_chosen(tmp_path):
    tried = []

    def costs(known, *_, **__):
        tried.append(known.batch_size)
        return COSTS

    expected, _ = train(tmp_path, place="cpu")
    placing = on_cuda(costs=costs)
    trainer = {"reload_dataloaders_every_n_epochs": 1}
    model, module = train(tmp_path, placing=placing, executor="workers", trainer=trainer)
    assert tried == [4]
    assert module.places == {epoch: 6 * ["device"] for epoch in range(EPOCHS)}
    all_equal(model.images, expected.images)


@pytest.mark.parametrize("place", ["cpu", "gpu"])
def test_what_was_asked_for_is_never_measured_nor_overruled(tmp_path, place):
    def forbidden(*_, **__):
        raise AssertionError("measured")

    _, module = train(tmp_path, placing=Placing(place, costs=forbidden), workers=0)
    assert module.augment_on == place
    left = {p for places in getattr(module, "places", {}).values() for p in places}
    assert left == ({"device"} if place == "gpu" else set())
    assert ("no accelerator" in module.explain()) == (place == "gpu")


def test_without_an_accelerator_everything_is_in_the_workers(tmp_path):
    _, module = train(tmp_path, workers=0, trainer={"max_epochs": 1})
    assert not hasattr(module, "places")
    assert module.placing.choice("train").place == "workers"
    assert "there is no accelerator" in module.explain()


def test_the_report_says_where_the_pixels_are(tmp_path):
    callback = DataThroughputCallback(summary=False, report=False)
    _, module = train(tmp_path, placing=placed(DEAR_DEVICE), trainer={"callbacks": [callback]})
    assert module.placing.choice("train").place == "workers"
    assert any("transforms run on the CPU" in line for line in callback.report.verdict.evidence)


class Facts(Callback):
    """Asks what is known of the loader while there is one."""

    def on_train_end(self, trainer, pl_module):
        self.found = MeasuredRun(trainer, Recording(trainer), None).facts()


@pytest.mark.parametrize(
    ("how", "settled"),
    [
        ({"placing": placed()}, True),
        ({"placing": placed(costs=replace(COSTS, sample=None))}, True),
        ({"place": "cpu"}, False),
        ({"place": "cpu", "augment": A.Compose([A.ImageCompression(p=1)])}, True),
    ],
    ids=["measured", "decided", "asked for", "nothing to leave"],
)
def test_another_place_is_only_advised_where_nobody_found_it_to_be_worse(tmp_path, how, settled):
    facts = Facts()
    train(tmp_path, workers=0, trainer={"callbacks": [facts], "max_epochs": 2}, **how)
    assert facts.found.augment_settled is settled


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_need_not_agree(tmp_path):
    program = Path(__file__).with_name("place_on_ranks.py")
    launched(program, str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["same"]
    assert second["same"]
    assert {p for places in first["places"].values() for p in places} == {"device"}
    assert second["places"] == {}
    for epoch, labels in first["labels"].items():
        assert sorted(labels + second["labels"][epoch]) == list(range(24))


# -- what is measured --------------------------------------------------------------------------


class Costly(Images):
    """Images that take 5 ms to read, 4 of them waiting."""

    def __init__(self, time):
        super().__init__(24)
        self.time = time

    def __getitem__(self, i):
        self.time.sleep(0.004)
        self.time.work(0.001)
        return super().__getitem__(i)


class CostlyPipeline(StageTransform):
    """An Albumentations pipeline whose two parts take 20 and 3 ms, and 0.5 ms on a device."""

    name = "costly"

    def __init__(self, time):
        self.inner = as_batch_transform(pipeline())
        self.time = time

    def in_worker(self, *, on_device):
        part, took = self.inner.in_worker(on_device=on_device), 0.003 if on_device else 0.02

        class Part:
            needs_batches = False
            collate, finish = part.collate, part.finish
            stacks, finish_each = part.stacks, part.finish_each

            def __call__(_, sample, key):
                self.time.work(took)
                return part(sample, key)

        return Part()

    def apply(self, batch, draws):
        self.time.sleep(0.0005)
        return self.inner.apply(batch, draws)


def measured(dataset, transform, *, accelerator=True, **how):
    spec = LoaderSpec(dataset=dataset, name="task", options=LoaderOptions(), batch_size=6)
    known = PlaceCosts(
        accelerator=accelerator, defers=transform.defers, batch_size=6, workers=2, cpus=2.0
    )
    return read_place_costs(known, spec, transform, seed=0, device=CPU, **how)


def test_costs_are_those_of_reading_of_the_two_parts_and_of_the_device(virtual):
    clocks = Clocks(queue_s=lambda: 0.0)
    costs = measured(Costly(virtual), CostlyPipeline(virtual), clocks=clocks)
    assert costs.sample.read_ms == pytest.approx(5)
    assert costs.sample.waits_ms == pytest.approx(4)
    assert costs.sample.whole_ms == pytest.approx(25)
    assert costs.sample.deferred_ms == pytest.approx(8)
    assert costs.device_ms == pytest.approx(0.5)
    assert costs.sample.samples == 10  # 28 ms each, until 0.3 s are over, without the first
    choice = choose_place(costs)
    assert choice.place == "device"
    saved_ms = costs.loader_ms("workers") - costs.loader_ms("device")
    assert saved_ms == pytest.approx(6 * 17 / 2)


def test_measuring_leaves_the_random_state_and_the_dataset_alone():
    class Draws(Images):
        opened = False

        def __getitem__(self, i):
            self.opened = True
            np.random.rand()
            torch.rand(())
            return super().__getitem__(i)

    dataset = Draws()
    torch.manual_seed(1)
    np.random.seed(1)
    costs = measured(dataset, as_batch_transform(pipeline()), budget_s=0.01)
    assert costs.sample.whole_ms > 0
    assert costs.sample.deferred_ms > costs.sample.read_ms
    assert costs.device_ms > 0
    assert not dataset.opened
    after = torch.rand(()), np.random.rand()
    torch.manual_seed(1)
    np.random.seed(1)
    assert after == (torch.rand(()), np.random.rand())


def test_a_dataset_that_gives_whole_batches_alone_is_measured():
    class Together(Images):
        def __getitem__(self, i):
            raise NotImplementedError("as of a Dataset without the method")

        def __getitems__(self, indices):
            return [Images.__getitem__(self, i) for i in indices]

    assert measured(Together(), as_batch_transform(pipeline()), budget_s=0.01).sample.read_ms > 0


def test_what_cannot_be_measured_is_not_guessed():
    class Broken(Images):
        def __getitem__(self, i):
            raise OSError("gone")

    transform = as_batch_transform(pipeline())
    for dataset in (Stream(), Broken()):
        costs = measured(dataset, transform)
        assert costs.sample is None
        assert choose_place(costs).place == "device"
    worker_only = as_batch_transform(A.Compose([A.ImageCompression(p=1)]))
    for costs in (
        measured(Broken(), worker_only),
        measured(Broken(), transform, accelerator=False),
    ):
        assert choose_place(costs).place == "workers"


def test_a_device_that_cannot_do_its_part_leaves_it_to_the_workers():
    def raises(work, device):
        raise torch.OutOfMemoryError("out of memory. Tried to allocate 2 GiB\nmore")

    transform = as_batch_transform(pipeline())
    costs = measured(Images(), transform, device_ms=raises)
    choice = choose_place(costs)
    assert choice.place == "workers"
    assert "Tried to allocate 2 GiB" in choice.reason
    assert "more" not in choice.reason


def test_a_device_is_timed_without_its_first_rounds(virtual):
    took = iter([9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 100.0])
    assert time_on_device(lambda: virtual.sleep(next(took) / 1000), CPU) == pytest.approx(3.0)

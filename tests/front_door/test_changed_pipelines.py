"""A pipeline of ``augment=`` that the program changes while it trains."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import albumentations as A
import numpy as np
import pytest
import torch
from misses import each
from samples import Samples
from torch.utils.data import DataLoader
from torchvision.transforms import v2
from trainers import Learner, quiet_trainer

from lightning_fastdata import (
    BatchTransform,
    DataThroughputCallback,
    FastDataLoader,
    FastDataModule,
    as_batch_transform,
    prefetch,
)
from lightning_fastdata.errors import FastDataWarning, OptionsError

IMAGE = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)


IMAGES = Samples(lambda _: IMAGE, 4)


class Seen(Learner):
    """Notes whether images are inverted; lets something be done behind the first epoch."""

    def __init__(self, do: Callable[[], object]) -> None:
        super().__init__(lambda batch: bool(batch.flatten(1)[:, 0].min() > 200))
        self.do = do

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.do()


def fitted(do: Callable[[], object], *callbacks: Any, **given: Any) -> list[bool]:
    """Return whether the images of each of three epochs of a step were inverted."""
    module = Seen(do)
    quiet_trainer(max_epochs=3, callbacks=list(callbacks)).fit(module, **given)
    return module.seen


def inverting() -> A.Compose:
    return A.Compose([A.InvertImg(p=1), A.ToTensorV2()])


CHANGES = [
    lambda compose: setattr(compose.transforms[0], "p", 0),
    lambda compose: compose.transforms.pop(0),
]


@each("change", CHANGES)
@each("place", ["cpu", "gpu", "callback"])
@each("workers", [0, 2])
def test_a_pipeline_that_is_changed_in_place_holds_from_the_next_epoch_on(
    change, place, workers
) -> None:
    compose, callbacks = inverting(), []
    if place == "callback":
        callbacks = [DataThroughputCallback(augment=compose, summary=False, report=False)]
        given = {"train_dataloaders": DataLoader(IMAGES, 4, num_workers=workers)}
    else:
        how = {"batch_size": 4, "num_workers": workers, "augment": compose, "augment_on": place}
        given = {"datamodule": FastDataModule.from_datasets(IMAGES, **how)}
    assert fitted(lambda: change(compose), *callbacks, **given) == [True, False, False]


@each("change", CHANGES)
@each("on_cpu", ["albumentations", "torch"])
def test_so_does_one_that_is_called_with_the_next_call(change, on_cpu) -> None:
    compose = inverting()
    images = torch.from_numpy(np.stack([IMAGE] * 2))
    aug = BatchTransform.from_albumentations(compose, on_cpu=on_cpu)
    right = images.permute(0, 3, 1, 2)
    assert torch.equal(aug(images), 255 - right)
    change(compose)
    assert torch.equal(aug(images), right)


TENSOR = torch.from_numpy(IMAGE).permute(2, 0, 1).contiguous()
TENSORS = Samples(lambda _: TENSOR, 4)
INVERTS = [inverting, lambda: v2.Compose([v2.RandomInvert(1.0)])]


@each("make", INVERTS)
@each("way", ["callback", "prefetch"])
def test_so_does_one_with_the_next_run_whose_epochs_have_the_same_numbers(make, way) -> None:
    pipeline, loader = make(), DataLoader(TENSORS, 4)
    callback = DataThroughputCallback(augment=pipeline, summary=False, report=False)
    batches, made = prefetch(loader, "cpu", pipeline), []
    for chance in (1, 0, 1):
        pipeline.transforms[0].p = chance
        if way == "callback":
            model = Learner()
            quiet_trainer(callbacks=[callback]).fit(model, loader)
            made += model.seen
        else:
            batches.set_epoch(0)
            made += batches
    assert [torch.equal(batch, (255 - TENSOR).expand(4, -1, -1, -1)) for batch in made] == [1, 0, 1]


@each(
    "change",
    [
        lambda steps: setattr(steps[0], "threshold", 10),
        lambda steps: steps.insert(0, v2.RandomEqualize(1.0)),
    ],
)
def test_what_prefetch_leaves_to_a_device_is_carried_out_by_the_changed_pipeline(change) -> None:
    pipeline = v2.Compose([v2.RandomSolarize(40, p=1.0)])
    transform = as_batch_transform(pipeline)
    loader = FastDataLoader(TENSORS, 4, transform=transform, on_device=True, staged="train")
    batches = prefetch(loader, "cpu")
    for _ in range(2):
        (made,) = batches
        assert torch.equal(made, pipeline(TENSOR).expand(4, -1, -1, -1))
        change(pipeline.transforms)


def test_another_pipeline_is_refused_while_the_training_runs_and_taken_before() -> None:
    def made() -> FastDataModule:
        how = {"batch_size": 4, "num_workers": 0, "augment": inverting()}
        return FastDataModule.from_datasets(IMAGES, **how)

    data = made()
    with pytest.raises(OptionsError, match="augment= was set while the training runs"):
        fitted(lambda: setattr(data, "augment", None), datamodule=data)
    for hook in "setup", "prepare_data":
        data = made()
        here = partial(setattr, data, "augment", A.Compose([A.ToTensorV2()]))
        setattr(data, hook, lambda *_, here=here, **__: here())
        assert fitted(lambda: None, datamodule=data) == [False, False, False]
    data = made()
    data.augment = A.Compose([A.ToTensorV2()])
    assert fitted(lambda: None, datamodule=data) == [False, False, False]


class Evaluated(Learner):
    """May be tested, too."""

    def test_step(self, *_: object) -> None:
        """Do nothing."""


def test_what_setup_registers_takes_the_place_of_what_it_registered_in_the_run_before() -> None:
    taken = []

    class Registers(FastDataModule):
        def setup(self, stage: str) -> None:
            self.register_transform(inverting())
            self.register_transform(lambda batch: taken.append(stage) or batch)

    data = Registers.from_datasets(IMAGES, test_dataset=IMAGES, batch_size=4, num_workers=0)
    data.register_transform(lambda batch: batch, stage="test")
    for run in 1, 2:
        assert fitted(lambda: None, datamodule=data) == [True, True, True]
        assert len(taken) == 3 * run
        quiet_trainer().test(Evaluated(), data)


@each("place", ["cpu", "callback"])
def test_a_pipeline_that_a_step_changes_is_warned_of(place) -> None:
    compose = inverting()
    images = Samples(lambda _: IMAGE, 8)

    class Changes(Learner):
        def on_train_batch_end(self, *_: object) -> None:
            compose.transforms[0].p = 0

    if place == "callback":
        callbacks = [DataThroughputCallback(augment=compose, summary=False, report=False)]
        given = {"train_dataloaders": DataLoader(images, 4, num_workers=0)}
    else:
        how = {"batch_size": 4, "num_workers": 0, "augment": compose, "augment_on": place}
        callbacks, given = [], {"datamodule": FastDataModule.from_datasets(images, **how)}
    with pytest.warns(FastDataWarning, match="Step 1 of the training changed the pipeline") as said:
        quiet_trainer(max_epochs=2, callbacks=callbacks).fit(Changes(), **given)
    assert sum("changed the pipeline" in str(each.message) for each in said) == 1

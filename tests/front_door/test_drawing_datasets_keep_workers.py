"""Workers of a dataset that draws outlive an epoch: what a sample's key sets is not compared."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import albumentations as A
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from misses import Misses
from torch.utils.data import Dataset
from trainers import Learner, quiet_trainer

from lightning_fastdata import FastDataLoader, FastDataModule, LoaderOptions

EPOCHS, LENGTH = 3, 8
PHOTO = np.random.default_rng(0).integers(0, 256, (24, 24, 3), np.uint8)
BOXES = {"bbox_params": A.BboxParams("pascal_voc", label_fields=["names"])}
Row = tuple[int, list[float]]


class Counting(A.HorizontalFlip):
    """A transform of the user's that is another one after each image."""

    calls = 0

    def apply(self, img: np.ndarray, *args: Any, **params: Any) -> np.ndarray:
        self.calls += 1
        return super().apply(img, *args, **params)


class Photos(Dataset[Row]):
    """Draws by whatever ``made`` returns, and tells in which process."""

    def __init__(self, made: Callable[[], Any], draw: Callable[[Any, int], Any]) -> None:
        self.drawn_by, self.draw = made(), draw

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Row:
        return os.getpid(), np.asarray(self.draw(self.drawn_by, index), float).ravel().tolist()


def pixels(pipeline: A.Compose, index: int) -> Any:
    return pipeline(image=np.roll(PHOTO, index))["image"][::5, ::7]


def boxes(pipeline: A.Compose, index: int) -> Any:
    box = np.array([[1, 2, 11, 14.0]])
    return pipeline(image=PHOTO, bboxes=box, names=[f"name {index}"])["bboxes"]


def flips_and_colours(**params: Any) -> A.Compose:
    nested = A.OneOf([A.RandomCrop(20, 20), A.RandomResizedCrop((20, 20))], p=1)
    some = A.SomeOf([A.ColorJitter(p=1), A.GaussNoise(p=1), A.CoarseDropout(p=1)], n=2)
    return A.Compose([nested, some, A.HorizontalFlip(p=0.5), A.Affine(rotate=(-9, 9))], **params)


KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any, int], Any]]] = {
    "a pipeline": (flips_and_colours, pixels),
    "a pipeline with boxes": (lambda: flips_and_colours(**BOXES), boxes),
    "a single transform": (lambda: A.GaussNoise(p=1), pixels),
    "pipelines": (
        lambda: [A.Compose([A.HorizontalFlip(p=0.5)]), flips_and_colours()],
        lambda both, index: pixels(both[index % 2], index),
    ),
    "np.random.Generator": (
        lambda: np.random.default_rng(3),
        lambda generator, index: generator.integers(0, 99, 4) + index,
    ),
    "np.random.RandomState": (
        lambda: np.random.RandomState(3),
        lambda generator, index: generator.rand(4) + index,
    ),
    "random.Random": (
        lambda: random.Random(3),
        lambda generator, index: [generator.random(), index],
    ),
    "torch.Generator": (
        lambda: torch.Generator().manual_seed(3),
        lambda generator, index: torch.rand(4, generator=generator) + index,
    ),
}


def own_rows(rows: list[Row]) -> list[Row]:
    return rows


def read(dataset: Dataset[Row], change: Callable[[int], None], **how: Any) -> list[list[Row]]:
    given: dict[str, Any] = {"batch_size": 2, "collate_fn": own_rows, "executor": "workers", **how}
    loader = FastDataLoader(dataset, num_workers=1, **given)
    epochs = []
    for epoch in range(EPOCHS):
        change(epoch)
        epochs.append([row for batch in loader for row in batch])
    return epochs


def processes(epochs: list[list[Row]]) -> int:
    return len({pid for rows in epochs for pid, _ in rows})


def values(epochs: list[list[Row]]) -> list[list[list[float]]]:
    return [[values for _, values in rows] for rows in epochs]


def nothing(_epoch: int) -> None:
    pass


def test_workers_stay_and_draw_what_new_ones_would() -> None:
    with Misses() as misses:
        for name, how in KEPT.items():
            with misses.case(name):
                new = read(Photos(*how), nothing)
                stay = read(Photos(*how), nothing, persistent_workers="unchanged")
                assert (processes(new), processes(stay)) == (EPOCHS, 1)
                assert values(stay) == values(new)
                assert len({str(epoch) for epoch in values(stay)}) == EPOCHS


def test_so_do_those_that_are_no_forks_of_the_program() -> None:
    how: dict[str, Any] = {"multiprocessing_context": "forkserver"}
    stay = read(Photos(flips_and_colours, pixels), nothing, persistent_workers="unchanged", **how)
    assert processes(stay) == 1
    assert values(stay) == values(read(Photos(flips_and_colours, pixels), nothing))


def probability(dataset: Photos, epoch: int) -> None:
    dataset.drawn_by.transforms[2].p = epoch / 2


def nested(dataset: Photos, epoch: int) -> None:
    dataset.drawn_by.transforms[0].transforms[1].scale = (0.1 + epoch / 4, 1)


def another(dataset: Photos, epoch: int) -> None:
    dataset.drawn_by.transforms[3] = A.Rotate((30 * epoch, 30 * epoch + 1), p=1)


def another_generator(dataset: Photos, epoch: int) -> None:
    dataset.drawn_by = np.random.default_rng(epoch)


def test_what_the_program_changes_is_read_as_changed() -> None:
    with Misses() as misses:
        for change in (probability, nested, another, another_generator):
            how = KEPT["np.random.Generator" if change is another_generator else "a pipeline"]
            with misses.case(change.__name__):
                new, stay = Photos(*how), Photos(*how)
                expected = values(read(new, partial(change, new)))
                kept = read(stay, partial(change, stay), persistent_workers="unchanged")
                assert values(kept) == expected


def test_a_transform_that_changes_itself_begins_anew_with_each_epoch() -> None:
    dataset = Photos(lambda: A.Compose([Counting(p=1)]), lambda pipe, _: counted(pipe))
    new = values(read(dataset, nothing))
    assert values(read(dataset, nothing, persistent_workers="unchanged")) == new
    assert new[0] == new[1] == new[2]


def counted(pipeline: A.Compose) -> list[int]:
    pipeline(image=PHOTO)
    return [pipeline.transforms[0].calls]


class Plain(Dataset[dict[str, Any]]):
    """Photographs without a pipeline, and in which process they were read."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": np.roll(PHOTO, index), "read by": os.getpid()}


class Shows(Callback):
    """Draws from the pipeline in the training process, as one that logs pictures does."""

    def __init__(self, pipeline: A.Compose) -> None:
        self.pipeline = pipeline

    def on_train_batch_end(self, *_: Any) -> None:
        self.pipeline(image=PHOTO)


@pytest.mark.filterwarnings("error::lightning_fastdata.FastDataWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_what_the_program_draws_from_the_pipeline_of_augment_changes_nothing(workers: int) -> None:
    seen = []
    for draws in (False, True):
        pipeline = flips_and_colours()
        model = Learner(lambda batch: (batch["image"].clone(), *batch["read by"].tolist()))
        module = FastDataModule.from_datasets(
            Plain(), batch_size=2, augment=pipeline, options=LoaderOptions(num_workers=workers)
        )
        shows = [Shows(pipeline)] if draws else []
        quiet_trainer(max_epochs=EPOCHS, callbacks=shows).fit(model, datamodule=module)
        assert len({pid for _, *pids in model.seen for pid in pids}) == 1
        seen.append([image for image, *_ in model.seen])
    assert all(map(torch.equal, *seen))
    assert len(seen[0]) == EPOCHS * LENGTH // 2


@pytest.mark.filterwarnings("error::lightning_fastdata.FastDataWarning")
@pytest.mark.parametrize("executor", ["workers", "inline"])
def test_a_loader_whose_workers_lightning_would_seed_is_read_as_without(
    executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``seed_everything(workers=True)`` has Lightning give each loader a ``worker_init_fn``."""
    seen = []
    for workers in ("0", "1"):
        monkeypatch.setenv("PL_SEED_WORKERS", workers)
        model = Learner(list)
        options = LoaderOptions(executor=executor, num_workers=1)
        module = FastDataModule.from_datasets(
            Photos(*KEPT["a pipeline"]), batch_size=2, collate_fn=own_rows, seed=3, options=options
        )
        quiet_trainer(max_epochs=EPOCHS).fit(model, datamodule=module)
        assert processes(model.seen) == 1
        seen.append(values(model.seen))
    assert seen[0] == seen[1]

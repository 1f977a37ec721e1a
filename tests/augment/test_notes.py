"""What a pipeline writes down of its draws reaches the batch, sample by sample."""

from functools import partial

import albumentations as A
import numpy as np
import pytest
from augment.batches import alike, by_albumentations, keys
from augment.loaders import SEED, Pictures, batches
from misses import each

COUNT = 14
IMAGES = np.random.default_rng(0).integers(0, 256, (COUNT, 40, 36, 3), np.uint8)
SAVING = A.Compose([A.HorizontalFlip(), A.RandomGamma(p=0.5)], save_applied_params=True)
REPLAYED = A.ReplayCompose([A.HorizontalFlip(), A.RandomGamma(p=0.5)])
OTHER_NAME = A.ReplayCompose([A.HorizontalFlip()], save_key="story")


def labelled(index, **more):
    return {"image": IMAGES[index], "label": index, **more}


@pytest.mark.cases(6)
@each("on_device", [False, True])
@each(("executor", "workers"), [("torch", 0), ("workers", 2)])
@each(
    ("pipeline", "name"),
    [(SAVING, "applied_transforms"), (REPLAYED, "replay"), (OTHER_NAME, "story")],
)
def test_notes_of_a_batch_are_those_of_its_samples(pipeline, name, executor, workers, on_device):
    place, how = "device" if on_device else "workers", {"executor": executor, "workers": workers}
    [batch] = batches(pipeline, Pictures(labelled, COUNT), size=COUNT, place=place, **how)
    assert batch["label"].tolist() == list(range(COUNT))
    wanted = by_albumentations(pipeline, [{"image": image} for image in IMAGES], keys(COUNT, SEED))
    assert alike(batch[name], [one[name] for one in wanted])


def test_a_first_sample_with_nothing_to_tell_speaks_for_no_other():
    def some(index):
        notes = [("HorizontalFlip", {"p": 1})] if index else []
        return {"applied_transforms": notes, "label": index}

    [batch] = batches(None, Pictures(some, COUNT), size=COUNT)
    assert [len(notes) for notes in batch["applied_transforms"]] == [0] + [1] * (COUNT - 1)


def test_other_fields_of_such_names_are_collated_as_ever():
    def collated(replay):
        data = Pictures(partial(labelled, replay=replay), COUNT)
        return batches(None, data, size=COUNT)[0]["replay"]

    assert collated(np.ones(3)).shape == (COUNT, 3)
    replay = collated({"state": np.ones(3), "reward": 2})
    assert replay["state"].shape == (COUNT, 3)
    assert replay["reward"].tolist() == [2] * COUNT

"""What a pipeline writes down of its draws reaches the batch, sample by sample."""

import albumentations as A
import numpy as np
import pytest
from augment.batches import alike
from misses import each
from torch.utils.data import Dataset

from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.randomness.seeds import reseed
from lightning_fastdata.types import SampleKey

COUNT = 14
IMAGES = np.random.default_rng(0).integers(0, 256, (COUNT, 40, 36, 3), np.uint8)
SAVING = A.Compose([A.HorizontalFlip(), A.RandomGamma(p=0.5)], save_applied_params=True)
REPLAYED = A.ReplayCompose([A.HorizontalFlip(), A.RandomGamma(p=0.5)])
OTHER_NAME = A.ReplayCompose([A.HorizontalFlip()], save_key="story")


class Labelled(Dataset):
    def __init__(self, extra=None):
        self.extra = extra or {}

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return {"image": IMAGES[index], "label": index, **self.extra}


@pytest.mark.cases(6)
@each("on_device", [False, True])
@each(("executor", "workers"), [("torch", 0), ("workers", 2)])
@each(
    ("pipeline", "name"),
    [(SAVING, "applied_transforms"), (REPLAYED, "replay"), (OTHER_NAME, "story")],
)
def test_notes_of_a_batch_are_those_of_its_samples(pipeline, name, executor, workers, on_device):
    loader = FastDataLoader(
        Labelled(),
        COUNT,
        num_workers=workers,
        executor=executor,
        seed=3,
        transform=as_batch_transform(pipeline),
        on_device=on_device,
        staged="train" if on_device else None,
    )
    (batch,) = loader
    batch = batch.batch if on_device else batch
    assert batch["label"].tolist() == list(range(COUNT))
    wanted = []
    for index, image in enumerate(IMAGES):
        reseed((pipeline,), SampleKey(3, 0, index))
        wanted.append(pipeline(image=image)[name])
    assert alike(batch[name], wanted)


def test_a_first_sample_with_nothing_to_tell_speaks_for_no_other():
    class Some(Labelled):
        def __getitem__(self, index):
            notes = [("HorizontalFlip", {"p": 1})] if index else []
            return {"applied_transforms": notes, "label": index}

    (batch,) = FastDataLoader(Some(), COUNT)
    assert [len(notes) for notes in batch["applied_transforms"]] == [0] + [1] * (COUNT - 1)


def test_other_fields_of_such_names_are_collated_as_ever():
    (batch,) = FastDataLoader(Labelled({"replay": np.ones(3)}), COUNT)
    assert batch["replay"].shape == (COUNT, 3)
    (batch,) = FastDataLoader(Labelled({"replay": {"state": np.ones(3), "reward": 2}}), COUNT)
    assert batch["replay"]["state"].shape == (COUNT, 3)
    assert batch["replay"]["reward"].tolist() == [2] * COUNT

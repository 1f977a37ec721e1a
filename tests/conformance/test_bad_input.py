"""Mistakes: each is an error of this package, as early as it can be known, that says what to do."""

from __future__ import annotations

import copy
from dataclasses import make_dataclass

import albumentations as A
import numpy as np
import pytest
import torch
from conformance.pieces import Images, Linear, Pixels, Rows, RowsModule, make_trainer
from misses import each
from torch.utils.data import Dataset, IterableDataset

from lightning_fastdata import (
    DataThroughputCallback,
    FastDataModule,
    LoaderOptions,
)
from lightning_fastdata.errors import BatchError, DatasetError, OptionsError, TransformError

torch.set_num_threads(1)

FLIP = A.Compose([A.HorizontalFlip()])


class Untouched(Linear):
    """Fails the test if any step runs."""

    def training_step(self, batch, batch_idx):
        raise AssertionError("a training step ran")

    validation_step = test_step = predict_step = training_step


class Samples(Dataset):
    """The same sample, again and again, or what a function returns of the index."""

    def __init__(self, sample):
        self.sample = sample

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return self.sample(i) if callable(self.sample) else self.sample


def broken(i):
    raise KeyError("no such photo")


def fit(tmp_path, module, model=None, **trainer):
    made = make_trainer(tmp_path, **{"num_sanity_val_steps": 0, **trainer})
    made.fit(model if model is not None else Untouched(), datamodule=module)


@each(
    ("given", "said"),
    [
        (None, r"no train dataset: train_dataset\(\) returned None. Override it"),
        ([], r"no train dataset: .*returned \[\]"),
        (Rows(0), r"train_dataset\(\) .*empty Rows"),
    ],
)
def test_no_training_dataset_or_an_empty_one(tmp_path, given, said):
    class Photos(FastDataModule):
        def train_dataset(self):
            return given

    with pytest.raises(DatasetError, match=f"Photos.*{said}"):
        fit(tmp_path, Photos())
    with pytest.raises(DatasetError, match=said):
        Photos().train_dataloader()


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_no_dataset_for_the_stage_that_was_asked_for(tmp_path, method):
    module = FastDataModule.from_datasets(Rows())
    stage = "val" if method == "validate" else method
    with pytest.raises(DatasetError, match=rf"no {stage} dataset: {stage}_dataset\(\)"):
        getattr(make_trainer(tmp_path), method)(Untouched(), datamodule=module)


def test_loaders_can_be_copied_after_an_error(tmp_path):
    with pytest.raises(DatasetError):
        fit(tmp_path, RowsModule(length=0))
    module = RowsModule(options=LoaderOptions(num_workers=1, persistent_workers=True))
    loader = module.train_dataloader()
    next(iter(loader))
    twin = copy.deepcopy(loader)
    assert len(list(twin)) == len(loader)
    for one in (loader, twin):
        one.close()
        assert one._iterator is None


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_raises_is_named_with_its_cause(tmp_path, workers):
    module = FastDataModule.from_datasets(
        Samples(broken), options=LoaderOptions(num_workers=workers)
    )
    with pytest.raises(
        DatasetError, match=r"sample 0 of .*Samples.*KeyError.*no such photo"
    ) as info:
        fit(tmp_path, module)
    assert isinstance(info.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ((torch.zeros(4), 1), r"No image was found in \(tensor\[float32: 4\]"),
        ({"photo": np.zeros((4, 4, 3), np.uint8)}, r"No image was found in \{'photo'"),
        ({"image": np.zeros((2, 4, 4, 3), np.uint8)}, "2 or 3 dimensions per sample"),
        ({"image": "photo.jpg"}, "The image is str. Expected a PIL image"),
        (make_dataclass("Shot", ["image"])(None), "Return a dict or a tuple: Shot has no fields"),
    ],
)
def test_a_sample_without_a_usable_image_for_a_pipeline(tmp_path, sample, said):
    for place in ("gpu", "cpu"):
        module = FastDataModule.from_datasets(Samples(sample), augment=FLIP, augment_on=place)
        with pytest.raises(BatchError, match=said):
            fit(tmp_path, module)


@pytest.mark.parametrize("name", ["image", "mask"])
def test_a_field_that_does_not_exist(tmp_path, name):
    module = FastDataModule.from_datasets(Images(), augment=FLIP, **{name: "photo"})
    with pytest.raises(BatchError, match=rf"no field 'photo' \(given as {name}=\)"):
        fit(tmp_path, module)


def test_a_stream_without_images_fails_at_its_first_batch(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(torch.zeros(4), 1)])

    module = FastDataModule.from_datasets(
        Stream(), augment=FLIP, augment_on="gpu", options=LoaderOptions(num_workers=0)
    )
    with pytest.raises(BatchError, match="No image was found"):
        fit(tmp_path, module)


def test_a_callback_pipeline_for_foreign_batches_without_images(tmp_path):
    trainer = make_trainer(
        tmp_path, callbacks=[DataThroughputCallback(augment=FLIP, summary=False, report=False)]
    )
    with pytest.raises(BatchError, match="No image was found"):
        trainer.fit(Untouched(), torch.utils.data.DataLoader(Rows(8), batch_size=4))


def test_images_of_different_sizes_name_the_sizes(tmp_path):
    dataset = Samples(lambda i: (np.zeros((4 + i, 4, 3), np.uint8), i))
    options = LoaderOptions(num_workers=0)
    module = FastDataModule.from_datasets(dataset, batch_size=4, augment=FLIP, options=options)
    for place in ("gpu", "cpu"):
        module.augment_on = place
        with pytest.raises(BatchError, match=r"Shapes found: .*Resize or a crop"):
            fit(tmp_path, module)


@each("value", [0, -1, True, "8", 2.0, None])
def test_impossible_batch_sizes(value):
    with pytest.raises(OptionsError, match="whole number of at least 1"):
        FastDataModule(batch_size=value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"guard": "stop"}, "guard is 'stop'; allowed are 'accumulate'"),
        ({"augment_on": "tpu"}, "augment_on is 'tpu'; allowed are 'auto', 'gpu', 'cpu'"),
        ({"options": {"num_workers": 2}}, r"is a dict; pass LoaderOptions\(...\)"),
    ],
)
def test_impossible_arguments(arguments, said):
    with pytest.raises(OptionsError, match=said):
        FastDataModule(**arguments)


@pytest.mark.parametrize("stage", ["fit", "training", "sanity"])
def test_a_transform_for_a_stage_that_does_not_exist(stage):
    for attempt in (
        lambda: FastDataModule(augment={stage: FLIP}),
        lambda: FastDataModule().register_transform(FLIP, stage=stage),
    ):
        with pytest.raises(TransformError, match=f"no stage '{stage}'.*train, val, test, predict"):
            attempt()


@pytest.mark.parametrize("first", [FLIP, lambda batch: batch], ids=["pipeline", "callable"])
def test_a_pipeline_that_would_not_come_first(tmp_path, first):
    module = RowsModule(augment=first)
    with pytest.raises(TransformError, match="join two pipelines in one Compose"):
        module.register_transform(A.Compose([A.VerticalFlip()]))
    callback = DataThroughputCallback(augment=FLIP, summary=False, report=False)
    with pytest.raises(TransformError, match="join two pipelines in one Compose"):
        fit(tmp_path, module, callbacks=[callback])


LISTED = torch.nn.ModuleList([torch.nn.Identity()])


@each("value", ["flip", 3, A.HorizontalFlip, A.Compose, [A.HorizontalFlip()], LISTED])
def test_what_is_not_a_transform(value):
    for attempt in (
        lambda: FastDataModule(augment=value),
        lambda: FastDataModule().register_transform(value),
        lambda: DataThroughputCallback(augment=value),
    ):
        with pytest.raises(TransformError, match="cannot transform a batch"):
            attempt()


def test_a_transform_that_forgets_to_return(tmp_path):
    def forgets(batch):
        batch[0].mul_(2)

    for image in (None, 0):
        module = RowsModule(augment=forgets, image=image)
        if image is not None:
            module = FastDataModule.from_datasets(Images(), augment=forgets, image=image)
        with pytest.raises(BatchError, match="forgets returned None"):
            fit(tmp_path, module, limit_val_batches=0)


class Labels(Pixels):
    """Learns nothing, and remembers the batches as they are."""

    def training_step(self, batch, batch_idx):
        self.seen["train"].append(batch)
        return self.layer(torch.ones(1, 1)).sum()


def labels_only(samples):
    return {"labels": [label for _, label in samples]}


def label_tensor(samples):
    return torch.tensor([label for _, label in samples])


def asks_for_a_mask(samples):
    return [sample["mask"] for sample in samples]


@pytest.mark.filterwarnings("ignore:.*gets finished images")
@each("collate_fn", [labels_only, label_tensor, asks_for_a_mask])
@each("model", [Labels, Pixels])
def test_a_collate_fn_that_loses_the_images_gives_the_same_in_both_places(
    tmp_path, model, collate_fn
):
    """The same batches, or the same error of who asks for what is not there."""

    def outcome(place):
        module = FastDataModule.from_datasets(
            Images(),
            batch_size=4,
            augment=A.Compose([A.HorizontalFlip(p=1)]),
            augment_on=place,
            collate_fn=collate_fn,
            options=LoaderOptions(num_workers=0),
        )
        learner = model()
        try:
            fit(tmp_path, module, learner)
        except Exception as error:
            return type(error), str(error)
        return [
            batch if isinstance(batch, dict) else batch.tolist() for batch in learner.seen["train"]
        ]

    on_cpu = outcome("cpu")
    assert on_cpu
    assert outcome("gpu") == on_cpu


@pytest.mark.filterwarnings("ignore:.*gets finished images")
@each("augment", [A.Compose([A.HorizontalFlip()]), lambda batch: {"labels": batch["labels"]}])
@each("place", ["gpu", "cpu"])
def test_a_batch_that_is_none_is_skipped_whatever_is_to_be_done_to_it(tmp_path, place, augment):
    def nothing_of_the_first(samples):
        labels = labels_only(samples)
        return None if 0 in labels["labels"] else labels

    module = FastDataModule.from_datasets(
        Images(12),
        batch_size=4,
        augment=augment,
        augment_on=place,
        collate_fn=nothing_of_the_first,
        options=LoaderOptions(num_workers=0),
        shuffle=False,
    )
    learner = Labels()
    fit(tmp_path, module, learner)
    assert [batch["labels"] for batch in learner.seen["train"]] == [[4, 5, 6, 7], [8, 9, 10, 11]]

"""Several augmentations of a sample in one batch: each with its own pixels, boxes and points."""

from __future__ import annotations

import albumentations as A
import numpy as np
import pytest
import torch
from augment.mixed_samples import IMAGES, PIPELINE, Photos, carried_out
from misses import each
from torch.utils.data import Dataset, default_collate

from lightning_fastdata import FastDataModule, LoaderOptions
from lightning_fastdata.augment.mixing import CutMix, mixed
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.types import SampleKey

torch.set_num_threads(1)


@each("on_device", [True, False])
@each("form", ["tuple", "dict"])
def test_repeats_are_augmentations_of_the_same_sample_side_by_side(form, on_device):
    transform = mixed(PIPELINE, repeats=3)
    samples = [Photos(form=form)[index] for index in range(4)]
    batch = carried_out(transform, samples, on_device=on_device)
    image, labels = (batch["image"], batch["label"]) if form == "dict" else batch
    assert image.shape == (12, 3, 32, 40)
    assert labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert form == "tuple" or batch["index"].tolist() == labels.tolist()
    # Each is what the pipeline makes of the sample for a key of its own.
    alone = as_batch_transform(PIPELINE).in_worker(on_device=False)
    for row in range(12):
        want = alone({"image": IMAGES[row // 3]}, SampleKey(0, 0, row))[0]["image"]
        assert (image[row] - want).abs().max() < 1e-5
    assert len({one.numpy().tobytes() for one in image}) == 12


def test_repeats_are_mixed_each_by_itself_and_masks_go_along():
    samples = [{"image": image, "mask": image[..., 0]} for image in IMAGES[:3]]
    compose = A.Compose([A.RandomCrop(32, 40)])
    batch = carried_out(mixed(compose, CutMix(), repeats=2), samples)
    assert batch["image"].shape == (6, 32, 40, 3)
    assert torch.equal(batch["mask"], batch["image"][..., 0])


def test_repeats_read_a_sample_once():
    class Counting(Photos):
        read = 0

        def __getitem__(self, index):
            Counting.read += 1
            return super().__getitem__(index)

    loader = FastDataLoader(Counting(), 4, num_workers=0, transform=mixed(PIPELINE, repeats=3))
    Counting.read = 0
    assert [len(image) for image, _ in loader] == [12, 12, 12]
    assert Counting.read == 12


def test_repeats_of_batches_of_other_loaders_stand_side_by_side():
    image = torch.rand(2, 3, 20, 24)
    transform = mixed(A.Compose([A.Erasing(fill=2, p=1)]), repeats=2)
    out = transform.apply_unprepared({"image": image, "name": ["a", "b"]}, SampleKey(0, 0, 0))
    assert out["name"] == ["a", "a", "b", "b"]
    kept = out["image"] < 2
    assert torch.equal(out["image"][kept], image.repeat_interleave(2, 0)[kept])
    assert not torch.equal(kept[0], kept[1])


HEIGHT, WIDTH = 40, 48


class Painted(Dataset):
    """Black images in which box ``k`` is filled with ``k + 1``, and a point is white."""

    def __len__(self):
        return 6

    def __getitem__(self, i):
        image = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
        boxes = [(3 + 14 * k, 4 + i, 12 + 14 * k, 14 + i) for k in range(i % 4)]
        for k, (x0, y0, x1, y1) in enumerate(boxes):
            image[y0:y1, x0:x1] = k + 1
        point = (20 + i, 30)
        image[point[1], point[0]] = 255
        return {
            "image": image,
            "bboxes": np.array(boxes, np.float32).reshape(-1, 4),
            "kinds": [k + 1 for k in range(len(boxes))],
            "keypoints": np.array([point], np.float32),
        }


def detection_batch(samples):
    """Collate as detection recipes do: images stacked, everything else in lists."""
    return {
        "image": default_collate([s["image"] for s in samples]),
        "bboxes": [
            torch.tensor(np.asarray(s["bboxes"], np.float32).reshape(-1, 4)) for s in samples
        ],
        "kinds": [torch.tensor([int(one) for one in s["kinds"]]) for s in samples],
        "keypoints": [torch.tensor(np.asarray(s["keypoints"], np.float32)) for s in samples],
    }


def detection_pipeline(*, points=True):
    return A.Compose(
        [A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5), A.RandomCrop(20, 24), A.ToTensorV2()],
        bbox_params=A.BboxParams("pascal_voc", label_fields=["kinds"]),
        keypoint_params=A.KeypointParams("xy") if points else None,
    )


def boxes_of(image):
    """Return the boxes around what is painted, by kind."""
    found = {}
    for kind in sorted(set(image[0].unique().tolist()) - {0, 255}):
        ys, xs = torch.nonzero(image[0] == kind, as_tuple=True)
        found[int(kind)] = [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
        found[int(kind)] = [int(edge) for edge in found[int(kind)]]
    return found


@each("on_device", [True, False])
def test_boxes_and_points_of_each_augmentation_are_where_its_pixels_are(on_device):
    transform = mixed(detection_pipeline(), repeats=3)
    samples = [Painted()[index] for index in range(6)]
    batch = carried_out(transform, samples, on_device=on_device, collate=detection_batch)
    assert batch["image"].shape == (18, 3, 20, 24)
    counts = set()
    for row, image in enumerate(batch["image"]):
        boxes = batch["bboxes"][row].round().int().tolist()
        seen = dict(zip(batch["kinds"][row].tolist(), boxes, strict=True))
        # A point may be painted over the edge of a box.
        assert seen == boxes_of(image)
        for x, y in batch["keypoints"][row].round().int().tolist():
            assert image[0, y, x] == 255
        counts.add((row // 3, len(boxes)))
    # The augmentations of one sample keep different numbers of boxes.
    assert len(counts) > 6


@each("executor", ["inline", "workers", "torch"])
def test_a_collate_fn_gets_every_augmentation_as_a_sample(executor):
    pipeline = detection_pipeline(points=False)
    transform = mixed(pipeline, repeats=2)
    workers = 0 if executor == "inline" else 1
    loader = FastDataLoader(
        Painted(),
        3,
        transform=transform,
        collate_fn=detection_batch,
        num_workers=workers,
        executor=executor,
    )
    wanted = [
        carried_out(
            transform,
            [Painted()[index] for index in range(6)],
            order,
            on_device=False,
            collate=detection_batch,
        )
        for order in ([0, 1, 2], [3, 4, 5])
    ]
    for batch, want in zip(loader, wanted, strict=True):
        assert len(batch["bboxes"]) == len(batch["image"]) == 6
        assert torch.equal(batch["image"], want["image"])
        for one, other in zip(batch["bboxes"], want["bboxes"], strict=True):
            assert torch.equal(one, other)


def test_a_number_of_repeats_below_one_is_refused():
    with pytest.raises(OptionsError, match="repeats is 0"):
        mixed(PIPELINE, repeats=0)


@each("augment_on", ["cpu", "gpu"])
def test_a_data_module_gives_every_augmentation_of_a_sample(augment_on):
    module = FastDataModule.from_datasets(
        Painted(),
        batch_size=2,
        augment=mixed(detection_pipeline(), repeats=3),
        augment_on=augment_on,
        collate_fn=detection_batch,
        options=LoaderOptions(num_workers=0),
    )
    sizes = [(len(batch["image"]), len(batch["bboxes"])) for batch in module.train_dataloader()]
    assert sizes == [(6, 6)] * 3

from __future__ import annotations

import albumentations as A
import numpy as np
import pytest
import torch
from misses import each
from torch.utils.data import Dataset

from lightning_fastdata import BatchTransform, FastDataLoader
from lightning_fastdata.augment.mixing import MixUp, mixed
from lightning_fastdata.augment.ops.output import OutputForm, convert_output
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.errors import OptionsError, TransformError
from lightning_fastdata.types import SampleKey

torch.set_num_threads(1)

RNG = np.random.default_rng(2)
IMAGES = torch.from_numpy(RNG.integers(0, 256, (6, 20, 28, 3), np.uint8))
MASKS = torch.from_numpy(RNG.integers(0, 9, (6, 20, 28), np.uint8))
COMPOSE = A.Compose(
    [A.RandomCrop(16, 16), A.HorizontalFlip(), A.RandomGamma(), A.Normalize(), A.ToTensorV2()],
    additional_targets={"second": "image"},
)
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FORMS = [(out, last) for out in (None, *DTYPES) for last in (False, True)]


class Images(Dataset):
    def __init__(self, *names):
        self.names = names

    def __len__(self):
        return len(IMAGES)

    def __getitem__(self, index):
        image, mask = IMAGES[index].numpy(), MASKS[index].numpy()
        every = {"image": image, "mask": mask, "second": image[::-1].copy(), "label": index % 3}
        return {name: every[name] for name in self.names}


def batches(transform, *, on_device, workers=0, names=("image", "mask", "second", "label")):
    """Return the batches that a training step would get."""
    loader = FastDataLoader(
        Images(*names), 3, num_workers=workers, transform=transform, on_device=on_device,
        staged="train" if on_device else None, seed=4,
    )  # fmt: skip
    if on_device:
        return [transform.apply(staged.batch, staged.draws) for staged in loader]
    return list(loader)


def assert_formed(result, plain, out, last) -> None:
    """Whether a result is the plain float32 one, converted by torch."""
    assert plain.dtype == torch.float32
    expected = plain if out is None else plain.to(DTYPES[out])
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)
    layout = torch.channels_last if last else torch.contiguous_format
    assert result.is_contiguous(memory_format=layout)


@each(("out", "last"), FORMS)
def test_called_on_images_the_result_is_the_plain_one_converted(out, last) -> None:
    plain = BatchTransform.from_albumentations(COMPOSE)
    formed = BatchTransform.from_albumentations(COMPOSE, out=out, channels_last=last)
    key = SampleKey(1, 2, 3)
    images, masks = formed(IMAGES, MASKS, key=key)
    expected = plain(IMAGES, MASKS, key=key)
    assert_formed(images, expected[0], out, last)
    assert torch.equal(masks, expected[1])
    assert masks.dtype == torch.uint8
    batch = {"image": IMAGES, "second": IMAGES}
    applied, unformed = formed(batch, key=key), plain(batch, key=key)
    for name in batch:
        assert_formed(applied[name], unformed[name], out, last)


@pytest.mark.cases(12)
@each(("out", "last"), FORMS)
@each("on_device", [False, True])
def test_behind_a_loader_the_result_is_the_plain_one_converted(out, last, on_device) -> None:
    plain, formed = (
        as_batch_transform(COMPOSE),
        as_batch_transform(COMPOSE, out=out, channels_last=last),
    )
    pairs = zip(batches(formed, on_device=on_device), batches(plain, on_device=False), strict=True)
    for batch, expected in pairs:
        assert batch.keys() == expected.keys()
        for name in ("image", "second"):
            assert_formed(batch[name], expected[name], out, last)
        assert torch.equal(batch["mask"], expected["mask"])
        assert torch.equal(batch["label"], expected["label"])


@each("on_device", [False, True])
def test_it_crosses_from_worker_processes_as_it_is(on_device) -> None:
    plain = as_batch_transform(COMPOSE)
    formed = as_batch_transform(COMPOSE, out="bfloat16", channels_last=True)
    pairs = zip(
        batches(formed, on_device=on_device, workers=2),
        batches(plain, on_device=False),
        strict=True,
    )
    for batch, expected in pairs:
        assert_formed(batch["image"], expected["image"], "bfloat16", True)


@each("on_device", [False, True])
def test_a_pipeline_that_stays_in_the_workers_or_skips_every_sample_is_converted_too(
    on_device,
) -> None:
    for middle in (A.ImageCompression(), A.HorizontalFlip(p=0)):
        compose = A.Compose([middle], p=1)
        transform = as_batch_transform(compose, out="float16")
        plain = as_batch_transform(compose)
        names = ("image", "mask", "label")
        pairs = zip(
            batches(transform, on_device=on_device, names=names),
            batches(plain, on_device=False, names=names),
            strict=True,
        )
        for batch, expected in pairs:
            assert batch["image"].dtype == torch.float16
            assert torch.equal(batch["image"], torch.as_tensor(expected["image"]).half())


@each("on_device", [False, True])
@each("way", ["options", "pipeline"])
def test_what_is_mixed_is_converted_behind_the_mixing(on_device, way) -> None:
    names = ("image", "label")
    compose = A.Compose([*COMPOSE.transforms])
    form = {"out": "bfloat16", "channels_last": True}
    plain = mixed(compose, MixUp(), num_classes=3)
    if way == "options":
        formed = mixed(compose, MixUp(), num_classes=3, **form)
    else:
        formed = mixed(as_batch_transform(compose, **form), MixUp(), num_classes=3)
    pairs = zip(
        batches(formed, on_device=on_device, names=names),
        batches(plain, on_device=on_device, names=names),
        strict=True,
    )
    for batch, expected in pairs:
        assert_formed(batch["image"], expected["image"], "bfloat16", True)
        assert torch.equal(batch["label"], expected["label"])


@each("shape", [(2, 3, 4, 5), (1, 1, 4, 5), (2, 3, 1, 1)])
@each("dtype", [None, *DTYPES.values()])
@each("last", [False, True])
def test_what_has_its_form_already_is_not_copied(shape, dtype, last) -> None:
    form = OutputForm(dtype=dtype, channels_last=last)
    once = convert_output(torch.randn(shape), form)
    assert convert_output(once, form) is once


def test_a_form_that_does_not_exist_is_refused() -> None:
    with pytest.raises(OptionsError, match="out is 'half'; choose one of float32, float16"):
        as_batch_transform(COMPOSE, out="half")
    with pytest.raises(TransformError, match="ToTensorV2"):
        as_batch_transform(A.Compose([A.HorizontalFlip()]), channels_last=True)
    with pytest.raises(TransformError, match="go with an albumentations Compose"):
        as_batch_transform(torch.nn.Identity(), out="float16")
    with pytest.raises(TransformError, match="go with an albumentations Compose"):
        as_batch_transform(as_batch_transform(COMPOSE), out="float16")


def test_a_form_needs_batches_to_convert() -> None:
    transform = as_batch_transform(COMPOSE, out="float16")
    with pytest.raises(OptionsError, match="converts whole batches"):
        list(FastDataLoader(Images("image"), None, transform=transform))

"""A pipeline that is called with batches on a GPU."""

from __future__ import annotations

import albumentations as A
import numpy as np
import pytest
import torch
from gpu.device import CUDA, needs_cuda

from lightning_fastdata import BatchTransform
from lightning_fastdata.types import SampleKey

pytestmark = needs_cuda

KEY = SampleKey(2, 0, 5)
RNG = np.random.default_rng(3)
IMAGES = torch.from_numpy(RNG.integers(0, 256, (6, 40, 48, 3), np.uint8))
MASKS = torch.from_numpy(RNG.integers(0, 9, (6, 40, 48), np.uint8))
HEAD = [A.RandomCrop(32, 32), A.HorizontalFlip(), A.RandomGamma()]
TAIL = [A.VerticalFlip(), A.Normalize(), A.ToTensorV2()]


@pytest.mark.parametrize("middle", [(), (A.ImageCompression(p=0.5),)])
def test_it_gives_what_the_cpu_gives_also_with_samples_that_visit_it(middle):
    aug = BatchTransform.from_albumentations(A.Compose([*HEAD, *middle, *TAIL]))
    images, masks = aug(IMAGES.to(CUDA), MASKS.to(CUDA), key=KEY)
    expected = aug(IMAGES, MASKS, key=KEY)
    assert images.device == masks.device == CUDA
    assert torch.equal(images.cpu(), expected[0])
    assert torch.equal(masks.cpu(), expected[1])


@pytest.mark.parametrize("images", [IMAGES[..., 0].contiguous(), IMAGES[..., 0].float() / 255])
def test_gray_images_without_a_dimension_for_channels_come_out_as_on_the_cpu(images):
    aug = BatchTransform.from_albumentations(A.Compose([*HEAD, A.RandomGamma(p=0.5)]))
    assert torch.equal(aug(images.to(CUDA), key=KEY).cpu(), aug(images, key=KEY))

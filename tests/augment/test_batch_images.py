"""The picture of a batch holds its images, as they are or as they were normalised."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from augment.parity import photographs
from misses import each

from lightning_fastdata.augment.batch_images import BatchImages
from lightning_fastdata.errors import BatchError

PHOTOS = torch.from_numpy(np.stack([*photographs(40, 60), *photographs(40, 60)]))


def batch_grid(batch, image=None, most=32):
    form = BatchImages(image=image)
    return form.grid(form.find(batch), most)


def tiles(page, height=40, width=60):
    """Return what lies in the grid, row by row."""
    down, across = (page.shape[0] + 2) // (height + 2), (page.shape[1] + 2) // (width + 2)
    assert page.shape == (down * (height + 2) - 2, across * (width + 2) - 2, 3)
    corners = [(y * (height + 2), x * (width + 2)) for y in range(down) for x in range(across)]
    return [page[top : top + height, left : left + width] for top, left in corners]


@each("count", [1, 2, 5, 6])
@each("form", ["hwc", "chw", "float", "dict", "alone"])
def test_every_image_is_in_the_picture_as_it_is(count, form):
    photos = PHOTOS[:count]
    batch = {
        "hwc": [photos, torch.arange(count)],
        "chw": (photos.permute(0, 3, 1, 2), torch.arange(count)),
        "float": (photos.permute(0, 3, 1, 2).float() / 255,),
        "dict": {"image": photos, "label": torch.arange(count)},
        "alone": photos,
    }[form]
    found = tiles(batch_grid(batch))
    for tile, photo in zip(found, photos.numpy(), strict=False):
        np.testing.assert_array_equal(tile, photo)
    # What is left of the last row is white.
    assert all((tile == 255).all() for tile in found[count:])
    assert len(found) - count < len(found) ** 0.5 + 1


def test_normalised_images_are_stretched_and_show_what_they_showed():
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    batch = ((PHOTOS / 255 - mean) / std).permute(0, 3, 1, 2)
    for half in (torch.float32, torch.bfloat16):
        found = tiles(batch_grid((batch.to(half), torch.arange(6))))
        for tile, photo in zip(found, PHOTOS.numpy(), strict=False):
            for channel in range(3):
                both = tile[..., channel].ravel(), photo[..., channel].ravel()
                assert np.corrcoef(*both)[0, 1] > 0.95


def test_gray_images_are_gray_and_more_channels_than_three_are_cut():
    gray = batch_grid((PHOTOS[..., 0], torch.arange(6)))
    assert (gray[..., 0] == gray[..., 2]).all()
    five = torch.cat([PHOTOS, PHOTOS[..., :2]], -1)
    np.testing.assert_array_equal(batch_grid((five,)), batch_grid((PHOTOS,)))


def test_at_most_so_many_and_the_named_field():
    batch = {"image": PHOTOS, "other": 255 - PHOTOS}
    page = batch_grid(batch, image="other", most=2)
    np.testing.assert_array_equal(tiles(page)[1], 255 - PHOTOS[1].numpy())


@pytest.mark.parametrize("batch", [torch.arange(6), {"image": torch.arange(6)}, (PHOTOS[:0],)])
def test_a_batch_without_images_says_what_it_holds(batch):
    with pytest.raises(BatchError):
        batch_grid(batch)

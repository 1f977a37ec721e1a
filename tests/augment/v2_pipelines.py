"""Photographs and pipelines of torchvision v2, and what v2 itself makes of them."""

from __future__ import annotations

import torch
from augment.parity import photographs
from torchvision import tv_tensors

from lightning_fastdata.randomness.seeds import torch_seed
from lightning_fastdata.tree import replace_leaves
from lightning_fastdata.types import SampleKey

torch.set_num_threads(1)


def images(count, height, width, dtype=torch.uint8):
    """Return different photographs ``[3, height, width]`` as v2's images."""
    made = []
    for number in range(count):
        pixels = photographs(height, width + number)[number % 3][:, number:]
        image = torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous()
        image = image if dtype == torch.uint8 else image.to(dtype) / 255
        made.append(tv_tensors.Image(image))
    return made


def sample(image, number, form="tuple"):
    """Return a sample as datasets return them."""
    height, width = image.shape[-2:]
    mask = tv_tensors.Mask((image.as_subclass(torch.Tensor)[:1] * 1).to(torch.uint8) // 64)
    if form == "tuple":
        return image, number
    if form == "tensor":
        return image.as_subclass(torch.Tensor), torch.tensor(number)
    if form == "masks":
        return {"label": torch.tensor(number), "image": image, "mask": mask}
    edge = torch.tensor([[2.0, 3, 20, 18], [5, 5, 12, 30], [0, 0, 3, 3]])
    boxes = tv_tensors.BoundingBoxes(edge, format="XYXY", canvas_size=(height, width))
    target = {
        "boxes": boxes,
        "labels": torch.arange(3),
        "masks": tv_tensors.Mask(mask.repeat(3, 1, 1)),
    }
    if hasattr(tv_tensors, "KeyPoints"):  # newer than some that are supported
        points = edge[:, :2].clone()
        target["points"] = tv_tensors.KeyPoints(points, canvas_size=(height, width))
    return image, target


def samples_of(count, height, width, form="tuple", dtype=torch.uint8):
    """Return different samples whose images have one size."""
    given = images(count, height, width, dtype)
    return [sample(image, number, form) for number, image in enumerate(given)]


def keys(count, *, seed=5, epoch=2):
    return [SampleKey(seed, epoch, index) for index in range(count)]


def eager(pipeline, samples, own_keys=None):
    """Return what v2 makes of samples, with torch's generator seeded by each one's key."""
    made = []
    for one, key in zip(samples, own_keys or keys(len(samples)), strict=True):
        torch.manual_seed(torch_seed(key))
        made.append(pipeline(copied(one)))
    return made


def worked(worker, samples):
    """Return what a worker makes of samples, and what it leaves to a device."""
    return tuple(zip(*map(worker, map(copied, samples), keys(len(samples))), strict=True))


def copied(item):
    """Return a sample in memory of its own."""
    return replace_leaves(item, lambda _, v: v.clone() if isinstance(v, torch.Tensor) else v)


def leaves_of(item):
    found = []
    replace_leaves(item, lambda path, value: found.append((path, value)), depth=-1)
    return found


def assert_same(made, wanted, *, types=True, floats=0.0):
    """Two samples or batches are equal to the bit, with their types.

    ``floats``: by how much floating point images may differ, except for a few pixels, at which what
    has a threshold may jump.
    """
    ours, theirs = leaves_of(made), leaves_of(wanted)
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (path, one), (_, other) in zip(ours, theirs, strict=True):
        if not isinstance(other, torch.Tensor):
            assert one == other, path
            continue
        assert not types or type(one) is type(other), path
        found, right = one.as_subclass(torch.Tensor), other.as_subclass(torch.Tensor)
        assert found.dtype == right.dtype, path
        assert found.shape == right.shape, path
        if floats and right.is_floating_point():
            off = ((found - right).abs() > floats).double()
            assert off.numel() == 0 or off.mean() < 0.005, path
        else:
            assert torch.equal(found, right), path

"""What datasets and collations do to a tensor that waits: it still waits, or comes out the same."""

import os

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import albumentations as A
import numpy as np
import pytest
import torch
from augment.test_dataset_styles import Reading, assert_left_over_and_the_same
from torchvision.transforms import functional as vision
from torchvision.transforms.v2 import functional as vision2

MEAN = torch.tensor([0.4, 0.5, 0.6])[:, None, None]


def bytes_only(*middle):
    return A.Compose([A.RandomCrop(32, 32), A.HorizontalFlip(), *middle, A.ToTensorV2()])


def reading(change):
    def read(dataset, image, index):
        return change(dataset.transform(image=image)["image"]), index

    return Reading(read, transform=bytes_only())


STAY = {
    "float and a division": lambda t: t.float() / 255,
    "to and div": lambda t: t.to(torch.float32).div(255),
    "a division by a float": lambda t: t / 255.0,
    "times a fraction, doubled and moved": lambda t: t.type(torch.float32) * (1 / 255) * 2 - 1,
    "torch's functions": lambda t: torch.sub(torch.div(t, 255), 0.5),
    "in place": lambda t: t.float().div_(255).sub_(MEAN).div_(MEAN),
    "augmented assignment": lambda t: in_place(t.float()),
    "means and deviations": lambda t: (t / 255 - MEAN) / MEAN,
    "channels last": lambda t: t.permute(1, 2, 0).contiguous().float() / 255,
    "there and back": lambda t: t.permute(1, 2, 0).float().permute(2, 0, 1) / 255,
    "transposed": lambda t: t.transpose(1, 2),
    "one more dimension": lambda t: t.unsqueeze(0).double() / 3,
    "cloned": lambda t: t.clone().detach().cpu().to("cpu").long(),
    "half": lambda t: (t / 255).half(),
    "torchvision": lambda t: vision.normalize(
        vision.convert_image_dtype(t, torch.float32), [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]
    ),
    "torchvision 2": lambda t: vision2.normalize(
        vision2.to_dtype(t, torch.float32, scale=True), [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]
    ),
}


def in_place(tensor):
    tensor /= 255
    tensor -= 0.5
    return tensor


@pytest.mark.parametrize("change", STAY)
def test_what_can_be_noted_leaves_the_pixels_to_the_device(change):
    assert_left_over_and_the_same(reading(STAY[change]))


@pytest.mark.parametrize("change", ["means and deviations", "channels last", "half", "transposed"])
def test_so_it_does_in_a_collation_before_and_behind_the_stack(change):
    def before(samples):
        return torch.stack([STAY[change](image) for image, _ in samples])

    assert_left_over_and_the_same(reading(lambda t: t), collate_fn=before)


BEHIND = {
    "divided": lambda b: b.float() / 255,
    "means of a batch": lambda b: (b / 255 - MEAN[None]) / MEAN,
    "channels last": lambda b: b.permute(0, 2, 3, 1).float(),
    "transposed": lambda b: b.transpose(-1, -2) * 0.5,
    "unsqueezed": lambda b: b.unsqueeze(1) / 2,
}


@pytest.mark.parametrize("change", BEHIND)
def test_behind_the_stack_too(change):
    def behind(samples):
        return BEHIND[change](torch.stack([image for image, _ in samples]))

    assert_left_over_and_the_same(reading(lambda t: t), collate_fn=behind)


def two_of(tensor):
    """Two tensors of one, and what is written to one of them."""
    half = tensor / 2
    whole = tensor.float()
    whole += 1
    return half, whole, tensor


def seen_by_a_view(tensor):
    values = tensor.float()
    turned = values.permute(1, 2, 0)
    values.mul_(2)
    return values, turned


def looked_at_between(tensor):
    first = tensor / 2
    second = first - 1
    total = float(first.mean())
    first.mul_(total)
    return first, second


def other_operand(tensor):
    number = torch.ones(3, 1, 1)
    scaled = tensor / number
    number.mul_(100)
    return scaled


ORDERS = {
    "two of one": (two_of, True),
    "a view sees what is written": (seen_by_a_view, False),
    "looked at between": (looked_at_between, False),
    "an operand is written to": (other_operand, True),
}


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_written_is_seen_by_those_that_would_see_it(order):
    change, left_over = ORDERS[order]
    assert_left_over_and_the_same(reading(change), left_over=left_over)


LEAVE = {
    "by the batch": lambda b: b / torch.arange(1, len(b) + 1)[:, None, None, None],
    "batch dimension moved": lambda b: b.permute(1, 0, 2, 3),
    "rounded": lambda b: torch.div(b, 3, rounding_mode="floor"),
    "to bytes": lambda b: (b / 3).to(torch.uint8),
    "half by a number": lambda b: b.half() / 3,
    "a gradient": lambda b: b.float().requires_grad_().detach(),
}


@pytest.mark.parametrize("change", LEAVE)
def test_what_cannot_be_noted_is_done_to_the_values(change):
    def collate(samples):
        return LEAVE[change](torch.stack([image for image, _ in samples]))

    assert_left_over_and_the_same(reading(lambda t: t), left_over=False, collate_fn=collate)


def listed(samples):
    return tuple(zip(*samples, strict=True))


def test_images_by_themselves_wait_each_for_itself():
    assert_left_over_and_the_same(reading(lambda t: t.float() / 255), collate_fn=listed)


def test_so_do_images_of_several_sizes():
    def read(dataset, image, index):
        return dataset.transform(image=image[: 20 + index % 3])["image"] / 255, {"number": index}

    pipeline = A.Compose([A.HorizontalFlip(), A.RandomBrightnessContrast(), A.ToTensorV2()])
    assert_left_over_and_the_same(Reading(read, transform=pipeline), collate_fn=listed)


def test_and_images_of_several_tails_beside_a_stack():
    def read(dataset, image, index):
        image = dataset.transform(image=image)["image"]
        return image if index % 2 else image / 255, {"stacked": image.float()}

    def collate(samples):
        images, others = zip(*samples, strict=True)
        return list(images), torch.stack([other["stacked"] for other in others])

    assert_left_over_and_the_same(Reading(read, transform=bytes_only()), collate_fn=collate)


def test_numbers_are_those_of_each_pixel_of_all_bytes():
    image = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, 2)

    def read(dataset, _, index):
        return dataset.transform(image=image)["image"] / (index + 0.1)

    pipeline = A.Compose([A.HorizontalFlip(), A.ToTensorV2()])
    assert_left_over_and_the_same(Reading(read, transform=pipeline), batch_size=1)

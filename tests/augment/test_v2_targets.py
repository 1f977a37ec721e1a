"""Masks, boxes, keypoints and labels go with their image, as v2 does it, in any structure."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass

import numpy as np
import PIL.Image
import pytest
import torch
from augment.test_v2_pipelines import carried_out, check, check_each
from augment.v2_pipelines import assert_same, copied, eager, images, keys, samples_of
from torch import nn
from torchvision import tv_tensors
from torchvision.datasets import VOCDetection, wrap_dataset_for_transforms_v2
from torchvision.transforms import v2

from lightning_fastdata import FastDataWarning, SampleKey, as_batch_transform
from lightning_fastdata.errors import BatchError

FLOAT = v2.ToDtype(torch.float32, scale=True)
DETECTION = {
    "hflip": [
        v2.ToImage(),
        v2.RandomHorizontalFlip(p=0.5),
        v2.ToDtype(torch.float32, scale=True),
        v2.SanitizeBoundingBoxes(),
        v2.ToPureTensor(),
    ],
    "lsj": [
        v2.ToImage(),
        v2.ScaleJitter(target_size=(48, 48), antialias=True),
        v2.RandomCrop(
            40, pad_if_needed=True, fill={tv_tensors.Image: (123, 117, 104), "others": 0}
        ),
        v2.RandomHorizontalFlip(p=0.5),
        v2.ToDtype(torch.float32, scale=True),
        v2.ClampBoundingBoxes(),
        v2.SanitizeBoundingBoxes(),
    ],
    "ssd": [
        v2.RandomPhotometricDistort(),
        v2.RandomZoomOut(fill={tv_tensors.Image: (123, 117, 104), "others": 0}),
        v2.RandomIoUCrop(),
        v2.RandomHorizontalFlip(p=0.5),
        v2.SanitizeBoundingBoxes(),
        v2.ToDtype(torch.float32, scale=True),
    ],
    "moved": [
        v2.RandomAffine(20, (0.1, 0.1), (0.8, 1.2)),
        v2.RandomPerspective(0.3),
        v2.ConvertBoundingBoxFormat("CXCYWH"),
        v2.RandomRotation(20, expand=True),
        v2.Resize((32, 36)),
        v2.RandomVerticalFlip(),
        v2.SanitizeBoundingBoxes(),
    ],
}


@pytest.mark.parametrize("name", DETECTION)
def test_detection_as_torchvisions_references_write_it(name):
    samples = samples_of(8, 40, 44, "boxes")
    # Labels of boxes that were removed are removed with them.
    for _, target in check_each(v2.Compose(DETECTION[name]), samples):
        assert len(target["labels"]) == len(target["boxes"])


@pytest.mark.parametrize("form", ["XYXY", "XYWH", "CXCYWH"])
def test_boxes_of_all_formats_ride_beside_deferred_images(form):
    samples = samples_of(4, 40, 44, "boxes")
    for _, target in samples:
        target["boxes"] = v2.functional.convert_bounding_box_format(
            target["boxes"], new_format=form
        )
        del target["masks"]
    pipeline = v2.Compose([v2.Resize((40, 44)), v2.RandomHorizontalFlip(), v2.RandomRotation(9)])
    check(pipeline, samples)


def test_several_images_share_their_draws():
    one, two = images(4, 40, 44), images(4, 40, 44)
    samples = [
        {"near": a, "far": v2.functional.invert(b), "truth": tv_tensors.Mask(a[0].clone())}
        for a, b in zip(one, two, strict=True)
    ]
    pipeline = v2.Compose(
        [v2.CenterCrop(36), v2.RandomHorizontalFlip(), v2.RandomAffine(30), v2.ColorJitter(0.5)]
    )
    check(pipeline, samples)


VOC = """<annotation><size><width>44</width><height>40</height><depth>3</depth></size>
<object><name>dog</name><bndbox><xmin>4</xmin><ymin>5</ymin><xmax>30</xmax><ymax>33</ymax></bndbox>
</object><object><name>cat</name><bndbox><xmin>0</xmin><ymin>0</ymin><xmax>2</xmax><ymax>2</ymax>
</bndbox></object></annotation>"""


def test_a_wrapped_dataset_of_torchvision_is_taken_as_it_is(tmp_path):
    folder = tmp_path / "VOCdevkit" / "VOC2012"
    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / name).mkdir(parents=True)
    names = [f"photo{number}" for number in range(3)]
    (folder / "ImageSets/Main/train.txt").write_text("\n".join(names))
    for name, image in zip(names, images(3, 40, 44), strict=True):
        (folder / f"Annotations/{name}.xml").write_text(VOC)
        v2.functional.to_pil_image(image).save(folder / f"JPEGImages/{name}.jpg")
    dataset = wrap_dataset_for_transforms_v2(VOCDetection(tmp_path, image_set="train"))
    samples = [dataset[index] for index in range(3)]
    assert type(samples[0][1]["boxes"]) is tv_tensors.BoundingBoxes
    check_each(v2.Compose([*DETECTION["ssd"][1:5], v2.ToImage(), *DETECTION["lsj"][1:]]), samples)


def test_a_segmentation_of_pil_images_is_moved():
    samples = []
    for image in images(4, 40, 44):
        mask = tv_tensors.Mask(PIL.Image.fromarray(image[0].numpy() // 64))
        samples.append((v2.functional.to_pil_image(image), mask))
    pipeline = v2.Compose(
        [
            v2.RandomResize(30, 50),
            v2.RandomHorizontalFlip(0.5),
            v2.ToImage(),
            v2.RandomCrop(28, pad_if_needed=True, fill={tv_tensors.Mask: 255, "others": 0}),
            v2.ToDtype(
                {tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None},
                scale=True,
            ),
            v2.Normalize([0.5] * 3, [0.2] * 3),
        ]
    )
    check(pipeline, samples)


@pytest.mark.parametrize("begun", [[], [v2.ToImage()]])
@pytest.mark.parametrize("image", [PIL.Image.fromarray, v2.functional.to_image])
@pytest.mark.parametrize(
    "mask",
    [
        PIL.Image.fromarray,
        np.asarray,
        lambda mask: mask[:, :, None],
        lambda mask: np.stack([mask, mask]),
        torch.from_numpy,
        v2.functional.to_image,
    ],
)
def test_what_is_said_to_be_a_mask_is_one_whatever_it_was(mask, image, begun):
    rows = images(1, 40, 44)[0].permute(1, 2, 0).numpy()
    classes = rows[:, :, 0] // 64
    given = image(rows), mask(classes)
    pipeline = v2.Compose(
        [*begun, v2.RandomResizedCrop(24), v2.ColorJitter(0.5), v2.ToImage(), v2.RandomRotation(30)]
    )
    transform = as_batch_transform(pipeline, mask=1)
    transform.check_sample(given)
    typed = given[0], tv_tensors.Mask(classes)
    [wanted] = eager(pipeline, [typed])
    fitted = transform.for_samples([given] * 2)
    for worker in (transform.in_worker(on_device=False), fitted.in_worker(on_device=True)):
        made, tape = worker(given, keys(1)[0])
        [(photo, moved)] = worker.finish_each([made], [tape])[0] if tape is not None else [made]
        assert_same(photo, wanted[0], types=False)
        assert type(moved) is tv_tensors.Mask
        for one in moved.reshape(-1, *moved.shape[-2:]):
            assert_same(one, wanted[1], types=False)


def test_an_image_behind_other_plain_tensors_is_found():
    """Of plain tensors v2 takes the first one, which is no image here."""
    pipeline = v2.Compose([v2.CenterCrop(24), v2.RandomHorizontalFlip(), v2.RandomInvert()])
    plain = [image.as_subclass(torch.Tensor) for image in images(4, 30, 30)]
    samples = [{"label": torch.tensor([n, 7]), "image": image} for n, image in enumerate(plain)]
    batch, _ = carried_out(pipeline, samples)
    assert_same(batch["image"], torch.stack(eager(pipeline, plain)), types=False)
    assert batch["label"].tolist() == [[0, 7], [1, 7], [2, 7], [3, 7]]


@pytest.mark.parametrize("begun", [[], [v2.ToImage()]])
@pytest.mark.parametrize("where", [None, 0])
def test_a_gray_image_without_channels_keeps_the_dimensions_that_v2_gives_it(begun, where):
    given = [(image[0].as_subclass(torch.Tensor), torch.arange(3.0)) for image in images(4, 30, 40)]
    pipeline = v2.Compose([*begun, v2.RandomHorizontalFlip(), v2.RandomCrop(24), FLOAT])
    wanted = eager(pipeline, given)
    transform = as_batch_transform(pipeline, image=where).for_samples(given)
    for worker in (transform.in_worker(on_device=False), transform.in_worker(on_device=True)):
        made, tapes = zip(*map(worker, given, keys(4)), strict=True)
        done = made if tapes[0] is None else worker.finish_each(made, tapes)[0]
        for one, other in zip(done, wanted, strict=True):
            assert_same(one[0], other[0], types=False)


@pytest.mark.parametrize("places", [{"mask": 0}, {"mask": 0, "image": 1}])
def test_a_mask_before_a_gray_image_leaves_it_its_dimensions(places):
    photos = [image[0].as_subclass(torch.Tensor) for image in images(4, 30, 40)]
    pipeline = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(24), FLOAT])
    wanted = eager(pipeline, [(tv_tensors.Mask(photo // 64), photo) for photo in photos])
    worker = as_batch_transform(pipeline, **places).in_worker(on_device=False)
    for photo, key, (mask, moved) in zip(photos, keys(4), wanted, strict=True):
        made = worker((photo // 64, photo), key)[0]
        assert_same(made[0], mask, types=False)
        assert_same(made[1], moved, types=False)


def test_functions_get_the_image_where_nothing_else_is_to_be_transformed():
    first = [v2.CenterCrop(24), v2.RandomHorizontalFlip()]
    pipeline = v2.Compose([*first, lambda image: image / 255, v2.RandomInvert(1)])
    samples = samples_of(4, 30, 30)
    batch, _ = carried_out(pipeline, samples)
    alone = eager(pipeline, [image for image, _ in samples])
    assert_same(batch[0], torch.stack(alone), types=False)
    assert batch[1].tolist() == [0, 1, 2, 3]


MASK, BOXES = tv_tensors.Mask(torch.arange(900).view(30, 30)), torch.tensor([[2.0, 3, 9, 8]])
BOXES = tv_tensors.BoundingBoxes(BOXES, format="XYXY", canvas_size=(30, 30))


@pytest.mark.parametrize("form", [torch.Tensor, tv_tensors.Image])
@pytest.mark.parametrize(
    ("made", "how"),
    [
        (lambda image: (image, MASK), {}),
        (lambda image, mask=MASK: (image, mask), {"mask": 1}),
        (lambda image: (BOXES, image), {}),
        (lambda image: {"image": image, "rest": [MASK, BOXES]}, {}),
        (lambda image: {"number": torch.tensor([7, 8]), "image": image, "boxes": BOXES}, {}),
    ],
)
def test_functions_get_the_image_alone_beside_what_v2_moves_with_it(form, made, how):
    [photo], flip = images(1, 30, 30), v2.RandomHorizontalFlip(1.0)
    transform = as_batch_transform(v2.Compose([halved, nn.Sequential(flip, nn.Identity())]), **how)
    given = photo.as_subclass(form)
    sample = made(given, MASK.as_subclass(torch.Tensor)) if how else made(given)
    with pytest.warns(FastDataWarning, match="it is called with the image of a sample alone"):
        transform.check_sample(sample)
    wanted = flip(made(tv_tensors.Image(halved(photo))))
    for on_device in (False, True):
        worker = transform.in_worker(on_device=on_device)
        left, tape = worker(copied(sample), keys(1)[0])
        [done] = worker.finish_each([left], [tape])[0] if on_device else [left]
        assert_same(done, wanted, types=False)


def halved(image):
    return image // 2


def test_a_field_of_the_images_size_without_a_role_is_an_error():
    pipeline = v2.Compose([v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)])
    image = images(1, 30, 30)[0]
    depth = torch.zeros(30, 30)
    for field, named in ({"image": image, "depth": depth}, "depth"), ((image, depth), 1):
        worker = as_batch_transform(pipeline).in_worker(on_device=True)
        with pytest.raises(BatchError, match=r"tv_tensors\.Mask.*stays="):
            worker(field, keys(1)[0])
        stays = as_batch_transform(pipeline, stays=named).in_worker(on_device=False)
        stays(field, keys(1)[0])
        masked = as_batch_transform(pipeline, mask=named).in_worker(on_device=False)
        made, _ = masked(field, keys(1)[0])
        assert type(made[named]) is tv_tensors.Mask


@pytest.mark.parametrize("on_device", [False, True])
def test_a_table_before_an_image_is_not_taken_for_the_image(on_device):
    [image] = images(1, 30, 30)
    plain, table, flip = (
        image.as_subclass(torch.Tensor),
        torch.rand(10, 8),
        v2.RandomVerticalFlip(1),
    )
    for sample in ((table, plain), (torch.tensor(3), table, plain)):
        worker = as_batch_transform(flip).in_worker(on_device=on_device)
        with pytest.raises(BatchError, match=r"Which field .* is the image\?"):
            worker(sample, keys(1)[0])
        worker = as_batch_transform(flip, image=-1).in_worker(on_device=on_device)
        left, tape = worker(sample, keys(1)[0])
        [done] = worker.finish_each([left], [tape])[0]
        assert torch.equal(done[-1], plain.flip(-2))
        assert torch.equal(done[-2], table)


@pytest.mark.parametrize("on_device", [False, True])
def test_what_is_to_stay_and_v2_would_transform_is_an_error(on_device):
    [image] = images(1, 30, 30)
    plain = image.as_subclass(torch.Tensor)
    photo = v2.functional.to_pil_image(image)
    kinds = [plain, tv_tensors.Mask(plain[0]), tv_tensors.Image(plain), photo]
    for stays in [*kinds, {"masks": kinds[1]}]:
        transform = as_batch_transform(v2.Compose([FLOAT]), stays="stays")
        worker = transform.in_worker(on_device=on_device)
        with pytest.raises(BatchError, match=r"'stays' is to stay .* a plain tensor or an array"):
            worker({"stays": stays, "image": plain}, keys(1)[0])
    made, _ = worker({"stays": plain, "image": tv_tensors.Image(plain)}, keys(1)[0])
    assert made["stays"] is plain


def test_arrays_that_v2_would_pass_through_are_refused():
    transform = as_batch_transform(v2.Compose([v2.RandomHorizontalFlip()]))
    with pytest.raises(BatchError, match=r"Begin the pipeline with v2\.ToImage"):
        transform.check_sample((images(1, 9, 9)[0].permute(1, 2, 0).numpy(), 3))


def turned(image):
    return image.permute(2, 0, 1)


@pytest.mark.parametrize("on_device", [False, True])
def test_tensors_with_their_channels_last_are_refused_where_v2_would_take_rows_for_them(on_device):
    last = images(1, 30, 30)[0].as_subclass(torch.Tensor).permute(1, 2, 0)
    flip, key = v2.RandomHorizontalFlip(1.0), keys(1)[0]
    for steps in ([flip], [FLOAT, v2.Normalize([0.5], [0.5])], [v2.RandomCrop(9), turned]):
        transform = as_batch_transform(v2.Compose(steps))
        with pytest.raises(
            BatchError, match=r"channels last, and (Random|Norm)\w+ takes \[C, H, W"
        ):
            transform.check_sample(last)
        with pytest.raises(BatchError, match="channels last"):
            transform.in_worker(on_device=on_device)(last, key)
    for steps in ([FLOAT, v2.RandomInvert(1.0)], [FLOAT, turned, flip]):
        pipeline = v2.Compose(steps)
        as_batch_transform(pipeline).check_sample(last)
        worker = as_batch_transform(pipeline).in_worker(on_device=on_device)
        made, tape = worker(last, key)
        [done] = worker.finish_each([made], [tape])[0] if on_device else [made]
        assert_same(done, pipeline(last), types=False)


@pytest.mark.parametrize("side", [1, 3, 4])
def test_small_patches_of_many_bands_have_them_first(side):
    patch = torch.arange(200 * side * side).view(200, side, side)
    flip = as_batch_transform(v2.RandomHorizontalFlip(1.0))
    flip.check_sample((patch, 3))
    made, _ = flip.in_worker(on_device=True)((patch, 3), keys(1)[0])
    assert torch.equal(made[0], patch.flip(-1))


def shifted(value):
    return value + 1 if isinstance(value, int) else value


def test_a_lambda_is_given_the_whole_sample_and_a_function_the_image_alone_with_a_warning():
    image = torch.zeros(3, 8, 8, dtype=torch.uint8)
    whole = as_batch_transform(v2.Compose([v2.RandomHorizontalFlip(1.0), v2.Lambda(shifted, int)]))
    whole.check_sample((image, 4))
    assert whole.in_worker(on_device=False)((image, 4), SampleKey(0, 0, 0))[0][1] == 5
    alone = as_batch_transform(v2.Compose([v2.RandomHorizontalFlip(1.0), lambda x: x / 255]))
    with pytest.warns(FastDataWarning, match="image of a sample alone"):
        alone.check_sample((image, 4))
    made, label = alone.in_worker(on_device=False)((image, 4), SampleKey(0, 0, 0))[0]
    assert (made.dtype, label) == (torch.float32, 4)


@dataclass
class Shot:
    image: torch.Tensor


def test_a_sample_in_which_v2_finds_nothing_is_refused():
    flip = as_batch_transform(v2.RandomHorizontalFlip(1.0))
    image = torch.zeros(3, 8, 8)
    converted = as_batch_transform(v2.Compose([v2.ToImage(), v2.RandomHorizontalFlip(1.0)]))
    # torch's own pytree, by which v2 looks, takes other mappings for leaves.
    for given in (Shot(image), {"x": 1.0}, ("text", 4), UserDict(image=image, label=3)):
        for transform in (flip, converted):
            with pytest.raises(BatchError, match="nothing to transform"):
                transform.check_sample(given)
            transform.in_worker(on_device=True)(given, SampleKey(0, 0, 0))


def test_an_array_beside_a_mask_moves_with_it_once_it_is_converted():
    samples = [
        {"image": image.permute(1, 2, 0).numpy(), "mask": tv_tensors.Mask(image[0])}
        for image in images(4, 30, 30)
    ]
    check(v2.Compose([v2.ToImage(), v2.RandomHorizontalFlip(), v2.RandomCrop(20)]), samples)
    late = as_batch_transform(v2.Compose([v2.RandomHorizontalFlip(), v2.ToImage()]))
    with pytest.raises(BatchError, match="no role"):
        late.check_sample(samples[0])


def test_what_v2_leaves_behind_is_refused_in_whatever_it_lies():
    transform = as_batch_transform(v2.RandomHorizontalFlip(1.0))
    image, mask = torch.rand(3, 8, 8), torch.zeros(8, 8)
    typed = tv_tensors.Mask(mask)
    for refused in (
        {"input": {"image": image, "mask": mask}, "id": 3},
        {"images": [image, image.clone()]},
        (image, [typed, mask]),
        ({"image": image}, {"masks": [mask]}),
        (tv_tensors.Image(image), Shot(typed)),
        (tv_tensors.Image(image), {"target": UserDict(mask=typed)}),
    ):
        with pytest.raises(BatchError, match=r"no role.*as tv_tensors\.Mask"):
            transform.check_sample(refused)
    for taken in ({"input": {"image": image, "mask": typed}}, (image, [typed, torch.zeros(8)])):
        transform.check_sample(taken)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("last", [v2.RandomInvert(), v2.ElasticTransform()])
def test_what_writes_in_place_leaves_the_dataset_as_it_is(on_device, last):
    """As in the workers of a DataLoader, whose memory is their own in each epoch."""
    kept = images(1, 30, 30, torch.float32)[0]
    written = v2.Normalize([0.5], [0.5], inplace=True), v2.RandomErasing(1.0, inplace=True)
    pipeline = v2.Compose([v2.CenterCrop(30), *written, last])
    for number in (0, 1):
        [wanted] = eager(pipeline, [kept], keys(1, epoch=number))
        worker = as_batch_transform(pipeline).in_worker(on_device=on_device)
        before = kept.clone()
        made, tape = worker(kept, keys(1, epoch=number)[0])
        [done] = worker.finish_each([made], [tape])[0] if on_device else [made]
        assert_same(done, wanted, floats=1e-5)
        assert torch.equal(kept, before)


def test_keypoints_that_a_collated_batch_has_lost_are_warned_of():
    batch = {"image": torch.zeros(2, 3, 8, 8), "keypoints": torch.zeros(2, 5, 2)}
    with pytest.warns(FastDataWarning, match="as keypoints are"):
        as_batch_transform(v2.RandomHorizontalFlip(1.0)).apply_unprepared(batch, SampleKey(0, 0, 0))

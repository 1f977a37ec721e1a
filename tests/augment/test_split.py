"""Operations that need real pixels, anywhere in a pipeline, change nothing about its result."""

from __future__ import annotations

import copy
import warnings

import albumentations as A
import cv2
import numpy as np
import pytest
from augment.batches import alike
from augment.own_transforms import HorizontalFlip, Pad, RollByBrightness
from augment.test_trees import EXACTLY, HEADS, OPTIONS, SEEDS, TAILS
from augment.trees import SIDE, compare, some_samples, targets, trees
from hypothesis import given
from hypothesis import strategies as st
from misses import each
from thoroughness import max_examples

from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.types import SampleKey


class Applies(RollByBrightness):
    """Takes the sample as a whole."""

    def apply_with_params(self, params, *args, **kwargs):
        result = super().apply_with_params(params, *args, **kwargs)
        if result.get("mask") is not None:
            result["image"] = result["image"] ^ (result["mask"] % 2)[..., None]
        return result


class Calls(RollByBrightness):
    """Has a way of its own to be called."""

    def __call__(self, *args, force_apply=False, **data):
        if self.py_random.random() < self.p:
            data["image"] = np.ascontiguousarray(255 - data["image"])
        return data


def halved(image, **_):
    return image // 2


def shortened(image, **_):
    return np.ascontiguousarray(image[:-2])


BARRIERS = [
    lambda p: RollByBrightness(p=p),
    lambda p: Pad(p=p),
    lambda p: Applies(p=p),
    lambda p: Calls(p=p),
    lambda p: HorizontalFlip(p=p),
    lambda p: A.Lambda(image=halved, name="halved", p=p),
    lambda p: A.ImageCompression(quality_range=(40, 60), p=p),
    lambda p: A.GlassBlur(max_delta=2, iterations=1, p=p),
    lambda p: A.RandomBrightnessContrast(brightness_by_max=False, p=p),
    lambda p: A.MaskDropout((1, 2), p=p),
    lambda p: A.ConstrainedCoarseDropout((1, 2), (0.2, 0.4), (0.2, 0.4), mask_indices=[1, 2], p=p),
    lambda p: A.CropNonEmptyMaskIfExists(SIDE - 4, SIDE - 4, p=p),
    lambda p: A.SelectiveChannelTransform([A.InvertImg(p=0.5)], channels=(0, 2), p=p),
]
SOME_BARRIERS = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from(BARRIERS), st.sampled_from([0.3, 1.0])),
    max_size=3,
)


def with_barriers(tree, barriers):
    tree = list(tree)
    for position, make, p in barriers:
        tree.insert(position % (len(tree) + 1), make(p))
    return tree


@max_examples(100)
@given(HEADS, trees(EXACTLY), SOME_BARRIERS, TAILS, OPTIONS, SEEDS)
def test_any_pipeline_also_split_by_barriers_gives_what_the_cpu_gives(
    head, tree, barriers, tail, options, seed
):
    # SelectiveChannelTransform cannot save what its transforms drew.
    options |= {"save_applied_params": options["save_applied_params"] and not barriers}
    operations = [*head(), *with_barriers(tree, barriers), *(make() for make in tail)]
    compare(A.Compose(operations, **options), some_samples(options=options), seed=seed)


@max_examples(40)
@given(trees([*EXACTLY, *BARRIERS[:9]], 6), targets(), SEEDS)
def test_barriers_within_containers_leave_boxes_and_keypoints_as_the_cpu_does(tree, formats, seed):
    compare(A.Compose(tree, **formats), some_samples(options=formats), seed=seed)


def plain(count=4, **more):
    return [sample | more for sample in some_samples(count)]


def test_pipelines_that_return_their_parameters_return_albumentations_own():
    operations = [
        A.Transpose(p=0.5),
        A.CenterCrop(40, 40),
        A.D4(p=1),
        A.Affine(rotate=(-30, 30), p=1),
    ]
    saving = A.Compose(operations, save_applied_params=True)
    transform, wanted, _ = compare(saving, plain(), pixels=False)
    assert all(one["applied_transforms"] for one in wanted)
    where = {place.name: place for place in transform.plan.placements}
    assert where["D4"].where == where["Affine"].where == "device"


def test_a_replay_says_what_was_done_and_does_it_again():
    pipeline = A.ReplayCompose(
        [
            A.HorizontalFlip(p=0.5),
            A.OneOf([A.RandomGamma(p=1), A.VerticalFlip(p=1)], p=0.8),
            A.CoarseDropout(p=0.5),
        ]
    )
    transform, wanted, got = compare(pipeline, plain(6))
    assert all(place.where == "device" for place in transform.plan.placements)
    for sample, want, done in zip(plain(6), wanted, got, strict=True):
        again = A.ReplayCompose.replay(want["replay"], image=sample["image"], mask=sample["mask"])
        assert np.array_equal(again["image"], np.asarray(done["image"]))
        assert np.array_equal(again["mask"], np.asarray(done["mask"]))


def test_a_pipeline_made_to_replay_runs_in_the_worker():
    first = A.ReplayCompose([A.HorizontalFlip(p=1), A.GaussNoise(p=1)])
    saved = first(image=plain(1)[0]["image"])["replay"]
    replaying = A.Compose([A.ReplayCompose._restore_for_replay(saved), A.VerticalFlip(p=0.5)])
    transform, _, _ = compare(replaying, plain())
    assert not transform.plan.defers
    assert "replays what another one has drawn" in transform.explain()


@each("as_array", [False, True])
def test_masks_of_instances_are_moved_while_their_image_is_left_to_the_device(as_array):
    samples = plain(5)
    for number, sample in enumerate(samples):
        masks = [np.full((SIDE, SIDE), one, np.uint8).cumsum(0) for one in range(number)]
        masks = [one.astype(np.uint8) for one in masks] or [np.zeros((SIDE, SIDE), np.uint8)]
        sample["masks"] = np.stack(masks) if as_array else masks
    operations = [
        A.VerticalFlip(p=0.7),
        A.Affine(rotate=(-40, 40), interpolation=0, p=1),
        A.RandomGamma(p=0.5),
    ]
    transform, _, _ = compare(A.Compose(operations), samples)
    assert [place.where for place in transform.plan.placements] == ["device"] * 3


def test_no_masks_at_all_are_no_masks_afterwards():
    samples = plain(2, masks=[])
    compare(A.Compose([A.HorizontalFlip(p=1), A.RandomCrop(8, 8)]), samples)


@each("name", ["images", "volume", "mask3d"])
def test_stacks_of_images_are_moved_in_the_worker_by_the_same_draws(name):
    image = plain(1)[0]["image"]
    stack = np.stack([image, image[::-1], 255 - image])
    stack = list(stack) if name == "images" else stack
    pipeline = A.Compose(
        [A.D4(p=1), A.RandomGamma(p=0.5), A.RandomCrop(20, 20), A.VerticalFlip(p=0.5)]
    )
    _, wanted, _ = compare(pipeline, plain(4, **{name: stack}))
    assert {np.shape(one[name])[:3] for one in wanted} == {(3, 20, 20)}


@each("count", [1, 2, 3, 4, 5])
def test_gray_frames_are_frames_however_many_there_are(count):
    frames = np.stack([sample["image"][..., 0] for sample in plain(count)])
    worker = as_batch_transform(A.Compose([A.HorizontalFlip(p=1)])).in_worker(on_device=True)
    sample, _ = worker({"images": frames, "label": 2}, SampleKey(0, 0, 0))
    np.testing.assert_array_equal(sample["images"], frames[:, :, ::-1])


def test_fields_that_share_a_name_with_a_stack_of_images_are_let_be():
    others = {"volume": 0.7, "images": ["a.jpg", "b.jpg"], "mask3d": None}
    worker = as_batch_transform(A.Compose([A.HorizontalFlip(p=1)])).in_worker(on_device=True)
    sample, _ = worker({"image": plain(1)[0]["image"], **others}, SampleKey(0, 0, 0))
    assert {name: sample[name] for name in others} == others


def test_targets_of_an_inner_pipeline_are_its_own():
    inner = A.Compose(
        [A.VerticalFlip(p=0.5), A.RandomGamma(p=1)],
        additional_targets={"depth": "mask", "infrared": "image"},
    )
    image = plain(1)[0]["image"]
    samples = plain(4, depth=image[..., 0].copy(), infrared=image[::-1].copy())
    _, wanted, _ = compare(A.Compose([A.HorizontalFlip(p=1), inner]), samples)
    assert any(not np.array_equal(one["depth"], image[..., 0]) for one in wanted)


def test_a_users_own_target_reaches_the_transform_that_reads_it():
    class Labels(RollByBrightness):
        @property
        def targets(self):
            return super().targets | {"label": lambda label, rows, **_: label + rows}

    samples = [sample | {"label": 100 * at} for at, sample in enumerate(plain(4))]
    _, wanted, _ = compare(A.Compose([A.HorizontalFlip(), Labels(p=1), A.D4(p=1)]), samples)
    assert {one["label"] % 100 for one in wanted} > {0} or max(one["label"] for one in wanted) > 300


BOXES = {"bbox_params": A.BboxParams("pascal_voc", label_fields=["classes"])}


def metadata(rng):
    image = rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    box = {"bboxes": [[2, 2, 20, 30]], "classes": [7]}
    return {
        "fda": [image],
        "overlay": {"image": image[:9, :9].copy(), "bbox": [0.1, 0.1, 0.4, 0.4]},
        "others": [{"image": image, "mask": image[..., 0].copy(), **box}] * 3,
        "near": [5, 5, 30, 30],
    }


@each(
    "transform",
    [
        A.FDA(metadata_key="fda", p=0.7),
        A.HistogramMatching(metadata_key="fda", p=0.7),
        A.PixelDistributionAdaptation(metadata_key="fda", p=0.7),
        A.OverlayElements(metadata_key="overlay", p=0.7),
        A.Mosaic(target_size=(SIDE, SIDE), metadata_key="others", p=0.7),
        A.RandomCropNearBBox(0.3, cropping_bbox_key="near", p=1),
        A.MaskDropout((1, 2), p=0.7),
        A.ConstrainedCoarseDropout((1, 2), (0.2, 0.4), (0.2, 0.4), mask_indices=[1, 2], p=0.7),
        A.ConstrainedCoarseDropout((1, 2), (0.2, 0.4), (0.2, 0.4), bbox_labels=[4], p=0.7),
        A.CropNonEmptyMaskIfExists(20, 20, p=1),
        A.BBoxSafeRandomCrop(p=0.7),
        A.RandomSizedBBoxSafeCrop(24, 24, p=1),
        A.AtLeastOneBBoxRandomCrop(24, 24, p=1),
    ],
)
def test_transforms_that_read_masks_boxes_or_other_images_are_given_them(transform):
    beside = metadata(np.random.default_rng(0)).items()
    read = {name: value for name, value in beside if name in transform.targets_as_params}
    samples = [
        one | {"bboxes": [[1, 2, 12, 13], [5, 5, 40, 40]], "classes": [4, 5]}
        for one in plain(4, **read)
    ]
    for sample in samples:
        del sample["masks"]  # Mosaic does not take them
        if isinstance(transform, A.OverlayElements):
            del sample["bboxes"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        operations = [A.HorizontalFlip(), A.InvertImg(), transform, A.VerticalFlip()]
        with_boxes = not isinstance(transform, A.OverlayElements)
        pipeline = A.Compose(operations, **(BOXES if with_boxes else {}))
    compare(pipeline, samples)


def test_masks_of_another_size_than_their_image_go_through_albumentations():
    operations = [
        A.HorizontalFlip(),
        A.Affine(rotate=(-40, 40), interpolation=0, p=1),
        A.Transpose(),
    ]
    samples = plain()
    for sample in samples:
        sample["mask"] = sample["mask"][::2, ::2].copy()
        del sample["masks"]
    compare(A.Compose(operations, is_check_shapes=False), samples)


@each("interpolation", [cv2.INTER_NEAREST, cv2.INTER_LINEAR, cv2.INTER_CUBIC])
def test_masks_are_interpolated_as_the_pipeline_says(interpolation):
    operations = [A.Affine(rotate=(-40, 40), interpolation=0, p=1), A.Resize(20, 20, 0)]
    pipeline = A.Compose(operations, mask_interpolation=interpolation)
    _, wanted, got = compare(pipeline, plain(), pixels=False)
    for want, done in zip(wanted, got, strict=True):
        gap = np.abs(want["mask"].astype(int) - np.asarray(done["mask"]))
        assert gap.max() <= (interpolation == cv2.INTER_LINEAR)


def test_a_function_that_changes_the_size_makes_no_batch_impossible():
    pipeline = A.Compose(
        [
            A.Resize(30, 30),
            A.Lambda(image=shortened, mask=shortened, name="shortened", p=0.5),
            A.Resize(24, 24),
            A.HorizontalFlip(),
        ]
    )
    samples = plain(8)
    for sample in samples:
        del sample["masks"]
    transform, _, _ = compare(pipeline, samples)
    assert [place.where[0] for place in transform.plan.placements] == list("wwwd")


def test_the_same_object_twice_is_run_by_albumentations():
    gamma = A.RandomGamma(p=0.5)
    pipeline = A.Compose([gamma, A.HorizontalFlip(), gamma])
    transform, _, _ = compare(pipeline, plain())
    assert not transform.plan.defers
    assert "appears twice" in transform.explain()


def test_what_a_strict_pipeline_refuses_is_refused_in_the_worker_too():
    pipeline = A.Compose([A.HorizontalFlip()], strict=True)
    worker = as_batch_transform(pipeline).in_worker(on_device=True)
    # Fields that the pipeline does not know are never given to it.
    sample, _ = worker(plain(1)[0] | {"label": 3}, SampleKey(0, 0, 0))
    assert sample["label"] == 3
    with pytest.raises(ValueError, match="Height and Width"):
        worker(plain(1)[0] | {"mask": np.zeros((3, 3), np.uint8)}, SampleKey(0, 0, 0))


def test_the_seed_of_a_pipeline_gives_way_to_the_key_of_the_sample():
    samples = plain(4)
    _, first, _ = compare(A.Compose([A.D4(p=1)], seed=1), copy.deepcopy(samples))
    _, other, _ = compare(A.Compose([A.D4(p=1)], seed=2), samples)
    assert alike(first, other)


@each("shape", [(50, 60), (50, 60, 1), (50, 60, 3), (50, 60, 6)])
@each(
    "operation",
    [
        A.ColorJitter(p=0.5),
        A.Sharpen(method="gaussian", p=0.5),
        A.FancyPCA(p=0.5),
        A.Rotate(interpolation=cv2.INTER_CUBIC, p=0.5),
        A.Resize(20, 20, interpolation=cv2.INTER_CUBIC),
    ],
)
def test_operations_without_a_form_for_these_images_may_stand_behind_a_crop(operation, shape):
    rng = np.random.default_rng(0)
    samples = [{"image": rng.integers(0, 256, shape, np.uint8)} for _ in range(6)]
    first = [A.Resize(48, 48), A.RandomCrop(32, 32), A.HorizontalFlip()]
    pipeline = A.Compose([*first, operation, A.Normalize(0.5, 0.5)])
    _, wanted, finished = compare(pipeline, samples, pixels=False, fitted=True)
    for want, got in zip(wanted, finished, strict=True):
        assert np.abs(want["image"] - np.asarray(got["image"])).max() <= 4 / 127


@each(
    "sample",
    [(np.zeros((8, 8, 3), np.uint8), {"boxes": [[1, 1, 4, 4]]}), {"boxes": [[1, 1, 4, 4]]}],
)
def test_boxes_that_would_stay_where_they_are_are_warned_of(sample):
    sample = sample if isinstance(sample, tuple) else sample | plain(1)[0]
    transform = as_batch_transform(
        A.Compose([A.HorizontalFlip()], bbox_params=A.BboxParams("pascal_voc"))
    )
    with pytest.warns(FastDataWarning, match="Images would move without their bboxes.*'bboxes'"):
        transform.check_sample(sample)
    with_boxes = plain(1)[0] | {"bboxes": []}
    transform.check_sample(with_boxes)


def test_a_mask_with_two_names_is_finished_in_the_worker_too():
    flip = A.Compose([A.HorizontalFlip(p=1)], additional_targets={"depth": "mask"})
    image = plain(1)[0]["image"]
    sample = {"image": image, "depth": image[..., 0].astype(np.int32)}
    worker = as_batch_transform(flip, mask="depth").in_worker(on_device=True)
    made, tape = worker(sample, SampleKey(0, 0, 0))
    [done], _ = worker.finish_each([made], [tape])
    assert np.array_equal(done["depth"], sample["depth"][:, ::-1])

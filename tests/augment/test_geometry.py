"""Joined geometric operations: one resampling, the same geometry."""

from __future__ import annotations

import copy
import pickle

import albumentations as A
import cv2
import numpy as np
import pytest
import torch
from augment.joined import (
    FORMS,
    OBLONG,
    PAIRS,
    RESIZES,
    SIZE,
    WARPS,
    WHOLE_PIXELS,
    affine,
    assert_alike,
    both,
    carry_out,
    in_levels,
    names,
    noise,
    record,
    smooth,
    wave,
)
from torch.utils.data import default_collate

from lightning_fastdata.augment.geometry import join_tapes
from lightning_fastdata.augment.geometry_moves import kind_of, move_of
from lightning_fastdata.augment.ops.border import fold
from lightning_fastdata.augment.ops.joint_warp import fold_between
from lightning_fastdata.augment.ops.operation import Encoded
from lightning_fastdata.augment.seeds import reseed
from lightning_fastdata.augment.tape import TapeOp
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.types import SampleKey

# ---- one operation alone


@pytest.mark.parametrize("form", FORMS)
def test_an_operation_alone_keeps_its_pixels(form) -> None:
    for transform in (*WARPS, *WHOLE_PIXELS, *RESIZES):
        exact, fused = both([transform], noise(*form), count=3)
        assert np.array_equal(exact, fused), transform


@pytest.mark.parametrize("form", FORMS)
def test_a_warp_that_shares_a_launch_with_joined_ones_keeps_its_pixels(form) -> None:
    transforms = [
        affine(p=0.5),
        A.Perspective(p=0.5),
        A.Rotate(border_mode=cv2.BORDER_REFLECT_101, p=0.4),
    ]
    image, shared = noise(*form), 0
    tapes = record(transforms, image, count=16)
    joined = join_tapes(tapes)
    exact, fused = carry_out(tapes, image), carry_out(joined, image)
    for row, (before, after) in enumerate(zip(tapes, joined, strict=True)):
        if len(names(before)) == 1:
            assert np.array_equal(exact[row], fused[row])
            shared += names(after) == ["JointWarp"]
    assert shared


def test_symmetries_crops_and_one_resize_are_left_alone() -> None:
    for transforms in (
        [A.D4(p=1), A.RandomCrop(40, 40, p=1), A.HorizontalFlip(), A.Pad(3, p=1)],
        [A.HorizontalFlip(), A.Resize(40, 40, p=1), A.Transpose()],
    ):
        tapes = record(transforms, noise())
        assert join_tapes(tapes) == tapes
        exact, fused = both(transforms, noise())
        assert np.array_equal(exact, fused)


# ---- the map of several


def composed(transforms, size, count):
    """Return the positions that Albumentations leads to, and which pixels are inside.

    They are found by resampling an image of coordinates, which interpolation leaves as they are.
    """
    compose = A.Compose(transforms)
    y, x = np.mgrid[: size[0], : size[1]].astype(np.float32)
    ramps = np.stack([x / 100, y / 100, np.ones_like(x)], -1)
    outs, known = [], []
    for index in range(count):
        reseed((compose,), SampleKey(0, 0, index))
        outs.append(compose(image=ramps)["image"].astype(np.float64))
        # A resize holds the coordinates of its edge for half a pixel, enlarged: no straight lines.
        whole = np.pad(outs[-1][..., 2] > 0.9999, 1).astype(np.uint8)
        known.append(cv2.erode(whole, np.ones((7, 7)))[1:-1, 1:-1].astype(bool))
    x, y, _ = np.moveaxis(np.stack(outs) * 100, -1, 0)
    return x, y, np.stack(known)


def between(image, x, y):
    """Return the values between pixels, linearly, in float64."""
    low_x, low_y = np.floor(x).astype(int), np.floor(y).astype(int)
    total = 0.0
    for dy, dx in ((0, 0), (0, 1), (1, 0), (1, 1)):
        weight = np.abs(1 - dx - (x - low_x)) * np.abs(1 - dy - (y - low_y))
        rows = (low_y + dy).clip(0, image.shape[0] - 1)
        columns = (low_x + dx).clip(0, image.shape[1] - 1)
        total = total + weight[..., None] * in_levels(image)[rows, columns]
    return total


@pytest.mark.cases(16)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [case for case in PAIRS if "reflected" not in case])
def test_a_joined_run_is_the_image_at_the_composed_positions(case, form) -> None:
    transforms, image, count = PAIRS[case], smooth(*form, OBLONG), 6
    x, y, known = composed(transforms, OBLONG, count)
    assert known.mean() > 0.25
    joined = join_tapes(record(transforms, image, count=count))
    assert all(names(tape) == ["JointWarp"] for tape in joined)
    exact, fused = (in_levels(one) for one in both(transforms, image, count=count))
    rounding = 0.5 if form[0] == np.uint8 else 0.0
    assert np.abs(fused - between(image, x, y))[known].max() <= rounding + 0.1
    errors = [np.abs(one - wave(x, y, form[1]))[known].mean() for one in (exact, fused)]
    assert errors[1] < errors[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("angle", [7, 33, 45])
def test_a_rotation_there_and_back_gives_the_image_back(angle, form) -> None:
    there, back = (A.Affine(rotate=(turn, turn), p=1) for turn in (angle, -angle))
    image = noise(*form)
    exact, fused = (
        np.abs(in_levels(one) - in_levels(image))[:, 14:-14, 14:-14]
        for one in both([there, back], image, count=1)
    )
    assert fused.max() <= 1
    assert exact.mean() > 10


def test_an_enlarged_image_that_is_reduced_again_is_the_image() -> None:
    image = noise()
    transforms = [A.Resize(2 * SIZE, 3 * SIZE, p=1), A.Resize(SIZE, SIZE, p=1)]
    _, fused = both(transforms, image, count=1)
    assert np.abs(in_levels(fused[0]) - in_levels(image)).max() <= 1


# ---- borders


@pytest.mark.parametrize("mode", [0, 1, 2, 4])
def test_what_a_crop_has_cut_off_is_not_seen_again(mode) -> None:
    image = np.full((80, 80, 3), 255, np.uint8)
    image[20:60, 20:60] = 0
    rotate = A.Rotate((30, 60), border_mode=mode, p=1)
    tilt = A.Perspective((0.1, 0.1), border_mode=mode, p=1)
    for transforms in (
        [A.CenterCrop(40, 40, p=1), A.HorizontalFlip(), rotate, tilt],
        [A.Affine(rotate=(-3, 3), border_mode=mode, p=1), A.CenterCrop(34, 34, p=1), rotate, tilt],
        [A.Crop(20, 20, 60, 60, p=1), A.Resize(90, 90, p=1), rotate],
    ):
        tapes = join_tapes(record(transforms, image))
        assert all(names(tape) == ["JointWarp"] for tape in tapes)
        assert carry_out(tapes, image).max() == 0


@pytest.mark.cases(18)
@pytest.mark.parametrize("mode", [0, 1, 2, 4])
@pytest.mark.parametrize("case", list(PAIRS))
def test_borders_are_those_of_the_separate_operations(case, mode) -> None:
    transforms = [copy.deepcopy(one) for one in PAIRS[case]]
    for one in transforms:
        if kind_of(type(one).__name__) == "warp":
            one.border_mode, one.fill = mode, (40.0,) * 3
    tapes = record(transforms, smooth(size=OBLONG))
    joined = join_tapes(tapes)
    assert all(names(tape) == ["JointWarp"] for tape in joined)
    assert_alike(tapes, joined, OBLONG)


def test_the_edges_of_an_enlarged_image_are_not_mixed_with_the_fill() -> None:
    white = np.full((30, 30, 3), 255, np.uint8)
    half_turn, back = (A.Affine(rotate=(180, 180), p=1) for _ in range(2))
    for transforms in (
        [A.Resize(90, 90, p=1), half_turn],
        [A.Crop(10, 0, 20, 30, p=1), A.Resize(90, 90, p=1), A.HorizontalFlip(p=1), half_turn],
        [half_turn, A.Resize(90, 90, p=1), back],
    ):
        tapes = join_tapes(record(transforms, white, count=1))
        assert names(tapes[0]) == ["JointWarp"]
        assert carry_out(tapes, white).min() >= 254


def test_masks_have_their_own_fill() -> None:
    mask = np.full((SIZE, SIZE), 9, np.uint8)
    twice = [A.Rotate((40, 50), fill=100, fill_mask=7, p=1) for _ in range(2)]
    tapes = record(twice, noise(), mask)
    exact, fused = (carry_out(each, mask, "mask") for each in (tapes, join_tapes(tapes)))
    assert set(np.unique(fused)) == {7, 9}
    assert (exact != fused).mean() < 0.02


def test_a_map_with_a_horizon_leaves_its_image() -> None:
    inverse = np.array([[1, 0, 0], [0, 0, 0], [0.05, 0, -1]], np.float32)
    static = (("size", (SIZE, SIZE)), ("interpolation", 1), ("border", 0))
    op = TapeOp(0, "Perspective", Encoded(static, {"inverse": inverse, "fill": np.zeros(3)}))
    assert move_of(op, (SIZE, SIZE), "image").leaves


def test_other_borders_fills_or_interpolations_are_not_joined() -> None:
    big = {"rotate": (30, 60), "p": 1}
    for first, second in (
        (A.Affine(**big), A.Affine(**big, border_mode=cv2.BORDER_REFLECT)),
        (A.Affine(**big, fill=3), A.Affine(**big, fill=4)),
        (A.Affine(**big), A.Affine(**big, interpolation=cv2.INTER_NEAREST)),
        (
            A.Affine(**big, border_mode=cv2.BORDER_WRAP),
            A.Affine(**big, border_mode=cv2.BORDER_WRAP),
        ),
    ):
        tapes = record([first, second], noise())
        assert join_tapes(tapes) == tapes


def test_cubic_warps_are_not_joined() -> None:
    warps = [A.Rotate(interpolation=cv2.INTER_CUBIC, p=1), affine(interpolation=cv2.INTER_CUBIC)]
    tapes = record(warps, noise())
    assert join_tapes(tapes) == tapes
    assert "joined" not in as_batch_transform(A.Compose(warps), geometry="fused").explain()


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float32])
def test_a_warp_alone_keeps_the_pixels_of_masks_beside_joined_ones(dtype) -> None:
    mask = noise()[..., 0].astype(dtype)
    tapes = record([affine(p=0.6), A.Rotate(p=0.6)], noise(), mask, count=12)
    exact, fused = (carry_out(each, mask, "mask") for each in (tapes, join_tapes(tapes)))
    alone = [row for row, tape in enumerate(tapes) if len(names(tape, "mask")) == 1]
    assert 0 < len(alone) < 12
    assert np.array_equal(exact[alone], fused[alone])


def test_a_warp_alone_keeps_to_the_grid_of_an_opencv_that_has_one() -> None:
    def on_grid(op):
        static = tuple((name, value or name == "cells") for name, value in op.encoded.static)
        return op._replace(encoded=op.encoded._replace(static=static))

    recorded = record([affine(p=0.6), A.Rotate(p=0.6)], noise(), count=12)
    tracks = [tape["image"] for tape in recorded if tape]
    tapes = [{"image": one._replace(ops=tuple(map(on_grid, one.ops)))} for one in tracks]
    joined = join_tapes(tapes)
    assert {len(names(tape)) for tape in tapes} == {1, 2}
    for before, after in zip(tapes, joined, strict=True):
        assert names(after) == (["JointWarp"] if len(names(before)) == 2 else names(before))


def test_a_warp_that_stays_inside_fits_any_border() -> None:
    inside = A.Affine(scale=(1.6, 2), rotate=(-5, 5), border_mode=cv2.BORDER_WRAP, p=1)
    tapes = join_tapes(record([A.Rotate((30, 60), p=1), inside], noise()))
    assert all(names(tape) == ["JointWarp"] for tape in tapes)


def test_operations_on_pixels_end_a_run() -> None:
    transforms = [affine(), A.InvertImg(p=0.5), A.Rotate(p=1)]
    for before, after in zip(
        *[tapes := record(transforms, noise(), count=12), join_tapes(tapes)], strict=True
    ):
        inverted = "InvertImg" in names(before)
        assert len(names(after)) == (3 if inverted else 1)


@pytest.mark.parametrize("mode", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_borders_of_a_rectangle_are_those_of_an_image_of_its_size(mode, length) -> None:
    at = torch.arange(-20, 20)
    first = torch.tensor(3)
    got = fold_between(at + first, first, first + length - 1, mode)
    assert torch.equal(got - first, fold(at, length, mode))
    floats = fold_between((at + first).float(), first.float(), (first + length - 1).float(), mode)
    assert torch.equal(floats.long(), got)


# ---- masks, boxes and keypoints


@pytest.mark.parametrize("case", list(PAIRS))
def test_masks_move_with_their_images(case) -> None:
    y, x = np.mgrid[: OBLONG[0], : OBLONG[1]]
    disc = (np.hypot(x - 20, y - 26) < 15).astype(np.uint8)
    disc[2:9, 30:44] = 1
    tapes = join_tapes(record(PAIRS[case], disc[..., None] * 255, disc, count=8))
    image = carry_out(tapes, disc[..., None] * 255)[..., 0]
    mask = carry_out(tapes, disc.astype(np.int32), "mask")
    pure = (image == 0) | (image == 255)
    assert pure.mean() > 0.7
    assert mask.dtype == np.int32
    assert np.array_equal(mask[pure], image[pure] // 255)


def through_worker(transforms, sample, count=6, **options):
    """Return the batch of images, and what the worker made of the rest of each sample."""
    transform = as_batch_transform(A.Compose(transforms, **options), geometry="fused")
    part = pickle.loads(pickle.dumps(transform.in_worker(on_device=True)))
    drawn = [part(sample, SampleKey(5, 0, index)) for index in range(count)]
    assert any("JointWarp" in names(tape) for tape in join_tapes([tape for _, tape in drawn]))
    images = default_collate([{"image": one["image"]} for one, _ in drawn])
    draws = part.collate([tape for _, tape in drawn])
    return transform.apply(images, draws)["image"].numpy(), [one for one, _ in drawn]


def test_boxes_are_where_their_painted_pixels_go() -> None:
    image = np.zeros((64, 64, 3), np.uint8)
    image[20:41, 14:33] = 255
    sample = {"image": image, "bboxes": [[14, 20, 33, 41]], "classes": [1]}
    move = {"scale": (0.7, 1.2), "translate_px": (-7, 7), "p": 1}
    images, rest = through_worker(
        [A.Affine(**move), A.HorizontalFlip(), A.VerticalFlip(), A.Affine(**move)],
        sample,
        12,
        bbox_params=A.BboxParams("pascal_voc", label_fields=["classes"]),
    )
    for out, one in zip(images, rest, strict=True):
        rows, columns = np.nonzero(out[..., 0] > 127)
        painted = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert np.abs(np.asarray(one["bboxes"][0]) - painted).max() <= 1


def test_keypoints_are_where_their_pixels_go() -> None:
    y, x = np.mgrid[:64, :64].astype(np.float32)
    image = np.stack([x, y, x * 0], -1) / 64
    points = [(20.0, 30.0), (40.0, 22.0), (31.0, 44.0)]
    images, rest = through_worker(
        [A.HorizontalFlip(), affine(), A.Rotate(p=1), A.Perspective(p=1)],
        {"image": image, "keypoints": points},
        keypoint_params=A.KeypointParams("xy", remove_invisible=False),
    )
    for out, one in zip(images, rest, strict=True):
        for point, moved in zip(points, one["keypoints"], strict=True):
            column, row = (round(float(where)) for where in moved)
            found = out[row, column, :2] * 64
            # Half a pixel of rounding and half of conventions, in an image scaled by 0.7 at least.
            assert np.hypot(*(found - point)) <= 1.5

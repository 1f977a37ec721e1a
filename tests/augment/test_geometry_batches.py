"""Joined geometric operations in batches: who is launched together, and what explains it."""

from __future__ import annotations

import albumentations as A
import cv2
import numpy as np
import pytest
import torch
from augment.joined import (
    RESIZES,
    SIZE,
    WARPS,
    WHOLE_PIXELS,
    affine,
    assert_alike,
    both,
    carried,
    carry_out,
    launches,
    names,
    noise,
    record,
    smooth,
)
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import max_examples

from lightning_fastdata.augment.foreign import ForeignBatches, replay_all
from lightning_fastdata.augment.geometry import join_tapes
from lightning_fastdata.augment.geometry_moves import kind_of
from lightning_fastdata.augment.ops import DEVICE_OPS, REPLAYED_OPS
from lightning_fastdata.augment.replay_torch import replay
from lightning_fastdata.augment.runs import launches as kernel_launches
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.errors import OptionsError
from lightning_fastdata.types import SampleKey

OPERATIONS = [
    lambda p: affine(p=p),
    lambda p: affine(p=p, border_mode=cv2.BORDER_REFLECT_101),
    lambda p: A.Rotate(p=p),
    lambda p: A.SafeRotate(p=p, border_mode=cv2.BORDER_REFLECT_101),
    lambda p: A.Perspective(p=p),
    lambda p: A.ShiftScaleRotate(p=p, fill=90),
    lambda p: A.HorizontalFlip(p=p),
    lambda p: A.D4(p=p),
    lambda p: A.RandomBrightnessContrast(p=p / 3),
    lambda p: A.OneOf([affine(), A.Perspective(), A.Transpose()], p=p),
    lambda p: A.RandomCrop(40, 40, p=1),
    lambda p: A.CenterCrop(36, 36, pad_if_needed=True, p=1),
    lambda p: A.Resize(56, 56, p=1),
    lambda p: A.RandomResizedCrop((44, 44), scale=(0.5, 1), p=1),
    lambda p: A.Pad(4, p=1),
]
pipelines = st.lists(
    st.builds(
        lambda make, p: make(p), st.sampled_from(OPERATIONS), st.sampled_from([0.5, 0.8, 1.0])
    ),
    min_size=2,
    max_size=5,
)


def fits(transforms):
    """Whether no crop asks for more than there is."""
    size = SIZE
    for one in transforms:
        size += 8 * isinstance(one, A.Pad)
        if type(one) is A.RandomCrop and size < 40:
            return False
        size = getattr(one, "height", None) or getattr(one, "size", (size,))[0]
    return True


@max_examples(25)
@given(pipelines.filter(fits), st.integers(0, 2**30))
def test_fused_and_exact_differ_by_interpolation_alone(transforms, seed) -> None:
    tapes = [tape for tape in record(transforms, smooth(), count=5, seed=seed) if tape]
    if not tapes:
        return
    joined = join_tapes(tapes)
    for before, after in zip(tapes, joined, strict=True):
        assert len(names(after)) <= len(names(before))
    assert_alike(tapes, joined, (SIZE, SIZE))


@max_examples(15)
@given(pipelines.filter(fits), st.integers(0, 2**30))
def test_a_sample_does_not_depend_on_the_batch_it_is_in(transforms, seed) -> None:
    tapes = [tape for tape in record(transforms, noise(), count=5, seed=seed) if tape]
    if not tapes:
        return
    together = carry_out(join_tapes(tapes), noise())
    for row, tape in enumerate(tapes):
        alone = join_tapes([tape])
        assert np.array_equal(carry_out(alone, noise())[0], together[row])


def test_images_that_change_their_size_in_a_run_do_it_together_with_all_others() -> None:
    transforms = [
        affine(p=0.5),
        A.RandomCrop(40, 40, p=1),
        A.GaussianBlur(p=0.4),
        A.Resize(60, 60, p=1),
        A.Rotate(p=0.4),
    ]
    tapes = record(transforms, noise(), count=24)
    joined = join_tapes(tapes)
    assert len({tuple(names(tape)) for tape in tapes}) >= 6
    exact, fused = carry_out(tapes, noise()), carry_out(joined, noise())
    assert fused.shape == (24, 60, 60, 3)
    alone = [row for row, tape in enumerate(tapes) if not {"Affine", "Rotate"} & {*names(tape)}]
    assert alone
    assert np.array_equal(exact[alone], fused[alone])


def test_joined_runs_are_fewer_launches_and_most_of_a_batch_is_in_one() -> None:
    always = record([A.D4(p=1), affine(), A.Perspective(p=1)], noise(), count=32)
    assert launches(always) >= 3
    assert launches(join_tapes(always)) == 1
    some = record(
        [affine(p=0.6), A.Perspective(p=0.6), A.Rotate(p=0.6), A.ShiftScaleRotate(p=0.6)],
        noise(),
        count=32,
    )
    assert launches(some) == 4
    assert launches(join_tapes(some)) == 1


def test_kernels_are_fewer_where_warps_are_joined() -> None:
    transforms = [affine(p=0.8), A.HorizontalFlip(), A.Rotate(p=0.6), A.Perspective(p=0.5)]
    tapes = record([*transforms, A.InvertImg(), A.Normalize(), A.ToTensorV2()], noise(), count=32)
    assert kernel_launches(carried(tapes)[0]) == 3
    assert kernel_launches(carried(join_tapes(tapes))[0]) == 1


TWO_WARPS = [
    lambda **options: affine(**options, fill=(9, 200.5, 31)),
    lambda **options: A.Affine(rotate=(-30, 30), **options, fill=(9, 200.5, 31)),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize("nearest", [False, True])
@pytest.mark.parametrize("mode", [0, 1, 4])
@pytest.mark.parametrize("last", ["mirrored", "warped again", "seen from the side"])
def test_a_kernel_reads_joined_warps_as_torch_does(last, mode, nearest) -> None:
    pytest.importorskip("triton")
    options = {"border_mode": mode, "interpolation": int(not nearest)}
    transforms = [A.HorizontalFlip(), TWO_WARPS[0](p=0.7, **options), A.VerticalFlip()]
    if last == "warped again":
        transforms.append(TWO_WARPS[1](p=0.7, **options))
    elif last == "seen from the side":
        transforms.append(A.Perspective(p=0.7, fill=(9, 200.5, 31), **options))
    image = noise()
    joined = join_tapes(record([*transforms, A.InvertImg()], image, count=8))
    program, blob = carried(joined)
    (step,) = (step for step in program.steps if step.name == "JointWarp")
    assert step.parts[0].arrays["chain"].shape[1] == 1 + (last == "warped again")
    # Reflected between two warps is left to torch.
    assert bool(program.runs and program.runs[0].geometry == "warp") == (
        mode != 4 or last != "warped again"
    )
    # Compiled kernels read no memory of the host; the interpreter runs where there is no GPU.
    where = "cuda" if torch.cuda.is_available() else "cpu"
    batch, blob = torch.from_numpy(np.stack([image] * len(joined))).to(where), blob.to(where)
    by_kernel, by_torch = (
        replay(program, blob, batch, REPLAYED_OPS, kernels=kernels) for kernels in (True, False)
    )
    assert torch.equal(by_kernel, by_torch)


# ---- how it is asked for


def test_the_same_pixels_come_from_a_batch_of_another_loader() -> None:
    transforms = [affine(), A.HorizontalFlip(), A.Rotate(p=1)]
    recorder = ForeignBatches(A.Compose(transforms), DEVICE_OPS, None).recorder((SIZE, SIZE))
    batch = {"image": torch.from_numpy(np.stack([noise()] * 6))}
    for geometry, wanted in zip(("exact", "fused"), both(transforms, noise()), strict=True):
        got, _ = replay_all(batch, SampleKey(0, 0, 0), recorder, REPLAYED_OPS, geometry=geometry)
        assert np.array_equal(got["image"].numpy(), wanted)


def test_geometry_is_exact_unless_asked_for() -> None:
    compose = A.Compose([affine(), A.Rotate(p=1)])
    part = as_batch_transform(compose).in_worker(on_device=True)
    _, tape = part({"image": noise()}, SampleKey(0, 0, 0))
    steps = part.collate([tape]).programs["image"].steps
    assert [step.name for step in steps] == ["Affine", "Rotate"]
    with pytest.raises(OptionsError, match="geometry='sharp'"):
        as_batch_transform(compose, geometry="sharp")


def test_explain_says_what_is_joined() -> None:
    compose = A.Compose(
        [
            A.Resize(64, 64),
            A.HorizontalFlip(),
            A.OneOf([affine(), A.Perspective()], p=1),
            A.GaussianBlur(p=0.2),
            A.Rotate(),
            A.InvertImg(p=1),
            A.VerticalFlip(),
            A.Normalize(),
        ]
    )
    assert "joined" not in as_batch_transform(compose).explain()
    why = [one.why for one in as_batch_transform(compose, geometry="fused").plan.placements]
    unless = ", unless GaussianBlur is drawn between"
    assert why[1].endswith(f"joined with Affine, Perspective, Rotate{unless}")
    assert why[2].endswith(f"joined with HorizontalFlip, Rotate{unless}")
    assert why[3].endswith(f"joined with HorizontalFlip, Rotate{unless}")
    assert why[5].endswith(f"joined with HorizontalFlip, Affine, Perspective{unless}")
    assert not any("joined" in one for one in (why[0], why[4], *why[6:]))


def test_every_geometric_operation_has_a_device_form() -> None:
    known = {name for name in DEVICE_OPS if kind_of(name)}
    assert {type(one).__name__ for one in (*WARPS, *WHOLE_PIXELS, *RESIZES)} <= known
    assert kind_of("GaussianBlur") is None

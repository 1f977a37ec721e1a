"""A v2 pipeline as ``augment=`` makes of each sample what v2 itself makes of it under its key."""

from __future__ import annotations

import pytest
import torch
from augment.v2_pipelines import assert_same, eager, samples_of, worked
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import max_examples
from torch import nn
from torchvision import tv_tensors
from torchvision.transforms import v2

from lightning_fastdata import as_batch_transform
from lightning_fastdata.batches.collate import collate_samples

COUNT = 6
FLOATS = 1e-4
"""Sums of a batch are made in another order; sharpening and normalising make more of that."""


COLOURS = st.one_of(
    st.builds(v2.ColorJitter, st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.5)),
    st.builds(v2.RandomPhotometricDistort, p=st.floats(0, 1)),
    st.builds(v2.RandomGrayscale, st.floats(0, 1)),
    st.builds(v2.RandomInvert),
    st.builds(v2.RandomPosterize, st.integers(0, 8)),
    st.builds(v2.RandomAutocontrast),
    st.builds(v2.RandomEqualize),
    st.builds(v2.RandomAdjustSharpness, st.floats(0, 3)),
    st.builds(v2.RandomSolarize, st.floats(0, 1)),
    st.builds(v2.RandomChannelPermutation),
    st.builds(v2.GaussianBlur, st.sampled_from([3, 5, (3, 7)]), st.just((0.1, 2.0))),
)
MODES = st.sampled_from([v2.InterpolationMode.NEAREST, v2.InterpolationMode.BILINEAR])
FILLS = st.sampled_from([0, 0.5, {tv_tensors.Image: (0.1, 0.2, 0.3), "others": 1}])
MOVES = st.one_of(
    st.builds(v2.RandomHorizontalFlip),
    st.builds(v2.RandomVerticalFlip),
    st.builds(v2.RandomRotation, st.floats(0, 90), MODES, fill=FILLS),
    st.builds(
        v2.RandomAffine,
        st.floats(0, 30),
        translate=st.sampled_from([None, (0.1, 0.2)]),
        scale=st.sampled_from([None, (0.7, 1.3)]),
        shear=st.sampled_from([None, 10, (-5, 5, -9, 9)]),
        interpolation=MODES,
        fill=FILLS,
    ),
    st.builds(v2.RandomPerspective, st.floats(0, 0.6), interpolation=MODES, fill=FILLS),
    st.builds(v2.ElasticTransform, st.just(20.0), st.just(1.5)),
)
SIZES = st.one_of(
    st.builds(v2.RandomResizedCrop, st.sampled_from([24, (20, 28)]), antialias=st.booleans()),
    st.builds(
        v2.RandomCrop, st.just(24), padding=st.sampled_from([None, 3]), pad_if_needed=st.just(True)
    ),
    st.builds(v2.Resize, st.sampled_from([(24, 28), (50, 60)]), antialias=st.booleans()),
    st.builds(v2.CenterCrop, st.sampled_from([24, 60])),
)
ENDS = st.one_of(
    st.just([]),
    st.just([v2.ToDtype(torch.float32, scale=True)]),
    st.just([v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.4] * 3, [0.2] * 3)]),
    st.just(
        [
            v2.ToDtype(
                {tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None},
                scale=True,
            )
        ]
    ),
)


TYPES = st.one_of(
    st.builds(
        v2.ToDtype,
        st.sampled_from([torch.float32, torch.uint8, torch.float64, torch.float16]),
        scale=st.just(True),
    ),
    st.builds(
        lambda image, mask: v2.ToDtype(
            {tv_tensors.Image: image, tv_tensors.Mask: mask, "others": None}, scale=True
        ),
        st.sampled_from([torch.float32, torch.uint8]),
        st.sampled_from([torch.int64, torch.bool, torch.int32]),
    ),
)


def nested(*steps):
    """Return steps within each other, as people nest them."""

    def containers(inside):
        some = st.lists(inside, min_size=1, max_size=3)
        return st.one_of(
            st.builds(v2.RandomApply, some, p=st.floats(0, 1)),
            st.builds(v2.RandomChoice, some),
            st.builds(v2.RandomOrder, some),
            st.builds(lambda inside: nn.Sequential(*inside), some),
            st.builds(v2.Compose, some),
        )

    return st.recursive(st.one_of(*steps), containers, max_leaves=4)


def pipelines(*steps):
    """Return pipelines of some steps."""
    one = nested(*steps)
    return st.builds(
        lambda before, size, behind, end: v2.Compose([*before, size, *behind, *end]),
        st.lists(one, max_size=2),
        SIZES,
        st.lists(one, max_size=4),
        ENDS,
    )


def carried_out(pipeline, samples):
    """Return the batch that a device makes of samples, drawn in a worker; or the samples."""
    transform = as_batch_transform(pipeline)
    worker = transform.in_worker(on_device=True)
    made, tapes = worked(worker, samples)
    if not worker.stacks(made, tapes):
        return None, worker.finish_each(made, tapes)[0]
    batch = collate_samples(made)
    return transform.apply(batch, worker.collate(tapes)), None


def check(pipeline, samples):
    """The worker alone, the device behind a worker, and batches of others: all are v2's own."""
    wanted = eager(pipeline, samples)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    made, tapes = worked(as_batch_transform(pipeline).in_worker(on_device=False), samples)
    assert set(tapes) == {None}
    assert_same(list(made), wanted)
    batch, each = carried_out(pipeline, samples)
    assert torch.equal(before, torch.get_rng_state())
    if each is None:
        assert_same(batch, collate_samples(wanted), floats=FLOATS)
    else:
        assert_same(list(each), wanted, floats=FLOATS)


def check_each(pipeline, samples):
    """Check samples that make no tensors of a batch; return them."""
    wanted = eager(pipeline, samples)
    transform = as_batch_transform(pipeline)
    for on_device in (False, True):
        worker = transform.in_worker(on_device=on_device)
        made, tapes = map(list, worked(worker, samples))
        done = worker.finish_each(made, tapes)[0] if on_device else made
        assert_same(done, wanted, floats=FLOATS if on_device else 0.0)
    return done


@max_examples(150)
@given(
    pipelines(COLOURS, MOVES, TYPES),
    st.sampled_from([torch.uint8, torch.float32]),
    st.sampled_from(["tuple", "tensor", "masks", "boxes"]),
    st.booleans(),
)
def test_random_pipelines_are_v2s_own(pipeline, dtype, form, several):
    """Of boxes, keypoints and masks, too; what v2 refuses is refused."""
    samples = samples_of(COUNT, 40, 44, form, dtype)
    if several:
        samples[1::2] = samples_of(COUNT // 2, 52, 36, form, dtype)
    try:
        eager(pipeline, samples)
    except (RuntimeError, TypeError, ValueError):
        for on_device in (False, True):
            worker = as_batch_transform(pipeline).in_worker(on_device=on_device)
            with pytest.raises((RuntimeError, TypeError, ValueError)):
                worked(worker, samples)
    else:
        (check_each if form == "boxes" else check)(pipeline, samples)


CHANGING = v2.RandomApply([v2.ToDtype(torch.float32, scale=True)])


@pytest.mark.parametrize(
    "steps",
    [
        [CHANGING, v2.RandomInvert(), v2.ToDtype(torch.float32, scale=True)],
        [v2.RandomChoice([v2.CenterCrop(20), v2.RandomCrop(24)]), v2.RandomRotation(9)],
        [v2.RandomOrder([v2.RandomCrop(30), v2.Pad(2)]), v2.Grayscale(), v2.CenterCrop(20)],
        [v2.RandomHorizontalFlip(), v2.RandomApply([v2.Resize(24)]), v2.RandomInvert()],
    ],
)
def test_what_changes_some_images_only_is_done_to_those(steps):
    check(v2.Compose(steps), samples_of(COUNT, 40, 44))


@pytest.mark.parametrize("inside", [v2.JPEG((20, 90)), v2.RandomApply([v2.JPEG(50)]), v2.AugMix()])
def test_what_needs_pixels_may_come_behind_any_other_of_a_random_order(inside):
    order = v2.RandomOrder([inside, v2.RandomHorizontalFlip(), v2.RandomInvert(0.9)])
    for pipeline in (order, v2.Compose([v2.RandomOrder([v2.Pad(1), order]), v2.RandomSolarize(0)])):
        check(pipeline, samples_of(COUNT, 40, 44))


HARDLY = (torch.uint16, torch.uint32, torch.uint64)


@pytest.mark.parametrize(
    "dtype", [torch.int16, torch.float16, torch.bfloat16, torch.float64, *HARDLY]
)
@pytest.mark.parametrize(
    "step",
    [
        v2.ColorJitter(0.5, 0.5, 0.5),
        v2.RandomAffine(20, interpolation=v2.InterpolationMode.BILINEAR),
        v2.RandomResizedCrop(24),
        v2.RandomErasing(1.0),
        v2.RandomHorizontalFlip(),
    ],
)
def test_dtypes_without_forms_are_v2s_own(step, dtype):
    given = samples_of(COUNT, 40, 44)
    casts = v2.ToDtype(dtype, scale=dtype not in {torch.uint32, torch.uint64})  # v2 refuses these
    check(v2.Compose([v2.RandomInvert(), casts, step]), given)
    check(v2.Compose([v2.RandomInvert(), casts]), given)


@pytest.mark.parametrize("dtype", HARDLY)
@pytest.mark.parametrize("kinds", [None, tv_tensors.Image, tv_tensors.Mask])
def test_dtypes_that_torch_writes_no_rows_of_are_made_in_the_worker(dtype, kinds):
    made = dtype if kinds is None else {kinds: dtype, "others": None}
    pipeline = v2.Compose([v2.RandomInvert(), v2.ToDtype(made), v2.RandomHorizontalFlip()])
    placed = as_batch_transform(pipeline).plan.placements
    assert [one.where for one in placed] == ["worker", "worker", "device"]

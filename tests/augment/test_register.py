from __future__ import annotations

import albumentations as A
import numpy as np
import pytest
import torch
from augment.batches import assert_both_ways_agree, in_worker, on_device
from augment.loaders import Pictures, loader_of
from augment.own_transforms import (
    BrightRow,
    Grayer,
    HorizontalFlip,
    Pad,
    Raises,
    RollByBrightness,
    RollRows,
    Steps,
    encode_roll,
    roll,
)
from misses import each
from torch.utils.data import default_collate

from lightning_fastdata.augment import register
from lightning_fastdata.augment.ops.operation import Encoded
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.errors import TransformError

torch.set_num_threads(1)

RNG = np.random.default_rng(5)
SAMPLES = [
    {
        "image": RNG.integers(0, 256, (20, 28, 3), np.uint8),
        "mask": RNG.integers(0, 400, (20, 28)).astype(np.int32),
    }
    for _ in range(6)
]


@pytest.fixture
def registered():
    """Register for one test."""
    taken = []

    def add(*args, **kwargs):
        taken.append(register(*args, **kwargs))
        return taken[-1]

    yield add
    for take_back in taken:
        take_back()


def places(transform) -> dict[str, str]:
    return {place.name: place.where for place in transform.plan.placements}


@each("tail", [(), (A.RandomGamma(), A.HorizontalFlip(), A.Normalize(), A.ToTensorV2())])
@each("kind", [Steps, A.RandomToneCurve])
def test_a_registered_table_makes_what_the_transform_makes(registered, kind, tail) -> None:
    registered(kind, table=True, reads_pixels=False)
    transform = as_batch_transform(A.Compose([A.VerticalFlip(), kind(p=0.7), *tail]))
    assert set(places(transform).values()) == {"device"}
    assert_both_ways_agree(transform, SAMPLES)


@each("channels", [1, 3, 5])
def test_a_table_knows_any_number_of_channels(registered, channels) -> None:
    registered(Steps, table=True)
    samples = [{"image": RNG.integers(0, 256, (9, 8, channels), np.uint8)} for _ in range(4)]
    assert_both_ways_agree(as_batch_transform(A.Compose([Steps(p=1)])), samples)


def test_images_of_floats_go_through_the_transform_itself(registered) -> None:
    registered(Steps, table=True)
    samples = [{"image": (one["image"] / 255).astype(np.float32)} for one in SAMPLES]
    assert_both_ways_agree(as_batch_transform(A.Compose([Steps(p=1), A.VerticalFlip()])), samples)


def test_a_table_behind_what_makes_floats_stays_on_the_cpu(registered) -> None:
    registered(Steps, table=True)
    transform = as_batch_transform(A.Compose([A.VerticalFlip(), A.Normalize(), Steps(p=0.6)]))
    assert places(transform)["Steps"] == "worker"
    assert_both_ways_agree(transform, SAMPLES)


@each("kind", [RollRows, RollByBrightness, Pad])
@each("head", [(), (A.RandomCrop(16, 16),)])
def test_registered_functions_make_what_the_transform_makes(registered, kind, head) -> None:
    registered(kind, encode=encode_roll, image=roll, mask=roll)
    transform = as_batch_transform(
        A.Compose([*head, A.HorizontalFlip(), kind(p=0.6), A.RandomGamma(), A.Normalize()])
    )
    where = places(transform)
    assert where[kind.__name__] == "either"
    assert where["Normalize"] == "device"
    assert_both_ways_agree(transform, SAMPLES)


def test_a_sampler_that_looks_at_no_pixels_spares_the_cpu(registered) -> None:
    registered(RollRows, encode=encode_roll, image=roll, mask=roll, reads_pixels=False)
    transform = as_batch_transform(
        A.Compose([A.RandomCrop(16, 16), A.HorizontalFlip(), RollRows(p=0.6), A.RandomCrop(8, 8)])
    )
    assert [one.where for one in transform.plan.placements] == ["worker", *["device"] * 3]
    assert_both_ways_agree(transform, SAMPLES)
    of_floats = [A.HorizontalFlip(), RollRows(p=0.6), A.Normalize(), RollRows(p=0.6)]
    behind = as_batch_transform(A.Compose(of_floats))
    assert set(places(behind).values()) == {"device"}
    assert_both_ways_agree(behind, SAMPLES)


def test_a_form_belongs_to_one_class_whatever_others_are_called(registered) -> None:
    registered(HorizontalFlip, encode=encode_roll, image=roll, mask=roll)
    compose = A.Compose([A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5)])
    assert_both_ways_agree(as_batch_transform(compose), SAMPLES)
    assert places(as_batch_transform(A.Compose([HorizontalFlip(p=1)]))) == {
        "HorizontalFlip": "device"
    }

    class ToGray(HorizontalFlip):
        pass

    child = as_batch_transform(A.Compose([ToGray(p=1), A.VerticalFlip()]))
    assert places(child)["ToGray"] == "worker"

    class ColorJitter(HorizontalFlip):
        pass

    registered(ColorJitter, encode=encode_roll, image=roll, mask=roll)
    before_jumps = as_batch_transform(A.Compose([ColorJitter(p=1), A.HueSaturationValue()]))
    assert places(before_jumps)["ColorJitter"] == "device"


def test_a_form_that_changes_the_shape_of_some_samples_only_is_an_error_that_names_it(
    registered,
) -> None:
    forms = {"image": lambda batch, *_: batch[:, ::2], "mask": roll}
    registered(RollRows, encode=encode_roll, reads_pixels=False, **forms)
    transform = as_batch_transform(A.Compose([RollRows(p=0.5)]))
    with pytest.raises(TransformError, match=r"RollRows.* would turn some images"):
        on_device(transform, SAMPLES)


def test_two_classes_of_one_name_in_one_pipeline_keep_their_own_forms(registered) -> None:
    def make(change):
        class Pointwise(A.ImageOnlyTransform):
            def apply(self, img, **params):
                return change(img)

        def encode(transform, params, shape, dtype):
            return Encoded((), {})

        def image(images, static, arrays):
            return change(images)

        registered(Pointwise, encode=encode, image=image)
        return Pointwise(p=0.5)

    halve, flip_bits = make(lambda img: img // 2), make(lambda img: img ^ 255)
    transform = as_batch_transform(A.Compose([halve, flip_bits, A.VerticalFlip()]))
    assert [place.where for place in transform.plan.placements] == ["device"] * 3
    assert_both_ways_agree(transform, SAMPLES)


def test_what_is_taken_back_runs_on_the_cpu_again(registered) -> None:
    take_back = registered(Steps, table=True)
    before = as_batch_transform(A.Compose([Steps(p=1)]))
    take_back()
    take_back()
    after = as_batch_transform(A.Compose([Steps(p=1)]))
    assert places(before) == {"Steps": "device"}
    assert places(after) == {"Steps": "worker"}
    assert_both_ways_agree(before, SAMPLES)
    assert places(before.for_samples(SAMPLES)) == {"Steps": "device"}


def test_the_newer_registration_holds_and_the_older_cannot_take_it_back(registered) -> None:
    older = registered(RollRows, encode=encode_roll, image=roll, mask=roll)
    registered(RollRows, encode=encode_roll, image=roll, mask=roll, reads_pixels=False)
    older()
    assert places(as_batch_transform(A.Compose([RollRows(p=1)]))) == {"RollRows": "device"}


@pytest.mark.cases(1)
@each(("workers", "context"), [(0, None), (2, "spawn"), (2, "fork"), (1, "forkserver")])
def test_a_registered_form_reaches_the_workers_however_they_start(
    registered, workers, context
) -> None:
    registered(Steps, table=True)
    registered(RollRows, encode=encode_roll, image=roll, mask=roll, reads_pixels=False)
    compose = A.Compose([A.HorizontalFlip(), Steps(p=0.8), RollRows(p=0.8), A.Normalize()])
    transform = as_batch_transform(compose)
    data = Pictures(SAMPLES.__getitem__, len(SAMPLES))
    how = {"workers": workers, "multiprocessing_context": context, "seed": 7}
    staged = list(loader_of(transform, data, size=3, **how))
    assert all(torch.uint8 == one.batch["image"].dtype for one in staged)  # left to the device
    steps = [step.name for one in staged for step in one.draws.programs["image"].steps]
    assert all(any(name in step for step in steps) for name in ("Steps", "RollRows"))
    oracle = default_collate(in_worker(transform, SAMPLES, seed=7))
    done = [transform.apply(one.batch, one.draws) for one in staged]
    for name in ("image", "mask"):
        expected = torch.as_tensor(oracle[name])
        assert torch.equal(torch.cat([one[name] for one in done]), expected), name


@each("kind", [BrightRow, Grayer])
def test_a_table_for_what_is_not_pointwise_is_refused(registered, kind) -> None:
    registered(kind, table=True)
    with pytest.raises(TransformError, match=f"{kind.__name__} is registered with table=True"):
        as_batch_transform(A.Compose([kind(p=1)]))


def test_a_table_for_what_raises_is_refused_with_its_error(registered) -> None:
    registered(Raises, table=True)
    with pytest.raises(TransformError, match=r"raised ValueError .*only portraits"):
        as_batch_transform(A.Compose([Raises(p=1)]))


def test_trying_a_table_out_draws_nothing_from_the_users_pipeline(registered) -> None:
    registered(Steps, table=True)
    compose = A.Compose([Steps(p=1)], seed=3)
    before = compose.transforms[0].py_random.getstate()
    as_batch_transform(compose)
    assert compose.transforms[0].py_random.getstate() == before


@each(
    ("what", "options", "message"),
    [
        (Steps, {}, "either table=True, or both encode= and image="),
        (Steps, {"encode": encode_roll}, "both encode= and image="),
        (Steps, {"table": True, "image": roll}, "either table=True"),
        (Steps, {"table": True, "encode": encode_roll, "image": roll}, "either table=True"),
        (RollRows, {"table": True}, "DualTransform, which changes masks too"),
        (RollRows, {"encode": encode_roll, "image": roll}, "changes masks too"),
        (Steps(), {"table": True}, "no class of a transform"),
        (dict, {"table": True}, "no class of a transform"),
        ("augment.own_transforms.Steps", {"table": True}, "no class of a transform"),
    ],
)
def test_what_cannot_be_registered_is_an_error_that_says_why(what, options, message) -> None:
    with pytest.raises(TransformError, match=message):
        register(what, **options)

"""What is drawn behind any operation is what Albumentations draws, wherever the pixels are made.

An operation of the device may draw less in the worker than Albumentations' own sampler, so that it
could leave the generators elsewhere. Then all that follows in the pipeline would be of another
sample: crops, holes, flips, and the boxes and keypoints that these move.
"""

from __future__ import annotations

import copy
import warnings
from itertools import product

import albumentations as A
import numpy as np
from augment.batches import BOXES, boxed, pipeline
from augment.oracle_cases import CASES
from augment.parity import photographs
from misses import Misses
from thoroughness import LONG, some

from benchmarks.parity import examples, make_example
from lightning_fastdata.augment.ops import DEVICE_OPS
from lightning_fastdata.augment.pipeline.trial import alike
from lightning_fastdata.randomness.seeds import reseed
from lightning_fastdata.types import SampleKey

SIZE = (36, 36)
DTYPES = some((np.uint8, np.float32), 2)
HOLE = 250
"""What the holes that are drawn last have in the mask, and nothing else has."""

NOISES = [
    *(("GaussNoise", one) for one in ({}, {"per_channel": False}, {"noise_scale_factor": 0.3})),
    ("GaussNoise", {"std_range": (0.1, 0.1), "mean_range": (-0.2, 0.2)}),
    *(
        (
            "ElasticTransform",
            {"alpha": 60, "sigma": 4, "noise_distribution": law, "same_dxdy": same},
        )
        for law in ("gaussian", "uniform")
        for same in (False, True)
    ),
    ("ElasticTransform", {"approximate": True}),
    *(("CoarseDropout", {"fill": fill}) for fill in ("random", "inpaint_ns")),
]
"""Settings in which an operation draws otherwise than by default."""


def black(image, **_):
    return image * 0


IN_WORKER = [
    *((name, {}) for name in ("AdditiveNoise", "CLAHE", "GridDistortion", "ImageCompression")),
    *((name, {}) for name in ("Perspective", "PixelDropout", "RandomFog", "RandomGridShuffle")),
    ("Lambda", {"image": black}),
    ("SmallestMaxSize", {"max_size": 40}),
    ("RandomSizedBBoxSafeCrop", {"height": 30, "width": 30}),
]
"""Operations without a device form, which Albumentations carries out on each sample."""
SMALL = {
    "CenterCrop": {"height": 30, "width": 34},
    "Crop": {"x_max": 34, "y_max": 34},
    "PadIfNeeded": {"min_height": 60, "min_width": 61, "position": "random"},
    "RandomCrop": {"height": 30, "width": 34},
    "RandomSizedCrop": {"min_max_height": (20, 34), "size": (30, 34)},
}
"""Arguments for images of this size."""


def tail():
    """Return operations that draw from both generators, and show it in masks, boxes and points."""
    return [
        A.CoarseDropout((1, 4), (0.1, 0.3), (0.1, 0.3), fill_mask=HOLE, p=1),
        A.SomeOf([A.VerticalFlip(p=1), A.RandomGamma(p=1), A.HorizontalFlip(p=1)], 2, p=0.7),
        A.OneOf([A.HorizontalFlip(), A.VerticalFlip()], p=0.6),
    ]


def settings():
    """Return the name and the arguments of every operation, once or more."""
    usual = [(name, SMALL.get(name, arguments)) for name, arguments in examples()]
    usual += [
        (case.name, case.arguments)
        for case in CASES
        if case.name not in SMALL and 3 in case.channels
    ]
    apart = {str(one): one for one in [*usual, *NOISES, *IN_WORKER]}
    # Behind ToTensorV2 nothing can draw.
    return [one for one in apart.values() if one[0] != "ToTensorV2"]


def given(dtype, boxes):
    items = []
    for image in some(photographs(*SIZE, dtype=dtype), 2):
        mask = (image[..., 0] * (1 if dtype == np.uint8 else 255)).astype(np.uint8) // 16
        item = {"image": image, "mask": mask}
        items.append(boxed(item, *SIZE) if boxes else item)
    return items


def later_draws(name, arguments, dtype, *, boxes):
    """Compare what a pipeline draws behind an operation on the device's place, and without it.

    Returns the names of the operations that were left to the device, or None where Albumentations
    refuses the sample.
    """
    options = BOXES if boxes else {}
    compose = A.Compose([make_example(name, arguments), *tail()], **options)
    transform = pipeline(*compose.transforms, **options)
    part, holes, on_device = transform.in_worker(on_device=True), 0, set()
    for row, item in enumerate(given(dtype, boxes)):
        key = SampleKey(3, 0, row)
        reseed((compose,), key)
        try:
            want = compose(**copy.deepcopy(item))
        except Exception:
            return None
        got, tape = part(copy.deepcopy(item), key)
        on_device |= {op.name for op in tape["image"].ops}
        made = transform.apply(
            {one: got[one][None] for one in ("image", "mask")}, part.collate([tape])
        )
        here, there = (np.asarray(mask) == HOLE for mask in (want["mask"], made["mask"][0]))
        holes += here.sum()
        assert (here == there).all(), f"sample {row}: the mask has other holes"
        for target in item.keys() - {"image", "mask"}:
            assert alike(want[target], got[target]), f"sample {row}: other {target}"
    assert holes, "nothing shows what was drawn"
    return on_device


def test_what_is_drawn_behind_any_operation_is_what_albumentations_draws():
    taken, on_device = set(), set()
    with Misses() as misses, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for (name, arguments), dtype, boxes in product(settings(), DTYPES, (True, False)):
            if not (LONG or boxes) and name in taken:
                continue  # what a sample with boxes shows, one without them shows, too
            with misses.case(name, arguments, dtype.__name__, "with boxes" if boxes else ""):
                names = later_draws(name, arguments, dtype, boxes=boxes)
                taken |= set() if names is None else {name}
                on_device |= names or set()
    assert taken == {name for name, _ in settings()}
    assert on_device >= {name for name, _ in NOISES} & DEVICE_OPS.keys()


def test_a_sample_that_the_device_form_does_not_take_is_albumentations_own():
    """As where a pipeline was planned for images from 0 to 1, and one reaches further."""
    images = {
        "brighter than 1": photographs(*SIZE, dtype=np.float32)[0] * 1.5,
        "float64": photographs(*SIZE)[1] / 255,
        "uint16": photographs(*SIZE)[2].astype(np.uint16) * 200,
    }
    little = [one for one in settings() if one[0] in DEVICE_OPS and DEVICE_OPS[one[0]].draw]
    equal = set()
    with Misses() as misses, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for (name, arguments), (kind, image) in product(little, images.items()):
            with misses.case(name, arguments, kind):
                compose = A.Compose([make_example(name, arguments), A.HorizontalFlip(p=1)])
                transform = pipeline(*compose.transforms)
                part, key = transform.in_worker(on_device=True), SampleKey(0, 0, 0)
                reseed((compose,), key)
                try:
                    want = compose(image=image.copy())["image"]
                except Exception:
                    continue  # refused by Albumentations, too
                got, tape = part({"image": image.copy()}, key)
                batch = transform.apply({"image": got["image"][None]}, part.collate([tape]))
                if name not in {op.name for op in tape["image"].ops}:
                    assert np.array_equal(batch["image"][0].numpy(), want)
                    equal.add(kind)
    assert equal == set(images)

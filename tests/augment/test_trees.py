"""Any tree of containers, over all operations: what it draws is Albumentations' own."""

from __future__ import annotations

import albumentations as A
from augment.test_pipelines import EQUAL
from augment.trees import TARGETS, compare, logged, some_samples, targets, trees
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import max_examples

from benchmarks.parity import examples, make_example
from lightning_fastdata.augment.transform import as_batch_transform
from lightning_fastdata.randomness.seeds import reseeder
from lightning_fastdata.types import SampleKey

SEEDS = st.integers(0, 2**40)
# Sizes that suit the small images here.
ARGUMENTS = {
    "CenterCrop": {"height": 20, "width": 24},
    "PadIfNeeded": {"min_height": 32, "min_width": 30},
    "RandomCrop": {"height": 20, "width": 24, "pad_if_needed": True},
    "RandomResizedCrop": {"size": (24, 24)},
    "RandomSizedCrop": {"min_max_height": (10, 16), "size": (24, 24)},
    "Resize": {"height": 18, "width": 26},
}
ENDS = frozenset({"Normalize", "ToFloat", "ToTensorV2"})


def made(name, arguments):
    def make(p):
        transform = make_example(name, ARGUMENTS.get(name, arguments))
        transform.p = p
        return transform

    return make


ALL = [made(name, arguments) for name, arguments in examples() if name not in ENDS]
EXACTLY = [made(name, arguments) for name, arguments in examples() if name in EQUAL - ENDS]
HEADS = st.sampled_from(
    [
        list,
        lambda: [A.RandomCrop(40, 40)],
        lambda: [A.Resize(42, 42), A.HorizontalFlip()],
        lambda: [A.RandomScale(), A.RandomResizedCrop((40, 44))],
    ]
)
TAILS = st.sampled_from([(), (A.Normalize,), (A.Normalize, A.ToTensorV2), (A.ToTensorV2,)])
OPTIONS = st.fixed_dictionaries(
    {
        "p": st.sampled_from([0.7, 1.0]),
        "save_applied_params": st.booleans(),
        "mask_interpolation": st.sampled_from([None, 0]),
        "seed": st.sampled_from([None, 1]),
        "strict": st.booleans(),
        "additional_targets": st.sampled_from(
            [None, {name: TARGETS[name] for name in ("other", "part")}]
        ),
    }
)


@max_examples(60)
@given(HEADS, trees(ALL), OPTIONS, targets(), SEEDS)
def test_any_tree_moves_boxes_keypoints_and_labels_as_albumentations_does(
    head, tree, options, formats, seed
):
    options |= formats
    samples = some_samples(options=options)
    compare(A.Compose([*head(), *tree], **options), samples, seed=seed, pixels=False)


def test_everything_that_was_drawn_is_left_to_the_device_where_it_has_a_form_for_all_of_it():
    tree = [
        A.HorizontalFlip(),
        A.OneOf([A.RandomGamma(), A.Sequential([A.NoOp(), A.VerticalFlip()])], p=0.8),
        A.SomeOf([A.CoarseDropout(), A.HorizontalFlip(), A.Erasing()], 2, replace=True),
        A.RandomOrder([A.ToGray(), A.Compose([A.Blur(p=1)], p=0.5)], 2),
        A.OneOrOther(A.Affine(), A.MotionBlur()),
    ]
    compose = A.Compose(tree)
    part = as_batch_transform(compose).in_worker(on_device=True)
    real, log = logged(compose)
    lengths = set()
    for index in range(40):
        sample = some_samples(1)[0]
        reseeder(real)(SampleKey(0, 0, index))
        log.clear()
        real(**sample)
        _, tape = part(sample, SampleKey(0, 0, index))
        assert [op.leaf for op in tape["image"].ops] == log
        lengths.add(len(log))
    assert len(lengths) > 3

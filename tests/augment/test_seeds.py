from __future__ import annotations

import functools

import albumentations as A
import numpy as np
from misses import each
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_fastdata.randomness.seeds import reseed, reseeder
from lightning_fastdata.tree import find_composes, is_users
from lightning_fastdata.types import SampleKey

IMAGE = np.zeros((8, 8, 3), np.uint8)


def applied(compose) -> set[str]:
    return {name for name, _ in compose(image=IMAGE)["applied_transforms"]}


def flips(**options):
    return A.Compose(
        [A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5)], save_applied_params=True, **options
    )


def test_what_is_reseeded_once_or_for_each_sample_draws_the_same() -> None:
    def pipeline():
        return A.Compose([A.GaussNoise(p=1), A.OneOf([A.Rotate(), A.Affine()], p=0.5)])

    anew, own = pipeline(), pipeline()
    seed = reseeder(own)
    for key in (SampleKey(0, 0, 5), SampleKey(3, 2, 1), SampleKey(-1, 0, 2**70)):
        reseeder(anew)(key)
        seed(key)
        for _ in range(3):
            assert np.array_equal(anew(image=IMAGE)["image"], own(image=IMAGE)["image"])


def test_two_pipelines_of_one_dataset_draw_different_streams() -> None:
    one, other = flips(), flips()
    draws = []
    for index in range(64):
        reseed((one, other), SampleKey(0, 0, index))
        draws.append(applied(one) == applied(other))
    assert not all(draws)


@each("key", [SampleKey(-1, 0, 0), SampleKey(2**80, 0, 2**70)])
def test_any_integers_make_a_key(key) -> None:
    reseed((flips(),), key)


class Holder:
    def __init__(self, value) -> None:
        self.value = value


class InSlots:
    __slots__ = ("value",)
    __init__ = Holder.__init__


class Transformed(Dataset):
    def __init__(self, transform) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 4


def closing_over(pipeline):
    return lambda image: pipeline(image=image)["image"]


def by_default(pipeline):
    def augment(image, pipeline=pipeline):
        return pipeline(image=image)

    return augment


def of_its_class(pipeline):
    return type("OfItsClass", (Transformed,), {"augment": pipeline})


@each(
    "hide",
    [
        lambda pipeline: pipeline,
        Holder,
        lambda pipeline: [1, {"a": (Holder(pipeline),)}],
        lambda pipeline: Subset(Transformed(pipeline), [0]),
        lambda pipeline: ConcatDataset([Transformed(None), Transformed(pipeline)]),
        lambda pipeline: Holder(closing_over(pipeline)),
        lambda pipeline: Holder(functools.partial(closing_over(None), pipeline)),
        lambda pipeline: Holder(Holder(pipeline).__init__),
        lambda pipeline: Subset(of_its_class(pipeline)(None), [0]),
        lambda pipeline: type("Inherited", (of_its_class(pipeline),), {})(None),
        lambda pipeline: Transformed(by_default(pipeline)),
        lambda pipeline: Transformed(InSlots(pipeline)),
    ],
)
def test_a_pipeline_is_found_wherever_a_dataset_keeps_it(hide) -> None:
    pipeline = flips()
    assert find_composes(hide(pipeline)) == (pipeline,)


A_GLOBAL = flips()


class ByAGlobal(Transformed):
    def __getitem__(self, index: int) -> object:
        return A_GLOBAL(image=IMAGE)


def by_a_global(image):
    return A_GLOBAL(image=image)


@each("dataset", [ByAGlobal(None), Transformed(by_a_global)])
def test_what_code_refers_to_is_not_held_by_a_dataset(dataset) -> None:
    assert find_composes(dataset) == ()


def test_code_of_installed_packages_is_not_the_user_s() -> None:
    assert not any(map(is_users, ["torch.utils.data", "json", "lightning_fastdata.types", None]))
    assert is_users(__name__)
    assert is_users("__main__")


def test_only_top_level_pipelines_are_found_once_each_in_order() -> None:
    inner = A.Compose([A.OneOf([A.HorizontalFlip()])])
    first, second = A.Compose([inner]), A.HorizontalFlip()
    holder = Holder([first, second, first])
    holder.itself = holder
    assert find_composes(holder) == (first, second)

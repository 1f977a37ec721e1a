"""Datasets as people write them: batches are the same wherever their pipelines run."""

import collections
import copy
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import albumentations as A
import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_fastdata.augment.dataset_recording import DatasetRecording
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.planning.facts.pipeline_trial import try_recording
from lightning_fastdata.plugin.placing.stage_transforms import finish

COUNT = 12
IMAGES = np.random.default_rng(0).integers(0, 256, (COUNT, 40, 36, 3), np.uint8)


def pipeline(*middle, mean=(0.4, 0.5, 0.6)):
    """Return a pipeline whose operations are the same to the bit in both places."""
    ends = A.Normalize(mean=mean), A.ToTensorV2()
    return A.Compose([A.RandomCrop(32, 32), A.HorizontalFlip(), *middle, *ends])


class Reading(Dataset):
    """A dataset that is told how to make a sample of an image and its number."""

    def __init__(self, read, **attributes):
        self.read = read
        vars(self).update(attributes)

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return self.read(self, IMAGES[index], index)


def batches(dataset, *, recorded, **options):
    """Return the batches, and whether pixels were left over in any of them."""
    options = {"batch_size": 4, "seed": 5, **options}
    if recorded:
        options |= {"staged": "train", "recording": DatasetRecording()}
    made = list(FastDataLoader(dataset, **options))
    if not recorded:
        return made, False
    left = any(batch.draws is not None for batch in made)
    return [finish(batch, {"train": []})[0] for batch in made], left


def leaves(value):
    if hasattr(value, "__dataclass_fields__"):
        value = vars(value)
    if isinstance(value, collections.abc.Mapping):
        return [leaf for key in value for leaf in leaves(value[key])]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def assert_left_over_and_the_same(dataset, *, left_over=True, **options):
    """Hold the batches that are recorded to those that are not."""
    plain, _ = batches(dataset, recorded=False, **options)
    recorded, left = batches(dataset, recorded=True, **options)
    assert left == left_over
    assert len(plain) == len(recorded) > 0
    for one, other in zip(plain, recorded, strict=True):
        assert type(one) is type(other)
        for a, b in zip(leaves(one), leaves(other), strict=True):
            assert type(a) is type(b)
            if isinstance(a, torch.Tensor):
                assert a.dtype == b.dtype
                assert torch.equal(a, b)
            else:
                assert a == b


def with_its_head(dataset, image, _index):
    return {
        "whole": dataset.whole(image=image)["image"],
        "head": dataset.head(image=image)["image"],
    }


def test_a_pipeline_within_another_may_be_called_by_itself():
    head = A.Compose([A.RandomCrop(32, 32), A.Solarize(p=1)])
    whole = A.Compose([head, A.Normalize(), A.ToTensorV2()])
    assert_left_over_and_the_same(Reading(with_its_head, head=head, whole=whole))


def test_a_tensor_pipeline_within_another_may_be_called_by_itself():
    head = A.Compose([A.Solarize(p=1), A.Normalize(), A.ToTensorV2()])
    whole = A.Compose([A.CenterCrop(36, 36), head])
    assert_left_over_and_the_same(Reading(with_its_head, head=head, whole=whole))
    assert_left_over_and_the_same(Reading(with_its_head, whole=whole, head=head))


def test_a_transform_of_a_pipeline_may_be_called_by_itself():
    def read(dataset, image, _index):
        one = dataset.transform.transforms[2](image=image)["image"]
        return dataset.transform(image=image)["image"], one

    assert_left_over_and_the_same(Reading(read, transform=pipeline(A.Solarize(p=1))))


def test_pipelines_may_share_their_last_transforms():
    ends = [A.Solarize(p=1), A.Normalize(), A.ToTensorV2()]
    both = [A.Compose([A.RandomCrop(32, 32), *ends]), A.Compose([A.CenterCrop(32, 32), *ends])]

    def read(dataset, image, index):
        return dataset.both[index < 4](image=image)["image"]

    assert_left_over_and_the_same(Reading(read, both=both))


def test_a_pipeline_that_fails_in_a_dataset_that_goes_on_hides_no_other():
    strict = A.Compose(
        [A.CenterCrop(32, 32), A.Solarize(p=1), A.Normalize(), A.ToTensorV2()],
        bbox_params=A.BboxParams("pascal_voc", label_fields=["labels"]),
    )
    plain = A.Compose(strict.transforms)

    def read(dataset, image, index):
        boxes = [[4, 4, 30, 30]] if index % 3 else [[30, 4, 4, 30]]
        try:
            return dataset.strict(image=image, bboxes=boxes, labels=[0])["image"]
        except ValueError:
            return dataset.plain(image=image)["image"]

    assert_left_over_and_the_same(Reading(read, strict=strict, plain=plain))


def refusing(image, **_):
    if image[0, 0, 0] % 2:
        raise ValueError(image[0, 0, 0])
    return image


def test_the_rest_of_a_pipeline_that_fails_may_be_called_by_itself():
    ends = A.Compose([A.Solarize(p=1), A.Normalize(), A.ToTensorV2()])
    picky = A.Lambda(image=refusing, p=1)
    whole = A.Compose([A.VerticalFlip(p=1), A.CenterCrop(32, 32), picky, ends])

    def read(dataset, image, index):
        try:
            return dataset.whole(image=image)["image"], index
        except ValueError:
            small = dataset.ends.transforms[0](image=image[:32, :32])["image"]
            return dataset.ends(image=small)["image"], index

    assert_left_over_and_the_same(Reading(read, whole=whole, ends=ends), batch_size=1)


def test_a_transform_may_call_another_pipeline_of_the_dataset():
    inner = A.Compose([A.VerticalFlip(p=1), A.Solarize(p=1), A.ToTensorV2()])

    def read(dataset, image, _index):
        return dataset.outer(image=image)["image"], dataset.inner(image=image[:32, :32])["image"]

    def again(image, **_):
        return inner(image=image)["image"].numpy().transpose(1, 2, 0).copy()

    steps = [A.CenterCrop(32, 32), A.HorizontalFlip(p=1), A.Lambda(image=again, p=1)]
    outer = A.Compose([*steps, A.Normalize(), A.ToTensorV2()])
    assert_left_over_and_the_same(Reading(read, outer=outer, inner=inner))


def in_threads(dataset, image, index):
    with ThreadPoolExecutor(4) as pool:
        views = pool.map(lambda _: dataset.transform(image=image)["image"], range(4))
        first = dataset.transform(image=image)["image"] if dataset.first else index
        return torch.stack(list(views)), first


@pytest.mark.parametrize("first", [False, True])
def test_a_pipeline_may_be_called_in_threads_of_the_dataset(first):
    fixed = [A.CenterCrop(32, 32), A.Solarize(p=1), A.Normalize(), A.ToTensorV2()]
    dataset = Reading(in_threads, transform=A.Compose(fixed), first=first)
    assert_left_over_and_the_same(dataset, left_over=first)


def one_view(dataset, image, _index):
    return dataset.transform(image=image)["image"]


def test_pipelines_of_other_forms_meet_in_a_batch_as_always():
    plain = Reading(one_view, transform=pipeline())
    other = Reading(one_view, transform=pipeline(A.Solarize(p=1), mean=(0.1, 0.2, 0.3)))
    joined = ConcatDataset([plain, Subset(other, [1])])
    assert try_recording(joined, seed=5, collate_fn=None).defers
    assert_left_over_and_the_same(joined)


def test_pipelines_of_one_form_with_other_settings_share_a_batch_on_the_device():
    settings = ((0.4, 0.5, 0.6), (0.1, 0.2, 0.3))
    parts = [Reading(one_view, transform=pipeline(mean=mean)) for mean in settings]
    order = np.random.default_rng(1).permutation(2 * COUNT).tolist()
    assert_left_over_and_the_same(ConcatDataset(parts), sampler=order, batch_size=5)


def test_two_views_by_two_pipelines_may_be_stacked():
    def read(dataset, image, _index):
        return torch.stack([one(image=image)["image"] for one in dataset.views])

    views = [pipeline(), pipeline(A.Solarize(p=0.5))]
    assert_left_over_and_the_same(Reading(read, views=views), left_over=False)


def test_images_of_several_dtypes_meet_in_a_batch_as_always():
    def read(dataset, image, index):
        image = image if index % 2 else (image / 255).astype(np.float32)
        return dataset.transform(image=image)["image"]

    transform = A.Compose([A.CenterCrop(32, 32), A.ToFloat(), A.ToTensorV2()])
    assert_left_over_and_the_same(Reading(read, transform=transform), left_over=False)


def test_a_sample_that_nothing_can_be_left_over_of_is_computed():
    def read(dataset, image, index):
        mask = image[::2, ::2, 0] if index == 1 else image[..., 0]
        return dataset.transform(image=image, mask=mask)["image"]

    steps = [A.HorizontalFlip(), A.Solarize(), A.Normalize(), A.ToTensorV2()]
    dataset = Reading(read, transform=A.Compose(steps, is_check_shapes=False))
    assert try_recording(dataset, seed=5, collate_fn=None).defers
    assert_left_over_and_the_same(dataset)


def test_a_dataset_may_copy_its_pipeline_for_each_sample():
    def read(dataset, image, _index):
        return copy.deepcopy(dataset.transform)(image=image)["image"]

    assert_left_over_and_the_same(Reading(read, transform=pipeline(A.Solarize(p=0.5))))


def with_another_transform(dataset):
    dataset.transform.transforms.insert(2, A.Solarize(p=1))


def with_another_pipeline(dataset):
    dataset.transform = A.Compose([A.RandomCrop(32, 32), A.VerticalFlip(), A.ToTensorV2()])


@pytest.mark.parametrize("change", [with_another_transform, with_another_pipeline])
def test_a_callback_may_change_a_pipeline_between_epochs(change):
    epochs = []
    for recorded in (False, False, True):
        dataset = Reading(one_view, transform=pipeline())
        options = {"staged": "train", "recording": DatasetRecording()} if recorded else {}
        loader = FastDataLoader(dataset, batch_size=4, seed=5, **options)
        made = list(loader)
        change(dataset)
        made += list(loader)
        if recorded:
            assert all(batch.draws is not None for batch in made)
            made = [finish(batch, {"train": []})[0] for batch in made]
        epochs.append(torch.stack([image.float() for image in made]))
    assert torch.equal(epochs[0], epochs[1])
    assert torch.equal(epochs[0], epochs[2])


@dataclass(frozen=True)
class Frozen:
    image: torch.Tensor
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "shape", tuple(self.image.shape))


class Noted(dict):
    """A dict that knows where it comes from."""

    source = None


def noted(images):
    batch = Noted(image=torch.stack(images))
    batch.source = "disk"
    return batch


BATCHES = {
    "frozen dataclass": lambda images: Frozen(torch.stack(images)),
    "dict with a default": lambda images: collections.defaultdict(list, x=torch.stack(images)),
    "ordered dict": lambda images: collections.OrderedDict(x=torch.stack(images)),
    "user dict": lambda images: collections.UserDict(x=torch.stack(images)),
    "dict with attributes": noted,
}


@pytest.mark.parametrize("form", BATCHES)
def test_collations_may_return_mappings_and_dataclasses_of_any_kind(form):
    options = {"collate_fn": BATCHES[form]}
    dataset = Reading(one_view, transform=pipeline())
    assert_left_over_and_the_same(dataset, **options)
    batch = batches(dataset, recorded=True, **options)[0][0]
    assert getattr(batch, "source", "disk") == "disk"
    assert getattr(batch, "shape", (4, 3, 32, 32)) == (4, 3, 32, 32)
    assert getattr(batch, "default_factory", list) is list


PAST_FUNCTIONS = {
    "tensor": torch.tensor,
    "as another dtype": lambda t: torch.as_tensor(t, dtype=torch.float64),
    "Tensor": torch.Tensor,
    "nested": lambda t: torch.nested.nested_tensor([t, t]).to_padded_tensor(0),
    "dlpack": torch.from_dlpack,
    "set_": lambda t: torch.empty(0).set_(t),
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("use", PAST_FUNCTIONS)
def test_what_asks_torch_below_its_functions_gets_values(use):
    def read(dataset, image, _index):
        return PAST_FUNCTIONS[use](dataset.transform(image=image)["image"])

    assert_left_over_and_the_same(Reading(read, transform=pipeline()), left_over=False)


def test_what_reaches_for_memory_by_itself_gets_an_error():
    def read(dataset, image, _index):
        return torch.from_dlpack(torch._C._to_dlpack(dataset.transform(image=image)["image"]))

    dataset = Reading(read, transform=pipeline())
    with DatasetRecording().reading(dataset), pytest.raises(RuntimeError, match="data pointer"):
        dataset[0]


class Sly(Dataset):
    """Gives another value beside the image where it is recorded."""

    def __init__(self):
        self.transform = pipeline()

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        image = self.transform(image=IMAGES[index])["image"]
        return image, torch.tensor(float(type(image) is torch.Tensor))


def test_other_values_beside_the_images_are_noticed():
    trial = try_recording(Sly(), seed=0, collate_fn=None)
    assert not trial.defers
    assert "[1] had other values" in trial.why


def test_values_that_are_others_each_time_are_no_difference():
    numbers = iter(range(100))

    def read(dataset, image, _index):
        return dataset.transform(image=image)["image"], torch.tensor(next(numbers))

    assert try_recording(Reading(read, transform=pipeline()), seed=0, collate_fn=None).defers


def test_images_of_several_sizes_are_left_over_in_batches_of_one():
    def read(dataset, image, index):
        return dataset.transform(image=image[: 20 + index])["image"]

    dataset = Reading(read, transform=A.Compose([A.Solarize(p=1), A.Normalize(), A.ToTensorV2()]))
    assert "1 sample tried" in try_recording(dataset, seed=0, collate_fn=None).why
    assert_left_over_and_the_same(dataset, batch_size=1)


def by_steps(dataset, image, index):
    for transform in dataset.transform.transforms:
        image = transform(image=image)["image"]
    return image, index


class Box:
    def __init__(self, samples):
        self.images = [image for image, _ in samples]


REASONS = {
    "torch.Tensor.clamp": (lambda d, x, i: (one_view(d, x, i).clamp(0, 1), i), None),
    "of another pipeline": (
        lambda d, x, i: torch.stack([one_view(d, x, i), torch.zeros(3, 32, 32)]),
        None,
    ),
    "one transform at a time": (by_steps, None),
    "given stacks": (
        lambda d, x, i: (d.transform(images=np.stack([x, x]))["images"], i),
        None,
    ),
}


@pytest.mark.parametrize("why", REASONS)
def test_the_reason_names_what_became_of_the_tensor(why):
    read, collate_fn = REASONS[why]
    dataset = Reading(read, transform=pipeline())
    trial = try_recording(dataset, seed=0, collate_fn=collate_fn)
    assert not trial.defers
    assert why in trial.why
    assert_left_over_and_the_same(dataset, left_over=False, collate_fn=collate_fn)


def test_a_batch_of_a_class_of_one_s_own_is_computed_in_the_workers():
    dataset = Reading(lambda d, x, i: (one_view(d, x, i), i), transform=pipeline())
    trial = try_recording(dataset, seed=0, collate_fn=Box)
    assert not trial.defers
    assert "dicts, lists, tuples or dataclasses" in trial.why

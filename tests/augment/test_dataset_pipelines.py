"""Pipelines that a dataset calls itself: what comes out is what would have come out."""

import copy
import gc
import os
import pickle
import weakref
from dataclasses import dataclass
from typing import NamedTuple

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

import albumentations as A
import lightning as L
import numpy as np
import pytest
import torch
from augment.own_transforms import Steps
from augment.trainers import quiet_trainer
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, default_collate

from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions
from lightning_fastdata.augment.dataset_recording import DatasetRecording, place_pipelines
from lightning_fastdata.augment.record.deferred import DeferredTensor
from lightning_fastdata.augment.registry import register
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.planning.facts.inspection import DatasetFacts
from lightning_fastdata.planning.facts.pipeline_trial import try_recording
from lightning_fastdata.planning.loader_plan import LoaderSpec
from lightning_fastdata.plugin.placing.pipelines import Pipelines
from lightning_fastdata.plugin.placing.stage_transforms import StagePlan, StageTransforms, finish
from lightning_fastdata.randomness.search import find_composes

COUNT = 14
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (COUNT, 40, 36, 3), np.uint8)


def exact(*tail):
    """Return a pipeline whose operations are the same to the bit in both places."""
    return A.Compose(
        [
            A.RandomCrop(32, 32),
            A.HorizontalFlip(),
            A.OneOf(
                [
                    A.RandomGamma(p=1),
                    A.Posterize(p=1),
                    A.ImageCompression(quality_range=(40, 60), p=1),
                ]
            ),
            A.RandomBrightnessContrast(p=0.7),
            A.CoarseDropout(p=0.5),
            *(tail or (A.Normalize(), A.ToTensorV2())),
        ]
    )


class Photos(Dataset):
    def __init__(self, transform=None, form="tuple"):
        self.transform = transform or exact()
        self.form = form

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return FORMS[self.form](self.transform, IMAGES[index], index)


@dataclass
class Record:
    image: torch.Tensor
    label: int


class Pair(NamedTuple):
    picture: torch.Tensor
    number: int


def with_mask(transform, image, index):
    out = transform(image=image, mask=image[..., 0] // 64)
    return {"image": out["image"], "mask": out["mask"], "index": index}


def two_views(transform, image, index):
    return torch.stack([transform(image=image)["image"] for _ in range(2)]), index


def nested(transform, image, index):
    return {"views": [transform(image=image)["image"], transform(image=image)["image"]], "y": index}


FORMS = {
    "tuple": lambda t, image, index: (t(image=image)["image"], index),
    "dict": lambda t, image, index: {"pixel_values": t(image=image)["image"], "label": index},
    "alone": lambda t, image, _: t(image=image)["image"],
    "dataclass": lambda t, image, index: Record(t(image=image)["image"], index),
    "named tuple": lambda t, image, index: Pair(t(image=image)["image"], index),
    "mask": with_mask,
    "long mask": lambda t, image, i: {
        k: v.long() if k == "mask" else v for k, v in with_mask(t, image, i).items()
    },
    "two views": two_views,
    "nested": nested,
}


def batches(dataset, *, recorded, **options):
    options = {"batch_size": 4, "seed": 5, **options}
    if recorded:
        options = {"staged": "train", "recording": DatasetRecording(), **options}
    loader = FastDataLoader(dataset, **options)
    return list(loader)


def finished(staged):
    return [finish(batch, {"train": []})[0] for batch in staged]


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if hasattr(value, "__dataclass_fields__"):
        value = list(vars(value).values())
    return [leaf for item in value for leaf in leaves(item)]


def assert_same(some, others):
    assert len(some) == len(others) > 0
    for one, other in zip(some, others, strict=True):
        assert type(one) is type(other)
        for a, b in zip(leaves(one), leaves(other), strict=True):
            assert type(a) is type(b) is torch.Tensor
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


@pytest.mark.cases(5)
@pytest.mark.parametrize("form", FORMS)
def test_batches_of_any_form_are_what_the_pipelines_alone_make(form):
    plain = batches(Photos(form=form), recorded=False)
    staged = batches(Photos(form=form), recorded=True)
    assert all(batch.draws is not None for batch in staged)
    assert any(leaf.dtype == torch.uint8 for leaf in leaves(staged[0].batch))
    assert_same(plain, finished(staged))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("executor", "workers", "context"),
    [
        ("torch", 2, None),
        ("torch", 1, "spawn"),
        ("workers", 2, None),
        ("inline", 0, None),
    ],
)
def test_any_loader_records_the_same(executor, workers, context):
    options = {"executor": executor, "num_workers": workers, "multiprocessing_context": context}
    plain = batches(Photos(form="mask"), recorded=False)
    assert_same(plain, finished(batches(Photos(form="mask"), recorded=True, **options)))


@pytest.mark.parametrize(
    "wrap", [lambda d: Subset(d, range(3, 12)), lambda d: ConcatDataset([d, d])]
)
def test_wrapped_datasets_are_recorded_too(wrap):
    staged = batches(wrap(Photos()), recorded=True)
    assert all(batch.draws is not None for batch in staged)
    assert_same(batches(wrap(Photos()), recorded=False), finished(staged))


USES = {
    "scaled": lambda t: t / 2,
    "in place": lambda t: t.mul_(2),
    "cut off": lambda t: t.clamp(0, 1),
    "written to": lambda t: t.__setitem__(0, 0.5) or t,
    "indexed": lambda t: t[1:],
    "numpy": lambda t: torch.from_numpy(np.asarray(t).copy()),
    "numpy()": lambda t: torch.from_numpy(t.numpy() + 1),
    "half": lambda t: t.half(),
    "moved axes": lambda t: t.permute(1, 2, 0),
    "joined": lambda t: torch.cat([t, t]),
    "stacked behind": lambda t: torch.stack([t, t], 1),
    "stacked with others": lambda t: torch.stack([t, torch.zeros_like(t)]),
    "copied": copy.deepcopy,
    "pickled": lambda t: pickle.loads(pickle.dumps(t)),
    "cloned": lambda t: t.clone(),
    "looked at": lambda t: t if float(t.mean()) < 100 else None,
    "compared": lambda t: (t > 0).float(),
    "walked": lambda t: torch.stack(list(t)),
    "printed": lambda t: t if repr(t) else None,
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "module": lambda t: torch.nn.functional.avg_pool2d(t, 2),
}


class Using(Photos):
    def __init__(self, use):
        super().__init__()
        self.use = USES[use]

    def __getitem__(self, index):
        tensor = self.transform(image=IMAGES[index])["image"]
        if self.use is USES["channels last"]:
            return self.use(tensor[None])[0]
        return self.use(tensor)


@pytest.mark.cases(9)
@pytest.mark.parametrize("use", USES)
def test_whatever_a_dataset_does_with_the_tensor_gives_the_same(use):
    assert_same(batches(Using(use), recorded=False), finished(batches(Using(use), recorded=True)))


FORM_ONLY = {
    "float": lambda t: t.float(),
    "contiguous": lambda t: t.contiguous(),
    "asked for its form": lambda t: (
        t if (t.shape[0], t.ndim, t.device.type) == (3, 3, "cpu") else 0
    ),
    "asked for its type": lambda t: t if t.dtype == torch.float32 and t.is_floating_point() else 0,
    "measured": lambda t: t if len(t) == 3 and t.size(1) == 32 and t.numel() == 3072 else 0,
    "of the right kind": lambda t: t if isinstance(t, torch.Tensor) else 0,
}


@pytest.mark.parametrize("look", FORM_ONLY)
def test_a_look_at_the_form_leaves_the_pixels_to_the_device(look):
    dataset = Photos()
    dataset.__class__ = type(
        "Looking",
        (Photos,),
        {"__getitem__": lambda s, i: FORM_ONLY[look](s.transform(image=IMAGES[i])["image"])},
    )
    staged = batches(dataset, recorded=True)
    assert all(batch.draws is not None for batch in staged)
    assert_same(batches(dataset, recorded=False), finished(staged))


def sorted_stack(samples):
    images, labels = zip(*sorted(samples, key=lambda pair: -pair[1]), strict=True)
    return {"images": torch.stack(images), "labels": torch.tensor(labels)}


def padded(samples):
    images = [torch.nn.functional.pad(image, (0, 1)) for image, _ in samples]
    return torch.stack(images), default_collate([label for _, label in samples])


@pytest.mark.parametrize(("collate", "deferred"), [(sorted_stack, True), (padded, False)])
def test_collations_of_the_user_get_what_they_need(collate, deferred):
    staged = batches(Photos(), recorded=True, collate_fn=collate)
    assert all((batch.draws is not None) == deferred for batch in staged)
    plain = batches(Photos(), recorded=False, collate_fn=collate)
    assert_same(plain, finished(staged))


class OneBuffer(Photos):
    def __init__(self):
        super().__init__(A.Compose([A.HorizontalFlip(), A.Normalize(), A.ToTensorV2()]))
        self.buffer = np.empty_like(IMAGES[0])

    def __getitem__(self, index):
        self.buffer[:] = IMAGES[index]
        return self.transform(image=self.buffer)["image"]


def test_a_dataset_may_read_each_image_into_the_same_buffer():
    staged = batches(OneBuffer(), recorded=True)
    assert staged[0].draws is not None
    assert_same(batches(OneBuffer(), recorded=False), finished(staged))


def test_the_pipelines_are_as_before_once_a_sample_was_read():
    dataset = Photos(form="mask")
    before = [sorted(vars(t)) for t in (dataset.transform, *dataset.transform.transforms)]
    batches(dataset, recorded=True)
    after = [sorted(vars(t)) for t in (dataset.transform, *dataset.transform.transforms)]
    assert before == after
    pickle.dumps(dataset)
    assert type(dataset[0]["image"]) is torch.Tensor


def test_an_error_within_the_dataset_leaves_no_hooks_behind():
    dataset = Photos(form="mask")
    recording = DatasetRecording()
    with recording.reading(dataset):
        assert isinstance(dataset[0]["image"], DeferredTensor)
    with pytest.raises(IndexError), recording.reading(dataset):
        dataset[COUNT]
    assert type(dataset[0]["image"]) is torch.Tensor


class Streamed(IterableDataset):
    def __init__(self):
        self.transform = exact()

    def __iter__(self):
        return (self.transform(image=image)["image"] for image in IMAGES)


def no_tensor():
    return A.Compose([A.Resize(32, 32), A.Normalize()])


def jpeg_last():
    return A.Compose([A.RandomCrop(32, 32), A.ImageCompression(p=1), A.ToTensorV2(p=0.5)])


@pytest.mark.parametrize(
    ("dataset", "why"),
    [
        (Photos(no_tensor(), "dict"), "does not end in ToTensorV2"),
        (Photos(jpeg_last(), "dict"), "some samples only"),
        (Using("cut off"), "works on what it returns"),
        (Streamed(), "a stream"),
        (Photos(A.ToTensorV2()), "not a Compose"),
    ],
)
def test_what_is_not_left_to_the_device_says_why(dataset, why):
    trial = try_recording(dataset, seed=0, collate_fn=None)
    assert not trial.defers
    assert why in trial.why
    assert why in trial.explain()


class Nothing(Photos):
    def __init__(self):
        self.form = "alone"
        self.transform = lambda image: {"image": torch.from_numpy(image)}


def test_a_dataset_without_a_pipeline_needs_no_trial():
    assert try_recording(Nothing(), seed=0, collate_fn=None) is None
    assert place_pipelines(find_composes(Nothing())) == ()


class Stubborn(Photos):
    """Reaches for memory that a deferred tensor has not got."""

    def __getitem__(self, index):
        tensor = self.transform(image=IMAGES[index])["image"]
        if type(tensor) is not torch.Tensor:
            raise RuntimeError("only plain tensors")
        return tensor


def test_code_that_cannot_take_the_tensor_gets_what_it_always_got():
    trial = try_recording(Stubborn(), seed=0, collate_fn=None)
    assert not trial.defers
    assert "RuntimeError: only plain tensors" in trial.why


class Sly(Photos):
    """Gives other values where it is recorded."""

    def __getitem__(self, index):
        tensor = self.transform(image=IMAGES[index])["image"]
        return tensor if type(tensor) is torch.Tensor else self.transform(image=IMAGES[0])["image"]


def test_other_values_are_noticed():
    trial = try_recording(Sly(), seed=0, collate_fn=None)
    assert not trial.defers
    assert "other values" in trial.why


def test_a_trial_leaves_the_random_state_alone():
    state = torch.get_rng_state(), np.random.get_state()[1].tolist()
    assert try_recording(Photos(), seed=0, collate_fn=None).defers
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1] == np.random.get_state()[1].tolist()


class Watching(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch)
        return self.scale * batch["image"].mean()

    def validation_step(self, batch, batch_idx):
        self.seen.append(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


def seen_by_training(augment_on, tmp_path, callbacks=(), **options):
    data = FastDataModule.from_datasets(
        Photos(form="mask"),
        Photos(A.Compose([A.CenterCrop(32, 32), A.Normalize(), A.ToTensorV2()]), form="mask"),
        batch_size=4,
        augment_on=augment_on,
        seed=3,
        **options,
    )
    module = Watching()
    quiet_trainer(tmp_path, max_epochs=2, callbacks=list(callbacks)).fit(module, datamodule=data)
    return module.seen, data


def test_a_training_sees_the_same_batches_wherever_the_dataset_s_pipeline_runs(tmp_path):
    on_cpu, cpu = seen_by_training("cpu", tmp_path)
    on_device, data = seen_by_training("gpu", tmp_path)
    assert_same(on_cpu, on_device)
    text = data.explain()
    assert "on the device: ['image'], ['mask']; 3 samples tried" in text
    assert "ToTensorV2" in text
    assert data.augments_on_device("train")
    assert data.augments_on_device("val")
    assert not cpu.augments_on_device("train")


@pytest.mark.parametrize("augment_on", ["cpu", "gpu"])
def test_what_the_device_computes_of_a_dataset_s_pipeline_is_measured(augment_on, tmp_path):
    callback = DataThroughputCallback(summary=False, report=False)
    seen_by_training(augment_on, tmp_path, [callback])
    measured = callback.report.stages[0].augment
    assert (measured is not None) == (augment_on == "gpu")


def test_what_is_registered_runs_behind_the_dataset_s_own_pipeline(tmp_path):
    def negated(batch):
        return {**batch, "image": -batch["image"]}

    plain, _ = seen_by_training("cpu", tmp_path)
    seen, _ = seen_by_training("gpu", tmp_path, augment={"train": negated, "val": negated})
    for one, other in zip(plain, seen, strict=True):
        assert torch.equal(one["image"], -other["image"])


def test_a_pipeline_of_the_data_module_has_the_dataset_run_its_own(tmp_path):
    second = A.Compose([A.HorizontalFlip(p=1)])

    class Head(Photos):
        def __getitem__(self, index):
            return {"image": self.transform(image=IMAGES[index])["image"]}

    head = A.Compose([A.RandomCrop(32, 32), A.ToTensorV2()])
    seen = {}
    for where in ("cpu", "gpu"):
        data = FastDataModule.from_datasets(
            Head(head), batch_size=4, augment=second, augment_on=where, seed=1
        )
        module = Watching()
        module.training_step = lambda batch, _i, m=module: (
            m.seen.append(batch) or m.scale * batch["image"].float().mean()
        )
        quiet_trainer(tmp_path).fit(module, datamodule=data)
        seen[where] = module.seen
    assert_same(seen["cpu"], seen["gpu"])


def test_a_loader_without_batches_has_the_dataset_run_its_pipeline(tmp_path):
    class Single(FastDataModule):
        def train_dataset(self):
            return Photos(form="dict")

        def train_dataloader(self):
            return self.make_loader(self.train_dataset(), stage="train", batch_size=None)

    class Training(Watching):
        def training_step(self, batch, batch_idx):
            self.seen.append(batch["pixel_values"])
            return self.scale * batch["pixel_values"].mean()

    module = Training()
    trainer = quiet_trainer(tmp_path)
    trainer.fit(module, datamodule=Single(augment_on="gpu"))
    assert [tuple(image.shape) for image in module.seen] == [(3, 32, 32)] * COUNT


def test_a_hook_that_loses_a_waiting_field_is_told_so():
    staged = batches(Photos(form="dict"), recorded=True)[0]
    with pytest.raises(Exception, match=r"no field \['pixel_values'\]"):
        staged.draws.apply({"other": staged.batch["pixel_values"]})
    with pytest.raises(Exception, match="should be a tensor of 4 images"):
        staged.draws.apply({"pixel_values": staged.batch["pixel_values"][:2], "label": 0})


@pytest.mark.slow
def test_forms_of_the_user_s_own_classes_run_on_the_device_too():
    compose = A.Compose([A.RandomCrop(32, 32), Steps(p=0.5), A.Normalize(), A.ToTensorV2()])
    unknown = place_pipelines([compose])[0].plan.placements[1].where
    remove = register(Steps, table=True)
    try:
        trial = try_recording(Photos(compose), seed=0, collate_fn=None)
        assert (unknown, trial.pipelines.places[0].plan.placements[1].where) == ("worker", "device")
        for workers, context in ((0, None), (2, "spawn")):
            staged = batches(
                Photos(compose),
                recorded=True,
                recording=trial.recording(),
                num_workers=workers,
                multiprocessing_context=context,
            )
            assert_same(batches(Photos(compose), recorded=False), finished(staged))
    finally:
        remove()


class Read(Photos):
    """Remembers what was read of it."""

    def __init__(self, transform=None):
        super().__init__(transform)
        self.read, self.mirrored = [], False

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)


def default_collation(samples):
    return default_collate(samples)


def pipelines():
    return Pipelines(StageTransforms(None, image=None, mask=None), "gpu")


def find(where, dataset, **other):
    given = {"stage": "train", "seed": 0, "collate_fn": None, **other}
    seed, against = given.pop("seed"), given.pop("against", None)
    given |= {"name": given["stage"], "pipelines": find_composes(dataset)}
    spec = LoaderSpec(dataset=dataset, options=LoaderOptions(), batch_size=1, **given)
    of = StagePlan(spec=spec, seed=seed, against=against, trainer=object())
    asked, trial = where.questions(of).trial, None
    if asked is not None:  # which a process that is thrown away does for a data module
        trial = try_recording(dataset, seed=asked[0], collate_fn=asked[1])
    return where.find(of, DatasetFacts(trial=trial)).own


def test_a_dataset_is_tried_once_for_a_stage_however_often_its_loader_is_made():
    where, dataset = pipelines(), Read()
    first = find(where, dataset)
    assert first.defers
    tried = len(dataset.read)
    list(FastDataLoader(dataset, batch_size=4, staged="train", recording=first.recording()))
    dataset.read.clear()
    assert [find(where, dataset) for _ in range(3)] == [first] * 3
    assert not dataset.read
    find(where, dataset, stage="val")
    assert len(dataset.read) == tried


def chance(dataset):
    dataset.transform.transforms[1].p = 0.1


def another(dataset):
    dataset.transform.transforms[1] = A.VerticalFlip()


def nested_range(dataset):
    dataset.transform.transforms[2].transforms[0].gamma_limit = (90, 110)


def replaced(dataset):
    dataset.transform = exact()


def switched(dataset):
    dataset.mirrored = True


@pytest.mark.parametrize("change", [chance, another, nested_range, replaced, switched])
def test_what_was_changed_is_tried_again(change):
    where, dataset = pipelines(), Read()
    find(where, dataset)
    change(dataset)
    dataset.read.clear()
    assert find(where, dataset).defers
    assert dataset.read


@pytest.mark.parametrize("other", [{"seed": 1}, {"collate_fn": default_collation}])
def test_so_is_what_is_drawn_or_collated_in_another_way_and_another_dataset(other):
    where, dataset = pipelines(), Read()
    find(where, dataset)
    dataset.read.clear()
    find(where, dataset, **other)
    assert dataset.read
    twin = Read(dataset.transform)
    find(where, twin, **other)
    assert twin.read


def test_a_change_for_the_worse_is_noticed_and_told():
    where, dataset = pipelines(), Read()
    assert find(where, dataset).defers
    dataset.transform.transforms.append(A.ToFloat(p=0))
    assert find(where, dataset) is None
    assert where.settled("train")
    assert any("does not end in ToTensorV2" in text for text in where.explain(None, {}))
    dataset.transform = None
    assert find(where, dataset) is None
    assert not where.explain(None, {})


def test_what_was_tried_is_neither_kept_alive_nor_used_in_another_process():
    where, dataset = pipelines(), Read()
    find(where, dataset)
    reference = weakref.ref(dataset)
    twin = pickle.loads(pickle.dumps(where))
    dataset.read.clear()
    assert find(twin, dataset).defers
    assert dataset.read
    del dataset
    gc.collect()
    assert reference() is None

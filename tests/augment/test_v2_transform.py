"""Where transforms of a v2 pipeline run, what is refused, and batches of other loaders."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from augment.v2_pipelines import assert_same, eager, images, keys, sample, samples_of, worked
from torch import nn
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms._presets import ImageClassification

from lightning_fastdata import as_batch_transform
from lightning_fastdata.augment.torchvision import plan
from lightning_fastdata.augment.torchvision import transform as home
from lightning_fastdata.augment.torchvision.transform import TorchvisionTransform
from lightning_fastdata.batches.collate import collate_samples
from lightning_fastdata.errors import BatchError, TransformError

FLOAT = v2.ToDtype(torch.float32, scale=True)


class Halved(v2.Transform):
    """A transform as torchvision's documentation writes them."""

    def make_params(self, flat_inputs):
        return {"by": torch.rand(()).item()}

    def transform(self, inpt, params):
        return inpt * params["by"] if isinstance(inpt, tv_tensors.Image) else inpt


def places(pipeline, **how):
    return [placed.where for placed in plan.make_plan(pipeline, **how).placements]


@pytest.mark.parametrize(
    ("steps", "where"),
    [
        ([v2.RandomResizedCrop(9), v2.RandomHorizontalFlip(), FLOAT], "worker device device"),
        ([v2.RandomInvert(), v2.Resize(9), v2.CenterCrop(9), FLOAT], "worker worker worker device"),
        ([v2.RandomHorizontalFlip(), v2.ColorJitter(0.1)], "device device"),
        ([v2.RandomInvert(), v2.ElasticTransform(), v2.RandomInvert()], "worker worker device"),
        ([v2.RandomInvert(), v2.RandomApply([v2.GaussianNoise()]), FLOAT], "worker worker device"),
        ([v2.RandomInvert(), Halved(), v2.RandomErasing()], "worker worker device"),
        ([v2.RandomApply([FLOAT]), v2.RandomInvert()], "worker device"),
        ([v2.RandomRotation(9, expand=True), v2.CenterCrop(9), FLOAT], "worker worker device"),
        ([v2.ToImage(), v2.RandAugment(), v2.SanitizeBoundingBoxes()], "worker device worker"),
        ([v2.RandAugment(), v2.AugMix()], "worker worker"),
    ],
)  # fmt: skip
def test_each_transform_has_its_place(steps, where):
    assert places(v2.Compose(steps)) == where.split()


def test_images_of_one_size_are_cropped_on_the_device():
    transform = as_batch_transform(v2.Compose([v2.RandomResizedCrop(9), FLOAT]))
    alike, unlike = images(3, 20, 24), [*images(2, 20, 24), *images(1, 24, 20)]
    assert "worker" in transform.for_samples([(image, 0) for image in unlike]).explain()
    assert "worker" in transform.for_samples([(alike[0], 0)]).explain()
    fitted = transform.for_samples([(image, 0) for image in alike])
    assert "worker" not in fitted.explain()
    # It is right for others, too.
    worker = fitted.in_worker(on_device=True)
    samples = [(image, 0) for image in unlike]
    made, tapes = worked(worker, samples)
    assert not worker.stacks(made, tapes)
    assert_same(worker.finish_each(made, tapes)[0], eager(transform.pipeline, samples))


def test_pil_images_are_left_to_pil_until_tensors_are_made_of_them():
    pipeline = v2.Compose(
        [v2.Resize((20, 24)), v2.RandomInvert(), v2.ToImage(), v2.ColorJitter(0.4)]
    )
    samples = [(v2.functional.to_pil_image(image), 0) for image in images(4, 40, 44)]
    transform = as_batch_transform(pipeline).for_samples(samples)
    assert [one.where for one in transform.plan.placements] == ["worker"] * 3 + ["device"]
    assert "takes PIL images" in transform.explain()
    worker = transform.in_worker(on_device=True)
    made, tapes = worked(worker, samples)
    done = transform.apply(collate_samples(made), worker.collate(tapes))
    assert_same(done, collate_samples(eager(pipeline, samples)), types=False)
    never = as_batch_transform(v2.Compose(pipeline.transforms[:2])).for_samples(samples)
    assert not never.defers


def test_explain_names_what_runs_in_the_worker_and_why():
    steps = [v2.CenterCrop(9), v2.RandomErasing(), v2.RandomRotation(3), v2.JPEG(50), v2.Resize(8)]
    text = as_batch_transform(v2.Compose(steps)).explain()
    assert "makes the images one size" in text
    assert "JPEG behind it needs pixels" in text
    assert "no form for batches: runs by itself on each sample" in text


def test_a_pipeline_of_v1_is_told_how_to_become_one_of_v2():
    given = v1.Compose([v1.RandomHorizontalFlip(), v1.ToTensor()])
    for pipeline in (given, given.transforms[0], torch.nn.Sequential(given.transforms[0])):
        with pytest.raises(TransformError, match=r"v2\.ToImage\(\), and write v2\.ToDtype"):
            as_batch_transform(pipeline)


def test_what_mixes_a_batch_or_is_none_of_v2_stays_a_callable():
    preset = ImageClassification(crop_size=8)
    for one in (v2.CutMix(num_classes=3), nn.Sequential(nn.Identity()), nn.Identity(), preset):
        assert not isinstance(as_batch_transform(one), TorchvisionTransform)
    assert isinstance(as_batch_transform(nn.Sequential(v2.RandomInvert())), TorchvisionTransform)
    assert isinstance(as_batch_transform(Halved()), TorchvisionTransform)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("p", [torch.tensor([0.2, 0.8]), np.array([0.2, 0.8]), [0.2, 0.8], None])
def test_a_transform_of_the_users_may_mean_anything_by_its_attributes(p, on_device):
    halved = Halved()
    halved.p = p
    pipeline = v2.Compose([v2.RandomHorizontalFlip(), halved, FLOAT])
    worker = as_batch_transform(pipeline).in_worker(on_device=on_device)
    made, tapes = worked(worker, images(2, 12, 12))
    assert_same(worker.finish_each(made, tapes)[0], eager(pipeline, images(2, 12, 12)))


def test_what_draws_nothing_may_run_on_batches_behind_another_transform():
    normal = as_batch_transform(v2.Compose([FLOAT, v2.Normalize([0.5], [0.5])]))
    assert not normal.behind().starts_in_worker
    for one in (v2.RandomInvert(), v2.ColorJitter(0.1), Halved(), v2.RandAugment()):
        drawing = as_batch_transform(v2.Compose([FLOAT, one]))
        assert drawing.behind() is drawing


BATCHED = {
    "all on the device": [v2.RandomResizedCrop(24), v2.RandomRotation(30), FLOAT],
    "some need pixels": [
        v2.RandomAffine(9),
        v2.RandomApply([v2.GaussianNoise()], 0.5),
        v2.RandomInvert(),
    ],
    "all need pixels": [v2.RandomInvert(), v2.ElasticTransform(9.0, 1.0), v2.ColorJitter(0.3)],
    "users": [Halved(), lambda image: image.clip(0, 0.5), v2.RandomHorizontalFlip()],
}


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("form", ["tuple", "masks"])
def test_batches_of_other_loaders_draw_by_sample(name, form):
    samples, steps = samples_of(6, 40, 44, form, torch.float32), BATCHED[name]
    if form == "masks" and name == "users":
        # Of an image and a mask, v2 itself gives a function both.
        steps = [steps[0], steps[2]]
        for one in samples:
            one["mask"] = tv_tensors.Mask(one["mask"].float())
    pipeline = v2.Compose(steps)

    def moved(one):
        return one[0] if form == "tuple" else {name: one[name] for name in ("image", "mask")}

    wanted = collate_samples(eager(pipeline, list(map(moved, samples))))
    batch = collate_samples(samples)
    transform = as_batch_transform(pipeline)
    for on_device in (False, True, True):
        made = transform.run_collated(batch, keys(6)[0], on_device=on_device)
        assert_same(moved(made), wanted, types=False, floats=1e-5)
        rest = made[1] if form == "tuple" else made["label"]
        assert rest.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("several", [v2.FiveCrop(20), lambda image: (image, image.flip(-1))])
def test_several_views_are_batches_of_views_as_torch_collates_them(on_device, several):
    pipeline = v2.Compose([v2.RandomInvert(), several])
    samples = samples_of(4, 40, 44)
    transform, batch = as_batch_transform(pipeline), collate_samples(samples)
    views, labels = transform.run_collated(batch, keys(4)[0], on_device=on_device)
    wanted = collate_samples(eager(pipeline, [image for image, _ in samples]))
    assert_same(views, wanted, types=False)
    assert labels.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_images_of_other_dtypes_are_computed_sample_by_sample(dtype):
    pipeline = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomAffine(9)])
    given = [image.to(dtype) for image in images(4, 40, 44)]
    transform = as_batch_transform(pipeline)
    made = transform.run_collated(torch.stack(given), keys(4)[0], on_device=True)
    assert_same(made, torch.stack(eager(pipeline, given)), types=False)


def test_batches_of_other_loaders_that_cannot_be_right_are_refused():
    sizes = as_batch_transform(v2.RandomResize(20, 40))
    with pytest.raises(TransformError, match="cannot be stacked"):
        sizes.apply_unprepared([torch.rand(4, 3, 30, 30), torch.arange(4)], keys(1)[0])
    boxes = as_batch_transform(v2.Compose([v2.RandomHorizontalFlip(), v2.SanitizeBoundingBoxes()]))
    with pytest.raises(TransformError, match="SanitizeBoundingBoxes"):
        boxes.apply_unprepared([torch.zeros(2, 3, 8, 8), torch.zeros(2)], keys(1)[0])
    flip = as_batch_transform(v2.RandomHorizontalFlip())
    with pytest.raises(BatchError, match=r"torchvision takes \[n, C, H, W\]"):
        flip.apply_unprepared(
            [torch.zeros(2, 8, 8, 3, dtype=torch.uint8), torch.zeros(2)], keys(1)[0]
        )
    with pytest.raises(BatchError, match="no role"):
        flip.apply_unprepared(
            {"image": torch.zeros(2, 3, 8, 8), "depth": torch.zeros(2, 8, 8)}, keys(1)[0]
        )


@pytest.mark.parametrize("recorded", [False, True])
def test_a_changed_pipeline_is_planned_anew(monkeypatch, recorded):
    there = torch.device("meta" if recorded else "cpu")
    monkeypatch.setattr(home, "first_device", lambda batch: there)
    pipeline = v2.Compose([v2.RandomResizedCrop(9), FLOAT])
    transform = as_batch_transform(pipeline)
    assert transform.renewed() is transform
    pipeline.transforms.append(v2.RandomInvert())
    assert len(transform.renewed().plan.leaves) == 3
    # Whoever takes batches of other loaders asks for it as an epoch begins.
    batch = [torch.stack(images(2, 20, 24)), torch.arange(2)]
    for epoch, steps in ((0, 3), (1, 4)):
        key = keys(1, epoch=epoch)[0]
        transform = transform.renewed()
        made = transform.apply_unprepared(batch, key)[0]
        assert_same(made[0], eager(pipeline, [images(1, 20, 24)[0]], [key])[0], types=False)
        assert len(pipeline.transforms) == steps
        pipeline.transforms.append(v2.RandomVerticalFlip(1))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda pipeline: pipeline.transforms.pop(0),
        lambda pipeline: pipeline.transforms.insert(0, v2.RandomInvert(1.0)),
        lambda pipeline: pipeline.transforms.__setitem__(0, Halved()),
        lambda pipeline: setattr(pipeline.transforms[0], "p", 0.0),
        lambda pipeline: setattr(pipeline.transforms[1], "mean", [0.5]),
        lambda pipeline: pipeline.transforms[1].mean.__setitem__(0, 0.5),
    ],
)
def test_a_pipeline_that_is_changed_is_what_it_was_until_it_is_renewed(change, on_device):
    """In the worker, and for what waits for the device, which the given transform carries out."""
    pipeline = v2.Compose([v2.RandomHorizontalFlip(1.0), v2.Normalize([0.0], [2.0])])
    samples = samples_of(3, 20, 24, dtype=torch.float32)
    transform = as_batch_transform(pipeline)
    fitted = transform.for_samples(samples)
    before = collate_samples(eager(pipeline, samples))
    worker = fitted.in_worker(on_device=on_device)
    change(pipeline)

    def done(worker):
        made, tapes = worked(worker, samples)
        return transform.apply(collate_samples(made), worker.collate(tapes))

    assert_same(done(worker), before, types=False, floats=1e-6)
    after = collate_samples(eager(pipeline, samples))
    renewed = fitted.renewed().in_worker(on_device=on_device)
    assert_same(done(renewed), after, types=False, floats=1e-6)


def test_workers_travel_to_other_processes():
    transform = as_batch_transform(v2.Compose([v2.CenterCrop(9), Halved(), v2.RandomInvert()]))
    for on_device in (False, True):
        worker = transform.in_worker(on_device=on_device)
        one = sample(images(1, 20, 20)[0], 3)
        assert_same(
            pickle.loads(pickle.dumps(worker))(one, keys(1)[0])[0], worker(one, keys(1)[0])[0]
        )


def test_policies_run_in_the_worker_where_their_method_has_another_name(monkeypatch):
    for policy in (v2.RandAugment(), v2.AutoAugment(), v2.TrivialAugmentWide()):
        assert plan.kind_of(policy) == "policy"  # of the installed version
    monkeypatch.setattr(plan, "POLICY_METHOD", "_of_another_version")
    assert places(v2.Compose([v2.RandAugment()])) == ["worker"]

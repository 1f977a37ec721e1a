"""MixUp, CutMix, Mosaic and RandomErasing: torchvision's arithmetic, keyed by sample."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from augment.parity import photographs
from hypothesis import given
from hypothesis import strategies as st
from misses import each
from scipy import stats
from thoroughness import max_examples
from torchvision.transforms import v2

from lightning_fastdata.augment.mixing import CutMix, MixUp, Mosaic, OneOfMixes, RandomErasing
from lightning_fastdata.augment.mixing.blend import cut_boxes, erased_boxes
from lightning_fastdata.augment.mixing.mosaic import move_boxes
from lightning_fastdata.augment.mixing.step import Parts, partners
from lightning_fastdata.augment.mixing.transform import draw_numbers, stack_drawn
from lightning_fastdata.errors import BatchError, OptionsError
from lightning_fastdata.types import SampleKey

torch.set_num_threads(1)

HEIGHT, WIDTH, CLASSES = 60, 72, 5


@functools.cache
def pictures(count=6):
    found = [*photographs(HEIGHT, WIDTH), *(255 - one for one in photographs(HEIGHT, WIDTH))]
    return torch.from_numpy(np.stack(found[:count])).permute(0, 3, 1, 2).contiguous()


def drawn(step, count, *, seed=0, first=0):
    """Return the numbers of some samples, and a random number of each."""
    keys = [SampleKey(seed, 3, first + index) for index in range(count)]
    numbers, order = stack_drawn([draw_numbers((step,), key) for key in keys]).values()
    return torch.from_numpy(numbers), torch.from_numpy(order)[:, 0]


def many(step, count=3000):
    return drawn(step, count)[0]


def shares(count):
    return torch.nn.functional.one_hot(torch.arange(count) % CLASSES, CLASSES).float()


@max_examples(40)
@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=12, unique=True), st.integers(1, 3))
def test_partners_form_one_ring_that_does_not_depend_on_the_order_of_the_batch(order, distance):
    order = torch.tensor(order)
    found = partners(order, distance)
    assert sorted(found.tolist()) == list(range(len(order)))
    if len(order) > distance:
        assert (found != torch.arange(len(order))).all()
    shuffled = torch.randperm(len(order), generator=torch.Generator().manual_seed(1))
    met = dict(zip(order.tolist(), order[found].tolist(), strict=True))
    again = order[shuffled]
    assert met == dict(zip(again.tolist(), again[partners(again, distance)].tolist(), strict=True))


@each("dtype", [torch.float32, torch.uint8])
def test_mixup_blends_as_torchvision_does(dtype):
    images = pictures().to(dtype) / 255 if dtype == torch.float32 else pictures()
    step, count = MixUp(0.7), len(images)
    numbers, _ = drawn(step, count)
    # In this order everybody's partner is the sample before, as in torchvision.
    out = step.mix(Parts(image=images, labels=shares(count)), numbers, torch.arange(count))
    reference = v2.MixUp(num_classes=CLASSES)
    labels = torch.arange(count) % CLASSES
    for row, share in enumerate(numbers[:, 1].tolist()):
        params = {"labels": labels, "batch_size": count, "lam": share}
        want = reference.transform(images.float(), params)[row]
        want = want if dtype == torch.float32 else want.round()
        apart = (out.image[row].float() - want).abs().max()
        assert apart < 1e-6 or (dtype == torch.uint8 and apart <= 1)
        assert torch.allclose(out.labels[row], reference.transform(labels, params)[row])


def test_cutmix_pastes_as_torchvision_does():
    images, step = pictures(), CutMix()
    count = len(images)
    numbers, _ = drawn(step, count)
    mask = images[:, 0].long()
    out = step.mix(
        Parts(image=images, labels=shares(count), mask=mask), numbers, torch.arange(count)
    )
    reference = v2.CutMix(num_classes=CLASSES)
    labels = torch.arange(count) % CLASSES
    boxes = torch.stack(cut_boxes(numbers, HEIGHT, WIDTH), 1).tolist()
    for row, (x1, y1, x2, y2) in enumerate(boxes):
        kept = 1 - (x2 - x1) * (y2 - y1) / (WIDTH * HEIGHT)
        params = {"labels": labels, "batch_size": count, "box": (x1, y1, x2, y2)}
        params["lam_adjusted"] = kept
        assert torch.equal(out.image[row], reference.transform(images, params)[row])
        assert torch.allclose(out.labels[row], reference.transform(labels, params)[row])
        # The mask is cut where the image is.
        assert torch.equal(out.mask[row], out.image[row, 0].long())
    assert (out.image != images).any()


def test_cutmix_rectangles_have_torchvisions_distribution():
    torch.manual_seed(0)
    reference = v2.CutMix(num_classes=CLASSES)
    theirs = [reference.make_params([pictures()]) for _ in range(1500)]
    left, top, right, bottom = (one.numpy() for one in cut_boxes(many(CutMix()), HEIGHT, WIDTH))
    wanted = np.array([one["box"] for one in theirs]).T
    for ours, theirs_ in zip((left, top, right, bottom), wanted, strict=True):
        assert stats.ks_2samp(ours, theirs_).pvalue > 1e-3
    kept = 1 - (right - left) * (bottom - top) / (HEIGHT * WIDTH)
    assert stats.ks_2samp(kept, [one["lam_adjusted"] for one in theirs]).pvalue > 1e-3


@pytest.mark.cases(2)
@each("options", [{}, {"scale": (0.3, 0.9), "ratio": (0.1, 8.0)}, {"scale": (1.0, 1.0)}])
def test_erased_rectangles_have_torchvisions_distribution(options):
    torch.manual_seed(0)
    reference = v2.RandomErasing(p=1, **options)
    theirs = []
    for _ in range(1500):
        one = reference.make_params([pictures()[0]])
        erased = one["v"] is not None
        theirs.append([one["i"], one["j"], one["h"], one["w"]] if erased else [0, 0, 0, 0])
    ours = torch.stack(erased_boxes(many(RandomErasing(p=1, **options)), HEIGHT, WIDTH), 1).numpy()
    theirs = np.array(theirs)
    share = [(one[:, 2] > 0).mean() for one in (ours, theirs)]
    assert abs(share[0] - share[1]) < 0.05
    for column in range(4):
        both = [one[one[:, 2] > 0][:, column] for one in (ours, theirs)]
        if len(both[0]) and len(both[1]):
            assert stats.ks_2samp(*both).pvalue > 1e-3
    assert (ours[:, 0] + ours[:, 2] <= HEIGHT).all()
    assert (ours[:, 1] + ours[:, 3] <= WIDTH).all()


@each("value", [0.0, (1.0, 2.0, 3.0), "random"])
@each("dtype", [torch.float32, torch.uint8])
def test_only_the_rectangle_is_painted_over(value, dtype):
    images = pictures().to(dtype)
    step = RandomErasing(p=0.7, value=value)
    numbers, order = drawn(step, len(images))
    labels = shares(len(images))
    out = step.mix(Parts(image=images, labels=labels), numbers, order)
    assert out.labels is labels
    assert out.image.dtype == dtype
    boxes = torch.stack(erased_boxes(numbers, HEIGHT, WIDTH, p=0.7), 1).tolist()
    assert 0 < sum(box[2] > 0 for box in boxes) < len(boxes)
    for row, (top, left, tall, wide) in enumerate(boxes):
        inside = torch.zeros(HEIGHT, WIDTH, dtype=torch.bool)
        inside[top : top + tall, left : left + wide] = True
        assert torch.equal(out.image[row][:, ~inside], images[row][:, ~inside])
        painted = out.image[row][:, inside].double()
        if value == "random" and painted.numel():
            middle, spread = (0, 1) if dtype == torch.float32 else (127.5, 73.9)
            assert abs(painted.mean() - middle) < spread / 4
            assert abs(painted.std() - spread) < spread / 4
        elif painted.numel():
            wanted = torch.tensor(value if isinstance(value, tuple) else [value] * 3)
            assert (painted == wanted.double()[:, None]).all()


def naive_mosaic(pixels, sources, y, x):
    """Paint four arrays ``[H, W, ...]``, each with a corner at the point."""
    height, width = pixels.shape[1:3]
    out = np.empty_like(pixels[0])
    out[:y, :x] = pixels[sources[0]][height - y :, width - x :]
    out[:y, x:] = pixels[sources[1]][height - y :, : width - x]
    out[y:, :x] = pixels[sources[2]][: height - y, width - x :]
    out[y:, x:] = pixels[sources[3]][: height - y, : width - x]
    return out


@each("count", [1, 3, 6])
@each("p", [1.0, 0.5])
def test_mosaics_are_four_corners_around_a_point(count, p):
    images, step = pictures()[:count], Mosaic(p=p)
    numbers, order = drawn(step, count, seed=5)
    mask = torch.arange(count)[:, None, None].expand(count, HEIGHT, WIDTH).contiguous()
    parts = Parts(image=images, labels=torch.eye(count), mask=mask)
    out = step.mix(parts, numbers, order)
    arrays = images.permute(0, 2, 3, 1).numpy()
    rings = [partners(order, distance).tolist() for distance in (1, 2, 3)]
    for row, (whether, down, across) in enumerate(numbers.tolist()):
        y, x = round(down * HEIGHT), round(across * WIDTH)
        sources = [row, *(ring[row] for ring in rings)]
        is_mosaic = whether < p
        wanted = naive_mosaic(arrays, sources, y, x) if is_mosaic else arrays[row]
        seen = naive_mosaic(mask.numpy(), sources, y, x) if is_mosaic else mask[row].numpy()
        np.testing.assert_array_equal(out.image[row].permute(1, 2, 0).numpy(), wanted)
        np.testing.assert_array_equal(out.mask[row].numpy(), seen)
        # Labels in the shares of the area that each sample covers.
        area = np.bincount(seen.ravel(), minlength=count) / seen.size
        np.testing.assert_allclose(out.labels[row].numpy(), area, atol=1e-6)


def test_boxes_go_where_their_pixels_go():
    rng, count, step = np.random.default_rng(0), 6, Mosaic(min_visibility=0.2)
    numbers, order = drawn(step, count, seed=2)
    boxes, classes, painted = [], [], np.zeros((count, HEIGHT, WIDTH), np.int64)
    for row in range(count):
        x1, y1 = rng.integers(0, WIDTH - 12), rng.integers(0, HEIGHT - 12)
        x2, y2 = rng.integers(x1 + 4, WIDTH + 1), rng.integers(y1 + 4, HEIGHT + 1)
        painted[row, y1:y2, x1:x2] = row + 1
        boxes.append(torch.tensor([[x1, y1, x2, y2]], dtype=torch.float32))
        classes.append(torch.tensor([row + 1]))
    parts = Parts(image=pictures(), boxes=tuple(boxes), classes=tuple(classes))
    out = step.mix(parts, numbers, order)
    rings = [partners(order, distance).tolist() for distance in (1, 2, 3)]
    dropped = 0
    for row, (_, down, across) in enumerate(numbers.tolist()):
        sources = [row, *(ring[row] for ring in rings)]
        seen = naive_mosaic(painted, sources, round(down * HEIGHT), round(across * WIDTH))
        wanted = {}
        for source in sources:
            ys, xs = np.nonzero(seen == source + 1)
            whole = (painted[source] > 0).sum()
            if len(ys) and len(ys) >= 0.2 * whole:
                wanted[source + 1] = [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]
            else:
                dropped += 1
        assert dict(zip(out.classes[row].tolist(), out.boxes[row].tolist(), strict=True)) == wanted
    assert dropped


def test_a_sample_without_boxes_is_none_of_a_problem():
    step = Mosaic()
    numbers, order = drawn(step, 2)
    empty, one = torch.zeros(0, 4), torch.tensor([[0.0, 0, WIDTH, HEIGHT]])
    out = step.mix(Parts(image=pictures(2), boxes=(empty, empty)), numbers, order)
    assert [tuple(box.shape) for box in out.boxes] == [(0, 4), (0, 4)]
    out = step.mix(Parts(image=pictures(2), boxes=(one, empty)), numbers, order)
    assert all(box.shape[1] == 4 for box in out.boxes)
    cut, kept = move_boxes(one, torch.tensor([0]), torch.tensor([[20, 30]]), (HEIGHT, WIDTH))
    assert cut.tolist() == [[0, 0, 30, 20]]
    assert kept.item() == pytest.approx(20 * 30 / (HEIGHT * WIDTH))


def test_each_sample_is_mixed_in_the_one_way_that_was_chosen_for_it():
    step = OneOfMixes(MixUp(1.0), CutMix(), weights=(1, 3), p=0.8)
    numbers, order = drawn(step, 6, seed=4)
    parts = Parts(image=pictures().float(), labels=shares(6))
    out = step.mix(parts, numbers, order)
    alone = [
        MixUp(1.0).mix(parts, numbers[:, 1:3], order),
        CutMix().mix(parts, numbers[:, 3:], order),
    ]
    chosen = [0 if one < 0.2 else 1 if one < 0.8 else 2 for one in numbers[:, 0].tolist()]
    assert set(chosen) == {0, 1, 2}
    for row, way in enumerate(chosen):
        wanted = [*alone, parts][way]
        assert torch.equal(out.image[row], wanted.image[row])
        assert torch.equal(out.labels[row], wanted.labels[row])
    share = np.bincount([0 if n < 0.2 else 1 if n < 0.8 else 2 for n in many(step)[:, 0]])
    np.testing.assert_allclose(share / share.sum(), [0.2, 0.6, 0.2], atol=0.04)


STEPS = [MixUp(), CutMix(), Mosaic(), RandomErasing(), OneOfMixes(MixUp(), CutMix())]


@each("step", STEPS)
def test_the_numbers_of_a_sample_belong_to_its_key_alone(step):
    first, again = (draw_numbers((step,), SampleKey(1, 2, 3)) for _ in range(2))
    assert first == again
    assert len(first[0]) == step.count()
    for other in (SampleKey(0, 2, 3), SampleKey(1, 0, 3), SampleKey(1, 2, 4), SampleKey(-1, 2, 3)):
        assert draw_numbers((step,), other)[0] != first[0]
    # What comes later in the list changes nothing of what comes before.
    longer, order = draw_numbers((step, RandomErasing()), SampleKey(1, 2, 3))
    assert (longer[: step.count()], order[:1]) == first


@each("step", STEPS)
def test_the_order_of_a_batch_does_not_matter(step):
    images = pictures().float()
    numbers, order = drawn(step, 6)
    turned = torch.tensor([3, 1, 5, 0, 2, 4])
    straight = step.mix(Parts(image=images, labels=shares(6)), numbers, order)
    shuffled = step.mix(
        Parts(image=images[turned], labels=shares(6)[turned]), numbers[turned], order[turned]
    )
    assert torch.equal(shuffled.image, straight.image[turned])
    assert torch.equal(shuffled.labels, straight.labels[turned])


@each("step", STEPS)
def test_no_step_asks_the_device_for_a_value(step):
    """A meta tensor has no values: whoever wants one gets an error instead of a stalled queue."""
    numbers, order = (one.to("meta") for one in drawn(step, 6))
    parts = Parts(image=pictures().float().to("meta"), labels=shares(6).to("meta"))
    out = step.mix(parts, numbers, order)
    assert out.image.shape == parts.image.shape
    assert out.labels.shape == (6, CLASSES)


@each("step", STEPS)
def test_nothing_is_written_to_what_was_given(step):
    images, labels = pictures().float(), shares(6)
    before = images.clone(), labels.clone()
    out = step.mix(Parts(image=images, labels=labels), *drawn(step, 6))
    assert torch.equal(images, before[0])
    assert torch.equal(labels, before[1])
    np.testing.assert_allclose(out.labels.sum(1), np.ones(6), atol=1e-6)


@each(
    "make",
    [
        lambda: MixUp(0),
        lambda: MixUp(1.0, p=1.5),
        lambda: CutMix(-1),
        lambda: Mosaic(middle=(0.8, 0.2)),
        lambda: Mosaic(min_visibility=2),
        lambda: RandomErasing(scale=(0.5, 0.2)),
        lambda: RandomErasing(ratio=(0, 1)),
        lambda: RandomErasing(value="noise"),
        OneOfMixes,
        lambda: OneOfMixes(MixUp(), weights=(1, 2)),
        lambda: OneOfMixes(MixUp(), weights=(0,)),
    ],
)
def test_impossible_values_are_refused_where_they_are_written(make):
    with pytest.raises(OptionsError):
        make()


@each(
    ("step", "field"),
    [(MixUp(), "mask"), (CutMix(), "boxes"), (OneOfMixes(Mosaic(), CutMix()), "boxes")],
)
def test_what_cannot_be_mixed_is_not_mixed_silently(step, field):
    value = torch.zeros(6, HEIGHT, WIDTH) if field == "mask" else (torch.zeros(0, 4),) * 6
    with pytest.raises(BatchError):
        step.mix(Parts(image=pictures(), **{field: value}), *drawn(step, 6))


def test_as_many_values_as_channels():
    step = RandomErasing(value=(1.0, 2.0))
    with pytest.raises(BatchError, match="3 channels"):
        step.mix(Parts(image=pictures()), *drawn(step, 6))

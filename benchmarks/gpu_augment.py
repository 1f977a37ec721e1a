"""Augmentation on a GPU: time beside what the memory allows, launches, and rivals.

Each recipe turns 256 uint8 images into 256 x 3 x 224 x 224 numbers. The least that can take is one
read of the bytes and one write of float32, which a copy that does nothing else takes on the same
device, and five launches; "over the limit" is the ratio to that sum.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from gpu_run import Skipped, failure
from torch import nn

MIB = 2**20
LAUNCHES = 5
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TARGETS = {
    "over the limit": "target: at most 3",
    "over Kornia, compiled": "target: at least 10",
    "of a ResNet-50 step": "target: below 2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One recipe on batches of images of one size."""

    name: str
    steps: Any
    """Takes the side of the result, returns Albumentations transforms."""
    rivals: bool = True
    """Whether others have a form of the recipe that is worth comparing with."""


def imagenet(side):
    import albumentations as A

    jitter = A.ColorJitter((0.8, 1.2), (0.8, 1.2), (0.8, 1.2), (-0.1, 0.1), p=0.8)
    return [A.RandomResizedCrop((side, side)), A.HorizontalFlip(), jitter]


def kaggle(side):
    import albumentations as A

    return [
        A.Resize(side, side),
        A.HorizontalFlip(),
        A.VerticalFlip(),
        A.Affine(rotate=(-30, 30), scale=(0.8, 1.2), translate_percent=(-0.1, 0.1), p=0.5),
        A.RandomBrightnessContrast(p=0.5),
        A.HueSaturationValue(p=0.5),
        A.GaussianBlur(p=0.3),
        A.CoarseDropout(p=0.5),
    ]


CASES = (
    Case(name="imagenet", steps=imagenet),
    Case(name="kaggle", steps=kaggle),
)


def measure_augment(run):
    rows, side = (8, 56) if run.quick else (256, 224)
    launch_ms = _launch_ms(run)
    run.add("augment", "one launch", launch_ms * 1e3, "us", "of many small ones")
    step_ms = _resnet_step_ms(run, rows, side)
    note = "torchvision is not installed" if step_ms is None else ""
    run.add("augment", f"ResNet-50 bf16 training step, {rows} images", step_ms, "ms", note)
    errors = []
    for case in CASES:
        try:
            _measure_case(run, case, rows, side, launch_ms=launch_ms, step_ms=step_ms)
        except Exception as error:  # the other recipes are still worth their time
            errors.append(error)
            run.add(f"augment, {case.name}", "all", None, "", failure(error))
    if errors:
        raise errors[0]


def _measure_case(run, case, rows, side, *, launch_ms, step_ms):
    from albumentations import Compose, Normalize, ToTensorV2

    from lightning_fastdata.augment.transform import as_batch_transform
    from lightning_fastdata.types import SampleKey

    name = f"augment, {case.name}, {rows}x3x{side}x{side}"
    rng = np.random.default_rng(0)
    images = list(rng.integers(0, 256, (rows, side, side, 3), np.uint8))
    compose = Compose([*case.steps(side), Normalize(), ToTensorV2()])
    transform = as_batch_transform(compose, image=0)
    worker = transform.in_worker(on_device=True)
    at = time.perf_counter()
    pairs = [worker((image,), SampleKey(0, 0, i)) for i, image in enumerate(images)]
    draws = worker.collate([tape for _, tape in pairs])
    drawn_ms = (time.perf_counter() - at) * 1e3
    run.add(name, "worker: draw and pack, one core", drawn_ms, "ms")
    run.add(name, "draws, size", draws.blob.numel() / 1024, "KiB")
    draws = draws.to(run.device)
    batch = (torch.stack([sample[0] for sample, _ in pairs]).to(run.device),)

    def ours():
        return transform.apply(batch, draws)[0]

    run.settle()
    at = time.perf_counter()
    ours()
    run.settle()
    run.add(name, "the first apply()", time.perf_counter() - at, "s", "compiles what is new")
    took_ms = run.time_ms(ours)
    run.add(name, "apply(), uint8 to float32", took_ms, "ms", "on the device")
    run.add(name, "apply(), host time", run.host_ms(ours), "ms", "until all is handed over")
    run.add(name, "launches", run.launches(ours), "")
    _measure_waiting(run, name, ours)
    _measure_memory(run, name, ours)

    copy_ms = _copy_ms(run, batch[0], ours())
    limit_ms = copy_ms + LAUNCHES * launch_ms
    run.add(name, "a copy from uint8 to float32", copy_ms, "ms", "read once, written once")
    moved = batch[0].numel() + 4 * ours().numel()
    run.add(name, "the copy's bandwidth", moved / copy_ms / 1e6, "GB/s", "bytes read and written")
    _ratio(run, name, "over the limit", took_ms / limit_ms, "x", f"limit: {limit_ms:.4g} ms")
    if step_ms is not None:
        _ratio(run, name, "of a ResNet-50 step", 100 * took_ms / step_ms, "%")
    if case.rivals:
        measure_rivals(run, name, case, batch[0].permute(0, 3, 1, 2).contiguous(), took_ms)


def _ratio(run, name, what, value, unit, note=""):
    notes = [one for one in (TARGETS.get(what), note) if one]
    run.add(name, what, value, unit, "; ".join(notes))


def _launch_ms(run, count=50):
    small = torch.zeros(32, device=run.device)

    def many():
        for _ in range(count):
            small.add_(1)

    return run.time_ms(many) / count


def _copy_ms(run, images, result):
    """Return the time to read as many bytes as came and to write as many float32 as went."""
    target, source = torch.empty_like(result.flatten()), images.flatten()
    return run.time_ms(lambda: target.copy_(source))


def _measure_waiting(run, name, function):
    what = 'apply() under set_sync_debug_mode("error")'
    if not run.cuda:
        run.add(name, what, None, "", "needs a CUDA device")
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        function()
        verdict = "passes"
    except RuntimeError as error:
        verdict = f"waits: {error}"[:200]
    finally:
        torch.cuda.set_sync_debug_mode(before)
    run.add(name, what, verdict, "")


def _measure_memory(run, name, function):
    if not run.cuda:
        return
    run.settle()
    torch.cuda.reset_peak_memory_stats(run.device)
    before = torch.cuda.memory_allocated(run.device)
    function()
    peak = torch.cuda.max_memory_allocated(run.device) - before
    run.add(name, "memory at its peak, with the result", peak / MIB, "MiB")


def _resnet_step_ms(run, rows, side):
    if find_spec("torchvision") is None:
        return None
    from torchvision.models import resnet50

    model = resnet50().to(run.device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    images = torch.randn(rows, 3, side, side, device=run.device)
    images = images.to(torch.bfloat16, memory_format=torch.channels_last)
    labels = torch.zeros(rows, dtype=torch.long, device=run.device)

    def step():
        with torch.autocast(run.device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run.time_ms(step, repeats=10)


def measure_rivals(run, name, case, images, ours_ms):
    """Measure what others make of the same recipe, or say why they cannot."""
    rivals = {
        "torchvision v2": ("torchvision", _torchvision, "one draw for the whole batch"),
        "Kornia": ("kornia", _kornia, "a draw per sample"),
        "Kornia, compiled": ("kornia", _kornia_compiled, "torch.compile"),
        "fuse-augmentations": ("fuse_augmentations", _fuse_augmentations, "from torchvision's"),
        "triton-augment": ("triton_augment", _triton_augment, "its own order, no hue"),
    }
    for who, (package, build, note) in rivals.items():
        if find_spec(package) is None:
            run.add(name, who, None, "ms", "not installed")
            continue
        try:
            theirs = build(run, case.name, images.shape[-1])
            took_ms = run.time_ms(lambda theirs=theirs: theirs(images))
            count = run.launches(lambda theirs=theirs: theirs(images))
        except Skipped as why:
            run.add(name, who, None, "ms", str(why))
            continue
        except Exception as error:  # whatever another package raises is its result
            why = f"cannot: {type(error).__name__}: {error}".replace("\n", " ").replace("|", "/")
            run.add(name, who, None, "ms", why[:160])
            continue
        run.add(name, who, took_ms, "ms", note)
        if count is not None:
            run.add(name, f"{who}, launches", count, "")
        _ratio(run, name, f"over {who}", took_ms / ours_ms, "x faster")


def _torchvision_steps(recipe, side):
    from torchvision.transforms import v2

    if recipe == "kaggle":
        return [
            v2.Resize((side, side)),
            v2.RandomHorizontalFlip(),
            v2.RandomVerticalFlip(),
            v2.RandomApply([v2.RandomAffine(30, (0.1, 0.1), (0.8, 1.2))], 0.5),
            v2.RandomApply([v2.ColorJitter(0.2, 0.2)], 0.5),
            v2.RandomApply([v2.ColorJitter(saturation=0.1, hue=0.05)], 0.5),
            v2.RandomApply([v2.GaussianBlur(7, (0.5, 3.0))], 0.3),
            v2.RandomErasing(0.5),
        ]
    return [
        v2.RandomHorizontalFlip(),
        v2.RandomApply([v2.ColorJitter(0.2, 0.2, 0.2, 0.1)], 0.8),
    ]


def _torchvision(run, recipe, side):
    from torchvision.transforms import v2

    last = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    return v2.Compose([*_torchvision_steps(recipe, side), *last])


def _kornia(run, recipe, side):
    from kornia import augmentation as K

    steps = [K.RandomHorizontalFlip(), K.ColorJiggle(0.2, 0.2, 0.2, 0.1, p=0.8)]
    if recipe == "kaggle":
        steps = [
            K.Resize((side, side)),
            K.RandomHorizontalFlip(),
            K.RandomVerticalFlip(),
            K.RandomAffine(30, (0.1, 0.1), (0.8, 1.2), p=0.5),
            K.ColorJiggle(0.2, 0.2, p=0.5),
            K.ColorJiggle(0.0, 0.0, 0.1, 0.05, p=0.5),
            K.RandomGaussianBlur((7, 7), (0.5, 3.0), p=0.3),
            K.RandomErasing(p=0.5),
        ]
    last = K.Normalize(torch.tensor(MEAN), torch.tensor(STD))
    augment = K.AugmentationSequential(*steps, last, data_keys=["input"]).to(run.device)
    return lambda images: augment(images.float() / 255)


def _kornia_compiled(run, recipe, side):
    if recipe != "imagenet":
        raise Skipped("only the ImageNet recipe is compiled, for time")
    if run.left_s() < 60 and not run.quick:
        raise Skipped("no time was left to compile it")
    return torch.compile(_kornia(run, recipe, side))


def _fuse_augmentations(run, recipe, side):
    from fuse_augmentations import Compose, ReorderPolicy
    from torchvision.transforms import v2

    steps = [*_torchvision_steps(recipe, side), v2.Normalize(MEAN, STD)]
    augment = Compose(steps, reorder=ReorderPolicy.NONE)
    return lambda images: augment(images.float() / 255)


def _triton_augment(run, recipe, side):
    if not run.cuda:
        raise Skipped("it needs a CUDA device")
    from triton_augment import TritonFusedAugment

    geometry = {}
    if recipe == "kaggle":
        geometry = {"degrees": 30, "translate": (0.1, 0.1), "scale": (0.8, 1.2)}
    augment = TritonFusedAugment(
        horizontal_flip_p=0.5,
        brightness=0.2,
        contrast=0.2,
        saturation=0.2,
        mean=MEAN,
        std=STD,
        **geometry,
    )
    return lambda images: augment(images.float() / 255)

"""What a device is given for a batch, by operation of torchvision v2: launches, and bytes.

``python benchmarks/parity_v2.py --launches`` prints it. No device is needed: torch carries the
operations out on tensors without memory (``meta``), and each operator that it is given is counted.
Those are a launch each, except for views and empty memory. A device may launch several kernels for
one of them: a sum, a convolution, or padding. What it reads and writes are its tensors as a whole.

What is compiled is counted where Inductor compiles it for the CPU, which takes a C++ compiler and
about ten minutes: the loops that it makes, each a kernel of a device, and what it calls in between.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2

from lightning_fastdata.augment.ops.operation import Tape, TapeOp, Track
from lightning_fastdata.augment.replay.compiled import Compiled, Told, by_inductor
from lightning_fastdata.augment.replay.program import Draws, compile_tapes
from lightning_fastdata.augment.replay.torch import replay
from lightning_fastdata.augment.stage_transform import plain_tensors
from lightning_fastdata.augment.torchvision.forms import FORMS, Form, encode

NEAREST, BILINEAR = InterpolationMode.NEAREST, InterpolationMode.BILINEAR
OPERATIONS: Final[Mapping[str, v2.Transform]] = {
    "brightness": v2.ColorJitter(brightness=0.4),
    "contrast": v2.ColorJitter(contrast=0.4),
    "saturation": v2.ColorJitter(saturation=0.4),
    "hue": v2.ColorJitter(hue=0.2),
    "sharpness": v2.RandAugment(),
    "posterize": v2.RandAugment(),
    "solarize": v2.RandAugment(),
    "permute": v2.RandomChannelPermutation(),
    "blur": v2.GaussianBlur(9),
    "erase": v2.RandomErasing(1),
    "crop": v2.RandomCrop(200),
    "crop, padded": v2.RandomCrop(224, padding=8),
    "resized crop, nearest": v2.RandomResizedCrop(192, interpolation=NEAREST),
    "resized crop, not smoothed": v2.RandomResizedCrop(192, antialias=False),
    "resized crop": v2.RandomResizedCrop(192),
    "rotation": v2.RandomRotation(30),
    "affine, bilinear": v2.RandomAffine(30, (0.1, 0.1), (0.8, 1.2), 5, BILINEAR),
    "affine, bilinear, filled": v2.RandomAffine(30, interpolation=BILINEAR, fill=0.5),
    "perspective, nearest": v2.RandomPerspective(0.5, 1, NEAREST),
    "perspective": v2.RandomPerspective(0.5, 1),
}
"""The operations that have a form for batches, each as one transform that every sample takes. Of
the policies it is the operation of that name."""
_CALLS: Final = re.compile(r"\b(?:extern_kernels|aten|torch\.ops)\.[\w.]+\(|\.copy_\(")
"""What code that Inductor has made calls besides its own kernels."""
_NO_LAUNCH: Final = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view"})


class Launches(TorchDispatchMode):
    """Counts what torch gives to a device: operators, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        results = func._schema.returns
        view = bool(results) and all(
            one.alias_info and not one.alias_info.is_write for one in results
        )
        name = func.overloadpacket.__name__
        if not view and name not in _NO_LAUNCH:
            self.names.append(name)
            # What is written in place is read, too.
            self.bytes += sum(map(_bytes, (*tree_leaves((args, kwargs)), *tree_leaves(out))))
        return out


def _bytes(value: Any) -> int:
    """Return the memory of a tensor; what was spread over an axis is there once."""
    if not isinstance(value, torch.Tensor):
        return 0
    sizes = zip(value.shape, value.stride(), strict=True)
    return int(np.prod([size for size, stride in sizes if stride])) * value.element_size()


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What a device was given for one batch."""

    operators: tuple[str, ...]
    """One launch each."""
    share: float
    """Bytes read and written, over those of the batch that goes in."""


def tapes_of(name: str, size: int, batch: int, dtype: torch.dtype) -> list[Tape]:
    """Return what the samples of a batch of square images draw for one of the operations."""
    transform, form = OPERATIONS[name], Form("Image", (3, size, size), dtype)
    tapes = []
    for row in range(batch):
        torch.manual_seed(row)
        if isinstance(transform, v2.RandAugment):
            magnitude = 4 + row % 4 if name == "posterize" else float(torch.rand(()))
            given = (name.capitalize(), magnitude, NEAREST, None)
        else:
            given = (transform.make_params([form.phantom().as_subclass(tv_tensors.Image)]),)
        steps = encode(transform, given, form)
        assert steps, f"{name} has no form for batches"
        tapes.append({(): Track("image", tuple(TapeOp(0, *step) for step in steps))})
    return tapes


def counted(draws: Draws, size: int, dtype: torch.dtype) -> Counted:
    """Return what a device is given to carry out the draws of a batch, the second time."""
    images = torch.empty((draws.samples, 3, size, size), dtype=dtype, device="meta")
    blob, [program] = draws.blob.to("meta"), draws.programs.values()
    with plain_tensors():
        replay(program, blob, images, FORMS)  # makes what is kept
        with Launches() as seen:
            replay(program, blob, images, FORMS)
    return Counted(operators=tuple(seen.names), share=seen.bytes / _bytes(images))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """What Inductor made of one operation, for all the batches that it was given."""

    launches: int
    """Kernels and other calls, of one batch."""
    compilations: int
    """How often it compiled."""
    right: bool
    """Whether each batch was as torch's operators make it, as near as is asked for."""


def fused(batches: Sequence[Draws], images: Sequence[torch.Tensor]) -> Fused:
    """Compile an operation for the CPU, and run it on batches of it."""
    from torch._inductor import config, metrics  # private, as there is no other count
    from torch._inductor.utils import run_and_get_code

    [step] = next(iter(batches[0].programs.values())).steps
    compiled = []

    def compiler(run: Told) -> Told:
        compiled.append(by_inductor(run))
        return compiled[-1]

    operation = Compiled(FORMS[step.name].image.run, compiler=compiler, suits=lambda batch: True)

    def run_all() -> list[bool]:
        same = []
        for draws, batch in zip(batches, images, strict=True):
            [program] = draws.programs.values()
            [part] = program.steps[0].parts
            arrays = {name: slot.view(draws.blob) for name, slot in part.arrays.items()}
            given = batch, dict(part.static), arrays
            operation(*given)
            made, was_compiled = compiled[0](*given)
            same.append(was_compiled and operation.same(made, operation.run(*given)))
        return same

    metrics.reset()
    with config.patch(force_disable_caches=True), plain_tensors():
        same, codes = run_and_get_code(run_all)
    calls = [len(_CALLS.findall(code.partition("def call(")[2])) for code in codes]
    launches = (metrics.generated_kernel_count + sum(calls)) // len(codes)
    return Fused(launches=launches, compilations=len(codes), right=all(same))


def fused_batches(name: str, size: int, dtype: torch.dtype, counts: Sequence[int] = (5,)) -> Fused:
    """Return what Inductor makes of one of the operations, on batches of several sizes."""
    images = torch.randint(0, 256, (max(counts), 3, size, size), dtype=torch.uint8)
    images = images / 255 if dtype.is_floating_point else images
    tapes = tapes_of(name, size, max(counts), dtype)
    draws = [compile_tapes(tapes[:count]) for count in counts]
    return fused(draws, [images[:count] for count in counts])


def is_compiled(name: str) -> bool:
    """Return whether one of the operations is compiled where a device can."""
    [tape] = tapes_of(name, 224, 1, torch.uint8)
    return all(isinstance(FORMS[step.name].image, Compiled) for step in tape[()].ops)


def table(size: int = 224, batch: int = 256) -> str:
    """Return launches and bytes of each operation as a table, for bytes and floats."""
    kinds = ("uint8", "float32")
    lines = [
        f"| operation | {' | '.join(f'{k}: operators | bytes | compiled' for k in kinds)} |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in OPERATIONS:
        cells = []
        for dtype in (torch.uint8, torch.float32):
            found = counted(compile_tapes(tapes_of(name, size, batch, dtype)), size, dtype)
            made = str(fused_batches(name, size, dtype).launches) if is_compiled(name) else "-"
            cells += [str(len(found.operators)), f"{found.share:.1f} x", made]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)

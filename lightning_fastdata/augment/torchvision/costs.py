"""What a batch costs where it lies, by transform of a v2 pipeline: black images are recorded.

A transform with forms for batches is as many calls for any batch. What else a device is given is
torchvision's own kernel, for each group of samples that have drawn the same.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import torch
from torchvision.transforms import v2

from lightning_fastdata.augment.replay.compiled import Compiled
from lightning_fastdata.augment.replay.program import ProgramStep, compile_tapes
from lightning_fastdata.augment.torchvision.forms import FORMS, chosen
from lightning_fastdata.augment.torchvision.kernels import as_type
from lightning_fastdata.augment.torchvision.plan import (
    METHODS,
    Leaf,
    Plan,
    changes_form,
    is_own,
    kind_of,
    leaves_of,
)
from lightning_fastdata.augment.torchvision.tape import Form, Recorder
from lightning_fastdata.randomness.seeds import keyed_draws
from lightning_fastdata.types import SampleKey

if TYPE_CHECKING:
    from torch import Tensor


USUAL: Final[Sequence[Form]] = (Form("Image", (3, 224, 224), torch.uint8),)
"""Of a sample of which nothing is known."""
_TRIED: Final = 64
"""Samples that are recorded."""


def costs_of(plan: Plan, forms: Sequence[Form]) -> Mapping[int, str]:
    """Return what carries out each transform that is left to a device, by their numbers.

    Each is taken to be applied to every sample.
    """
    left = [leaf for leaf in plan.leaves[plan.boundary + 1 :] if kind_of(leaf.transform) in METHODS]
    try:
        steps, here = _recorded(left, _behind_workers(plan, forms))
    except Exception as error:  # which torchvision will raise when it is given samples
        unknown = f"on the batch; black images of such a form raise: {error}"
        return dict.fromkeys((leaf.number for leaf in left), unknown)
    return {leaf.number: _cost(steps, n, here=n in here) for n, leaf in enumerate(left)}


def _behind_workers(plan: Plan, forms: Sequence[Form]) -> list[Tensor]:
    """Return black images and masks as the workers leave them."""
    made = [as_type(torch.zeros(form.shape, dtype=form.dtype), form.type_name) for form in forms]
    for leaf in plan.leaves[: plan.boundary + 1]:
        if is_own(leaf.transform) and changes_form(leaf.transform):
            with suppress(Exception), keyed_draws(SampleKey(0, 0, 0), ("torch",)):
                made = leaf.transform(made)
    return made


def _recorded(
    leaves: Sequence[Leaf], sample: Sequence[Tensor]
) -> tuple[list[Sequence[ProgramStep]], Collection[int]]:
    """Return the steps of a batch for each image and mask, and which transforms are none of them.

    The transforms are numbered from 0.
    """
    steps = [copy.copy(leaf.transform) for leaf in leaves]
    for step in steps:
        step.p = 1.0
    pipeline, tapes = v2.Compose(steps or [v2.Identity()]), []
    plan = Plan(leaves=tuple(leaves_of(pipeline)), placements=(), boundary=-1)
    recorder = Recorder(pipeline, plan)
    for index in range(_TRIED):
        with keyed_draws(SampleKey(0, 0, index), ("torch",)):
            tapes.append(recorder(list(sample))[1])
    programs = compile_tapes(tapes).programs.values()
    return [program.steps for program in programs], recorder.done_here


def _cost(programs: Sequence[Sequence[ProgramStep]], number: int, *, here: bool) -> str:
    """Return what a transform costs; ``here``: it was carried out while it was recorded."""
    own = [[step for step in steps if step.leaf == number] for steps in programs]
    known = [[step for step in steps if step.name in FORMS] for steps in own]
    kernels = [[step for step in steps if step.name not in FORMS] for steps in own]
    said = [_calls(known)] if any(known) else []
    if any(kernels):
        said.append(f"torchvision's own kernel{_chosen(kernels)}, {_calls(kernels)}")
    if here:
        said.append("torchvision's own kernel on each sample in the worker, for lack of a form")
    for name in sorted({step.name for steps in known for step in steps}):
        for run in (FORMS[name].image, FORMS[name].mask):
            if isinstance(run, Compiled) and run.left is not None:
                said.append(f"{name} by {run.left}")
    return "; ".join(said) or "does nothing"


def _count(steps: Sequence[ProgramStep]) -> int:
    return sum(len(step.parts) for step in steps)


def _calls(programs: Sequence[Sequence[ProgramStep]]) -> str:
    """Return how often something is called for an image or mask, of those for which it is most."""
    most = max(programs, key=_count)
    if all(part.rows is None for step in most for part in step.parts) and len(most) == 1:
        return "one call for all samples"
    return f"{_count(most)} calls for {_TRIED} samples"


def _chosen(programs: Sequence[Sequence[ProgramStep]]) -> str:
    """Return which operations of a policy are torchvision's own kernels."""
    parts = (part for steps in programs for step in steps for part in step.parts)
    names = {chosen(dict(part.static)) for part in parts} - {None}
    return f" for {', '.join(sorted(map(str, names)))}" if names else ""

"""Which part of making a sample always comes to the same, and may be kept: found by trying.

The whole of it, or all but the last steps of a torchvision ``Compose`` that the dataset holds as
``transform``. A part counts as fixed if it draws from no generator that can be seen and gives the
same twice; what is left has to make of it what the dataset makes, under the same random state.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch.utils.data import Subset

from lightning_fastdata.caches.sample_form import Form, Raw, taken_apart
from lightning_fastdata.errors import DatasetError
from lightning_fastdata.randomness.generators import GENERATOR_CLASSES, seed_generator, state_of
from lightning_fastdata.randomness.global_generators import DrawWatch, kept_random_state
from lightning_fastdata.randomness.search import find_instances
from lightning_fastdata.randomness.seeds import seed_global_generators
from lightning_fastdata.tree import held
from lightning_fastdata.types import Batch, MapDataset

_TRIED: Final = 8
"""Samples from all over the dataset."""


@dataclass(frozen=True, slots=True)
class FixedPart:
    """The part of making a sample that is kept, and the rest, which is done each time."""

    dataset: MapDataset
    """The dataset, without the steps that are left out."""
    steps: int | None
    """How many steps of its ``Compose`` are part of it; None: the dataset is taken as it is."""
    rest: Callable[[Batch], Batch] | None
    """From what is kept to the sample; None: it is the sample."""
    said: str
    """What is kept, in words."""


def find_fixed_part(dataset: MapDataset, *, always_same: bool) -> FixedPart:
    """Return the largest part that is fixed.

    Args:
        dataset: Map-style; some of its samples are read several times.
        always_same: The user says that the whole of it is.

    Raises:
        DatasetError: No part of it is.
    """
    whole = FixedPart(dataset, None, None, "samples as the dataset returns them")
    if always_same or is_fixed(dataset):
        return whole
    steps = _steps(dataset)
    for count in range(len(steps or ()) - 1, -1, -1):
        part = part_of(dataset, count)
        if is_fixed(part.dataset) and _makes_the_same(dataset, part):
            return part
    left = "nothing can be kept of it"
    if steps is None:
        left = "it holds no torchvision Compose as `transform` that could be divided"
    raise DatasetError(
        f"{type(_innermost(dataset)).__name__} draws at random, or differs from reading to "
        f"reading, and {left}. "
        "Cache a dataset without its random transforms, and give these to the cache "
        "(transform=...), or to the data module (augment=...). If it always returns the same "
        "samples, say so: always_same=True."
    )


def part_of(dataset: MapDataset, count: int | None) -> FixedPart:
    """Return the part with the first ``count`` steps of the dataset's ``Compose``; None: all."""
    if count is None:
        return FixedPart(dataset, None, None, "samples as the dataset returns them")
    steps = _steps(dataset)
    if steps is None or count > len(steps):
        raise DatasetError(
            f"{type(_innermost(dataset)).__name__} has no {count} steps in its transform."
        )
    names = [type(step).__name__ for step in steps]
    said = f"after {names[count - 1]}" if count else "before the transform"
    rest = _Rest(_composed(dataset, steps[count:]))
    return FixedPart(
        _with_steps(dataset, steps[:count]),
        count,
        rest,
        f"samples {said}; {', '.join(names[count:])} are done each time",
    )


class _Rest:
    """The last steps of a ``Compose``, for the first of a sample's parts: the picture."""

    def __init__(self, steps: Callable[[Batch], Batch]) -> None:
        self.steps = steps

    def __call__(self, sample: Batch) -> Batch:
        if isinstance(sample, tuple | list):
            return type(sample)((self.steps(sample[0]), *sample[1:]))
        if isinstance(sample, dict) and sample:
            first = next(iter(sample))
            return {**sample, first: self.steps(sample[first])}
        return self.steps(sample)


def _innermost(dataset: object) -> object:
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return dataset


def _steps(dataset: object) -> list[Any] | None:
    """Return the steps of the torchvision ``Compose`` that a dataset holds; None: it holds none."""
    compose = held(_innermost(dataset), "transform")
    named = type(compose).__name__ == "Compose"
    if not named or not type(compose).__module__.startswith("torchvision.transforms"):
        return None
    return list(compose.transforms)


def _composed(dataset: object, steps: Sequence[object]) -> Callable[[Batch], Batch]:
    twin: Callable[[Batch], Batch] = copy.copy(held(_innermost(dataset), "transform"))
    vars(twin)["transforms"] = list(steps)
    return twin


def _with_steps(dataset: Any, steps: Sequence[object]) -> Any:
    """Return a copy of a dataset with other steps, which shares everything else with it."""
    if type(dataset) is Subset:
        return Subset(_with_steps(dataset.dataset, steps), dataset.indices)
    twin = copy.copy(dataset)
    # A Compose of no step returns what it is given.
    twin.transform = _composed(dataset, steps) if steps else _nothing
    both = held(dataset, "transforms")
    if type(both).__name__ == "StandardTransform":  # torchvision's, of picture and target
        twin.transforms = type(both)(twin.transform, both.target_transform)
    return twin


def _nothing(value: Batch) -> Batch:
    return value


def tried_indices(length: int, count: int = _TRIED) -> list[int]:
    """Return indices from all over a dataset."""
    return sorted({round(i * (length - 1) / max(1, count - 1)) for i in range(count)})


def is_fixed(dataset: MapDataset) -> bool:
    """Return whether samples are read without drawing, and are the same twice."""
    for index in tried_indices(len(dataset)):
        with kept_random_state():
            watch, before = DrawWatch(), _own_states(dataset)
            first = taken_apart(dataset[index])
            if watch.drew() or _own_states(dataset) != before:
                return False
            _seed_all(dataset, index)
            second = taken_apart(dataset[index])
        if not same_parts(first, second):
            return False
    return True


def _makes_the_same(dataset: MapDataset, part: FixedPart) -> bool:
    """Return whether the rest makes of a part what the dataset returns."""
    assert part.rest is not None
    for index in tried_indices(len(dataset)):
        with kept_random_state():
            _seed_all(dataset, index)
            wanted = taken_apart(dataset[index])
            _seed_all(dataset, index)
            try:
                found = taken_apart(part.rest(part.dataset[index]))
            except Exception:  # the picture is not where it was looked for
                return False
        if not same_parts(wanted, found):
            return False
    return True


def same_parts(ours: tuple[Form, list[Raw]], theirs: tuple[Form, list[Raw]]) -> bool:
    """Return whether two samples that were taken apart are the same to the last bit."""
    if ours[0] != theirs[0]:
        return False
    return all(bytes(a) == bytes(b) for a, b in zip(ours[1], theirs[1], strict=True))


def _own_states(dataset: object) -> list[bytes]:
    """Return the states of the generators that a dataset holds, pipelines' among them."""
    return [pickle.dumps(state_of(one)) for one in find_instances(dataset, GENERATOR_CLASSES)]


def _seed_all(dataset: object, number: int) -> None:
    seed_global_generators(number, 0, number)
    for place, generator in enumerate(find_instances(dataset, GENERATOR_CLASSES)):
        seed_generator(generator, 1 + number + 1000 * place)

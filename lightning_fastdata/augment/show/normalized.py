"""How images were normalised, so that they can be shown as they were before."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lightning_fastdata.augment.pipeline.tree import list_leaves
from lightning_fastdata.randomness.search import find_composes, find_instances, loaded_classes


class Normalized(NamedTuple):
    """How images were normalised: ``(image - mean) / std`` of images in [0, 1]."""

    mean: tuple[float, ...]
    """One number per channel, or one for all."""
    std: tuple[float, ...]
    """One number per channel, or one for all."""

    def undone(self, images: np.ndarray) -> np.ndarray:
        """Return images ``[..., C]`` as they were before, in [0, 1] if they were so."""
        undone: np.ndarray = images * np.asarray(self.std) + np.asarray(self.mean)
        return undone


def find_normalized(owner: Any) -> Normalized | None:
    """Return how the pipelines of a dataset or a transform normalise; None if that is not known.

    It is known if there is one way, by fixed numbers in every sample: Albumentations' ``Normalize``
    or torchvision's, anywhere in it.

    Args:
        owner: what holds pipelines, or is one.
    """
    composes = find_composes(owner)
    leaves = [leaf for compose in composes for leaf in list_leaves(compose)]
    found: set[Normalized | None] = {
        None if leaf.conditional else _albumentations_way(leaf.transform)
        for leaf in leaves
        if type(leaf.transform).__name__ == "Normalize"
    }
    for module in ("torchvision.transforms", "torchvision.transforms.v2"):
        kinds = loaded_classes(module, "Normalize")
        found |= {_way(own.mean, own.std) for own in find_instances(owner, kinds)}
    return found.pop() if len(found) == 1 else None


def _albumentations_way(normalize: Any) -> Normalized | None:
    if normalize.normalization != "standard":
        return None
    return _way(normalize.mean, normalize.std)


def _way(mean: Any, std: Any) -> Normalized:
    both = (np.atleast_1d(np.asarray(one, np.float64)) for one in (mean, std))
    return Normalized(*(tuple(one.tolist()) for one in both))

"""What verdicts need to know of a loader, None where it is not known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.utils.data import IterableDataset


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """What is known about how batches are made. None = not known, e.g. of a foreign loader."""

    num_workers: int | None = None
    """Worker processes; 0 = the training process loads."""
    usable_cpus: int | None = None
    """CPUs this process may use, after affinity, cgroup quota and other ranks on the host."""
    augment_on: Literal["cpu", "device"] | None = None
    """Where the transforms run."""
    augment_settled: bool = False
    """Whether no other place is to be advised: that one was measured to be the faster, or nothing
    of the transforms can be deferred to a device."""
    pinned: bool | None = None
    """Whether batches arrive in page-locked memory."""
    persistent_workers: bool | None = None
    """Whether workers live through the end of an epoch."""
    streamed: bool | None = None
    """Whether the dataset is an iterable one."""
    loader: str | None = None
    """Which of several loaders this is about, e.g. ``loader 'images'``; None: there is one."""


def read_loader(loader: object) -> LoaderFacts:
    """Return what a loader of any kind says about itself, which may be nothing."""
    workers = getattr(loader, "num_workers", None)
    return LoaderFacts(
        num_workers=workers,
        pinned=getattr(loader, "pin_memory", None),
        persistent_workers=getattr(loader, "persistent_workers", None) if workers else None,
        streamed=isinstance(getattr(loader, "dataset", None), IterableDataset),
    )


def device_could_augment(device: str, facts: LoaderFacts, *, seen: bool = False) -> bool:
    """Return whether to advise that a device takes over what workers do to samples.

    Args:
        device: Type of what computes.
        facts: What its loader says about itself.
        seen: Whether workers were seen to transform samples. What a dataset does is not known to
            its loader.
    """
    in_workers = facts.augment_on == "cpu" or (facts.augment_on is None and seen)
    return device != "cpu" and in_workers and not facts.augment_settled

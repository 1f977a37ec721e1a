"""Checks of the arguments of the public classes."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_fastdata.errors import OptionsError


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise OptionsError if a value is not one of those allowed."""
    if value not in allowed:
        raise OptionsError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}.")


def checked_batch_size(batch_size: object) -> int:
    """Return the batch size.

    Raises:
        OptionsError: It is not a whole number of at least 1.
    """
    if batch_size is None:
        raise OptionsError(
            "batch_size=None has to be a whole number of at least 1, as a data module makes "
            "batches. For a dataset that gives batches already, override train_dataloader() to "
            'return self.make_loader(dataset, stage="train", batch_size=None).'
        )
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise OptionsError(f"batch_size={batch_size!r} has to be a whole number of at least 1.")
    return batch_size

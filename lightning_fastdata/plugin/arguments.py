"""Checks of the arguments of the public classes, and of those that a subclass keeps to itself."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, TypeVar

from lightning_fastdata.errors import FastDataWarning, OptionsError
from lightning_fastdata.loading.options import LoaderOptions

C = TypeVar("C", bound=type)
_TAKEN_OVER: Final = ("batch_size", "drop_last", "seed")
"""Arguments that are looked up when a loader is made; what others say has gone into objects."""


def check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise OptionsError if a value is not one of those allowed."""
    if value not in allowed:
        raise OptionsError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}.")


def checked_batch_size(batch_size: object) -> int:
    """Return the batch size.

    Raises:
        OptionsError: It is not a whole number of at least 1.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise OptionsError(f"batch_size={batch_size!r} has to be a whole number of at least 1.")
    return batch_size


def remembers_given(cls: C) -> C:
    """Have the objects of a class remember which arguments their constructor was given.

    An attribute that a subclass has set before it calls the constructor counts as given.
    """
    construct: Callable[..., None] = vars(cls)["__init__"]
    parameters = inspect.signature(construct)

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        before = {name: vars(self)[name] for name in _TAKEN_OVER if name in vars(self)}
        construct(self, *args, **kwargs)
        given = parameters.bind(self, *args, **kwargs).arguments
        vars(self).update({name: before[name] for name in before if name not in given})
        self._not_given = {
            name: parameter.default
            for name, parameter in parameters.parameters.items()
            if name not in {"self", *given, *before}
        }

    __init__.remembers = True  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def take_over_hyperparameters(module: Any) -> None:
    """Use what a subclass was given, has saved as hyperparameter, and has not passed on.

    Lightning's usual data module takes ``batch_size``, calls ``super().__init__()`` and then
    ``save_hyperparameters()``. Its batch size, seed and drop_last are used; for other arguments of
    :class:`FastDataModule` that have come no further there is a warning.
    """
    saved, defaults = module.hparams_initial, vars(module).get("_not_given") or {}
    lost = []
    for name in [name for name in defaults if name in saved]:
        default = defaults.pop(name)
        now = getattr(module, name, default)
        if saved[name] == default or now not in (default, LoaderOptions()):
            continue  # as it is here, or set by the subclass
        if name in _TAKEN_OVER:
            value = saved[name]
            setattr(module, name, checked_batch_size(value) if name == "batch_size" else value)
        else:
            lost.append(name)
    if lost:
        _warn_of_lost(module, lost)


def warn_of_lost_batch_size(module: Any, overrides: Collection[str]) -> None:
    """Warn of a subclass that takes ``batch_size`` and keeps it to itself.

    Args:
        module: The data module, whose hyperparameters were taken over.
        overrides: Names of what is set for the one loader that is being made.
    """
    defaults, construct = vars(module).get("_not_given") or {}, type(module).__init__
    if "batch_size" in overrides or hasattr(construct, "remembers"):
        return
    taken = "batch_size" in inspect.signature(construct).parameters
    if taken and module.batch_size == defaults.pop("batch_size", None):
        _warn_of_lost(module, ["batch_size"])


def _warn_of_lost(module: Any, names: Sequence[str]) -> None:
    named = ", ".join(f"{name}={name}" for name in names)
    warnings.warn(
        f"{type(module).__name__} takes {' and '.join(names)} and does not pass it on, so that the "
        f"default of FastDataModule is used. Call super().__init__({named}).",
        FastDataWarning,
        stacklevel=3,
    )

"""What the command line does with a data module that a user names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.host.machine import import_by_name
from lightning_fastdata.plugin.data.time_travel import TimeTravel
from lightning_fastdata.tree import name_of


def open_datamodule(spec: str, hyperparameters: Mapping[str, object]) -> Any:
    """Return the data module that a user named as ``MODULE:NAME``; nothing else is imported.

    Raises:
        OptionsError: The text does not name one.
    """
    module_name, _, name = spec.rpartition(":")
    if not module_name or not name:
        raise OptionsError(
            f"{spec!r} does not say where the data module is. Write MODULE:NAME, for example "
            "train:Data for `class Data(FastDataModule)` in train.py."
        )
    found = vars(import_by_name(module_name, "the data module"))
    if name not in found:
        raise OptionsError(f"{module_name} has no {name!r}.")
    return _made(found[name], hyperparameters)


def _made(found: object, hyperparameters: Mapping[str, Any]) -> TimeTravel:
    """Return a data module, with its datasets, from what a user named.

    Args:
        found: A data module, a function that returns one, or a class.
        hyperparameters: What the class is made with, of what it takes.

    Raises:
        OptionsError: It is none of these, or cannot be made.
    """
    given: Mapping[str, Any] = {}
    if isinstance(found, type):
        taken = inspect.signature(found).parameters
        several = any(one.kind is one.VAR_KEYWORD for one in taken.values())
        given = {n: v for n, v in hyperparameters.items() if several or n in taken}
    made: Any = found
    if callable(found) and not isinstance(found, TimeTravel):
        try:
            made = found(**given)
        except TypeError as error:
            raise OptionsError(
                f"{name_of(found)} cannot be called with "
                f"{', '.join(given) or 'no arguments'}: {error}. Name a function without arguments "
                "that returns the data module of the run."
            ) from error
    if not isinstance(made, TimeTravel):
        raise OptionsError(
            f"{made!r:.200} is no FastDataModule. Name one, its class, or a function that returns "
            "it."
        )
    made.prepare_data()  # type: ignore[attr-defined]  # Lightning's, as its trainer calls it
    made.setup("fit")  # type: ignore[attr-defined]
    return made

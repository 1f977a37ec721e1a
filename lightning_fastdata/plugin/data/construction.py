"""Data modules made of datasets or loaders that exist already."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.plugin.data.arguments import (
    LOADER_ARGUMENTS,
    checked_batch_size,
    checked_shuffle,
    joined_options,
)
from lightning_fastdata.plugin.data.datasets import Constant, in_form_of, named
from lightning_fastdata.plugin.data.given_loaders import given_loaders
from lightning_fastdata.plugin.data.module_loaders import DATASET_METHOD
from lightning_fastdata.types import STAGES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lightning_fastdata.types import Stage

_ABOUT_LOADERS: Final = ("batch_size", "shuffle", "options", *LOADER_ARGUMENTS)
_OF_THE_LOADERS: Final = ("batch_size", "shuffle")


def of_datasets(cls: Any, datasets: Sequence[Any], arguments: Mapping[str, Any]) -> Any:
    """Return a data module whose dataset methods return these datasets.

    Args:
        cls: Its class.
        datasets: One for each stage; None: the stage has none.
        arguments: Of the constructor; None for a loader's own argument: not given.
    """
    module = _made(cls, arguments)
    for stage, dataset in zip(STAGES, datasets, strict=True):
        if dataset is not None:
            setattr(module, DATASET_METHOD[stage], Constant(dataset))
    return module


def of_loaders(
    cls: Any, loaders: Mapping[Stage, Any], arguments: Mapping[str, Any], *, keep_workers: bool
) -> Any:
    """Return a data module that makes the batches of these loaders.

    Args:
        cls: Its class.
        loaders: By stage, in any form; None: the stage has none.
        arguments: Of the constructor.
        keep_workers: See `given_loaders`.

    Raises:
        OptionsError: An argument is one that the loaders decide, or one of them cannot be taken
            apart.
    """
    for name in _OF_THE_LOADERS:
        if name in arguments:
            raise OptionsError(
                f"from_loaders() takes {name} from the loaders. Leave out {name}="
                f"{arguments[name]!r}, or use from_datasets()."
            )
    given = {
        stage: given_loaders(own, stage, keep_workers=keep_workers)
        for stage, own in loaders.items()
        if own is not None
    }
    sizes = [one.batch_size for form, _ in given.values() for _, one in named(form, "")]
    base = next((size for size in sizes if size is not None), None)
    module = _made(cls, {**arguments, "batch_size": base})
    for stage, (form, combine) in given.items():
        based = [replace(one, base=base) for _, one in named(form, stage)]
        setattr(module, DATASET_METHOD[stage], Constant(in_form_of(form, based), combine))
    return module


def _made(cls: Any, arguments: Mapping[str, Any]) -> Any:
    """Return a data module, also of a class that does not take all arguments about loaders.

    What its constructor leaves out is set afterwards.
    """
    given = {n: v for n, v in arguments.items() if v is not None or n not in _ABOUT_LOADERS}
    parameters = inspect.signature(cls.__init__).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    later = set() if open_ended else set(_ABOUT_LOADERS) - set(parameters)
    module = cls(**{n: v for n, v in given.items() if n not in later})
    rest = {n: v for n, v in given.items() if n in later}
    if "batch_size" in rest:
        module.batch_size = checked_batch_size(rest["batch_size"])
    if "shuffle" in rest:
        module.shuffle = checked_shuffle(rest["shuffle"])
    module.options = joined_options(
        rest.get("options", module.options), {n: rest.get(n) for n in LOADER_ARGUMENTS}
    )
    return module

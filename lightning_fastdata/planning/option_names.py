"""Misspelled option names and constructors left out: errors of ours that say what was meant."""

from __future__ import annotations

import functools
import inspect
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_fastdata.errors import OptionsError

if TYPE_CHECKING:
    from collections.abc import Callable

C = TypeVar("C", bound=type)


class NotConstructedError(OptionsError, AttributeError):
    """An object was used whose class does not call the constructor that it inherits."""


class NeedsConstruction:
    """Says so when a subclass's ``__init__`` has left out ``super().__init__()``."""

    _constructed = False
    """Set by the constructor, before all else."""

    def __getattr__(self, name: str) -> Any:
        cls = type(self)
        if not self._constructed and not name.startswith("__"):
            raise NotConstructedError(
                f"{cls.__name__} has no {name!r} yet, as {cls.__name__}.__init__() has not called "
                "super().__init__(). Call it first, with the arguments of the constructor."
            )
        # Python's own error; or that of a property, which ended here for raising an AttributeError.
        return object.__getattribute__(self, name)


def refuses_unknown_names(cls: C) -> C:
    """Make the constructor of a class raise OptionsError for a keyword that it does not have.

    The signature stays visible to LightningCLI and to ``help()``.

    Args:
        cls: A class with an ``__init__`` of its own, without ``**kwargs``.
    """
    construct: Callable[..., None] = vars(cls)["__init__"]
    known = list(inspect.signature(construct).parameters)[1:]

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        for name in kwargs:
            if name not in known:
                close = get_close_matches(name, known, 1)
                meant = f" Did you mean {close[0]}?" if close else ""
                raise OptionsError(
                    f"{cls.__name__.removesuffix('Hooks')} has no option {name!r}.{meant} "
                    f"Options are: {', '.join(known)}."
                )
        construct(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls

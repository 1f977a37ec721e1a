"""Every error and warning of the package, and the checks of arguments that rooms share.

Every message says what happened, quotes the value, and says what to do.
"""

from __future__ import annotations

import contextlib
import math
import numbers
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any


def printable(text: str, keep: str = "\n\t") -> str:
    r"""Return a text that can be shown: characters that do not print become escapes, as ``\x1b``.

    Names of files may hold anything: commands to a terminal, characters that turn the direction of
    the line, and bytes that are no text (surrogates), which cannot be written as UTF-8.

    Args:
        text: the text to show.
        keep: characters that stay as they are, by default ends of lines and tabs.
    """
    if text.isprintable():
        return text
    return "".join(
        sign if sign.isprintable() or sign in keep else sign.encode("unicode_escape").decode()
        for sign in text
    )


def text_of(error: BaseException) -> str:
    """Return the text of an error; of one whose ``__str__`` raises, what Python shows for it."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error, if that takes one: a frozen dataclass takes none."""
    with contextlib.suppress(Exception):
        error.add_note(note)


def rounded(value: float, digits: int) -> str:
    """Return a number with ``digits`` significant digits, in full: ``1,200``, not ``1.2e+03``."""
    return f"{float(f'{value:.{digits}g}'):,.10g}"


class FastDataError(Exception):
    """Root of all errors raised on purpose by this package."""

    def __str__(self) -> str:
        return printable(super().__str__())


class OptionsError(FastDataError, ValueError):
    """An option has an unknown name or an impossible value."""


class DatasetError(FastDataError):
    """A dataset is missing, empty, or raised while it was read."""


class BatchError(FastDataError):
    """A batch does not have the form that a transform or a loader needs."""


class TransformError(FastDataError):
    """A transform cannot be built, registered or run."""


class WorkerError(FastDataError, RuntimeError):
    """A side process of a loader died, hung, or could not be started."""


class BatchSizeError(FastDataError):
    """The batch does not fit the device, and the guard may not change it."""


class VersionError(FastDataError, ImportError):
    """A package that this one needs is installed in a version that does not work with it."""


class MissingPackageError(FastDataError, ImportError):
    """A feature needs a package that is not installed; the message says how to get it."""


class FastDataWarning(UserWarning):
    """Something was limited or degraded; the message says what, and how to lift it."""

    def __str__(self) -> str:
        return printable(super().__str__())


def is_whole(value: Any, least: float = -math.inf) -> bool:
    """Return whether a value is a whole number, of Python or NumPy, from ``least`` on."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return whole and bool(value >= least)


def is_number(value: Any, above: float = -math.inf) -> bool:
    """Return whether a value is a real number, of Python or NumPy, and greater than ``above``."""
    real = isinstance(value, numbers.Real)
    return real and bool(value > above)


def check(name: str, value: object, fine: bool, allowed: str) -> None:
    """Raise an :class:`OptionsError` that names the option and its value, unless it is fine."""
    if not fine:
        raise OptionsError(f"{name} is {value!r}; allowed are {allowed}.")


def check_among(name: str, value: object, allowed: Iterable[str]) -> None:
    """Raise an :class:`OptionsError` unless a value is one of the allowed texts."""
    fine = isinstance(value, str) and value in allowed
    check(name, value, fine, ", ".join(map(repr, allowed)))


def check_callable(name: str, value: object, takes: str) -> None:
    """Raise an :class:`OptionsError` unless a value is None or can be called.

    ``takes`` says what the function takes and returns, as ``"samples and returns a batch"``.
    """
    fine = value is None or (callable(value) and not isinstance(value, str))
    check(name, value, fine, f"None and a function that takes {takes}")


def checked_seed(seed: Any) -> int:
    """Return a seed as an integer of Python; raises OptionsError if it is no whole number."""
    check("seed", seed, is_whole(seed), "whole numbers")
    return int(seed)


def has_package(package: str) -> bool:
    """Return whether a package is installed. It is not imported."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # raised by a finder that hides packages
        return False


def require(package: str, *, extra: str, what: str) -> None:
    """Say how to install a package before an import of it fails.

    Args:
        package: Name by which it is imported.
        extra: The extra of this package that installs it.
        what: Name of the feature that needs it; it begins a sentence.

    Raises:
        MissingPackageError: The package is not installed.
    """
    if not has_package(package):
        raise MissingPackageError(
            f"{what} needs {package}, which is not installed. Run "
            f'`pip install "lightning-fastdata[{extra}]"`.'
        )


def as_error(kind: type[BaseException], number: int, text: str) -> BaseException:
    """Return an error of the same class as one that was raised in a side process."""
    message = f"Caught {kind.__name__} in side process {number} {text}"
    if issubclass(kind, StopIteration) or not issubclass(kind, Exception):
        # Raised from __next__, it would end the epoch or the program early, without a message.
        return RuntimeError(message)
    try:
        if getattr(kind, "message", None):  # a class that may take it by name alone, as for torch
            return kind(message=message)  # type: ignore[call-arg]
        # A KeyError shows its argument quoted, which would put a traceback on one line.
        return kind(_Verbatim(message)) if issubclass(kind, KeyError) else kind(message)
    except Exception:  # a user's exception class may need other arguments
        return RuntimeError(message)


class _Verbatim(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

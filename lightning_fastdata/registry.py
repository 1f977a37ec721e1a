"""Lookup by name: the optional rooms of ``ext``, and executors that other packages add.

Only modules of ``ext`` import ``ext``. This module finds executors by the name that a user gives,
those of this package and of installed packages (entry points of the group
``lightning_fastdata.executors``); classes and functions of ``ext`` by their public name elsewhere;
and kernels by :func:`fuse`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from lightning_fastdata.errors import OptionsError

EXECUTORS: Final = "lightning_fastdata.executors"
"""Group of entry points that are :class:`~lightning_fastdata.executors.kinds.ExecutorKind`."""
_EXT: Final = f"{__name__.partition('.')[0]}.ext"
_OWN: Final = {"ray": f"{_EXT}.ray:KIND"}
_HOMES: Final = {
    "FastImageFolder": "images.folder",
    "cache_images": "images.folder",
    "decode_crop": "images.decoders",
    "TarSource": "sources.files",
    "Hdf5Source": "sources.tables",
    "ZarrSource": "sources.tables",
    "FileSource": "sources.files",
    "ObjectSource": "sources.files",
    "LmdbSource": "sources.tables",
    "ParquetSource": "sources.tables",
}


def from_ext(name: str) -> Any:
    """Return the object of ``ext`` with a public name; AttributeError: there is none."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"lightning_fastdata has no {name!r}.")
    return getattr(import_module(f"{_EXT}.{home}"), name)


@cache
def fuse() -> Any:
    """Return the function that finds operations for kernels; None: that room is not there."""
    try:
        return import_module(f"{_EXT}.kernels.runs").fuse
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(_EXT):
            raise
        return None


def executor_names() -> list[str]:
    """Return the names of the executors found by this module, this package's own first."""
    return [*_OWN, *sorted(_added().keys() - _OWN.keys())]


@cache
def executor(name: str) -> Any:
    """Return the object registered for the name of an executor; None: there is none.

    Raises:
        OptionsError: An executor of a package cannot be loaded.
    """
    own = _OWN.get(name)
    entry = _added().get(name) if own is None else EntryPoint(name, own, EXECUTORS)
    if entry is None:
        return None
    try:
        return entry.load()
    except Exception as error:  # whatever modules of other packages raise
        raise OptionsError(
            f"executor={name!r} is {entry.value} of an installed package, which cannot be loaded: "
            f"{type(error).__name__}: {error}."
        ) from error


def _added() -> dict[str, EntryPoint]:
    return {each.name: each for each in entry_points(group=EXECUTORS)}

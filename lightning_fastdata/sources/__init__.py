"""Where the bytes of samples come from: files, archives, databases and object storage.

:class:`SourceDataset` makes samples of the bytes that a source gives. The sources of this package
are loaded when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_fastdata.registry import from_ext
from lightning_fastdata.sources.source import Raw, Source, SourceDataset

if TYPE_CHECKING:
    from lightning_fastdata.ext.sources.files import FileSource, ObjectSource, TarSource
    from lightning_fastdata.ext.sources.tables import (
        Hdf5Source,
        LmdbSource,
        ParquetSource,
        ZarrSource,
    )

__all__ = [
    "FileSource",
    "Hdf5Source",
    "LmdbSource",
    "ObjectSource",
    "ParquetSource",
    "Raw",
    "Source",
    "SourceDataset",
    "TarSource",
    "ZarrSource",
]

# Type checkers would take any name for one of the package's.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return from_ext(name)

"""Where the bytes of samples come from: files, archives, databases and object storage.

Each adapter is a thin layer over the library of its format, opens what it reads in the process
that reads it, and may be sent to any process. :class:`SourceDataset` makes samples of their bytes.
"""

from lightning_fastdata.sources.archives import TarSource, ZipSource
from lightning_fastdata.sources.arrays import Hdf5Source, ZarrSource
from lightning_fastdata.sources.dataset import SourceDataset
from lightning_fastdata.sources.files import FileSource, ObjectSource
from lightning_fastdata.sources.source import Raw, Source
from lightning_fastdata.sources.tables import ArrowSource, LmdbSource, ParquetSource

__all__ = [
    "ArrowSource",
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
    "ZipSource",
]

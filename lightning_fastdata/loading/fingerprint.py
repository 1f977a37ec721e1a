"""By what a dataset is recognised when a training goes on."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from lightning_fastdata.caches.cached_dataset import CachedDataset
from lightning_fastdata.tree import held


def fingerprint(dataset: object) -> str:
    """Return 16 hexadecimal digits that differ for datasets of another class, length or files.

    No sample is read. Of a dataset that lists its files (``samples``, ``imgs``) 64 names count,
    without their folders, as data may move to another machine.
    """
    text: list[str] = []
    while dataset is not None and len(text) < 64:
        if type(dataset) is not CachedDataset:  # with a cache, it is the same data
            text.append(f"{type(dataset).__module__}.{type(dataset).__qualname__}")
        listed = next((v for n in ("samples", "imgs") if (v := _listed(dataset, n))), None)
        if listed is not None:
            text.append(str(len(listed)))
            text.extend(_file_name(listed[i]) for i in range(0, len(listed), -(-len(listed) // 64)))
        dataset = held(dataset, "dataset")
    joined = "\n".join(text).encode(errors="surrogateescape")
    return f"{zlib.crc32(joined):08x}{zlib.adler32(joined):08x}"


def _listed(dataset: object, name: str) -> Sequence[object] | None:
    found = held(dataset, name)
    return found if isinstance(found, list | tuple) and found else None


def _file_name(entry: object) -> str:
    path = entry[0] if isinstance(entry, tuple | list) and entry else entry
    return path.replace("\\", "/").rpartition("/")[2] if isinstance(path, str) else ""

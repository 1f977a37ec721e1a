"""What an earlier training of the same data came to, kept in a file; and how data are recognised.

It is where a training begins, and is measured like any other: never trusted, and replaced by what
the next training comes to.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from lightning_fastdata.caches.cached import CachedDataset
from lightning_fastdata.host import clock
from lightning_fastdata.host.system_calls import cache_folder, write_atomically
from lightning_fastdata.tree import held

_MOST_BYTES: Final = 4096
_VALID_S: Final = 30 * 24 * 3600
"""A month: by then machine, storage and data may have changed."""
_PRIVATE: Final = 0o700
_VERSION: Final = 1


class KeptFile:
    """A few plain values that outlive the process, found again by what they rest on.

    Without a folder that can be written nothing is kept, and nothing is said of it. What cannot be
    read, or is older than a month, is not there.

    Args:
        kind: Of the values, which the file's name begins with.
        about: What has to be the same, as plain values: dataset, batch size, machine, ...
        folder: Default: :func:`cache_folder`.
    """

    def __init__(self, kind: str, about: Mapping[str, Any], folder: Path | None = None) -> None:
        text = json.dumps({"version": _VERSION, **about}, sort_keys=True, default=str)
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        with suppress(RuntimeError):  # no home folder is known
            folder = cache_folder() if folder is None else folder
        self.path = None if folder is None else folder / f"{kind}-{name}.json"

    def read(self) -> dict[str, Any]:
        """Return what was kept; empty: nothing."""
        if self.path is None:
            return {}
        try:
            if clock.unix_s() - self.path.stat().st_mtime > _VALID_S:
                return {}
            with self.path.open("rb") as file:
                kept = json.loads(file.read(_MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        return kept if isinstance(kept, dict) else {}

    def write(self, values: Mapping[str, Any]) -> None:
        """Keep values, in a file that only this user may read."""
        if self.path is None:
            return
        with suppress(OSError):
            self.path.parent.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(dict(values)))


def about_dataset(dataset: object) -> dict[str, Any]:
    """Return what tells a dataset from others: the plain values among its attributes."""
    own = getattr(dataset, "__dict__", {}).items()
    return {name: value for name, value in own if isinstance(value, int | float | str | None)}


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

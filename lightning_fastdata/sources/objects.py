"""Objects in S3, Google Cloud Storage, Azure or behind HTTP, by obstore; others by fsspec."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from lightning_fastdata.errors import DatasetError, OptionsError, require
from lightning_fastdata.images.packed import PackedStrings
from lightning_fastdata.sources.source import OpenedInEachProcess, Raw

if TYPE_CHECKING:
    import fsspec
    from obstore.store import ObjectStore

_PARALLEL: Final = 64


class ObjectSource(OpenedInEachProcess["ObjectStore"]):
    """An object a record, read by obstore, which also has retries, time-outs and credentials.

    Its clients do not survive a fork, so each process opens its own, and one that was forked from a
    process that has one refuses. Workers are such processes only if samples were read in the
    training process before (``num_workers=0``).

    Args:
        url: ``s3://bucket/prefix``, ``gs://``, ``az://``, ``https://host/path``, ``file:///``, ...
        keys: Of the objects, below ``url``; None: all there are, in the order of their names.
        suffix: Of the keys that count, where all are listed.
        parallel_reads: Objects that a worker asks for at once.
        **config: For ``obstore.store.from_url``: ``config``, ``client_options``,
            ``retry_config``, ``credential_provider``, ...

    Raises:
        MissingPackageError: obstore is not installed (``lightning-fastdata[objects]``).
        DatasetError: The objects cannot be listed.
    """

    survives_forks = False

    def __init__(
        self,
        url: str,
        keys: Iterable[str] | None = None,
        *,
        suffix: str = "",
        parallel_reads: int = _PARALLEL,
        **config: Any,
    ) -> None:
        require("obstore", extra="objects", what="ObjectSource")
        self.url = url.rstrip("/")
        self.config = config
        self.parallel_reads = parallel_reads
        self.listed: str | None = None
        """Digest of what the listing said of sizes and versions; None: the keys were given."""
        if keys is None:
            try:
                keys, self.listed = self.asked_apart(partial(_list, self, suffix))
            except DatasetError as error:
                raise DatasetError(
                    f"The objects of {self.url} cannot be listed: {error}. Check address and "
                    "rights, or give their keys."
                ) from error
        self.keys = PackedStrings(keys)

    def __len__(self) -> int:
        return len(self.keys)

    def open(self) -> ObjectStore:
        """Return a client of this process."""
        from obstore.store import from_url

        return from_url(self.url, **self.config)

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return the contents of objects, one after the other."""
        import obstore

        store = self.opened()
        return [memoryview(obstore.get(store, self.keys[i]).bytes()) for i in indices]

    def name_of(self, index: int) -> str:
        """Return the address of an object."""
        return f"{self.url}/{self.keys[index]}"

    def recognised_by(self) -> tuple[object, ...]:
        """Return what tells these objects from others: without credentials, which change."""
        return self.url, _endpoints(self.config), self.keys, self.listed


def _list(source: ObjectSource, suffix: str) -> tuple[list[str], str]:
    """Return the keys of all objects, and a digest of what is said of their sizes and versions."""
    import obstore

    found: dict[str, str] = {}
    for page in obstore.list(source.open()):
        for each in cast("Sequence[Mapping[str, Any]]", page):
            if each["path"].endswith(suffix):
                version = each.get("e_tag") or each.get("last_modified")
                found[each["path"]] = f"{each['path']}\0{each['size']}\0{version}\n"
    keys = sorted(found)
    digest = hashlib.blake2b(digest_size=16)
    for key in keys:
        digest.update(found[key].encode())
    return keys, digest.hexdigest()


class FsspecSource(OpenedInEachProcess["fsspec.AbstractFileSystem"]):
    """A file a record, of any file system that fsspec knows.

    Args:
        urls: Of the files, all of one file system: ``hf://...``, ``sftp://...``, ``memory://...``.
        parallel_reads: Files that a worker asks for at once.
        **storage_options: For the file system.

    Raises:
        OptionsError: There is no URL, or fsspec is not installed.
    """

    def __init__(
        self, urls: Iterable[str], *, parallel_reads: int = _PARALLEL, **storage_options: object
    ) -> None:
        try:
            import fsspec  # noqa: F401
        except ImportError as error:
            raise OptionsError("FsspecSource needs fsspec: pip install fsspec.") from error
        self.urls = PackedStrings(urls)
        self.storage_options = storage_options
        self.parallel_reads = parallel_reads
        if not len(self.urls):
            raise OptionsError("FsspecSource got no URL; give at least one.")

    def __len__(self) -> int:
        return len(self.urls)

    def open(self) -> fsspec.AbstractFileSystem:
        """Return the file system, with connections of this process."""
        import fsspec

        # An instance that was made before a fork is not to be found again.
        options = {**self.storage_options, "skip_instance_cache": True}
        return fsspec.core.url_to_fs(self.urls[0], **options)[0]

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return the contents of files, one after the other."""
        files = self.opened()
        return [files.cat_file(self.urls[index]) for index in indices]

    def name_of(self, index: int) -> str:
        """Return the address of a file."""
        return self.urls[index]

    def recognised_by(self) -> tuple[object, ...]:
        """Return what tells these files from others: without credentials, which change."""
        return _endpoints(self.storage_options), self.urls


def _endpoints(options: object) -> list[str]:
    """Return the addresses of servers among options."""
    if not isinstance(options, Mapping):
        return []
    found = []
    for name, value in options.items():
        if isinstance(value, str) and "endpoint" in str(name).lower():
            found.append(value)
        found += _endpoints(value)
    return sorted(found)

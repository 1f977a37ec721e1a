"""Files as a source: on this machine, within tar archives, or in object storage."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import posixpath
import signal
import tarfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import numpy as np

from lightning_fastdata.errors import (
    DatasetError,
    FastDataWarning,
    OptionsError,
    check,
    is_whole,
    require,
)
from lightning_fastdata.ext.sources import PATHS, OpenedInEachProcess, Paths, as_list, each_of
from lightning_fastdata.host.system_calls import size_and_time, started
from lightning_fastdata.sources.files import ColdFiles, PackedStrings, begin_to_read
from lightning_fastdata.sources.source import Raw

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")
_PARALLEL: Final = 64
_users: set[int] = set()
"""Numbers of the processes in which obstore was used: this one and its ancestors."""


class FileSource:
    """Files, each of which is a record.

    Args:
        paths: Paths of the files.
        parallel_reads: See :class:`Source`; give more than 1 for a network file system.

    Raises:
        OptionsError: ``paths`` is no list of paths.
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]], *, parallel_reads: int = 1) -> None:
        listed = each_of("paths", paths, "paths", *PATHS)
        self.paths = PackedStrings(os.fsdecode(path) for path in listed)
        self.parallel_reads = parallel_reads
        self._cold = ColdFiles()

    def __len__(self) -> int:
        return len(self.paths)

    def will_read(self, indices: Sequence[int]) -> None:
        """Have the system begin to read files that are not in memory."""
        self._cold.begin([self.paths[index] for index in indices])

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return the contents of files."""
        return [Path(self.paths[index]).read_bytes() for index in indices]

    def name_of(self, index: int) -> str:
        """Return the path of a file."""
        return self.paths[index]


class TarSource(OpenedInEachProcess[list[int]]):
    """The files in uncompressed tar archives, WebDataset's shards among them.

    The archives are read once, header by header, to find where each file begins. Of one that has
    changed since they are read again, and a file that is elsewhere by then is an error.

    Args:
        paths: Paths of the archives.
        parts: Extensions of the files that make one record (``("jpg", "cls")``), by WebDataset's
            convention that they share their name up to its first dot: a record is a dict of bytes
            by extension, and files without one are left out. None: each file is a record of bytes.

    An archive that ends without its last block, as one that was cut off does, is a warning.

    Raises:
        OptionsError: ``parts`` is empty, or no list of extensions.
        DatasetError: An archive cannot be read, is compressed, has a link that leads out of it, or
            has a record without a part.
    """

    parallel_reads = 1

    def __init__(self, paths: Paths, parts: Sequence[str] | None = None) -> None:
        self.paths = as_list(paths)
        self.parts = None
        if parts is not None:
            self.parts = tuple(each_of("parts", parts, "extensions", str))
            if not self.parts:
                raise OptionsError("parts is empty; give extensions, or leave it out.")
        found: list[Any] = []
        self._states: list[tuple[int, int] | None] = []
        for number, path in enumerate(self.paths):
            before = size_and_time(path)
            found += _members(number, path)
            self._states.append(before)
        if self.parts is not None:
            found = _grouped(found, self.parts, self.paths)
        self._names = PackedStrings(name for name, _ in found)
        self._slices = np.array([at for _, at in found], np.int64).reshape(-1, 3)
        self._each = 1 if self.parts is None else len(self.parts)

    def __len__(self) -> int:
        return len(self._slices) // self._each

    def open(self) -> list[int]:
        """Return the descriptors of the archives, which are closed with the process."""
        return [os.open(path, os.O_RDONLY) for path in self.paths]

    def will_read(self, indices: Sequence[int]) -> None:
        """Have the system begin to read records that are not in memory."""
        files = self.opened()
        for index in indices:
            for file, offset, length in self._slices[self._places(index)].tolist():
                begin_to_read(files[file], offset, length)

    def get_bytes(self, indices: Sequence[int]) -> list[Raw]:
        """Return the bytes of files, or dicts of them by extension.

        Raises:
            DatasetError: An archive has changed, and has a file no longer where it was.
        """
        if self.parts is None:
            return [self._read(index) for index in indices]
        return [
            dict(zip(self.parts, map(self._read, self._places(index)), strict=True))
            for index in indices
        ]

    def name_of(self, index: int) -> str:
        """Return the archive, and the name of the record in it."""
        return self._name(index * self._each)

    def _places(self, index: int) -> range:
        """Return the places of the files that make a record."""
        return range(index * self._each, (index + 1) * self._each)

    def _read(self, place: int) -> bytes:
        file, offset, length = at = tuple(self._slices[place].tolist())
        descriptor = self.opened()[file]
        data = os.pread(descriptor, length, offset)
        if len(data) < length:
            raise DatasetError(
                f"{self._name(place)} ends early: {len(data)} of {length} bytes are there. The "
                "archive has changed since it was opened; make the source anew."
            )
        # Behind the reading: by now the archive may be written anew in place.
        state = size_and_time(descriptor)
        if state != self._states[file]:
            path = self.paths[file]
            if (self._names[place], at) not in _members_now(file, path, state):
                raise DatasetError(
                    f"{self._name(place)} is no longer where it was: the archive has changed since "
                    "the source was made. Make the source anew."
                )
        return data

    def _name(self, place: int) -> str:
        return f"{self.paths[int(self._slices[place, 0])]}:{self._names[place]}"


@lru_cache(maxsize=8)
def _members_now(
    number: int, path: str, _state: tuple[int, int] | None
) -> frozenset[tuple[str, tuple[int, int, int]]]:
    """Return the members of an archive in a later state than when its source was made."""
    return frozenset(_members(number, path))


def _members(number: int, path: str) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield the name of each file of an archive, and its archive's number, offset and size.

    A link has the offset and size of the file that it leads to.
    """
    found: list[tuple[str, Any]] = []
    places: dict[str, Any] = {}
    """Number, offset and size of each file; the target of each link; None for a folder."""
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                name = posixpath.normpath(member.name)
                at: Any = None
                if member.sparse:
                    raise DatasetError(
                        f"{path}:{member.name} is stored without its empty parts, not in one piece."
                        " Make the archive without --sparse."
                    )
                if member.isreg():
                    at = number, member.offset_data, member.size
                elif member.islnk():  # to what the archive had by then
                    target = posixpath.normpath(member.linkname)
                    at = places.get(target, target)
                elif member.issym():
                    folder = posixpath.dirname(member.name)
                    at = posixpath.normpath(posixpath.join(folder, member.linkname))
                places[name] = at
                found.append((member.name, at))
                archive.members = []  # type: ignore[attr-defined]  # tarfile would keep them all
            end = archive.offset  # behind the last member
        with Path(path).open("rb") as file:
            file.seek(end)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                warnings.warn(
                    f"{path} has no end behind its {len(found):,} members: it may have been cut "
                    "off, or be damaged there, and more files may be missing. Compare it with the "
                    "original; `tar` writes an end.",
                    FastDataWarning,
                    stacklevel=3,
                )
    except (OSError, tarfile.TarError) as error:
        advice = "Give the paths of archives; patterns and folders are not searched."
        if isinstance(error, tarfile.TarError) and Path(path).stat().st_size:
            advice = "Unpack a compressed one: its files cannot be reached in any order."
        raise DatasetError(
            f"{path} cannot be read as an uncompressed tar archive: {error}. {advice}"
        ) from error
    for name, own in found:
        place = _led_to(own, places)
        if isinstance(place, tuple):
            yield name, place
        elif place is not None and not any(other.startswith(f"{place}/") for other in places):
            raise DatasetError(
                f"{path}:{name} is a link to {place}, which is not in the archive. Make it "
                "with --dereference, which has files in the place of links, or leave the link out."
            )


def _led_to(at: Any, places: Mapping[str, Any]) -> Any:
    """Return what symbolic links lead to; a name that is not there, or that leads to itself."""
    passed = set[str]()
    while isinstance(at, str) and at not in passed:
        passed.add(at)
        at = places.get(at, at)
    return at


def _grouped(found: list[Any], parts: tuple[str, ...], files: list[str]) -> list[Any]:
    """Return the slices of each record one after the other, in the order of the parts."""
    records: dict[tuple[int, str], dict[str, Any]] = {}
    for name, at in found:
        folder, _, base = name.rpartition("/")
        stem, _, extension = base.partition(".")
        if not stem or stem == base:  # WebDataset leaves out README and .hidden, too
            continue
        records.setdefault((at[0], f"{folder}/{stem}"), {})[extension] = (name, at)
    grouped = []
    for (number, name), record in records.items():
        for part in parts:
            if part not in record:
                raise DatasetError(
                    f"{files[number]}:{name.lstrip('/')} has {', '.join(sorted(record))}, and no "
                    f"{part!r}. Leave it out of parts, or repair the archive."
                )
            grouped.append(record[part])
    if found and not grouped:
        name, (number, _, _) = found[0]
        raise DatasetError(
            f"{files[number]} has no file with an extension: {name!r}, say. Leave parts out, or "
            "name the files by WebDataset's convention."
        )
    return grouped


class ObjectSource(OpenedInEachProcess["ObjectStore"]):
    """Objects, each a record, read by obstore, which also has retries, time-outs and credentials.

    Clients of obstore do not survive a fork. So each process opens its own, and a process that was
    forked from one with a client refuses to read. Workers are such processes only if samples were
    read in the training process before (``num_workers=0``).

    Args:
        url: ``s3://bucket/prefix``, ``gs://``, ``az://``, ``https://host/path``, ``file:///``, ...
        keys: Keys of the objects, below ``url``; None: all objects, in the order of their names. A
            cache knows sizes and versions only of objects that were listed, and warns of others.
        suffix: Suffix of the keys to take, if objects are listed.
        parallel_reads: Objects that a worker asks for at once.
        **config: Options of ``obstore.store.from_url``: ``config``, ``client_options``,
            ``retry_config``, ``credential_provider``, ...

    Raises:
        OptionsError: ``url`` or ``suffix`` is no text, ``keys`` is no list of texts, or
            ``parallel_reads`` is no whole number from 1.
        MissingPackageError: obstore is not installed (``lightning-fastdata[objects]``).
        DatasetError: The objects cannot be listed.
    """

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
        check("url", url, isinstance(url, str), "addresses, such as s3://bucket and file:///folder")
        check("suffix", suffix, isinstance(suffix, str), "texts")
        fine = is_whole(parallel_reads, 1)
        check("parallel_reads", parallel_reads, fine, "whole numbers from 1")
        self.url = url.rstrip("/")
        self.config = config
        self.parallel_reads = parallel_reads
        self.listed: str | None = None
        """Digest of the listing, with sizes and versions; None: the keys were given."""
        if keys is None:
            try:
                keys, self.listed = asked_apart(partial(_list, self, suffix))
            except DatasetError as error:
                raise DatasetError(
                    f"The objects of {self.url} cannot be listed: {error}. Check address and "
                    "rights, or give their keys."
                ) from error
        self.keys = PackedStrings(each_of("keys", keys, "keys", str))

    def __len__(self) -> int:
        return len(self.keys)

    def open(self) -> ObjectStore:
        """Return a client of this process.

        Raises:
            DatasetError: This process was forked from one that has a client, too.
        """
        if _users - {os.getpid()}:
            raise DatasetError(
                f"{type(self).__name__} cannot read in this process, which was forked from one "
                "that has read with it, too: its library does not survive that. Start workers "
                'another way (multiprocessing_context="forkserver"), or read in workers from the '
                "start."
            )
        _users.add(os.getpid())
        return self.client()

    def client(self) -> ObjectStore:
        """Return a new client."""
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
        """Return what identifies these objects, without credentials, which change."""
        if self.listed is None:
            warnings.warn(
                f"A cache knows these {len(self.keys):,} files by their names alone "
                f"({self.keys[0]}, ...): if one changes, its old bytes may be handed out. Have "
                "them listed (ObjectSource without keys), or give the cache a key=... that you "
                "change when they change.",
                FastDataWarning,
                stacklevel=2,
            )
        return self.url, _endpoints(self.config), self.keys, self.listed


def asked_apart(question: Callable[[], T]) -> T:
    """Return the result of a function that uses obstore, called in a process of its own.

    So obstore is not used in this process, from which workers may still be forked. If it was used
    here already, the function is called here.

    Raises:
        DatasetError: The function raised, with the text of the error; or the process died.
    """
    if os.getpid() in _users:
        answer, error = _answer(question)
    else:
        context: Any = multiprocessing.get_context("fork" if os.name == "posix" else "spawn")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_send_answer, args=(question, theirs))
        with ours, theirs, started(process):
            theirs.close()
            try:
                answer, error = ours.recv()
            except EOFError:
                answer, error = None, "the process that asked died"
    if error is not None:
        raise DatasetError(error)
    return cast("T", answer)


def _answer(question: Callable[[], object]) -> tuple[object, str | None]:
    try:
        return question(), None
    except Exception as error:
        said = str(error).partition("\n")[0]
        return None, f"{type(error).__name__}: {said}"


def _send_answer(question: Callable[[], object], pipe: Connection) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    pipe.send(_answer(question))


def _list(source: ObjectSource, suffix: str) -> tuple[list[str], str]:
    """Return the keys of all objects, and a digest of them with their sizes and versions."""
    import obstore

    found: dict[str, str] = {}
    for page in obstore.list(source.client()):
        for each in cast("Sequence[Mapping[str, Any]]", page):
            if each["path"].endswith(suffix):
                version = each.get("e_tag") or each.get("last_modified")
                found[each["path"]] = f"{each['path']}\0{each['size']}\0{version}\n"
    keys = sorted(found)
    digest = hashlib.blake2b(digest_size=16)
    for key in keys:
        digest.update(found[key].encode())
    return keys, digest.hexdigest()


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

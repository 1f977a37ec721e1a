"""Requests to the operating system about this process, its files and the memory it shares."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import signal
import stat
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from lightning_fastdata.errors import FastDataWarning, OptionsError
from lightning_fastdata.host import clock

_PR_SET_PDEATHSIG: Final = 1
_DESCRIPTORS: Final = "/proc/self/fd"
_HELD: Final = ("SIGUSR1", "SIGTERM", "SIGINT")
_STANDARD: Final = 2
"""Highest descriptor of the standard streams."""


class OpenFile(NamedTuple):
    """A file that this process has open for reading."""

    descriptor: int
    flags: int
    """Flags of the open file, as ``fcntl`` gives them."""
    position: int
    identity: tuple[int, int]
    """Device and inode number of the file."""


def files_being_read() -> tuple[OpenFile, ...]:
    """Return the regular files that this process has open for reading only.

    There are none if the system does not list them (it is not Linux).
    """
    if not sys.platform.startswith("linux"):
        return ()
    import fcntl

    found = []
    with suppress(OSError):
        for name in os.listdir(_DESCRIPTORS):  # noqa: PTH208  # the names alone
            descriptor = int(name)
            with suppress(OSError):  # it was the descriptor of the listing, or has no position
                flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
                if descriptor <= _STANDARD or flags & os.O_ACCMODE != os.O_RDONLY:
                    continue
                status = os.fstat(descriptor)
                if stat.S_ISREG(status.st_mode):
                    position = os.lseek(descriptor, 0, os.SEEK_CUR)
                    identity = status.st_dev, status.st_ino
                    found.append(OpenFile(descriptor, flags, position, identity))
    return tuple(found)


def open_anew(files: Iterable[OpenFile]) -> None:
    """Open files anew under their present descriptors; a forked process calls this first of all.

    A fork copies descriptors, but both processes go on to share the position of each file, so that
    reading in one moves it in the other: https://man7.org/linux/man-pages/man2/fork.2.html. From
    now on this process has positions of its own, which begin where ``files`` say.

    A thread of the parent may have closed a file before the fork, and its descriptor may belong to
    another file by now: such descriptors are left alone.
    """
    for file in files:
        try:
            status = os.fstat(file.descriptor)
        except OSError:
            continue
        if (status.st_dev, status.st_ino) != file.identity:
            continue
        try:
            # The way to it is a link, which libraries such as SQLite forbid of their files.
            flags = file.flags & ~os.O_NOFOLLOW | os.O_CLOEXEC
            new = os.open(f"{_DESCRIPTORS}/{file.descriptor}", flags)
            try:
                os.lseek(new, file.position, os.SEEK_SET)
                os.dup2(new, file.descriptor, inheritable=os.get_inheritable(file.descriptor))
            finally:
                os.close(new)
        except OSError as error:
            with suppress(OSError):
                path = os.readlink(f"{_DESCRIPTORS}/{file.descriptor}")  # noqa: PTH115
                warnings.warn(
                    f"{path} is open in the training process, and a worker cannot open it for "
                    f"itself ({error}). If the dataset reads it, open it on first use in "
                    "__getitem__: processes that share its position read wrong samples.",
                    FastDataWarning,
                    stacklevel=2,
                )


def threads_running() -> int:
    """Return the number of threads of this process, also of those that libraries have started."""
    return int(psutil.Process().num_threads())


def done_in_fork(work: Callable[[], object], *, within_s: float) -> bool:
    """Return whether a fork of this process has done some work in time; it is then gone."""
    parent, ends_s = os.getpid(), clock.monotonic() + within_s
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that the fork may hang, as is tried
        child = os.fork()
    if not child:
        die_with(parent)
        with suppress(BaseException):
            work()
            os._exit(0)
        os._exit(1)
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        if clock.monotonic() > ends_s:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        clock.sleep(0.001)


@contextmanager
def held_signals() -> Iterator[None]:
    """Hold back signals that end or save a training while a process starts; deliver them then.

    Python calls its handlers between any two steps of the main thread, and an exception of a
    handler within the hooks of ``os.fork`` is printed and lost: a Ctrl-C there would end nothing.
    The signals are not blocked, since the kernel would give them to another thread, and Python's
    handler would run in the main thread all the same. A forked process begins with these signals
    held, and sets its own handlers.
    """
    came: list[int] = []

    def deliver() -> None:
        for number in came:
            signal.raise_signal(number)

    with ExitStack() as undo:
        undo.callback(deliver)
        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in _HELD if hasattr(signal, name)):
                handler = signal.getsignal(number)
                if callable(handler):
                    undo.callback(signal.signal, number, handler)
                    signal.signal(number, lambda number, _: came.append(number))
        yield


def pass_over_interrupts() -> None:
    """Have this process go on at Ctrl-C, of which its parent makes what is right.

    An interrupt that is ignored would be ignored by the programs that it starts, too, which would
    outlive the training. One that is handled is told to an event loop of the parent by a descriptor
    that a fork has, too: there it would be one more interrupt of the parent.
    """
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda _number, _frame: None)
        signal.siginterrupt(signal.SIGINT, False)  # system calls of libraries go on


@contextmanager
def started(process: BaseProcess) -> Iterator[None]:
    """Start a process for the block, and kill it afterwards, however the block ends.

    Nobody waits until it has ended, as the kernel takes 15 ms to free what one has that has loaded
    torch. :func:`multiprocessing.active_children` then forgets it, which starting another one and
    the end of each epoch call.
    """
    try:
        with held_signals():
            process.start()
        yield
    finally:
        if process.pid is not None:
            process.kill()


def size_and_time(file: str | os.PathLike[str] | int) -> tuple[int, int] | None:
    """Return the size of a file in bytes, and the time of its last change in ns.

    By these it is seen that a file was written anew. ``file``: its path, or its descriptor. None:
    there is no such file; a folder, whose status changes with what is written to it, is none.
    """
    try:
        status = os.stat(file)  # noqa: PTH116 - a Path would take as long as the system
    except (OSError, ValueError):  # a text that names no file
        return None
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def cache_folder() -> Path:
    """Return the folder of this package's own files.

    It is ``$LIGHTNING_FASTDATA_CACHE``, or ``lightning_fastdata`` in ``$XDG_CACHE_HOME`` or
    ``~/.cache``.
    """
    own = os.environ.get("LIGHTNING_FASTDATA_CACHE")
    if own:
        return Path(own).expanduser()  # a file of settings has no shell that does it
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_fastdata"


def check_replaceable(path: Path) -> None:
    """Raise an OptionsError if what is at a path must not be replaced by a file."""
    if (path.exists() and not path.is_file()) or path.absolute().parent == Path("/dev"):
        raise OptionsError(
            f"{str(path)!r} is no file (but a folder, a device or a pipe), and is not replaced by "
            "one. Name another place."
        )


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Write a text as UTF-8, or bytes, so that no reader ever sees a part of it; return the path.

    Characters that UTF-8 does not have (surrogates) are written as escapes. A link at ``path`` is
    replaced, and its target stays as it is. The umask decides who may read the file.

    Raises:
        OptionsError: There is something else than a file at the path: a device, say.
    """
    check_replaceable(path)
    if isinstance(content, str):
        content = content.encode("utf-8", "backslashreplace")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".fastdata-{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path


def private_folder(path: Path, *, make: bool = True) -> Path | None:
    """Return a folder whose files this user alone can read and write.

    If it is not there, it is made with ``make``; without, None is returned.

    Raises:
        OptionsError: It belongs to another user, is a link, or cannot be made.
    """
    try:
        if make:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()  # the status of a link itself, which may lead to anybody's folder
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        if ours and stat.S_IMODE(found.st_mode) != 0o700:
            path.chmod(0o700)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not make:
            return None
        raise OptionsError(f"{path} cannot be used as a folder: {error}.") from error
    if not ours:
        owner = f"user {found.st_uid}" if stat.S_ISDIR(found.st_mode) else "nobody: it is no folder"
        raise OptionsError(
            f"{path} belongs to {owner}, and this is user {os.getuid()}. Nothing is written to it "
            "or read from it. Remove it, or name another place."
        )
    return path


def die_with(parent: int) -> None:
    """Have this process killed when ``parent`` ends, if that is its parent process (Linux)."""
    if sys.platform.startswith("linux") and os.getppid() == parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def append_privately(path: str | os.PathLike[str], text: str) -> None:
    """Append text to a file that only its owner may read; its folder is created.

    A link at ``path``, which may lead to another file, is not followed, except on Windows.

    Raises:
        OSError: The file cannot be written, or is a link.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    how = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    if sys.platform != "win32":
        how |= os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, how, 0o600)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


class SharedFlags:
    """Flags by number, all lowered at first: a byte each in memory that forked processes share.

    A copy that is sent to another process or made by ``copy`` begins with lowered flags.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        # The memory goes with the last process that has it; a length of 0 is refused.
        self._raised = mmap.mmap(-1, max(1, count))

    def __contains__(self, index: int) -> bool:
        return self._raised[index] == 1

    def add(self, index: int) -> None:
        """Raise a flag, in all processes."""
        self._raised[index] = 1

    def __reduce__(self) -> tuple[type[SharedFlags], tuple[int]]:
        return SharedFlags, (self._count,)

"""What is asked of the operating system for this process and its files."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
"""glibc's numbers in ``malloc.h``."""
_KEPT_BYTES: Final = 256 << 20
"""Free memory at the end of the heap from which on it goes back to the system."""
_BLOCK_BYTES: Final = (64 << 20, 32 << 20)
"""Blocks from this size on go back as soon as they are freed. Older versions of glibc take no more
than the second."""


def keep_freed_memory() -> bool:
    """Have this process keep what it frees for the next batch; False where glibc cannot be set so.

    glibc gives large blocks back at once, and the system clears each page of the next one: for a
    batch of 12 MB that is 3000 page faults, a third of what a worker spends on decoded images.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    kept = mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    return bool(kept and any(mallopt(_M_MMAP_THRESHOLD, size) for size in _BLOCK_BYTES))


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Write a text as UTF-8, or bytes, so that no reader ever sees a part of it; return the path.

    What is no text (surrogates) is spelled. A link at ``path`` is replaced, and what it points to
    stays as it is. Who may read the file is for the umask to say.
    """
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


def die_with(parent: int) -> None:
    """Have this process killed when its parent ends, if it is the child of that process (Linux)."""
    if sys.platform.startswith("linux") and os.getppid() == parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def append_privately(path: str | os.PathLike[str], text: str) -> None:
    """Append text to a file that only its owner may read; its folder is created.

    A link in its place, which may lead to another file, is not followed where the system can tell.

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

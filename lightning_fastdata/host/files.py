"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write_atomically(path: Path, text: str) -> Path:
    """Write ``text`` as UTF-8 so that no reader ever sees a part of it; return the path.

    What is no text (surrogates) is spelled. Who may read the file is for the umask to say.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".fastdata-{secrets.token_hex(8)}")
    try:
        with temporary.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path

"""The number of workers that an earlier training of the same data came to, kept in a file.

It is where a training begins, and is measured like any other: never trusted, and replaced by what
the next training comes to.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from lightning_fastdata.host.system_calls import write_atomically

_MOST_BYTES: Final = 4096
_VALID_S: Final = 30 * 24 * 3600
"""A month: by then machine, storage and data may have changed."""
_PRIVATE: Final = 0o700
_VERSION: Final = 1


def cache_folder() -> Path:
    """Return where numbers are kept.

    That is ``$LIGHTNING_FASTDATA_CACHE``, or ``lightning_fastdata`` in ``$XDG_CACHE_HOME`` or
    ``~/.cache``.
    """
    own = os.environ.get("LIGHTNING_FASTDATA_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_fastdata"


class Prior:
    """What is known of a loader from earlier trainings, by everything that it rests on.

    Without a folder that can be written nothing is kept, and nothing is said of it.

    Args:
        about: What has to be the same, as plain values: dataset, batch size, machine, ...
        folder: Default: :func:`cache_folder`.
        planned: Workers by the plan, which has measured samples: what was kept of a plan for less
            than half or more than twice as many is of other samples.
    """

    def __init__(
        self, about: Mapping[str, Any], folder: Path | None = None, *, planned: int = 0
    ) -> None:
        self._planned = planned
        text = json.dumps({"version": _VERSION, **about}, sort_keys=True, default=str)
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        with suppress(RuntimeError):  # no home folder is known
            folder = cache_folder() if folder is None else folder
        self.path = None if folder is None else folder / f"tune-{name}.json"

    def recall(self) -> int | None:
        """Return the number of workers that was kept; None: none, or too long ago."""
        if self.path is None:
            return None
        try:
            if time.time() - self.path.stat().st_mtime > _VALID_S:
                return None
            with self.path.open("rb") as file:
                kept = json.loads(file.read(_MOST_BYTES))
            workers, planned = kept["workers"], kept["planned"]
            if not (self._planned + 1) / 2 <= planned + 1 <= 2 * (self._planned + 1):
                return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return workers if type(workers) is int and workers >= 0 else None

    def keep(self, workers: int) -> None:
        """Keep a number that has proved itself, in a file that only this user may read."""
        if self.path is None:
            return
        with suppress(OSError):
            self.path.parent.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps({"workers": workers, "planned": self._planned}))

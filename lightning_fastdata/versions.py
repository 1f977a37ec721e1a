"""What has to be installed beside the package, and in which versions."""

from __future__ import annotations

import importlib.metadata
import re
from typing import TYPE_CHECKING, Final

from lightning_fastdata.errors import VersionError

if TYPE_CHECKING:
    from collections.abc import Callable

LEAST: Final = {"torch": (2, 6), "lightning": (2, 5), "pytorch-lightning": (2, 5)}
"""The first versions that will do, as in ``pyproject.toml``. An Albumentations that will not do is
found out when a pipeline is to run, which then runs on the CPU."""
MALICIOUS: Final = {
    "lightning": ((2, 6, 2), (2, 6, 3)),
    "pytorch-lightning": ((2, 6, 2), (2, 6, 3)),
}
"""Uploads that were no releases (GHSA-w37p-236h-pfx3)."""


def check_versions(installed: Callable[[str], str] = importlib.metadata.version) -> None:
    """Raise :class:`VersionError` if a package is installed in a version that will not do.

    One that is not installed, or does not tell its version, is left to whoever imports it.

    Args:
        installed: returns the version of a distribution, or raises ``PackageNotFoundError``.
    """
    for name in LEAST:
        try:
            told = installed(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found = tuple(map(int, re.findall(r"\d+", (told or "").split("+")[0])[:3]))
        if found and found < LEAST[name]:
            least = ".".join(map(str, LEAST[name]))
            raise VersionError(
                f"lightning_fastdata needs {name} {least} or newer, and {told} is installed. "
                f"pip install --upgrade '{name}>={least}'"
            )
        if found in MALICIOUS.get(name, ()):
            raise VersionError(
                f"{name} {told} was a malicious upload, not a release: GHSA-w37p-236h-pfx3 says "
                f"what to do about it. Then pip install '{name}>2.6.3'."
            )

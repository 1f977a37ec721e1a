"""Whether the installed Albumentations is the one whose pipelines can be recorded.

The recorder hooks into attributes that Albumentations does not promise to keep, and device forms
are those of one version: the last that was released. With any other library under its name every
operation stays on the CPU, where it gives what that library gives, and a warning says so.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import warnings
from typing import Final

from lightning_fastdata.errors import FastDataWarning

KNOWN_VERSION: Final = "2.0.8"
"""The version of Albumentations that device forms and recorder are tested with."""


@functools.cache
def refusal() -> str | None:
    """Return why no pipeline may be recorded in this environment, or None.

    The first call of a process warns if there is a reason.
    """
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
    reason = unknown(_version("albumentations"), _version("albumentationsx"))
    if reason is not None:
        warnings.warn(what_it_means(reason), FastDataWarning, stacklevel=2)
    return reason


def unknown(version: str | None, of_x: str | None) -> str | None:
    """Return what is not known of an installed library, or None.

    Args:
        version: of Albumentations; None: it is not installed, or nothing tells its version.
        of_x: of AlbumentationsX, which installs a package of the same name; None: it is not there.
    """
    if of_x is not None:
        return f"`import albumentations` is AlbumentationsX {of_x}, which cannot be recorded"
    if version != KNOWN_VERSION:
        return f"Albumentations {version or 'of an unknown version'} has not been tried"
    return None


def what_it_means(reason: str) -> str:
    """Return what follows from a reason not to record, and what to do about it."""
    return (
        f"Albumentations pipelines run whole in the workers, on the CPU, because {reason}. They "
        "give what the installed library gives. To have a GPU run what it can: pip uninstall "
        f"albumentations albumentationsx; pip install albumentations=={KNOWN_VERSION}."
    )


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None

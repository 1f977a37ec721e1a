"""Trials, on the training itself, that tell whether a change of the loader makes it faster."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

PROVE_VARIABLE: Final = "LIGHTNING_FASTDATA_PROVE"
"""The environment variable that holds the settings for the process that runs the script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProveSettings:
    """The settings of ``fastdata prove``."""

    script: str
    """Name of the script in the report."""
    file: str
    """Path of the file to which the trial is written while it runs."""
    budget_s: float
    """Seconds that the trial may take, from the beginning of the training."""

    def as_text(self) -> str:
        """Return the value of the environment variable."""
        return json.dumps(asdict(self))


def read_settings(environ: Mapping[str, str] = os.environ) -> ProveSettings | None:
    """Return the settings; None: the program was started without ``fastdata prove``."""
    text = environ.get(PROVE_VARIABLE)
    return ProveSettings(**json.loads(text)) if text else None

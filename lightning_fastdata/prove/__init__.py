"""Whether a change of the loader makes a training faster, tried on the training itself."""

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
    """What ``fastdata prove`` was asked for."""

    script: str
    """As the report calls it."""
    file: str
    """Where what is known is written."""
    budget_s: float
    """How long the trial may take, from when the training begins."""

    def as_text(self) -> str:
        """Return the value of the environment variable."""
        return json.dumps(asdict(self))


def read_settings(environ: Mapping[str, str] = os.environ) -> ProveSettings | None:
    """Return what was asked for; None: the program was started without ``fastdata prove``."""
    text = environ.get(PROVE_VARIABLE)
    return ProveSettings(**json.loads(text)) if text else None

"""The callback for each Trainer of a script that ``fastdata run`` or ``prove`` starts.

Lightning asks the entry points ``lightning.pytorch.callbacks_factory`` for callbacks whenever a
Trainer is made:
https://lightning.ai/docs/pytorch/stable/extensions/entry_points.html
This module is what it finds; without either it gives none, and imports nothing.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.prove import settings as proving

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE: Final = "LIGHTNING_FASTDATA_RUN"
"""The environment variable that says what was asked for; the processes of all ranks inherit it."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What ``fastdata run`` was asked for."""

    report: str | None = None
    """Where the report is written, as of ``DataThroughputCallback(report=...)``."""

    def as_text(self) -> str:
        """Return the value of the environment variable."""
        return json.dumps(asdict(self))


def read_settings(environ: Mapping[str, str] = os.environ) -> RunSettings | None:
    """Return what ``fastdata run`` was asked for; None: the program was started without it."""
    text = environ.get(VARIABLE)
    return RunSettings(**json.loads(text)) if text else None


def lightning_callbacks() -> list[Any]:
    """Return the callbacks for a Trainer of ``lightning.pytorch``."""
    return _callbacks("lightning_fastdata.plugin.bindings")


def pytorch_lightning_callbacks() -> list[Any]:
    """Return the callbacks for a Trainer of ``pytorch_lightning``."""
    return _callbacks("lightning_fastdata.pytorch_lightning")


def _callbacks(home: str) -> list[Any]:
    to_prove, to_run = proving.read_settings(), read_settings()
    if to_prove is not None:
        _silence()
        return [import_module(home).ProvingCallback(to_prove)]
    return [] if to_run is None else [import_module(home).AddedCallback(**asdict(to_run))]


def _silence() -> None:
    """Have loggers write nothing until the callback takes them away, which it can in ``setup``.

    They make their files when a fit begins, before any callback is asked, but on the first rank
    alone.
    """
    from lightning_utilities.core.rank_zero import rank_zero_only

    rank_zero_only.rank = 1

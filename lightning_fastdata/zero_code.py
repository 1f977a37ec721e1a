"""The callback for each Trainer of a script that ``fastdata run`` or ``prove`` starts.

Lightning asks the entry points ``lightning.pytorch.callbacks_factory`` for callbacks whenever a
Trainer is made:
https://lightning.ai/docs/pytorch/stable/extensions/entry_points.html
This module is what it finds; without either it gives none, and imports nothing.
"""

from __future__ import annotations

import json
import os
from importlib import import_module
from typing import Any, Final

from lightning_fastdata.prove import read_settings

RUN_VARIABLE: Final = "LIGHTNING_FASTDATA_RUN"
"""The environment variable with what ``fastdata run`` gives to the callback, as JSON; the processes
of all ranks inherit it."""


def lightning_callbacks() -> list[Any]:
    """Return the callbacks for a Trainer of ``lightning.pytorch``."""
    return _callbacks("lightning_fastdata.plugin.bindings")


def pytorch_lightning_callbacks() -> list[Any]:
    """Return the callbacks for a Trainer of ``pytorch_lightning``."""
    return _callbacks("lightning_fastdata.pytorch_lightning")


def _callbacks(home: str) -> list[Any]:
    to_prove, to_run = read_settings(), os.environ.get(RUN_VARIABLE)
    if to_prove is not None:
        _silence()
        return [import_module(home).ProvingCallback(to_prove)]
    return [import_module(home).AddedCallback(**json.loads(to_run))] if to_run else []


def _silence() -> None:
    """Have loggers write nothing until the callback takes them away, which it can in ``setup``.

    They make their files when a fit begins, before any callback is asked, but on the first rank
    alone.
    """
    from lightning_utilities.core.rank_zero import rank_zero_only

    rank_zero_only.rank = 1

"""The callback for each Trainer of a script that ``fastdata run`` or ``prove`` starts.

Lightning asks the entry points ``lightning.pytorch.callbacks_factory`` for callbacks whenever a
Trainer is made:
https://lightning.ai/docs/pytorch/stable/extensions/entry_points.html
It finds this module; without ``fastdata`` there is no callback, and nothing is imported.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from importlib import import_module
from typing import Any, Final

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.prove import read_settings

RUN_VARIABLE: Final = "LIGHTNING_FASTDATA_RUN"
"""Environment variable with the callback's arguments from ``fastdata run``, as JSON; the processes
of all ranks inherit it."""

_NO_GUARD: Final = (
    "A worker process that starts runs the whole script, and would train, too. Put what trains "
    'under `if __name__ == "__main__":`.'
)


def lightning_callbacks() -> list[Any]:
    """Return the callbacks for a Trainer of ``lightning.pytorch``."""
    return _callbacks("lightning_fastdata.plugin.bindings")


def pytorch_lightning_callbacks() -> list[Any]:
    """Return the callbacks for a Trainer of ``pytorch_lightning``."""
    return _callbacks("lightning_fastdata.pytorch_lightning")


def _callbacks(home: str) -> list[Any]:
    to_prove, to_run = read_settings(), os.environ.get(RUN_VARIABLE)
    if _only_imports():
        if to_prove is not None:
            raise OptionsError(_NO_GUARD)
        return []
    if to_prove is not None:
        _silence()
        return [import_module(home).ProvingCallback(to_prove)]
    return [import_module(home).AddedCallback(**json.loads(to_run))] if to_run else []


def _only_imports() -> bool:
    """Return whether this is a worker that starts, and imports the script by its other name.

    A script of which nothing stands under ``if __name__ == "__main__":`` trains then once more.
    """
    # By this mark Python itself refuses to start processes there.
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def _silence() -> None:
    """Have loggers write nothing until the callback removes them, which it can do in ``setup``.

    Loggers make their files when a fit begins, before any callback runs, but only on rank 0: so
    this process pretends to be rank 1.
    """
    from lightning_utilities.core.rank_zero import rank_zero_only

    rank_zero_only.rank = 1

"""Settings of the whole suite."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import settings
from thoroughness import LONG, left_out

# A failure in CI has to come back on the next run; new examples are looked for on developers'
# machines.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

# Without a GPU the Triton kernels are tested in Triton's interpreter, which has to be asked for
# before anybody imports Triton.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(config, items):
    """Leave out what only a long run has, but never a test that was asked for by its name."""
    if LONG or any("::" in asked for asked in config.args):
        return
    left = left_out(items)
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]

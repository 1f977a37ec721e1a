"""Settings of the whole suite."""

from __future__ import annotations

import os

from hypothesis import settings

# A failure in CI has to come back on the next run; new examples are looked for on developers'
# machines.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

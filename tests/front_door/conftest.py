"""Fixtures of this room."""

from __future__ import annotations

import pytest
from rig.virtual_crew import on_machine


@pytest.fixture
def machine():
    """What samples and steps take is exact, also in the process that tries a dataset."""
    with on_machine() as virtual:
        yield virtual

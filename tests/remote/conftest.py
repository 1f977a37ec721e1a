"""One cluster of three nodes for all tests here, which are left out where Ray is not installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

collect_ignore_glob = ["test_*.py"] if find_spec("ray") is None else []


@pytest.fixture(scope="session")
def cluster():
    from remote.clusters import cluster_of

    with cluster_of(1, 2, 2) as running:
        yield running

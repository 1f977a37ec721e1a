"""One cluster of three nodes for all tests here, which are marked ``remote``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def cluster():
    from ext.ray.clusters import cluster_of

    with cluster_of(1, 2, 2) as running:
        yield running


class WithoutRay(pytest.Module):
    """A module that would import Ray."""

    def collect(self):
        pytest.skip("Ray is not installed: pip install 'ray[train]', if there is a wheel of it")


def pytest_pycollect_makemodule(module_path, parent):
    return WithoutRay.from_parent(parent, path=module_path) if find_spec("ray") is None else None


@pytest.hookimpl(tryfirst=True)  # before those that are not asked for are left out
def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.remote)
            item.add_marker(pytest.mark.timeout(900))  # on a loaded machine a start takes minutes

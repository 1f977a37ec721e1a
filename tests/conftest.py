"""Settings of the whole suite."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import multiprocessing
import os
import sys
from pathlib import Path

import pytest
from process_memory import settle, take_in_one_piece

if "PYTEST_XDIST_WORKER" in os.environ:
    take_in_one_piece(mebibytes=340)  # what Python's objects take once all tests are collected

from programs import PRELOADED, serve
from thoroughness import choose_examples, left_out, longest_first
from virtual_time import PatientClock, virtual_time

choose_examples()

# Nothing of what is imported becomes garbage.
gc.disable()

# Albumentations asks the network for its newest version at import unless this is set.
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")

# Programs of tests, and workers, that are started so find imported what takes seconds.
multiprocessing.set_forkserver_preload(PRELOADED)

# Each Trainer asks all installed packages for callbacks, which takes it ten milliseconds.
_entry_points = importlib.metadata.entry_points


@functools.cache
def _entry_points_on(path, wanted):
    return _entry_points(**dict(wanted))


importlib.metadata.entry_points = lambda **wanted: _entry_points_on(
    tuple(sys.path), tuple(wanted.items())
)

# Without a GPU the Triton kernels are tested in Triton's interpreter, which has to be asked for
# before anybody imports Triton.
collect_ignore = []
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    collect_ignore = ["gpu"]


@pytest.fixture(autouse=True)
def torchs_own_loaders():
    """Undo what Lightning leaves in torch's classes where a hook that makes loaders has raised.

    Afterwards it cannot predict from a plain ``DataLoader`` any more, in the whole process.
    """
    # Here, since a process of pytest-xdist that only hands out tests needs no torch.
    from torch.utils.data import BatchSampler, DataLoader

    methods = ("__init__", "__setattr__", "__delattr__")
    kinds = [
        (kind, name)
        for kind in [*subclasses(DataLoader), *subclasses(BatchSampler)]
        for name in methods
    ]
    before = [(kind, name, vars(kind).get(name)) for kind, name in kinds]
    yield
    for kind, name, method in before:
        if f"__old{name}" in vars(kind):
            delattr(kind, f"__old{name}")
        if vars(kind).get(name) is method:
            continue
        if method is None:
            delattr(kind, name)
        else:
            setattr(kind, name, method)


@pytest.fixture
def patient():
    """Live in a time that the test drives, and in which waits for other processes are real."""
    with virtual_time(PatientClock) as clock:
        yield clock


@pytest.fixture
def virtual():
    """Live in a time that the test drives; its datasets, steps and hooks sleep in it."""
    with virtual_time() as clock:
        yield clock


def subclasses(kind):
    """Return a class and all that are derived from it."""
    found = {kind}
    for one in kind.__subclasses__():
        found |= subclasses(one)
    return found


@pytest.fixture(autouse=True)
def no_earlier_trainings(monkeypatch, tmp_path_factory):
    """Begin without what another test, or a training on this machine, has kept."""
    folder = tmp_path_factory.getbasetemp() / f"cache-{os.urandom(6).hex()}"
    monkeypatch.setenv("LIGHTNING_FASTDATA_CACHE", str(folder))


@pytest.fixture(autouse=True)
def nobody_counts_other_programs(monkeypatch, request):
    """Leave open what other programs of this machine take: a training is judged by itself."""
    if "realtime" not in request.keywords:
        read = {"read_cpu_use": None, "read_cpu_throttling": None, "read_queued": {}}
        for name, told in read.items():
            monkeypatch.setattr(f"lightning_fastdata.insight.machine.{name}", lambda *_, t=told: t)
        monkeypatch.setattr("lightning_fastdata.loading.tuner.read_cpu_throttling", lambda: None)
        monkeypatch.setattr("lightning_fastdata.loading.facts._MOST_CROWDED", 0.0)


@pytest.fixture(autouse=True)
def no_global_seed(monkeypatch):
    """Begin without the seed that another test has set for the whole process."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    yield
    os.environ.pop("PL_GLOBAL_SEED", None)


@pytest.fixture(autouse=True, scope="module")
def freed_memory_given_back():
    """Give back what the tests of a file have freed: each fork copies the tables of all memory.

    What stays, modules above all, is left out of later collections of garbage, of which the
    batch-size guard makes many.
    """
    yield
    settle()


def pytest_configure(config):
    """Import once, in each process of pytest-xdist, what its tests and their programs need."""
    if hasattr(config, "workerinput") and sys.platform == "linux":
        serve()


def pytest_collection_finish(session):
    """Leave what was imported by now, and the tests, out of collections of garbage."""
    gc.freeze()
    gc.enable()
    if not session.config.option.collectonly:
        settle()


def pytest_collection_modifyitems(config, items):
    """Leave out what this run does not have, but never a test that was asked for by its name."""
    if hasattr(config, "workerinput"):  # of pytest-xdist
        items[:] = longest_first(items, config.rootpath)
    if any("::" in asked for asked in config.args):
        return
    left = left_out(items)
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]

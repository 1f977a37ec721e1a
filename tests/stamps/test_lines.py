"""Lines of code are named after what threads really do, and reading is none the worse for it."""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import threading
from pathlib import Path

import albumentations as A
import numpy as np
import pytest
import torch
from looked_at import looked_at, takes
from misses import each
from processes import until
from thread_waits import ThreadProbe
from torchvision.transforms import transforms as v1
from torchvision.transforms import v2

from lightning_fastdata.host import clock
from lightning_fastdata.stamps import lines as line_names
from lightning_fastdata.stamps.batch_stamps import TaskStamps, TaskWatch
from lightning_fastdata.stamps.lines import LineWatch, look_at_thread, place_of, short_file


def test_modules_that_read_are_where_stacks_are_compared_with() -> None:
    package = Path(line_names._PACKAGE)
    for name in (line_names._DATASETS, "executors", "loading/stamped.py"):
        assert (package / name).exists()


def typed_in(filename, module):
    """Return the place in a function whose source was typed into a file of this name."""
    scope = {"__name__": module, "sys": sys, "found": []}
    source = "class Rows:\n    def __getitem__(self, i):\n        found.append(sys._getframe())\n"
    exec(compile(source, filename, "exec"), scope)
    scope["Rows"]()[0]
    return place_of(scope["found"][0])


@each(
    ("filename", "module", "file"),
    [
        ("/home/me/project/data/rows.py", "data.rows", "data/rows.py"),
        ("/tmp/ipykernel_1234/567.py", "__main__", "notebook cell"),
        ("<ipython-input-3-abc>", "__main__", "notebook cell"),
        ("<stdin>", "__main__", "<stdin>"),
        ("<string>", "dataclasses", None),
        ("/venv/lib/python3.11/site-packages/webdataset/pipeline.py", "webdataset", None),
    ],
)
def test_user_code_is_what_is_neither_installed_nor_made(filename, module, file):
    place = typed_in(filename, module)
    if file is None:  # who called it is named
        assert place.function == "typed_in"
    else:
        assert place[:3] == (file, 3, "Rows.__getitem__")


@pytest.fixture
def collections():
    """Yield how often garbage was collected so far; it is at nearly every chance."""
    found = []
    before, was_on = gc.get_threshold(), gc.isenabled()
    gc.callbacks.append(lambda phase, _: found.append(phase))
    gc.set_threshold(1)
    yield found
    del gc.callbacks[-1]
    gc.set_threshold(*before)
    (gc.enable if was_on else gc.disable)()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="looking at frames collects no garbage")
@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_a_thread_is_looked_at(collections, enabled):
    (gc.enable if enabled else gc.disable)()

    def see(frame):
        before, kept = len(collections), []
        while frame is not None:
            kept.append([frame.f_code])
            frame = frame.f_back
        assert len(kept) > 5
        return len(collections) - before

    assert look_at_thread(threading.get_ident(), see) == 0
    assert gc.isenabled() == enabled
    with pytest.raises(ZeroDivisionError):
        look_at_thread(threading.get_ident(), lambda _: 1 / 0)
    assert gc.isenabled() == enabled
    assert look_at_thread(-1, lambda frame: frame) is None


def test_files_have_short_names():
    assert short_file("/a/b/c/rows.py") == "c/rows.py"
    assert short_file("/x/site-packages/PIL/Image.py") == "PIL/Image.py"
    assert short_file(json.__file__) == "json/__init__.py"


class Frames:
    """Loaded by a library: keeps the frame in which it is asked for its text."""

    def read(self):
        self.frame = sys._getframe()
        return "[1, 2]"


def test_the_innermost_line_of_the_user_is_named_whatever_calls_it():
    file = Frames()
    json.load(file)
    assert place_of(file.frame).function == "Frames.read"
    # From outside of it, a library is what the line calls.
    names = []

    def hook(_):
        names.append(place_of(sys._getframe().f_back))

    json.loads("{}", object_hook=hook)
    assert "innermost_line" in names[0].function


@pytest.fixture
def its_time():
    with looked_at() as found:
        yield found


def reads():
    takes(0.004, waits_in="lock").result()


def tasks(watch, read=reads, number=6):
    """Return the stamps of so many tasks of four samples."""
    found = []
    for _ in range(number):
        watch.begin()
        for index in range(4):
            began_ns = clock.monotonic_ns()
            read()
            watch.read(index, began_ns)
        found.append(watch.end())
    return found


def ms_of(found):
    """Return how long each function was seen; nothing of tasks that were not looked at."""
    seen = {}
    for task in found:
        for place, ns in task.lines or ():
            function = place.function.rpartition(".")[2]
            seen[function] = seen.get(function, 0) + ns / 1e6
    return seen


def test_lines_share_the_time_as_they_take_it_from_the_third_task_on(its_time):
    def computes():
        going = threading.Event()
        passed = takes(0.006, begins=going)
        while not passed.done():
            going.set()

    def waits():
        takes(0.002, waits_in="lock").result()

    def read():
        computes()
        waits()

    found = tasks(TaskWatch(0, LineWatch(every=1)), read, number=5)
    assert [task.lines is not None for task in found] == [False, False, True, True, True]
    # Of 3 tasks of 4 samples. A look is due every 2 ms, the last one when the time has passed.
    assert ms_of(found) == {"computes": 3 * 4 * 6, "waits": 3 * 4 * 2}


def test_a_look_that_comes_late_counts_for_all_the_time_since_the_one_before(its_time):
    def holds():
        its_time.advance(50_000_000)  # as a call does that keeps the interpreter's lock
        takes(0.002, waits_in="lock").result()

    found = tasks(TaskWatch(0, LineWatch(every=1)), holds, number=3)
    assert sum(ms_of(found).values()) == 4 * 52


def test_no_thread_starts_for_tasks_that_are_shorter_than_starting_it(its_time, monkeypatch):
    started, kind = [], threading.Thread

    def starts(*args, **named):
        started.append(named["name"])
        return kind(*args, **named)

    watch = TaskWatch(0, LineWatch(every=1))
    monkeypatch.setattr(line_names.threading, "Thread", starts)
    tasks(watch, lambda: its_time.advance(40_000), number=20)
    assert started == []
    tasks(watch, lambda: its_time.advance(4_000_000), number=2)
    assert len(started) == 1


def test_starting_to_look_is_neither_seen_nor_counted_as_reading(its_time, monkeypatch):
    class Slow(threading.Thread):
        def start(self):
            super().start()
            probe = ThreadProbe(self.native_id)
            until(lambda: probe.state() == (True, "lock"))
            its_time.advance(10_000_000)
            until(lambda: probe.state() == (True, "lock"))
            probe.close()

    watch = TaskWatch(0, LineWatch(every=1))
    tasks(watch, number=2)
    monkeypatch.setattr(line_names.threading, "Thread", Slow)
    assert ms_of(tasks(watch, number=3)) == {"reads": 3 * 4 * 4}


def test_most_tasks_are_not_looked_at_and_short_ones_in_a_row(its_time):
    found = tasks(TaskWatch(0, LineWatch()), number=240)
    looked = [number for number, task in enumerate(found) if task.lines]
    # Of 16 ms each: 7 of them are 100 ms, and so are looked at 7 of 224.
    assert looked == [*range(2, 9), *range(226, 233)]


@pytest.mark.parametrize("ends", ["well", "in an error"])
def test_the_interpreter_switches_between_threads_as_before(its_time, ends):
    before, during = sys.getswitchinterval(), []
    watch = TaskWatch(0, LineWatch(every=1))
    for _ in range(5):
        watch.begin()
        try:
            during.append(sys.getswitchinterval() < before)
            reads()
            if ends == "in an error":
                raise ValueError
        except ValueError:
            pass
        finally:
            watch.end()
        assert sys.getswitchinterval() == before
    assert during == [False, False, True, True, True]


def test_the_interpreter_switches_as_before_whoever_of_two_that_read_ends_first(its_time):
    before = sys.getswitchinterval()
    watches = [TaskWatch(0, LineWatch(every=1)) for _ in range(2)]
    for watch in watches:
        tasks(watch, number=2)
    for order in (watches, watches[::-1]):
        for watch in watches:
            watch.begin()
        for watch in order:
            reads()
            watch.end()
        assert sys.getswitchinterval() == before


def test_a_switch_interval_that_the_user_sets_while_it_reads_is_left_alone(its_time):
    before = sys.getswitchinterval()
    watch = TaskWatch(0, LineWatch(every=1))
    tasks(watch, number=2)
    try:
        tasks(watch, lambda: sys.setswitchinterval(0.003), number=1)
        assert sys.getswitchinterval() == pytest.approx(0.003)
    finally:
        sys.setswitchinterval(before)


def test_a_forked_process_starts_its_own_thread(its_time):
    watch = TaskWatch(0, LineWatch(every=1))
    tasks(watch)
    watch.begin()
    reads()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with looked_at() as childs:
                childs.advance_to(its_time.monotonic_ns())
                code = 0 if ms_of(tasks(watch)) else 1
        finally:
            os._exit(code)
    watch.end()
    assert os.waitpid(child, 0)[1] == 0


def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_thread_that_ends_leaves_the_watch_to_others(its_time):
    lines = LineWatch(every=1)
    in_a_thread(lambda: tasks(TaskWatch(0, lines), number=4))
    held = threading.Event()
    # Another thread gets the number that the interpreter had for the first one.
    other = threading.Thread(target=held.wait)
    other.start()
    found = tasks(TaskWatch(1, lines), number=24)
    held.set()
    other.join()
    assert ms_of(found)


def test_where_no_thread_can_be_started_nothing_is_named_and_nothing_fails():
    """Thread after thread is refused by the limit on the address space of their stacks."""
    size = threading.stack_size()
    threading.stack_size(1 << 62)
    try:
        found = tasks(TaskWatch(0, LineWatch(every=1)), int)
    finally:
        threading.stack_size(size)
    assert len(found) == 6
    assert not ms_of(found)


def test_no_variable_of_the_reading_function_is_kept(its_time):
    alive = []

    class Large:
        def __del__(self):
            alive.remove(id(self))

    def read():
        large = Large()
        alive.append(id(large))
        reads()

    found = tasks(TaskWatch(0, LineWatch(every=1)), read)
    assert all(isinstance(task, TaskStamps) for task in found)
    assert ms_of(found)
    assert not alive


def test_named_lines_are_small_and_hold_no_values(its_time):
    def read():
        secret = "hunter2"
        np.sort(np.arange(20_000) % 7)
        reads()
        return secret

    found = tasks(TaskWatch(0, LineWatch(every=1)), read)
    sent = [pickle.dumps(task) for task in found if task.lines]
    assert sent
    assert max(map(len, sent)) < 4000
    assert not any(b"hunter2" in each for each in sent)


INSTALLED = """
class Mine(Base):
    def {method}(self, image, *others, **more):
        found.append(place_of(sys._getframe()))
        return image
"""


def operation(library, base, method):
    """Return an operation of a library, which keeps the place in which it is called, and that."""
    scope = {"Base": base, "sys": sys, "place_of": place_of, "found": [], "__name__": library}
    file = f"/venv/lib/python3.11/site-packages/{library}/mine.py"
    exec(compile(INSTALLED.format(method=method), file, "exec"), scope)
    kept = scope["Mine"](p=1) if library == "albumentations" else scope["Mine"]()
    return kept, scope["found"]


@each(
    ("library", "base", "method", "hold"),
    [
        ("albumentations", A.ImageOnlyTransform, "apply", lambda op: A.Compose([op])),
        ("albumentations", A.ImageOnlyTransform, "apply",
         lambda op: A.ReplayCompose([A.OneOf([A.Sequential([op])], p=1)])),
        ("torchvision", v2.Transform, "transform", lambda op: v2.Compose([op])),
        ("torchvision", v2.Transform, "transform",
         lambda op: v2.Compose([v2.RandomApply([v2.RandomOrder([op])], p=1)])),
        ("torchvision", torch.nn.Module, "forward", lambda op: v1.Compose([op])),
        ("torchvision", torch.nn.Module, "forward",
         lambda op: v1.Compose([v1.RandomApply([v1.RandomChoice([op])], p=1)])),
    ],
)  # fmt: skip
def test_within_a_pipeline_the_operation_is_named(library, base, method, hold):
    kept, found = operation(library, base, method)
    pipeline, pixels = hold(kept), np.zeros((8, 8, 3), np.uint8)
    if library == "albumentations":
        pipeline(image=pixels)
    else:
        pipeline(torch.from_numpy(pixels))
    assert found[0].function == "test_within_a_pipeline_the_operation_is_named"
    assert found[0].calls == f"{library} Mine.{method}"

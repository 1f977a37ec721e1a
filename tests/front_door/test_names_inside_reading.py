"""A training whose batches are late is told which line of its dataset they wait for, and how."""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from PIL import Image
from torch.utils.data import Dataset, IterableDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_fastdata import DataThroughputCallback, FastDataLoader, FastImageFolder
from lightning_fastdata.host.thread_waits import ThreadProbe

BATCH, BATCHES = 8, 12
READ_S = 0.004
LOADERS = {
    "torch in the training": {"executor": "torch", "num_workers": 0},
    "torch, forked": {
        "executor": "torch", "num_workers": 1, "multiprocessing_context": "fork"
    },
    "inline": {"executor": "inline", "num_workers": 0},
    "workers": {"executor": "workers", "num_workers": 1},
}  # fmt: skip
SPAWNED = {"num_workers": 1, "multiprocessing_context": "spawn"}


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, _):
        x = batch[0] if isinstance(batch, list | tuple) else batch
        return self.layer(x.reshape(len(x), -1)[:, :4].float()).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def fit(folder, dataset, **options):
    """Return the report of a training, and the folder with its files."""
    callback = DataThroughputCallback(summary=False)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=CSVLogger(folder),
        callbacks=[callback],
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    loader = FastDataLoader(dataset, BATCH, **options)
    trainer.fit(Model(), loader)
    loader.close()
    return callback.report, Path(trainer.log_dir)


def longest(report):
    """Return the line that takes longest, of those that the report names."""
    lines = report.stages[0].causes.lines
    assert lines
    assert sum(line.share for line in lines) <= 1.001
    return lines[0]


def line_of(function, marked):
    """Return the number of the line of a function that holds a text."""
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if marked in line)


class Rows(Dataset):
    def __len__(self):
        return BATCH * BATCHES

    def __getitem__(self, index):
        self.read()
        return torch.full((4,), float(index))

    def read(self):
        raise NotImplementedError


class Computes(Rows):
    def read(self):
        total = 0
        for number in range(60_000):
            total += number * number  # computed here
        return total


class Sleeps(Rows):
    def read(self):
        time.sleep(READ_S)


class Locked(Rows):
    """Waits for a lock that somebody else keeps."""

    def __init__(self):
        self.lock = multiprocessing.get_context("fork").Lock()
        self.lock.acquire()

    def read(self):
        self.lock.acquire(timeout=READ_S)


class Piped(Rows):
    def __init__(self, path):
        self.path, self.file = str(path), None

    def read(self):
        if self.file is None:
            self.file = Path(self.path).open("rb", buffering=0)  # noqa: SIM115
        self.file.read(1)


class Remote(Rows):
    def __init__(self, port):
        self.port, self.connection = port, None

    def read(self):
        if self.connection is None:
            self.connection = socket.create_connection(("127.0.0.1", self.port))
        self.connection.recv(1)


class Jpegs(Rows):
    def __init__(self, path):
        self.path = str(path)

    def __getitem__(self, index):
        with Image.open(self.path) as image:
            pixels = np.asarray(image.convert("RGB"))  # decoded here
        return torch.tensor(pixels[0, 0, 0]).float().expand(4).clone()


class Stream(IterableDataset):
    def __iter__(self):
        for index in range(BATCH * BATCHES):
            time.sleep(READ_S)
            yield torch.full((4,), float(index))


def kernel_tells():
    probe = ThreadProbe(threading.get_native_id())
    try:
        return probe.state() is not None
    finally:
        probe.close()


def expect(line, function, marked, waits_in):
    assert line.file.endswith("test_names_inside_reading.py")
    assert (line.function, line.line) == (function.__qualname__, line_of(function, marked))
    assert line.waits_in == (waits_in if kernel_tells() else "")


@pytest.mark.flaky(reruns=2)  # a short run is looked at a few times, which chance may share out
@pytest.mark.cases(4)
@pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS)
def test_the_line_that_computes_is_named_by_every_loader(tmp_path, options):
    report, _ = fit(tmp_path, Computes(), **options)
    line = longest(report)
    assert line.function == "Computes.read"
    # The loop is two lines, each of which takes its part.
    marked = line_of(Computes.read, "computed here")
    assert line.line in (marked, marked - 1)


@pytest.mark.cases(4)
@pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS)
def test_the_line_that_sleeps_is_named_by_every_loader(tmp_path, options):
    report, _ = fit(tmp_path, Sleeps(), **options)
    expect(longest(report), Sleeps.read, "time.sleep", "sleep")


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["torch", "workers"])
def test_a_spawned_process_names_its_lines(tmp_path, executor):
    report, _ = fit(tmp_path, Sleeps(), executor=executor, **SPAWNED)
    expect(longest(report), Sleeps.read, "time.sleep", "sleep")


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["torch in the training", "torch, forked", "inline", "workers"])
def test_a_line_of_a_stream_is_named(tmp_path, name):
    report, _ = fit(tmp_path, Stream(), **LOADERS[name])
    expect(longest(report), Stream.__iter__, "time.sleep", "sleep")


def test_the_decoding_of_jpegs_is_named_with_the_users_line(tmp_path):
    path = tmp_path / "image.jpg"
    noise = np.random.default_rng(0).integers(0, 255, (300, 400, 3), np.uint8)
    Image.fromarray(noise).save(path)
    report, _ = fit(tmp_path, Jpegs(path), executor="workers", num_workers=1)
    line = longest(report)
    expect(line, Jpegs.__getitem__, "decoded here", "")
    assert line.calls.startswith("PIL Image.convert")


@pytest.mark.parametrize("kind", [ImageFolder, FastImageFolder])
def test_of_a_dataset_that_is_installed_its_own_line_is_named(tmp_path, kind):
    folder = tmp_path / "images" / "class"
    folder.mkdir(parents=True)
    noise = np.random.default_rng(0).integers(0, 255, (500, 600, 3), np.uint8)
    for number in range(BATCH * BATCHES):
        Image.fromarray(noise).save(folder / f"{number:03}.jpg")
    if kind is FastImageFolder:
        dataset = FastImageFolder(folder.parent, size=64)
    else:
        dataset = ImageFolder(str(folder.parent), transform=v2.PILToTensor())
    report, _ = fit(tmp_path, dataset, executor="workers", num_workers=1)
    line = longest(report)
    assert line.function.startswith(("DatasetFolder.", "FastImageFolder."))
    assert line.file.endswith("/folder.py")
    assert line.calls.startswith(("torchvision ", "lightning_fastdata "))


@pytest.mark.parametrize("name", ["torch, forked", "workers"])
def test_a_line_that_waits_for_a_lock_is_named(tmp_path, name):
    report, _ = fit(tmp_path, Locked(), **LOADERS[name])
    expect(longest(report), Locked.read, "acquire", "lock")


@contextmanager
def given_out(give):
    """Call a function every few milliseconds, in a thread, until nobody takes what it gives."""

    def work():
        try:
            while True:
                time.sleep(READ_S)
                give()
        except OSError:
            pass

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join()


def test_a_line_that_waits_for_a_file_is_named(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    end = os.open(path, os.O_RDWR)  # so that neither side waits to open it
    with ExitStack() as stack:
        stack.enter_context(given_out(lambda: os.write(end, b"x")))
        stack.callback(os.close, end)
        report, _ = fit(tmp_path, Piped(path), executor="workers", num_workers=1)
    expect(longest(report), Piped.read, "self.file.read", "file")


def test_a_line_that_waits_for_a_socket_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted = []

        def give():
            if not accepted:
                accepted.append(server.accept()[0])
            accepted[0].send(b"x")

        with given_out(give):
            dataset = Remote(server.getsockname()[1])
            report, _ = fit(tmp_path, dataset, executor="workers", num_workers=1)
    expect(longest(report), Remote.read, "recv", "socket")


def test_finding_summary_report_and_page_name_the_line(tmp_path):
    report, folder = fit(tmp_path, Sleeps(), executor="workers", num_workers=1)
    place = f"test_names_inside_reading.py:{line_of(Sleeps.read, 'time.sleep')}"
    finding = next(found for found in report.verdict.findings if found.code in ("FD303", "FD309"))
    assert place in finding.cause
    assert "Sleeps.read" in finding.cause
    written = json.loads((folder / "report.json").read_text())
    line = written["stages"]["train"]["causes"]["lines"][0]
    assert place == f"{Path(line['file']).name}:{line['line']}"
    assert place in (folder / "report.html").read_text()
    summary = " ".join(report.text(120).split())
    assert summary.count("Sleeps.read") == 1


SCRIPT = """
import io, time, torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import Dataset
from lightning_fastdata import DataThroughputCallback, FastDataLoader

CELL = '''
class Mine(Dataset):
    def __len__(self):
        return 96
    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.zeros(4)
'''
exec(compile(CELL, FILE, "exec"))

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, _):
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

callback = DataThroughputCallback(summary=False, report=False)
loader = FastDataLoader(Mine(), 8, executor="workers", num_workers=1)
Trainer(max_epochs=1, accelerator="cpu", logger=False, callbacks=[callback],
        enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False).fit(Model(), loader)
loader.close()
line = callback.report.stages[0].causes.lines[0]
print("LINE", line.file, line.line, line.function)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "name"), [("__file__", "script.py"), ("'/tmp/ipykernel_7/8.py'", "notebook cell")]
)
def test_a_dataset_of_the_script_itself_or_of_a_notebook_is_the_users(tmp_path, file, name):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).replace("FILE", file, 1))
    told = subprocess.run(
        [sys.executable, str(script)],
        check=False,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert told.returncode == 0, told.stderr
    assert f"LINE {name} 6 Mine.__getitem__" in told.stdout

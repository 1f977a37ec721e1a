"""A training whose batches are late is told which line of its dataset they wait for, and how."""

from __future__ import annotations

import inspect
import io
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from looked_at import looked_at, takes
from PIL import Image
from torch.utils.data import Dataset, IterableDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from trainers import Learner, quiet_trainer

from lightning_fastdata import DataThroughputCallback, FastDataLoader, FastImageFolder

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


@pytest.fixture(autouse=True)
def its_time(request):
    """Each process has a time of its own, which passes where the test says so, and is looked at."""
    if "realtime" in request.keywords:
        yield
        return
    with looked_at() as found:
        yield found


def fit(folder, dataset, **options):
    """Return the report of a training, and the folder with its files."""
    callback = DataThroughputCallback(summary=False)
    trainer = quiet_trainer(logger=CSVLogger(folder), callbacks=[callback])
    loader = FastDataLoader(dataset, BATCH, **options)
    trainer.fit(Learner(), loader)
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
        going = threading.Event()
        passed = takes(READ_S, begins=going)
        while not passed.done():
            going.set()  # computed here


class Sleeps(Rows):
    def read(self):
        time.sleep(READ_S)


class Waits(Rows):
    def read(self):
        takes(READ_S, waits_in="lock").result()  # waits here


LIBRARY = """
class HeldFile(io.BytesIO):
    held = False

    def read(self, size=-1):
        if self.held:
            self.held = False
            takes(READ_S, waits_in="lock").result()
        return super().read(size)
"""
library = {"io": io, "takes": takes, "READ_S": READ_S, "__name__": "files"}
exec(compile(LIBRARY, "/venv/lib/python3.11/site-packages/files/held.py", "exec"), library)


class Jpegs(Rows):
    def __init__(self, encoded):
        self.encoded = encoded

    def __getitem__(self, index):
        file = library["HeldFile"](self.encoded)
        with Image.open(file) as image:
            file.held = True
            pixels = np.asarray(image.convert("RGB"))  # decoded here
        return torch.tensor(pixels[0, 0, 0]).float().expand(4).clone()


def noise(height, width):
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8))


class Stream(IterableDataset):
    def __iter__(self):
        for index in range(BATCH * BATCHES):
            takes(READ_S, waits_in="lock").result()  # waits here
            yield torch.full((4,), float(index))


def expect(line, function, marked):
    assert line.file.endswith("test_names_inside_reading.py")
    assert (line.function, line.line) == (function.__qualname__, line_of(function, marked))


@pytest.mark.cases(2)
@pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS)
def test_the_line_that_computes_is_named_by_every_loader(tmp_path, options):
    report, _ = fit(tmp_path, Computes(), **options)
    line = longest(report)
    assert line.function == "Computes.read"
    # The loop is two lines, each of which takes its part.
    marked = line_of(Computes.read, "computed here")
    assert line.line in (marked, marked - 1)


@pytest.mark.cases(3)
@pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS)
@pytest.mark.parametrize(("dataset", "function"), [(Waits, Waits.read), (Stream, Stream.__iter__)])
def test_the_line_that_waits_is_named_by_every_loader(tmp_path, options, dataset, function):
    report, _ = fit(tmp_path, dataset(), **options)
    expect(longest(report), function, "waits here")


@pytest.mark.realtime
@pytest.mark.parametrize("executor", ["torch", "workers"])
def test_a_spawned_process_names_its_lines(tmp_path, executor):
    report, _ = fit(tmp_path, Sleeps(), executor=executor, **SPAWNED)
    expect(longest(report), Sleeps.read, "time.sleep")


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["torch in the training", "torch, forked", "inline", "workers"])
def test_a_line_of_a_stream_is_named(tmp_path, name):
    report, _ = fit(tmp_path, Stream(), **LOADERS[name])
    expect(longest(report), Stream.__iter__, "waits here")


def test_the_decoding_of_jpegs_is_named_with_the_users_line(tmp_path):
    encoded = io.BytesIO()
    noise(300, 400).save(encoded, "JPEG")
    report, _ = fit(tmp_path, Jpegs(encoded.getvalue()), executor="workers", num_workers=1)
    line = longest(report)
    expect(line, Jpegs.__getitem__, "decoded here")
    assert line.calls.startswith("PIL Image.convert")


@pytest.mark.realtime  # what decodes is written in C and takes what it takes
@pytest.mark.parametrize("kind", [ImageFolder, FastImageFolder])
def test_of_a_dataset_that_is_installed_its_own_line_is_named(tmp_path, kind):
    folder = tmp_path / "images" / "class"
    folder.mkdir(parents=True)
    for number in range(BATCH * BATCHES):
        noise(500, 600).save(folder / f"{number:03}.jpg")
    if kind is FastImageFolder:
        dataset = FastImageFolder(folder.parent, size=64)
    else:
        dataset = ImageFolder(str(folder.parent), transform=v2.PILToTensor())
    report, _ = fit(tmp_path, dataset, executor="workers", num_workers=1)
    line = longest(report)
    assert line.function.startswith(("DatasetFolder.", "FastImageFolder."))
    assert line.file.endswith("/folder.py")
    assert line.calls.startswith(("torchvision ", "lightning_fastdata "))


def test_finding_summary_and_report_name_the_line(tmp_path):
    report, folder = fit(tmp_path, Waits(), executor="inline", num_workers=0)
    place = f"test_names_inside_reading.py:{line_of(Waits.read, 'waits here')}"
    finding = next(found for found in report.verdict.findings if found.code == "FD303")
    assert place in finding.cause
    assert "Waits.read" in finding.cause
    written = json.loads((folder / "report.json").read_text())
    line = written["stages"]["train"]["causes"]["lines"][0]
    assert place == f"{Path(line['file']).name}:{line['line']}"
    summary = " ".join(report.text(120).split())
    assert summary.count("Waits.read") == 1


CELL = """
class Mine(Rows):
    def read(self):
        takes(READ_S, waits_in="lock").result()
"""


@pytest.mark.parametrize(
    ("file", "name"), [("mine/script.py", "mine/script.py"), ("ipykernel_7/8.py", "notebook cell")]
)
def test_a_dataset_of_a_script_or_of_a_notebook_is_the_users(tmp_path, file, name):
    cell = {"Rows": Rows, "takes": takes, "READ_S": READ_S, "__name__": "__main__"}
    exec(compile(CELL, str(tmp_path / file), "exec"), cell)
    report, _ = fit(tmp_path, cell["Mine"](), executor="workers", num_workers=1)
    line = longest(report)
    assert (line.file, line.line, line.function) == (name, 4, "Mine.read")

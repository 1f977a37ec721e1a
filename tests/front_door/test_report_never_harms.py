"""A report tells of a training and never ends it, whatever files are called and loggers do."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from rig.machine import sleep
from rig.virtual_crew import on_machine
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, Dataset
from trainers import Learner, quiet_trainer, trained

from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions
from lightning_fastdata.errors import FastDataWarning, OptionsError

torch.set_num_threads(1)

NAMES = {
    "no text": os.fsdecode(b"/data/\xff\xfe.jpg"),
    "orders to the terminal": "/data/\x1b[31mred\x1b]0;title\x07.jpg",
    "two lines": "/data/one\ntwo\r.jpg",
    "turned around": "/data/\u202egpj.exe",
    "bytes": b"/data/\xff.jpg",
}


class Slow(Dataset):
    """One file of ten takes much longer than the others, if any takes time."""

    def __init__(self, name, length=40, slow_s=0.0):
        self.slow_s = slow_s
        self.samples = [(name, i) for i in range(length)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        sleep(self.slow_s if i % 10 == 5 else self.slow_s / 250)
        return torch.full((4,), float(i)), i


class Model(Learner):
    """Logs nothing itself."""

    def validation_step(self, batch, _):
        pass


class HasNoLength:
    """A batch that says that it is sized, and is not."""

    def __len__(self):
        raise TypeError("unsized")


def fit(tmp_path, callback, *, model=None, dataset=None, logger=False, val=None, more=()):
    model = Model() if model is None else model
    dataset = Slow("/data/a.jpg", 8) if dataset is None else dataset
    trainer = quiet_trainer(
        str(tmp_path),
        devices=1,
        logger=logger,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        callbacks=[callback, *more],
    )
    options = LoaderOptions(num_workers=1, executor="workers", prefetch_factor=1)
    module = FastDataModule.from_datasets(dataset, val, batch_size=4, options=options)
    trainer.fit(model, datamodule=module)
    return model


def is_plain(text):
    return all(sign.isprintable() or sign in "\n" for sign in text)


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_any_name_of_a_file_is_shown_spelled_and_kept_whole_in_the_json(tmp_path, capsys, name):
    callback = DataThroughputCallback(report=tmp_path / "report.json")
    logger = TensorBoardLogger(tmp_path, name="board")
    with on_machine():
        fit(tmp_path, callback, dataset=Slow(name, slow_s=0.25), logger=logger)
    told = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    slow = told["stages"]["train"]["causes"]["slow_samples"]
    assert slow
    assert {each["path"] for each in slow} == {os.fsdecode(name)}
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    out = capsys.readouterr().out
    last = os.path.basename(os.fsdecode(name)).encode("unicode_escape").decode()
    assert last in page
    assert is_plain(page)
    assert is_plain(out)
    # The texts alone: in a compressed picture any three bytes come by chance.
    events = EventAccumulator(logger.log_dir, size_guidance={"tensors": 0}).Reload()
    tags = [tag for tag in events.Tags()["tensors"] if tag.endswith("text_summary")]
    shown = [each for tag in tags for each in events.Tensors(tag)]
    texts = [text for each in shown for text in each.tensor_proto.string_val]
    assert any(last.encode() in text for text in texts)
    assert all(is_plain(text.decode()) for text in texts)


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_who_may_read_a_report_is_for_the_umask_to_say(tmp_path, umask):
    before = os.umask(umask)
    try:
        fit(tmp_path, DataThroughputCallback(report=tmp_path / "deep" / "r.json", summary=False))
    finally:
        os.umask(before)
    assert (tmp_path / "deep").stat().st_mode & 0o777 == 0o777 & ~umask
    files = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "deep").iterdir()}
    assert files == dict.fromkeys(("r.json", "r.html"), 0o666 & ~umask)


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("folder", {"folder/report.json", "folder/report.html"}),
        (".", {"report.json", "report.html"}),
        ("page.HTML", {"page.json", "page.html"}),
    ],
)
def test_a_report_in_a_folder_has_its_usual_name_and_a_page_one_of_its_own(
    tmp_path, monkeypatch, given, written
):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    fit(tmp_path / "run", DataThroughputCallback(report=given, summary=False))
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.[jh]*")}
    assert files == written
    for name in written:
        assert (tmp_path / name).read_text().startswith("{" if name.endswith("json") else "<!")


@pytest.mark.parametrize("name", ["pipe", "link", ""])
def test_what_is_no_file_is_refused_as_a_report_and_never_replaced(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")

    def there():  # looking at a file may change the time of its last access
        return {path: (path.lstat().st_mode, path.lstat().st_ino) for path in tmp_path.iterdir()}

    before = there()
    callback = DataThroughputCallback(summary=False, report=False)
    trained(DataLoader(Slow("/data/a.jpg", 8)), folder=tmp_path, callbacks=[callback])
    path = name and tmp_path / name
    for write in (callback.report.write_json, callback.report.write_html):
        with pytest.raises(OptionsError, match="file"):
            write(path)
        with pytest.raises(OptionsError, match=r"s3://bucket/x.json'; .* of this machine"):
            write("s3://bucket/x.json")
    with pytest.raises(OptionsError, match="file"):
        DataThroughputCallback(report=path)
    assert there() == before


@pytest.mark.parametrize("name", ["report.json", "report.html"])
def test_a_file_that_is_no_report_is_not_replaced_by_one_that_nobody_named(tmp_path, name):
    def written():
        callback = DataThroughputCallback(summary=False)
        trained(DataLoader(range(60)), folder=tmp_path, callbacks=[callback])
        return {file.name: file.read_bytes() for file in tmp_path.glob("report.*")}

    (tmp_path / name).write_bytes(b"a report of something else")
    with pytest.warns(FastDataWarning, match=f"{name} is a file of yours"):
        assert written() == {name: b"a report of something else"}
    (tmp_path / name).write_bytes(b"")
    first = written()
    assert set(first) == {"report.json", "report.html"}
    assert written() != first, "one of ours is replaced"


class WritesAlone:
    """What scripts set as sys.stdout to have all that is printed in a file, too."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text


def test_the_summary_is_written_to_whatever_is_set_as_the_output(tmp_path, monkeypatch):
    for output in (WritesAlone(), None):
        monkeypatch.setattr(sys, "stdout", output)
        fit(tmp_path, DataThroughputCallback(report=False))
        assert output is None or "samples/s in a step" in output.text


def test_a_warning_that_is_made_an_error_keeps_its_text(tmp_path):
    (tmp_path / "file").touch()
    callback = DataThroughputCallback(report=tmp_path / "file" / "r.json", summary=False)
    with pytest.raises(FastDataWarning) as raised:
        trained(DataLoader(range(60)), folder=tmp_path, callbacks=[callback])
    assert str(raised.value).startswith("The report was not written: ")
    assert str(raised.value).count("The training itself is not affected") == 1


class Away:
    def __getattr__(self, name):
        raise ConnectionError("the server of the logger is away")


class Sulking(Logger):
    """Raises whatever it is asked for."""

    name, version = "sulking", 0

    def log_metrics(self, metrics, step=None):
        raise ConnectionError("the server of the logger is away")

    def log_hyperparams(self, params, *args, **kwargs):
        pass

    @property
    def experiment(self):
        return Away()


class Unprintable:
    """A stream that takes nothing."""

    encoding = "utf-8"

    def write(self, text):
        raise BrokenPipeError("nobody reads this")

    def flush(self):
        pass

    def isatty(self):
        return False


def test_a_logger_that_raises_is_told_once_and_the_training_goes_on(tmp_path):
    callback = DataThroughputCallback(summary=False)
    with pytest.warns(FastDataWarning) as caught:
        model = fit(tmp_path, callback, logger=Sulking(), val=Slow("/data/a.jpg", 4))
    assert len(model.seen) == 2
    assert callback.report.stages[0].steps == 2
    told = [str(each.message) for each in caught if each.category is FastDataWarning]
    assert told
    assert all("ConnectionError: the server of the logger is away" in each for each in told)
    assert len(told) == len(set(told))


@pytest.mark.parametrize("closed", [True, False])
def test_a_summary_that_cannot_be_printed_is_a_warning(tmp_path, monkeypatch, closed):
    stdout = (tmp_path / "closed").open("w")
    stdout.close()
    monkeypatch.setattr(sys, "stdout", stdout if closed else Unprintable())
    callback = DataThroughputCallback()
    with pytest.warns(FastDataWarning, match="The summary was not printed"):
        model = fit(tmp_path, callback)
    assert len(model.seen) == 2
    assert (tmp_path / "report.json").exists()


def test_names_of_samples_that_raise_leave_the_report_as_it_is(tmp_path):
    class Moody(Slow):
        @property
        def samples(self):
            raise RuntimeError("not now")

        @samples.setter
        def samples(self, _):
            pass

        def __len__(self):
            return 40

    callback = DataThroughputCallback(summary=False)
    fit(tmp_path, callback, dataset=Moody("a"))
    assert (tmp_path / "report.json").exists()


def test_errors_of_the_training_and_interrupts_pass_untouched(tmp_path):
    steps = iter([1, 0])
    breaks = Learner(lambda _: 1 / next(steps))
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, DataThroughputCallback(summary=False), model=breaks)

    class Breaks(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            raise OSError("a broken file")

    class Stops(Callback):
        def on_train_batch_end(self, *_):
            raise KeyboardInterrupt

    with pytest.raises(Exception, match="a broken file"):
        fit(tmp_path, DataThroughputCallback(summary=False), dataset=Breaks())
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(tmp_path, DataThroughputCallback(summary=False), more=[Stops()])


def test_any_loader_may_be_measured_and_none_is_harmed(tmp_path):
    """Plain loaders whose samples have keys that no report can hold."""

    class Key:
        def __repr__(self):
            raise RuntimeError("no name")

    class Keyed(Slow):
        def __getitem__(self, key):
            return torch.zeros(4), 0

    model = Model()
    loader = DataLoader(Keyed("a", 8), sampler=[Key() for _ in range(8)], batch_size=4)
    trainer = quiet_trainer(str(tmp_path), callbacks=[DataThroughputCallback(summary=False)])
    trainer.fit(model, loader)
    assert len(model.seen) == 2


@pytest.mark.parametrize("samples", [torch.zeros(8), [HasNoLength()] * 8], ids=["0-d", "unsized"])
def test_batches_of_any_kind_are_steps_that_are_measured(tmp_path, samples):
    callback = DataThroughputCallback(summary=False, report=False)
    trained(DataLoader(samples, batch_size=None), folder=tmp_path, callbacks=[callback])
    assert callback.report.stages[0].steps == 8

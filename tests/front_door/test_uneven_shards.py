"""A stream of which one worker makes nearly everything is told so, and no more workers."""

from __future__ import annotations

import pytest
import torch
from samples import Samples
from torch.utils.data import IterableDataset, get_worker_info
from trainers import Learner, quiet_trainer

from lightning_fastdata import DataThroughputCallback, FastDataLoader
from lightning_fastdata.host import clock

BATCH, BATCH_MS = 4, 16.0
NOT_WITH_IT = {"FD302", "FD303", "FD304", "FD305"}
EXECUTORS = ("torch", "workers")


pytestmark = pytest.mark.usefixtures("virtual")
"""The training has a time of its own, and each worker another, from when it is forked."""


class Coming:
    """A batch on its way; in the time of the training it takes as long to come as to be read."""

    def __init__(self, values, seconds):
        self.values, self.seconds = values, seconds

    def __reduce__(self):
        return come, (self.values, self.seconds)


def come(values, seconds):
    clock.sleep(seconds)
    return torch.tensor(values)


def batch_of(samples):
    return Coming([value for value, _ in samples], sum(seconds for _, seconds in samples))


class Files(IterableDataset):
    """Reads files of so many samples, each by the worker whose turn it is."""

    def __init__(self, *sizes, whole=False, batch_ms=BATCH_MS):
        self.sizes, self.whole, self.sample_s = sizes, whole, batch_ms / 1e3 / BATCH

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (0, 1) if info is None or self.whole else (info.id, info.num_workers)
        for size in self.sizes[worker::workers]:
            for number in range(size):
                clock.sleep(self.sample_s)
                yield [float(number)] * 4, self.sample_s


def row(index):
    clock.sleep(BATCH_MS / 1e3 / BATCH)
    return [float(index)] * 4, BATCH_MS / 1e3 / BATCH


def fit(folder, train, *, epochs=1, step_s=0.002):
    callback = DataThroughputCallback(summary=False)
    trainer = quiet_trainer(folder, max_epochs=epochs, callbacks=[callback])
    trainer.fit(Learner(lambda _: clock.sleep(step_s)), train)
    return callback.report


def codes(report):
    return [each.code for each in report.verdict.findings]


def told(report):
    return next(each for each in report.verdict.findings if each.code == "FD325")


def read(files, workers, executor, **options):
    return FastDataLoader(
        files, BATCH, num_workers=workers, executor=executor, collate_fn=batch_of, **options
    )


@pytest.mark.cases(2)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("sizes", [(120,), (150, 4), (4, 150)])
def test_a_stream_whose_samples_come_from_one_worker_is_told_to_share_them_out(
    tmp_path, executor, sizes
):
    report = fit(tmp_path, read(Files(*sizes), 2, executor), epochs=2)
    found = told(report)
    assert found.cause.startswith("one of 2 workers makes ")
    assert "more workers" in found.leave_alone
    assert not NOT_WITH_IT & set(codes(report))
    assert found.gain.basis == "floor"


def test_files_fewer_than_half_of_the_workers_leave_the_others_without_work(tmp_path):
    report = fit(tmp_path, read(Files(80, 80), 4, "torch"))
    assert told(report).cause.startswith("one of 4 workers makes 5")
    assert not NOT_WITH_IT & set(codes(report))


NO_MATTER = {
    "even shares, torch": lambda: read(Files(48, 48), 2, "torch"),
    "even shares, workers": lambda: read(Files(48, 48), 2, "workers"),
    "each yields the whole stream": lambda: read(Files(48, whole=True), 2, "torch"),
    "a last file that is read alone at the end": lambda: read(Files(80, 48), 2, "torch"),
    "a batch sampler gives each worker its turn": lambda: FastDataLoader(
        Samples(row, 96),
        batch_sampler=[[number] * BATCH for number in range(24)],
        num_workers=2,
        collate_fn=batch_of,
    ),
}


@pytest.mark.parametrize("name", NO_MATTER)
def test_shares_that_are_no_matter_are_not_told(tmp_path, name):
    report = fit(tmp_path, NO_MATTER[name]())
    assert "FD325" not in codes(report)
    assert report.stages[0].stall_share > 0.03 or not name.startswith("even")


def test_uneven_shares_that_nothing_waits_for_are_not_told(tmp_path):
    files = Files(60, batch_ms=0.4)
    report = fit(tmp_path, read(files, 2, "torch"), step_s=0.06)
    assert report.stages[0].stall_share < 0.03
    assert "FD325" not in codes(report)


def test_of_several_loaders_the_one_with_the_uneven_stream_is_named(tmp_path):
    quick = FastDataLoader(list(torch.zeros(96, 4)), BATCH, num_workers=0)
    train = {"rows": quick, "stream": read(Files(96), 2, "torch")}
    report = fit(tmp_path, train)
    found = told(report)
    assert found.cause.startswith("loader 'stream': one of 2 workers makes 100% ")
    # Where other programs have the CPUs, it gains nothing, and is not told.
    assert not found.remedy or found.remedy.startswith(
        "loader 'stream': share the stream out evenly"
    )

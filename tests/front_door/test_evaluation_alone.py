"""validate, test and predict by themselves leave a report of their own, and say it once."""

from __future__ import annotations

import json
import warnings

import pytest
from front_door.timed import Model, Rows
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from trainers import quiet_trainer

from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions
from lightning_fastdata.host import clock

pytestmark = pytest.mark.usefixtures("virtual")

METHODS = {"validate": "val", "test": "test", "predict": "predict"}
WORDS = {"validate": "validation", "test": "test", "predict": "prediction"}
HOOKS = {"validate": "validation", "test": "test", "predict": "predict"}
SAMPLES = 24


def trainer_of(tmp_path, *callbacks, logger=False):
    return quiet_trainer(tmp_path, logger=logger, callbacks=list(callbacks), num_sanity_val_steps=0)


def read(file):
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ours", [True, False], ids=["a FastDataModule", "torch's loader"])
def test_each_method_has_a_report_under_its_own_name(tmp_path, capsys, method, ours):
    callback = DataThroughputCallback()
    trainer = trainer_of(tmp_path, callback)
    data, stage = Rows(SAMPLES, 0.004), METHODS[method]
    if ours:
        options = LoaderOptions(num_workers=0, executor="inline", probe=False)
        module = FastDataModule.from_datasets(None, data, data, data, batch_size=2, options=options)
        getattr(trainer, method)(Model(), datamodule=module)
    else:
        getattr(trainer, method)(Model(), DataLoader(data, 2))
    assert {file.name for file in tmp_path.iterdir()} == {
        f"report-{method}.json",
        f"report-{method}.html",
    }
    report = read(tmp_path / f"report-{method}.json")
    assert list(report["stages"]) == [stage]
    told = report["stages"][stage]
    assert (told["steps"], told["samples"]) == (SAMPLES // 2, SAMPLES)
    assert told["wait"]["mean_ms"] == 8
    assert (told["causes"] is not None) == ours
    assert report["ended"] is True
    assert report["verdict"]["kind"] == "data-bound"
    assert f"the {WORDS[method]} loop waits" in report["verdict"]["sentence"]
    assert any("0 workers" in fact for fact in report["verdict"]["evidence"])
    wall = report["wall"]
    assert {part: taken for part, taken in wall["parts_s"].items() if taken > 1e-9} == {
        "epoch_starts": pytest.approx(0.008),
        "wait": pytest.approx(SAMPLES * 0.004 - 0.008),
    }
    assert wall["total_s"] == pytest.approx(SAMPLES * 0.004)
    assert (wall["steps"], wall["samples"]) == (SAMPLES // 2, SAMPLES)
    assert callback.report is callback.reports[method]
    assert callback.report.stages[0].stage == stage
    out = capsys.readouterr().out
    assert out.count(f"fastdata · {stage} · {SAMPLES // 2} steps") == 1
    assert f"samples/s in the whole {WORDS[method]}" in out
    assert f": {WORDS[method]} steps " in out


@pytest.mark.parametrize("method", METHODS)
def test_where_its_seconds_went(tmp_path, method):
    slow = Callback()
    setattr(slow, f"on_{HOOKS[method]}_batch_end", lambda *_, **__: clock.sleep(0.2))
    callback = DataThroughputCallback(summary=False)
    getattr(trainer_of(tmp_path, slow, callback), method)(
        Model(evaluate_s=0.01), DataLoader(Rows(SAMPLES), 2)
    )
    wall = callback.report.wall
    assert wall.parts_s["compute"] == pytest.approx(SAMPLES // 2 * 0.01)
    assert wall.parts_s["callbacks"] == pytest.approx(SAMPLES // 2 * 0.2)
    assert wall.total_s == pytest.approx(SAMPLES // 2 * 0.21)
    assert callback.report.verdict.code == "FD320"
    assert callback.report.stages[0].compute.mean_ms == 10


def test_what_comes_after_a_fit_leaves_its_report_alone(tmp_path):
    callback = DataThroughputCallback(summary=False)
    logger = CSVLogger(tmp_path, name="", version="")
    trainer, model = trainer_of(tmp_path, callback, logger=logger), Model()
    fitted, other = DataLoader(Rows(), 2), DataLoader(Rows(6), 2)
    trainer.fit(model, fitted, fitted)
    of_fit = (tmp_path / "report.json").read_bytes()
    for method in METHODS:
        getattr(trainer, method)(model, other)
    assert (tmp_path / "report.json").read_bytes() == of_fit
    assert list(read(tmp_path / "report.json")["stages"]) == ["train", "val"]
    for method, stage in METHODS.items():
        told = read(tmp_path / f"report-{method}.json")["stages"]
        assert {name: each["steps"] for name, each in told.items()} == {stage: 3}
    assert set(callback.reports) == {"fit", *METHODS}
    assert callback.reports["fit"].stages[0].stage == "train"


@pytest.mark.parametrize("suffix", [".json", ".html"])
def test_a_path_of_ones_own_gets_the_method_in_its_name(tmp_path, suffix):
    callback = DataThroughputCallback(summary=False, report=tmp_path / f"mine{suffix}")
    trainer, model = trainer_of(tmp_path / "elsewhere", callback), Model()
    trainer.fit(model, DataLoader(Rows(), 2))
    trainer.test(model, DataLoader(Rows(), 2))
    names = {"mine.json", "mine.html", "mine-test.json", "mine-test.html"}
    assert {file.name for file in tmp_path.iterdir()} - {"elsewhere"} == names


@pytest.mark.parametrize("own", [True, False])
def test_a_callback_that_a_trainer_within_a_fit_takes_away_is_warned_of(tmp_path, own):
    outer = DataThroughputCallback(summary=False)

    class Nests(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            inner = DataThroughputCallback(summary=False) if own else outer
            trainer_of(tmp_path / "in", inner).validate(Model(), DataLoader(Rows(6), 2))

    trainer = trainer_of(tmp_path, outer, Nests())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Model(), DataLoader(Rows(), 2))
    told = [each for each in caught if "of another Trainer" in str(each.message)]
    assert len(told) == (0 if own else 1)
    assert set(outer.reports) == ({"fit"} if own else {"fit", "validate"})


def test_several_loaders_are_one_stage(tmp_path):
    callback = DataThroughputCallback(summary=False)
    loaders = [DataLoader(Rows(), 2), DataLoader(Rows(6), 2)]
    trainer_of(tmp_path, callback).test(Model(), loaders)
    assert callback.report.stages[0].steps == 16 + 3


def test_a_loader_that_fails_leaves_a_report_of_what_came_before(tmp_path):
    callback = DataThroughputCallback(summary=False)
    with pytest.raises(KeyError):
        trainer_of(tmp_path, callback).predict(Model(), DataLoader(Rows(missing=20), 2))
    assert read(tmp_path / "report-predict.json")["stages"]["predict"]["steps"] == 10

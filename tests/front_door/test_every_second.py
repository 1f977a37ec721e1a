"""Every second of a fit is somewhere, under the name of what took it."""

from __future__ import annotations

import json

import pytest
import torch
from front_door.timed import Model, Rows
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Sampler
from trainers import quiet_trainer

from lightning_fastdata import DataThroughputCallback, FastDataLoader, FastDataModule
from lightning_fastdata.host import clock

pytestmark = pytest.mark.usefixtures("virtual")

STEPS = 16


class Sleeps(Callback):
    """Sleeps in one hook, whichever it is."""

    def __init__(self, hook, seconds):
        self.slept = 0.0

        def sleep(*_args, **_kwargs):
            clock.sleep(seconds)
            self.slept += seconds

        setattr(self, hook, sleep)


class Plain(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Rows(), 2)


class SlowSampler(Sampler):
    def __init__(self, count, seconds):
        self.count, self.seconds = count, seconds

    def __len__(self):
        return self.count

    def __iter__(self):
        clock.sleep(self.seconds)
        return iter(range(self.count))


class SlowToSave(ModelCheckpoint):
    def _save_checkpoint(self, trainer, filepath):
        clock.sleep(0.25)
        super()._save_checkpoint(trainer, filepath)


class SlowLogger(CSVLogger):
    def log_metrics(self, metrics, step=None):
        clock.sleep(0.03)
        super().log_metrics(metrics, step)


def fit(tmp_path, *, callbacks=(), train=None, val=None, step_s=0.004, **options):
    throughput = DataThroughputCallback(summary=False)
    options = {"max_epochs": 3, "num_sanity_val_steps": 0} | options
    trainer = quiet_trainer(tmp_path, callbacks=[throughput, *callbacks], **options)
    began = clock.monotonic()
    trainer.fit(Model(step_s), DataLoader(Rows(), 2) if train is None else train, val)
    took_s = clock.monotonic() - began
    report = throughput.report
    (file,) = tmp_path.rglob("report.json")
    wall = json.loads(file.read_text())["wall"]
    assert sum(wall["parts_s"].values()) == pytest.approx(wall["total_s"])
    assert wall["total_s"] == pytest.approx(took_s)
    assert report.text().count("of ") >= 1
    return report, wall


def seconds(wall):
    """Return each part of a run that took any time, to the nanosecond."""
    return {part: round(taken, 9) for part, taken in wall["parts_s"].items() if taken > 1e-9}


def test_a_healthy_training_is_nearly_all_steps(tmp_path):
    report, wall = fit(tmp_path, step_s=0.02)
    assert seconds(wall) == {"compute": 3 * STEPS * 0.02}
    assert report.verdict.kind == "compute-bound"
    assert wall["samples"] == 3 * STEPS * 2
    assert wall["samples_per_s"] == pytest.approx(report.stages[0].samples_per_s)


@pytest.mark.parametrize(
    "hook",
    [
        "on_train_batch_start",
        "on_train_batch_end",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_train_epoch_end",
        "on_train_epoch_start",
    ],
)
def test_a_slow_callback_is_named_whichever_its_hook(tmp_path, hook):
    slow = Sleeps(hook, 0.4 if "epoch" in hook else 0.03)
    report, wall = fit(tmp_path, callbacks=[slow])
    assert wall["parts_s"]["callbacks"] == pytest.approx(slow.slept)
    assert wall["named_s"]["callbacks"] == {f"Sleeps.{hook}": pytest.approx(slow.slept)}
    assert report.verdict.kind == "held up"
    assert report.verdict.code == "FD320"
    assert f"Sleeps.{hook}" in report.verdict.sentence
    # It is no part of a step, also where it is called within one.
    assert (report.stages[0].compute.p50_ms, wall["parts_s"]["compute"]) == (4, 3 * STEPS * 0.004)
    if "epoch" not in hook:
        assert report.stages[0].gap.p50_ms == 30


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_end", "on_fit_end"])
def test_a_hook_that_runs_once_is_counted_and_blamed_for_nothing(tmp_path, hook):
    report, wall = fit(tmp_path, callbacks=[slow := Sleeps(hook, 5.0)])
    assert slow.slept == 5.0
    assert wall["total_s"] == pytest.approx(3 * STEPS * 0.004 + 5.0)
    assert "FD320" not in {each.code for each in report.verdict.findings}


@pytest.mark.parametrize(
    ("hook", "calls"),
    [
        ("on_train_batch_end", 3 * STEPS),
        ("lr_scheduler_step", 3 * STEPS),
        *((f"on_validation_batch_{when}", 3 * 4) for when in ("start", "end")),
        *((f"on_validation_epoch_{when}", 3) for when in ("start", "end")),
        *((f"on_validation_{when}", 3) for when in ("start", "end", "model_eval", "model_train")),
        ("on_validation_model_zero_grad", 3),
    ],
)
def test_a_slow_hook_of_the_module_is_named(tmp_path, monkeypatch, hook, calls):
    def configure(module):
        optimizer = torch.optim.SGD(module.parameters(), 0.0)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    written = getattr(Model, hook)

    def slow(*args, **named):
        clock.sleep(2.4 / calls)
        return written(*args, **named)

    monkeypatch.setattr(Model, "configure_optimizers", configure)
    monkeypatch.setattr(Model, hook, slow)
    report, wall = fit(tmp_path, val=DataLoader(Rows(8), 2))
    assert report.verdict.code == "FD320"
    assert wall["named_s"]["callbacks"] == {f"Model.{hook}": pytest.approx(2.4)}


@pytest.mark.parametrize("owner", [Model, FastDataModule, Plain], ids=lambda kind: kind.__name__)
def test_a_slow_hook_before_the_transfer_is_transfer_and_is_named(tmp_path, owner):
    def before(_self, batch, _dataloader_idx):
        clock.sleep(0.04)
        return batch

    kind = type("Mine", (owner,), {"on_before_batch_transfer": before})
    throughput = DataThroughputCallback(summary=False)
    loader = DataLoader(Rows(), 2)
    model, data = Model(0.004), loader
    if owner is Model:
        model = kind(0.004)
    else:
        data = kind.from_loaders(loader) if owner is FastDataModule else kind()
    quiet_trainer(tmp_path, callbacks=[throughput]).fit(model, data)
    report = throughput.report
    assert report.stages[0].transfer.mean_ms == 40
    assert seconds(report.wall.as_dict()) == {"compute": STEPS * 0.044}
    assert report.verdict.code == "FD312"
    (first, *_) = report.verdict.findings
    assert first.cause.startswith("Mine.on_before_batch_transfer takes 40.0 ms")


class Moves:
    """An object that takes a while to be moved."""

    def to(self, *_args, **_kwargs):
        clock.sleep(0.0001)
        return self


@pytest.mark.parametrize(("objects", "told"), [(8, False), (400, True)])
def test_many_objects_are_told_of_where_batches_have_them(tmp_path, objects, told):
    def collate(samples):
        return [Moves() for _ in range(objects)]

    report, _ = fit(tmp_path, train=DataLoader(Rows(), 2, collate_fn=collate))
    assert report.stages[0].transfer.mean_ms == pytest.approx(objects / 10)
    assert (report.verdict.code == "FD312") == told


def test_epochs_that_start_slowly_are_told_from_the_end_of_the_last_step(tmp_path):
    slow = DataLoader(Rows(), 2, sampler=SlowSampler(STEPS * 2, 0.5))
    report, wall = fit(tmp_path, train=slow)
    assert wall["named_s"]["epoch_starts"] == {
        "first epoch": pytest.approx(0.5),
        "later epochs": pytest.approx(1.0),
    }
    assert report.verdict.kind == "paused between epochs"
    assert report.verdict.code == "FD310"


def test_the_first_start_of_workers_is_nobodys_fault(tmp_path):
    slow = DataLoader(Rows(), 2, sampler=SlowSampler(STEPS * 2, 0.5))
    report, wall = fit(tmp_path, train=slow, max_epochs=1, step_s=0.02)
    assert seconds(wall) == {"epoch_starts": 0.5, "compute": STEPS * 0.02}
    assert report.verdict.code != "FD310"


def test_a_validation_that_waits_for_its_data_is_starved(tmp_path):
    val = DataLoader(Rows(40, read_s=0.01), 4)
    report, wall = fit(tmp_path, val=val, num_sanity_val_steps=2)
    assert wall["named_s"]["validation"] == {"waiting for batches": pytest.approx(3 * 0.4)}
    assert wall["parts_s"]["setup"] == pytest.approx(2 * 0.04)  # the sanity check
    assert report.verdict.kind == "starved in validation"
    assert report.verdict.code == "FD318"


class SlowToIterate(DataLoader):
    def __iter__(self):
        clock.sleep(0.5)
        return super().__iter__()


@pytest.mark.parametrize("interval", [0.5, 6])
def test_validation_in_the_middle_of_an_epoch_is_validation(tmp_path, interval):
    val = SlowToIterate(Rows(8, read_s=0.01), 4)
    report, wall = fit(tmp_path, val=val, step_s=0.02, val_check_interval=interval)
    validations = report.stages[1].steps // 2
    assert validations >= 6
    assert seconds(wall) == {
        "compute": pytest.approx(3 * STEPS * 0.02),
        "validation": pytest.approx(validations * (0.5 + 8 * 0.01)),
    }
    assert report.stages[1].duration_s == pytest.approx(validations * 8 * 0.01)


def test_validation_within_an_epoch_is_no_time_of_the_steps_that_a_gain_is_simulated_from(tmp_path):
    def told(name, **how):
        late = FastDataLoader(Rows(64, 0.002), 2, num_workers=0)
        report, _ = fit(tmp_path / name, train=late, val=DataLoader(Rows(4, 0.1), 2), **how)
        (found,) = (each for each in report.verdict.findings if each.code == "FD303")
        return found.remedy, found.gain

    assert told("within", val_check_interval=3) == told("behind")


def test_checkpoints_that_take_long_are_told(tmp_path):
    save = SlowToSave(dirpath=tmp_path, every_n_train_steps=4)
    report, wall = fit(tmp_path, callbacks=[save], enable_checkpointing=True)
    # Every four of 48 steps.
    assert wall["parts_s"]["checkpoints"] == pytest.approx(12 * 0.25)
    assert report.verdict.kind == "held up"
    assert "SlowToSave" in report.verdict.sentence


def test_a_slow_logger_is_told(tmp_path):
    report, wall = fit(tmp_path, logger=SlowLogger(tmp_path), log_every_n_steps=1)
    # Ours are the first two, after which there is a rest, and one at the end of each epoch.
    assert seconds(wall) == {
        "compute": pytest.approx(3 * STEPS * 0.004),
        "logging": pytest.approx(3 * STEPS * 0.03),
        "measuring": pytest.approx(5 * 0.03),
    }
    assert report.verdict.code == "FD320"


class Reloads(Model):
    def train_dataloader(self):
        clock.sleep(0.25)
        return SlowToIterate(Rows(), 2)

    def on_train_epoch_end(self):
        self.log("own/epoch", 1.0)


@pytest.mark.parametrize("reload", [0, 1])
def test_what_is_logged_at_the_end_of_an_epoch_is_not_the_start_of_the_next(tmp_path, reload):
    throughput = DataThroughputCallback(summary=False, figures=False)
    options = {"log_every_n_steps": 100, "reload_dataloaders_every_n_epochs": reload}
    options |= {"callbacks": [throughput], "logger": SlowLogger(tmp_path)}
    quiet_trainer(tmp_path, max_epochs=3, **options).fit(Reloads(0.004))
    wall = throughput.report.wall
    later_s = wall.named_s["epoch_starts"]["later epochs"]
    # Lightning iterates a loader that was made anew twice.
    assert later_s == pytest.approx(2 * (0.25 + 2 * 0.5 if reload else 0.5))
    assert wall.parts_s["logging"] == pytest.approx(3 * 0.03)


def test_what_came_before_the_training_is_setup(tmp_path):
    _, wall = fit(tmp_path, callbacks=[Sleeps("on_fit_start", 0.3)])
    assert seconds(wall) == {"setup": 0.3, "compute": pytest.approx(3 * STEPS * 0.004)}
    assert wall["samples_per_s"] == pytest.approx(2 / 0.004)


def test_an_epoch_that_ends_in_an_error_is_accounted_for(tmp_path):
    throughput = DataThroughputCallback(summary=False)
    trainer = quiet_trainer(tmp_path, max_epochs=None, callbacks=[throughput])
    with pytest.raises(KeyError):
        trainer.fit(Model(0.004), DataLoader(Rows(missing=30), 2))
    wall = throughput.report.wall
    assert sum(wall.parts_s.values()) == pytest.approx(wall.total_s)
    assert wall.steps == 15


def test_each_epoch_that_begins_finds_the_report_of_those_before(tmp_path):
    known = []

    class Looks(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            file = tmp_path / "report.json"
            report = json.loads(file.read_text()) if file.exists() else None
            known.append(0 if report is None else report["stages"]["train"]["steps"])

    fit(tmp_path, callbacks=[Looks()], step_s=0.02)
    assert known == [0, STEPS, 2 * STEPS]


@pytest.mark.parametrize("bar", [True, False])
def test_one_line_tells_after_fifty_steps_what_limits_them(tmp_path, capsys, bar):
    trainer = quiet_trainer(tmp_path, enable_progress_bar=bar, callbacks=[DataThroughputCallback()])
    trainer.fit(Model(0.004), DataLoader(Rows(240, read_s=0.004), 2))
    text = capsys.readouterr().out
    assert text.count("fastdata after 50 steps: data-bound") == 1
    assert text.index("fastdata after 50 steps") < text.index("DATA-BOUND")

"""Around a run: profilers, bars, errors, copies, processes, compilation and early ends."""

from __future__ import annotations

import copy
import gc
import json
import multiprocessing
import pickle
import re
import signal
from datetime import timedelta

import pytest
import torch
from conformance.pieces import Linear, Rows, RowsModule, add_one, make_trainer, quiet
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import (
    EarlyStopping,
    ModelCheckpoint,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.profilers import (
    AdvancedProfiler,
    PassThroughProfiler,
    Profiler,
    PyTorchProfiler,
    SimpleProfiler,
)
from misses import each
from programs import run_program
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions

# -- profilers -------------------------------------------------------------------------------------


class OwnProfiler(Profiler):
    """Somebody's profiler: counts, and keeps an attribute of its own."""

    def __init__(self):
        super().__init__()
        self.counts = {}
        self.open = []

    def start(self, action_name):
        self.open.append(action_name)
        self.counts[action_name] = self.counts.get(action_name, 0) + 1

    def stop(self, action_name):
        self.open.remove(action_name)


def actions_of(profiler, folder):
    """Return how often each action was profiled; once is all that is known of some."""
    if isinstance(profiler, SimpleProfiler):
        return {name: len(times) for name, times in profiler.recorded_durations.items()}
    if isinstance(profiler, AdvancedProfiler):
        (report,) = folder.glob("fit-profile*.txt")
        names = re.findall(r"^Profile stats for: (.*?)(?: rank: \d+)?$", report.read_text(), re.M)
        return dict.fromkeys(names, 1)
    if isinstance(profiler, PyTorchProfiler):
        events = profiler.function_events
        return {e.key: e.count for e in events.key_averages() if e.key.startswith("[pl]")}
    return profiler.counts


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", [SimpleProfiler, AdvancedProfiler, PyTorchProfiler, OwnProfiler])
def test_row_27_a_users_profiler_sees_what_it_saw_without_the_callback(tmp_path, kind):
    seen = []
    for name, callbacks in (("without", []), ("with", [quiet()])):
        folder = tmp_path / name
        profiler = kind() if kind is OwnProfiler else kind(dirpath=folder, filename="profile")
        trainer = make_trainer(tmp_path, max_epochs=2, callbacks=callbacks, profiler=profiler)
        trainer.fit(Linear(), datamodule=RowsModule(batch_size=8, guard="off"))
        assert trainer.profiler is profiler
        if kind is not OwnProfiler:
            assert len(list(folder.glob("fit-profile*.txt"))) == 1
        actions = actions_of(profiler, folder).items()
        seen.append({name: count for name, count in actions if "[Callback]" not in name})
    assert seen[0] == seen[1]
    assert any("train_dataloader_next" in name for name in seen[1])
    if kind is OwnProfiler:
        assert profiler.open == []
        assert profiler.counts["[_TrainingEpochLoop].train_dataloader_next"] == 8


def test_row_27_a_profiler_built_on_lightnings_idle_one_is_asked(tmp_path):
    class Notes(PassThroughProfiler):
        noted = ()

        def start(self, action_name):
            self.noted = (*self.noted, action_name)

    profiler = Notes()
    trainer = make_trainer(tmp_path, callbacks=[quiet()], profiler=profiler)
    trainer.fit(Linear(), datamodule=RowsModule())
    assert profiler.noted.count("[Strategy]SingleDeviceStrategy.batch_to_device") >= 4
    assert profiler.noted.count("run_training_batch") == 4


# -- progress bars ---------------------------------------------------------------------------------


class Fails(Linear):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            raise ZeroDivisionError("the step failed")
        return super().training_step(batch, batch_idx)


@pytest.mark.cases(2)
@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("ending", ["end", "exception"])
def test_row_28_the_summary_comes_after_the_bar(tmp_path, capsys, bar, ours_first, ending):
    callback = DataThroughputCallback(report=False)
    callbacks = [callback, bar()] if ours_first else [bar(), callback]
    trainer = make_trainer(tmp_path, callbacks=callbacks, enable_progress_bar=True)
    if ending == "end":
        trainer.fit(Linear(), datamodule=RowsModule(batch_size=4))
    else:
        with pytest.raises(ZeroDivisionError, match="the step failed"):
            trainer.fit(Fails(), datamodule=RowsModule(batch_size=4))
    out = capsys.readouterr().out
    assert out.count("fastdata · train") == 1
    assert "Epoch 0" in out
    assert out.rindex("Epoch 0") < out.index("fastdata · train")
    # Nothing of the bar is drawn behind the summary.
    last = out[out.index("fastdata · train") :]
    assert "/8" not in last
    assert "it/s" not in last


class CountsReads(TorchDispatchMode):
    """Counts tensor values read by the host, each of which would wait for a device."""

    def __init__(self):
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.reads += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("logger", [False, True])
def test_row_28_nothing_of_ours_reads_a_tensor(tmp_path, logger):
    reads = []
    for callbacks in ([], [quiet(augment=add_one)]):
        trainer = make_trainer(
            tmp_path, callbacks=callbacks, logger=logger, log_every_n_steps=1, limit_val_batches=0
        )
        with CountsReads() as mode:
            trainer.fit(Linear(), DataLoader(Rows(16), batch_size=2))
        reads.append(mode.reads)
    assert reads[0] == reads[1]


# -- errors ----------------------------------------------------------------------------------------


class Breaks(Dataset):
    """Raises at one sample, but not at the first, which is looked at beforehand."""

    def __init__(self, at=None):
        self.at = at

    def __len__(self):
        return 32

    def __getitem__(self, i):
        if i == self.at:
            raise ZeroDivisionError(f"sample {i} is broken")
        return torch.full((4,), float(i)), i


def broken_collate(samples):
    raise ZeroDivisionError("collate is broken")


def broken_transform(batch):
    raise ZeroDivisionError("transform is broken")


BREAKS = ("sample", "collate", "transform", "step")
# Errors in the workers of a foreign loader are torch's affair; it takes ten seconds to end them.
CASES = [
    (ours, where, workers)
    for ours in (True, False)
    for where in BREAKS
    for workers in (0, 2)
    if ours or not workers or where in ("transform", "step")
]


@pytest.mark.cases(2)
@pytest.mark.parametrize(("ours", "where", "workers"), CASES)
def test_row_35_an_error_keeps_its_type_and_place_and_leaves_no_worker(
    tmp_path, workers, where, ours
):
    dataset = Breaks(at=17 if where == "sample" else None)
    collate = broken_collate if where == "collate" else None
    augment = broken_transform if where == "transform" else None
    if ours:
        options = LoaderOptions(num_workers=workers)
        module = FastDataModule.from_datasets(
            dataset, batch_size=4, options=options, collate_fn=collate, guard="off"
        )
        data = {"datamodule": module}
    else:
        loader = DataLoader(dataset, 4, num_workers=workers, collate_fn=collate)
        data = {"train_dataloaders": loader}
    trainer = make_trainer(
        tmp_path, callbacks=[quiet(augment=augment)], limit_val_batches=0, max_epochs=2
    )
    model = Fails() if where == "step" else Linear()
    before = set(multiprocessing.active_children())
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.fit(model, **data)
    said = {"sample": "sample 17", "step": "the step failed"}.get(where, f"{where} is broken")
    assert said in str(caught.value)
    places = {"sample": "__getitem__", "step": "training_step"}
    place = places.get(where, f"broken_{where}")
    # A worker's traceback comes as text.
    told = [*(entry.name for entry in caught.traceback), str(caught.value)]
    assert any(place in name for name in told)
    del caught, trainer, data
    gc.collect()  # an exception and its frames hold each other
    left = set(multiprocessing.active_children()) - before
    for worker in left:
        worker.join(10)
    assert [worker for worker in left if worker.is_alive()] == []


# -- copies and processes --------------------------------------------------------------------------


def data_of(source, batch_size):
    """What a fit is given: a data module of ours, or a plain loader."""
    if source == "ours":
        return {"datamodule": RowsModule(batch_size=batch_size)}
    return {"train_dataloaders": DataLoader(Rows(32), batch_size=batch_size)}


class Copies(Callback):
    """Copies trainer and module in the middle of an epoch."""

    def __init__(self):
        self.made = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1 and trainer.current_epoch == 0:
            self.made = [copy.deepcopy(trainer), copy.deepcopy(pl_module)]


@pytest.mark.parametrize("source", ["ours", "loaders"])
def test_row_37_trainers_and_modules_can_be_copied_while_they_run(tmp_path, source):
    copies, callback = Copies(), quiet(augment=add_one)
    trainer = make_trainer(tmp_path, callbacks=[callback, copies], limit_val_batches=0)
    data = data_of(source, batch_size=8)
    model = Linear()
    trainer.fit(model, **data)
    assert callback.report.stages[0].steps == 4
    assert model.added() == {1.0}
    twin, twin_model = copies.made
    # A copy is not measured: its profiler is the plain one.
    assert type(twin.profiler) is PassThroughProfiler
    (twin_callback,) = (c for c in twin.callbacks if isinstance(c, DataThroughputCallback))
    assert twin_callback._run is None
    assert copy.deepcopy(trainer).profiler is not trainer.profiler
    x, _ = twin_model.seen["train"][0]
    assert torch.equal(x, model.seen["train"][0][0])
    again = make_trainer(tmp_path, callbacks=[quiet(augment=add_one)], limit_val_batches=0)
    twin_model.seen["train"].clear()
    again.fit(twin_model, **data)
    assert twin_model.added() == {1.0}


@pytest.mark.cases(1)
@pytest.mark.parametrize("source", ["ours", "loaders"])
def test_row_37_averaged_weights_follow_an_augmented_run(tmp_path, source):
    callbacks = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")
    data = data_of(source, batch_size=8)
    model = Linear()
    average = callbacks.EMAWeightAveraging(decay=0.5)
    for order in ([average, quiet(augment=add_one)], [quiet(augment=add_one), average]):
        model.seen["train"].clear()
        trainer = make_trainer(tmp_path, callbacks=order, max_epochs=1)
        trainer.fit(model, **data)
        assert model.added() == {1.0}
        assert "on_after_batch_transfer" not in vars(model)


def test_row_37_a_data_module_and_a_callback_can_be_pickled(tmp_path):
    module, callback = RowsModule(batch_size=8), quiet(augment=add_one)
    module.register_transform(add_one)
    trainer = make_trainer(tmp_path, callbacks=[callback], limit_val_batches=0)
    trainer.fit(Linear(), datamodule=module)
    module.trainer = None
    twin, twin_callback = pickle.loads(pickle.dumps((module, callback)))
    assert twin_callback.report == callback.report
    model = Linear()
    make_trainer(tmp_path, callbacks=[twin_callback], limit_val_batches=0).fit(
        model, datamodule=twin
    )
    assert model.added() == {2.0}


class WritesSeen(Callback):
    """Writes what each rank saw."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_end(self, trainer, pl_module):
        rows = [[x[:, 0].tolist(), i.tolist()] for x, i in pl_module.seen["train"]]
        (self.folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(rows))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "strategy", ["ddp_fork", pytest.param("ddp_spawn", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("source", ["ours", "loaders"])
def test_row_37_two_processes_share_the_samples_and_one_writes_the_report(
    tmp_path, strategy, source
):
    if strategy == "ddp_spawn" and source == "loaders":
        pytest.skip("starting interpreters is slow; the callback starts the same way in both")
    seen, samples = trained_by_two(tmp_path, strategy, source)
    assert sorted(seen[0] + seen[1]) == list(range(32))
    assert samples == 16


def test_row_14_without_a_distributed_sampler_each_rank_sees_everything(tmp_path):
    seen, _ = trained_by_two(tmp_path, "ddp_fork", "ours", use_distributed_sampler=False)
    assert [sorted(rank) for rank in seen] == [list(range(32))] * 2


def trained_by_two(tmp_path, strategy, source, **arguments):
    """Return which samples each process saw, and how many the report of the first one counts."""
    data = data_of(source, batch_size=4)
    callbacks = [DataThroughputCallback(augment=add_one, summary=False), WritesSeen(tmp_path)]
    trainer = make_trainer(
        tmp_path,
        strategy=strategy,
        devices=2,
        callbacks=callbacks,
        limit_val_batches=0,
        **arguments,
    )
    trainer.fit(Linear(), **data)
    seen = [[], []]
    for rank, found in enumerate(seen):
        for x, i in json.loads((tmp_path / f"rank{rank}.json").read_text()):
            assert x == [value + 1.0 for value in i]
            found.extend(i)
    (report,) = tmp_path.rglob("report.json")
    return seen, json.loads(report.read_text())["stages"]["train"]["samples"]


# -- compilation -----------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize("source", ["ours", "loaders"])
def test_row_49_a_compiled_model_is_compiled_as_often_as_without_us(tmp_path, source):
    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(4, 1)
            self.losses, self.graphs, self.compiled = [], [], []

        def compiler(self, graph, inputs):
            self.graphs.append(graph)
            return graph.forward

        def forward(self, x):
            return self.layer(x * 1e-2)

        def training_step(self, batch, batch_idx):
            return self(batch[0]).pow(2).mean()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.losses.append(float(outputs["loss"]))

        def on_train_epoch_end(self):
            self.compiled.append(len(self.graphs))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-2)

    def run(with_us):
        torch._dynamo.reset()
        model = Model()
        callbacks = [quiet()] if with_us else []
        trainer = make_trainer(
            tmp_path, max_epochs=3, callbacks=callbacks, logger=True, log_every_n_steps=1
        )
        if source == "ours" and with_us:
            module = RowsModule(batch_size=4, length=24)
            module.register_transform(add_one)
            data = {"datamodule": module}
        else:
            data = {"train_dataloaders": DataLoader(Rows(24), batch_size=4)}
        trainer.fit(torch.compile(model, backend=model.compiler), **data)
        return model

    plain, model = run(with_us=False), run(with_us=True)
    # In the first of three epochs.
    assert model.compiled == [len(plain.graphs)] * 3
    assert plain.graphs
    if source == "loaders":
        assert model.losses == plain.losses


# -- other callbacks, and early ends ---------------------------------------------------------------


def test_row_51_stateful_callbacks_live_beside_two_of_ours(tmp_path):
    callbacks = [
        quiet(),
        Timer(),
        EarlyStopping("val", patience=5),
        quiet(augment=add_one),
        ModelCheckpoint(tmp_path / "a", monitor="val"),
        ModelCheckpoint(tmp_path / "b", every_n_train_steps=2),
    ]

    class Validated(Linear):
        def on_validation_epoch_end(self):
            self.log("val", 1.0)

    trainer = make_trainer(tmp_path, max_epochs=2, callbacks=callbacks, enable_checkpointing=True)
    model = Validated()
    trainer.fit(model, datamodule=RowsModule(batch_size=8))
    (last,) = (tmp_path / "b").iterdir()
    x, i = model.seen["train"][-1]
    assert torch.equal(x[:, 0], i + 1.0)
    resumed = make_trainer(tmp_path, max_epochs=3, callbacks=callbacks, enable_checkpointing=True)
    resumed.fit(Validated(), datamodule=RowsModule(batch_size=8), ckpt_path=last)
    assert [c.report.stages[0].steps for c in (callbacks[0], callbacks[3])] == [4, 4]


class StopsItself(Linear):
    def training_step(self, batch, batch_idx):
        self.trainer.should_stop = batch_idx == 2
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("how", ["should_stop", "max_steps", "max_time", "timer", "skipped epoch"])
def test_row_52_a_run_that_ends_in_mid_epoch_is_reported(tmp_path, capsys, how):
    class Skips(Linear):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 3 else None

    model = {"should_stop": StopsItself, "skipped epoch": Skips}.get(how, Linear)()
    callbacks, arguments = [DataThroughputCallback()], {}
    if how == "max_steps":
        arguments = {"max_steps": 3, "max_epochs": -1}
    elif how == "max_time":
        arguments = {"max_time": timedelta(seconds=0.2), "max_epochs": -1}
    elif how == "timer":
        callbacks.append(Timer(timedelta(seconds=0.2)))
        arguments = {"max_epochs": -1}
    trainer = make_trainer(tmp_path, callbacks=callbacks, limit_val_batches=0, **arguments)
    rows = Rows(10_000, dict.fromkeys(range(10_000), 0.02))
    trainer.fit(model, DataLoader(rows, batch_size=1))
    report = json.loads((tmp_path / "report.json").read_text())
    steps = report["stages"]["train"]["steps"]
    assert steps == len(model.seen["train"]) == callbacks[0].report.stages[0].steps
    assert steps == 3 or how in ("max_time", "timer")
    assert 1 <= steps < 10_000
    assert capsys.readouterr().out.count("fastdata · train") == 1


SCRIPT = """
import os, sys, torch
from conformance.pieces import Linear, Rows, make_trainer
from torch.utils.data import DataLoader
from lightning_fastdata import DataThroughputCallback

class Says(Linear):
    def training_step(self, batch, batch_idx):
        if batch_idx == 5:
            os.kill(os.getpid(), int(sys.argv[2]))
        return super().training_step(batch, batch_idx)

rows = Rows(100_000, dict.fromkeys(range(100_000), 0.01))
trainer = make_trainer(sys.argv[1], callbacks=[DataThroughputCallback()], limit_val_batches=0)
trainer.fit(Says(), DataLoader(rows, batch_size=1))
"""


@each("sent", [signal.SIGTERM, signal.SIGINT])
def test_row_52_a_signal_leaves_summary_and_report(tmp_path, sent):
    done = run_program("-c", SCRIPT, tmp_path, int(sent))
    assert "fastdata · train" in done.stdout, done.stderr
    steps = json.loads((tmp_path / "report.json").read_text())["stages"]["train"]["steps"]
    assert 5 <= steps < 100_000

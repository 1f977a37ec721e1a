"""What the guard tries before a fit changes nothing of the training, and what it chooses fits."""

from __future__ import annotations

import random
import weakref
from collections import deque
from functools import partial
from pathlib import Path

import albumentations as A
import lightning.pytorch
import numpy as np
import pytest
import pytorch_lightning
import torch
from alike import alike
from conformance.pieces import Images, Pixels
from device.host_streams import OnStreams
from lightning.pytorch.plugins import MixedPrecision
from misses import each
from plugin.counted_device import GIB, MIB, Device, InBackward
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import CatMetric
from torchmetrics.classification import MulticlassAccuracy
from trainers import Keeps, quiet_trainer

from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions
from lightning_fastdata import pytorch_lightning as of_the_other_package
from lightning_fastdata.errors import BatchSizeError, FastDataWarning, OptionsError
from lightning_fastdata.host.memory import reserve_bytes
from lightning_fastdata.plugin import bindings
from lightning_fastdata.plugin.bindings import BatchSizeGuard
from lightning_fastdata.plugin.guard import callback as guard_callback
from lightning_fastdata.plugin.guard import snapshots

ROWS, BATCH, FEATURES, CLASSES = 48, 16, 6, 3
HOMES = {lightning.pytorch: bindings, pytorch_lightning: of_the_other_package}
INLINE = LoaderOptions(num_workers=0, executor="inline", probe=False)

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning|pytorch_lightning|torch")


class Steps(Device):
    """A step of ``rows`` rows takes ``fixed + per_row * rows`` bytes, and 10 ms for any 64 rows.

    The module under test tells it, at the place named ``where``, how many rows are at work.
    """

    def __init__(self, where="forward", fixed=GIB, per_row=GIB, total=1000 * GIB):
        super().__init__(total)
        self.where, self.fixed, self.per_row = where, fixed, per_row
        self.rows_tried, self.now_s = [], 0.0
        self.others = self.others_grow = 0

    def work(self, where, rows):
        if where == self.where:
            self.rows_tried.append(rows)
            self.now_s += 0.010 * max(1.0, rows / 64)
            self.take(self.fixed + int(self.per_row * rows))

    def free_bytes(self):
        free = self.total - self.others
        self.others = self.others_grow
        return free

    def clock(self):
        return self.now_s


def module_for(device, optimizer="adam", pl=lightning.pytorch, **options):
    """Return a module that has, draws and changes all that a module may."""

    class Adam(torch.optim.AdamW):
        def step(self, closure=None):
            with torch.enable_grad():
                loss = closure()
            with torch.no_grad():
                self.param_groups[0]["params"][0].add_(1.0)  # half-way when memory runs out
            device.work("optimizer", module.rows_now)
            super().step()
            return loss

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(FEATURES)
            self.hidden = nn.Linear(FEATURES, 8)
            self.drop = nn.Dropout(0.3)
            self.frozen = nn.BatchNorm1d(8).eval()
            self.head = nn.Linear(8, CLASSES)
            self.accuracy = MulticlassAccuracy(CLASSES)
            self.seen = CatMetric()
            self.register_buffer("average", torch.zeros(3), persistent=False)
            self.steps, self.outputs, self.last = 0, [], None
            self.nested = {"list": [[0]], "set": {1}, "deque": deque([1], maxlen=2)}
            self.own = torch.Generator().manual_seed(7)
            self.rows_now = 0
            self.losses = []

        def on_before_batch_transfer(self, batch, dataloader_idx):
            device.work("before_transfer", len(batch[0]))
            return batch

        def on_after_batch_transfer(self, batch, dataloader_idx):
            device.work("after_transfer", len(batch[0]))
            return batch

        def training_step(self, batch, batch_idx):
            x, y = batch
            self.rows_now = len(x)
            x = x + 0.01 * torch.randn_like(x) + 0.01 * random.random() + 0.01 * np.random.rand()
            x = x + 0.01 * torch.rand(len(x), 1, generator=self.own)
            device.work("forward", len(x))
            hidden = self.frozen(self.hidden(self.norm(x))).relu()
            hidden = InBackward.apply(hidden, device.work)
            logits = self.head(self.drop(hidden))
            loss = nn.functional.cross_entropy(logits, y)
            self.accuracy(logits, y)
            self.seen.update(loss.detach())
            self.average += logits.detach().mean(0)
            self.steps += 1
            self.outputs.append(loss.detach())
            self.nested["list"][0].append(self.steps)
            self.nested["set"].add(9)
            self.nested["deque"].extend([5, 6])
            self.last = logits.detach()
            self.log("loss", loss, prog_bar=True)
            self.log_dict({"accuracy": self.accuracy, "twice": 2 * loss})
            self.logger.log_metrics({"by_hand": loss.item()})
            self.losses.append(loss.item())
            return {"loss": loss, "logits": logits}

        def configure_optimizers(self):
            if optimizer == "adam":
                made = Adam(self.parameters(), lr=0.01)
            else:
                made = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
            if options.get("estimate"):
                steps = self.trainer.estimated_stepping_batches
                return [made], [torch.optim.lr_scheduler.OneCycleLR(made, 0.1, total_steps=steps)]
            if options.get("bare"):
                return made
            return [made], [torch.optim.lr_scheduler.StepLR(made, 1)]

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            if options.get("warmup"):
                self.lr_schedulers().step()

    torch.manual_seed(0)
    module = Module()
    return module


def rows_of_numbers():
    x = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, torch.arange(ROWS) % CLASSES)


def state_of(trainer, module):
    """All that must not change, copied by means of its own."""
    optimizer = trainer.optimizers[0]
    return {
        "parameters": {name: p.detach().clone() for name, p in module.named_parameters()},
        "buffers": {name: b.clone() for name, b in module.named_buffers()},
        "accuracy": [v.clone() for v in module.accuracy.metric_state.values()],
        "seen": [*module.seen.metric_state["value"]],
        "updates": (module.accuracy.update_count, module.seen.update_count),
        "optimizer": {
            "groups": [{**g, "params": len(g["params"])} for g in optimizer.param_groups],
            "state": [dict(optimizer.state[p]) for p in optimizer.state],
            "attributes": sorted(vars(optimizer)),
        },
        "schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
        "random": [random.getstate(), list(np.random.get_state()), torch.get_rng_state()],
        "own": module.own.get_state(),
        "modes": [m.training for m in module.modules()],
        "gradients": [p.grad for p in module.parameters()],
        "plain": [module.steps, list(module.outputs), module.last, list(module.losses)],
        "nested": [repr(module.nested), *map(id, module.nested.values())],
        "attributes": sorted(vars(module)),
        "trainer": [trainer.global_step, trainer.current_epoch],
        "watchers": [*map(id, trainer.callbacks), *map(id, trainer.loggers), id(trainer.profiler)],
        "identities": [id(p) for p in module.parameters()] + [id(b) for b in module.buffers()],
    }


class Run:
    """A fit of a module behind the guard, on a device that is counted."""

    def __init__(self, module, device, where=None, *, data=None, pl=lightning.pytorch, **options):
        guard, callbacks = options.pop("guard", "accumulate"), options.pop("callbacks", ())
        home = HOMES[pl]
        if data is None:
            data = home.FastDataModule.from_datasets(
                rows_of_numbers(), batch_size=BATCH, guard=guard, options=INLINE, seed=1
            )
        self.module, self.data, self.states, self.tried = module, data, [], []
        own = getattr(device, "clock", lambda: 0.0)
        self.guard = home.BatchSizeGuard(reader=device, clock_s=own)
        run = self

        class Watch(pl.Callback):
            def on_fit_start(self, trainer, pl_module):
                run.tried = [*getattr(device, "rows_tried", ())]
                if hasattr(pl_module, "own"):
                    run.states.append(state_of(trainer, pl_module))

        logger = where is not None and pl.loggers.CSVLogger(where, name="", version="")
        quiet = ("enable_progress_bar", "enable_model_summary", "enable_checkpointing")
        self.ckpt = options.pop("ckpt", None)
        self.trainer = pl.Trainer(
            **{"max_epochs": 1, "accelerator": "cpu", "devices": 1, "logger": logger}
            | dict.fromkeys(quiet, False)
            | options,
            callbacks=[Watch(), *([self.guard] if guard else []), *callbacks, Watch()],
            log_every_n_steps=1,
            num_sanity_val_steps=0,
        )
        pl.seed_everything(3, verbose=False)

    def __call__(self):
        self.trainer.fit(self.module, datamodule=self.data, ckpt_path=self.ckpt)
        return self

    @property
    def decision(self):
        return self.guard.decision

    def assert_restored(self):
        before, after = self.states
        for name, value in before.items():
            assert alike(value, after[name]), name


# --- everything is as before -------------------------------------------------------------------


@each(
    ("pl", "options"),
    [
        (lightning.pytorch, {}),
        (lightning.pytorch, {"optimizer": "sgd", "bare": True}),
        (pytorch_lightning, {"optimizer": "sgd", "warmup": True}),
    ],
)
def test_everything_is_restored_bit_for_bit(pl, tmp_path, options):
    device = Steps()
    run = Run(module_for(device, pl=pl, **options), device, tmp_path, pl=pl)()
    assert set(run.tried) == {BATCH}
    run.assert_restored()
    assert run.decision.action == "keep"


def test_training_after_the_guard_is_the_training_without_it(tmp_path):
    runs = []
    for guard in ("off", "accumulate"):
        device, where = Steps(), tmp_path / guard
        run = Run(module_for(device), device, where, guard=guard, gradient_clip_val=0.5)()
        metrics = Path(where, "metrics.csv").read_text()
        parameters = state_of(run.trainer, run.module)["parameters"]
        runs.append([parameters, run.module.losses, metrics])
    assert alike(*runs)
    assert len(runs[0][1]) == ROWS // BATCH


@each("where", ["before_transfer", "after_transfer", "forward", "backward", "optimizer"])
@each(("total", "tried"), [(8, {16, 8, 4}), (4, {16, 8, 4, 2})])
def test_out_of_memory_anywhere_is_undone_and_the_chosen_size_trains(tmp_path, where, total, tried):
    device = Steps(where, total=total * GIB)
    run = Run(module_for(device), device, tmp_path)()
    assert set(run.tried) == tried
    run.assert_restored()
    chosen = run.decision.batch_size
    assert (run.decision.action, chosen) == ("accumulate", min(tried))
    assert device.fixed + device.per_row * chosen <= device.total - reserve_bytes(device.total)
    assert set(device.rows_tried[len(run.tried) :]) == {chosen}
    assert chosen * run.decision.accumulate_grad_batches == BATCH
    assert run.trainer.global_step == ROWS // BATCH


def test_another_error_is_raised_after_everything_is_restored(tmp_path):
    device = Steps()

    def work(where, rows):
        if where == "optimizer":
            raise RuntimeError("mat1 and mat2 do not fit")

    device.work = work
    run = Run(module_for(device), device, tmp_path)
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        run()
    assert any("16 samples" in note and "'off'" in note for note in caught.value.__notes__)
    run.states.append(state_of(run.trainer, run.module))
    run.states[1]["random"] = run.states[0]["random"]  # put back behind the error, drawn from since
    run.assert_restored()


def test_the_gradient_scaler_is_restored_and_does_not_hide_the_optimizer_state(tmp_path):
    device = Steps()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)  # overflows in half precision
    module, states, seen = module_for(device, "sgd"), [], []
    step = type(module).training_step

    def training_step(self, batch, batch_idx):
        states.append(len(self.optimizers().optimizer.state))
        return step(self, batch, batch_idx)

    type(module).training_step = training_step

    class Watch(lightning.pytorch.Callback):
        def on_fit_start(self, trainer, pl_module):
            seen.append((dict(vars(scaler)), list(states)))

    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    run = Run(module, device, tmp_path, plugins=[plugin], callbacks=[Watch()])
    run.trainer.callbacks.insert(0, Watch())
    run()
    assert seen[0][0] == seen[1][0]
    first, second, *_ = seen[1][1]
    assert first == 0 < second


# --- the steps are real ------------------------------------------------------------------------


@each("owner", ["datamodule", "module", "both"])
def test_a_tried_step_calls_the_data_hooks_as_the_first_real_batch_does(owner):
    trace = []

    def traced(kind, label):
        def on_before(self, batch, dataloader_idx):
            batch = kind.on_before_batch_transfer(self, batch, dataloader_idx)
            trace.append((label, "before", type(batch), batch[0].dtype, dataloader_idx))
            return batch

        def on_after(self, batch, dataloader_idx):
            batch = kind.on_after_batch_transfer(self, batch, dataloader_idx)
            trace.append((label, "after", type(batch), batch[0].dtype, dataloader_idx))
            return batch

        hooks = {"on_before_batch_transfer": on_before, "on_after_batch_transfer": on_after}
        return type(kind.__name__, (kind,), hooks)

    class Module(Keeps):
        def training_step(self, batch):
            trace.append(("step", batch[0].dtype, self.training, torch.is_grad_enabled()))
            return batch[0].mean() * self.scale

    module = (traced(Module, "module") if owner != "datamodule" else Module)()
    kind = traced(FastDataModule, "datamodule") if owner != "module" else FastDataModule
    data = kind.from_datasets(
        rows_of_numbers(), batch_size=BATCH, guard="accumulate", options=INLINE
    )
    run = Run(module, Steps(), data=data, limit_train_batches=1, precision="bf16-true")()
    each_step = len(trace) // 4
    parts = [trace[i * each_step : (i + 1) * each_step] for i in range(4)]
    assert each_step == (5 if owner == "both" else 3)
    assert parts == [parts[0]] * 4  # three steps, then the real batch
    assert run.decision.action == "keep"


def test_callbacks_and_profilers_do_not_see_the_steps(tmp_path):
    calls = []

    class Sees(lightning.pytorch.Callback):
        def on_before_backward(self, *args):
            calls.append("backward")

        def on_before_optimizer_step(self, *args):
            calls.append("step")

    device = Steps()
    run = Run(module_for(device), device, tmp_path, callbacks=[Sees()], profiler="simple")()
    assert calls == ["backward", "step"] * (ROWS // BATCH)
    recorded = run.trainer.profiler.recorded_durations
    assert len(recorded["run_training_batch"]) == ROWS // BATCH
    hook = "[LightningModule]Module.on_before_optimizer_step"
    assert len(recorded[hook]) == ROWS // BATCH


def test_a_compiled_module_is_compiled_for_the_real_size_only():
    compiled_for = []

    def backend(graph, inputs):
        compiled_for.append([d for i in inputs if hasattr(i, "shape") for d in i.shape])
        return graph.forward

    class Module(Keeps):
        fast = staticmethod(torch.compile(lambda x: x.sin() * 2, backend=backend))

        def training_step(self, batch, batch_idx):
            return self.fast(batch[0]).mean() * self.scale

    assert Run(Module(), Steps())().decision.action == "keep"
    assert compiled_for == [[BATCH, FEATURES]]


@pytest.mark.parametrize("way", ["off", "auto"])
def test_steps_are_tried_with_the_batches_on_the_device_that_the_training_has(way):
    arrived, alive, left = [], {"tried": [], "trained": []}, []

    def count():
        return sum(batch() is not None for batch in arrived)

    class Module(Keeps):
        now = "tried"

        def on_train_start(self):
            self.now = "trained"

        def on_after_batch_transfer(self, batch, dataloader_idx):
            x = batch[0].clone()  # as a device has it
            arrived.append(weakref.ref(x))
            return [x]

        def training_step(self, batch, batch_idx):
            alive[self.now].append(count())
            device.take(GIB * len(batch[0]))
            return batch[0].mean() * self.scale

    device = Device(8 * GIB)
    reset = device.reset_peak
    device.reset_peak = lambda: (left.append(count()), reset())
    data = OnStreams.from_datasets(
        TensorDataset(torch.randn(64, 4)), batch_size=16, guard="accumulate", prefetch=way,
        options=INLINE,
    )  # fmt: skip
    run = Run(Module(), device, data=data)()
    assert run.decision.batch_size == 4
    assert set(alive["tried"]) == {1 if way == "off" else 2}
    assert max(alive["trained"]) <= max(alive["tried"])
    assert set(left) == {0}  # nothing of a step is alive when memory is read, nor of one that fails


# --- deciding and applying ---------------------------------------------------------------------


def test_memory_that_another_process_takes_meanwhile_counts(tmp_path):
    decisions = []
    for grow in (0, 8 * GIB):
        device = Steps(total=20 * GIB)
        device.others_grow = grow
        decisions.append(Run(module_for(device), device, tmp_path)().decision)
    assert [each.action for each in decisions] == ["keep", "accumulate"]
    assert decisions[0].probes[0].budget_bytes - decisions[1].probes[0].budget_bytes == 8 * GIB
    assert decisions[1].batch_size == 8
    assert decisions[1].reason.endswith("Batch normalisation now averages over 8 samples.")


@each("estimate", [False, True])
def test_accumulation_keeps_the_optimizer_steps_also_if_the_loader_was_built_before(
    tmp_path, estimate
):
    device = Steps(total=10 * GIB)
    sizes = []

    class Sizes(lightning.pytorch.Callback):
        def on_train_start(self, trainer, pl_module):
            sizes.append((trainer.datamodule.batch_size, trainer.accumulate_grad_batches))

    module = module_for(device, "sgd", estimate=estimate)
    run = Run(module, device, tmp_path, accumulate_grad_batches=3, callbacks=[Sizes()])()
    assert sizes == [(8, 6)]
    assert set(device.rows_tried[len(run.tried) :]) == {8}
    assert run.trainer.global_step == ROWS // (3 * BATCH)
    assert run.data.notes == [run.decision.reason]
    assert "Each optimizer step still sees 48 samples." in run.decision.reason
    assert (run.data.batch_size, run.trainer.accumulate_grad_batches) == (BATCH, 3)  # again


class Takes(Keeps):
    """Takes memory of a counted device in each training step, and remembers the sizes."""

    def __init__(self, device):
        super().__init__()
        self.device_memory, self.sizes, self.ids = device, [], []

    def training_step(self, batch, batch_idx):
        self.device_memory.work("forward", len(batch[0]))
        if self.trainer.state.stage == "train" and self.trainer.callbacks:
            self.sizes.append(len(batch[0]))
            self.ids += batch[1].tolist()
        return batch[0].float().mean() * self.scale


def numbered(rows):
    return TensorDataset(torch.randn(rows, 4), torch.arange(rows))


def made(
    device, guard="accumulate", *, batch_size=32, rows=64, model=None, kind=FastDataModule, **how
):
    model = Takes(device) if model is None else model
    data = kind.from_datasets(numbered(rows), batch_size=batch_size, guard=guard, options=INLINE)
    return Run(model, device, data=data, **how)


def fit(*args, **how):
    return made(*args, **how)()


def narrow():
    return Steps(fixed=0, per_row=100 * MIB, total=2 * GIB)  # 15 rows fit with the reserve


def test_accumulate_loads_smaller_batches_and_each_sample_once(capsys):
    callback = DataThroughputCallback(report=False)
    run = fit(narrow(), callbacks=[callback])
    assert run.module.sizes == [8] * 8
    assert sorted(run.module.ids) == list(range(64))
    assert run.trainer.global_step == 2
    assert callback.report.notes == (run.decision.reason,)
    printed = " ".join(capsys.readouterr().out.split())
    assert "the loader now gives 8 samples at a time" in printed


def test_the_asked_sizes_are_back_after_an_error():
    class Fails(Takes):
        def on_train_epoch_end(self):
            data = self.trainer.datamodule
            assert (data.batch_size, self.trainer.accumulate_grad_batches) == (8, 4)
            raise ZeroDivisionError

    device = narrow()
    run = made(device, model=Fails(device))
    with pytest.raises(ZeroDivisionError):
        run()
    assert (run.data.batch_size, run.trainer.accumulate_grad_batches) == (32, 1)


def saved(tmp_path, *args, **how):
    """Return a run that has ended, and where it is saved."""
    run = fit(narrow(), *args, **how)
    run.trainer.save_checkpoint(tmp_path / "one.ckpt")
    return run, tmp_path / "one.ckpt"


@each(
    ("guard", "how"),
    [
        ("accumulate", {}),
        ("accumulate", {"batch_size": "auto", "rows": 640}),
        ("warn", {}),
        ("raise", {}),
    ],
)
def test_a_run_goes_on_with_the_sizes_that_it_was_saved_with_whatever_guards_it(
    tmp_path, guard, how
):
    first, path = saved(tmp_path, **how)
    again = fit(narrow(), guard, ckpt=path, max_epochs=2, **how)
    assert again.tried == []
    assert set(again.module.sizes) == set(first.module.sizes) == {8}
    assert again.trainer.global_step == 2 * first.trainer.global_step
    assert (again.data.batch_size, again.trainer.accumulate_grad_batches) == (32, 1)


def test_a_run_goes_on_with_its_sizes_where_nothing_tells_of_memory(tmp_path, monkeypatch):
    first, path = saved(tmp_path)
    monkeypatch.setattr(guard_callback, "memory_reader", lambda _: None)
    again = made(narrow(), "warn", ckpt=path, max_epochs=2)
    again.guard.reader = None
    again()
    assert set(again.module.sizes) == set(first.module.sizes) == {8}


def test_a_run_that_resumes_without_sizes_is_not_tried(tmp_path):
    _, path = saved(tmp_path, "off", batch_size=8)
    again = fit(narrow(), batch_size=8, ckpt=path, max_epochs=2)
    assert "resumed" in again.decision.reason
    assert again.tried == []


@each("guard", ["accumulate", "auto"])
def test_where_not_even_one_row_fits_the_training_ends_before_its_first_step(guard):
    device = Steps(total=GIB)
    model = Takes(device)
    how = {"batch_size": "auto", "rows": 400} if guard == "auto" else {"guard": guard}
    with pytest.raises(BatchSizeError, match="not even one sample fits"):
        fit(device, model=model, **how)
    assert model.sizes == []


@each("guard", ["warn", "raise", "off"])
def test_others_try_nothing(guard):
    run = fit(Steps(total=1000 * GIB), guard)
    if guard == "off":
        assert run.decision is None
    else:
        assert (run.decision.action, run.decision.batch_size) == ("skipped", 32)
        assert f'guard="{guard}" tries nothing' in run.decision.reason
    assert run.tried == run.data.notes == []
    assert run.module.sizes == [32, 32]


def test_transforms_on_the_device_are_part_of_the_steps():
    device = Device(2 * GIB, raises=False)

    class Upscale(nn.Module):
        def forward(self, batch):
            image, label = batch
            device.take(len(image) * 100 * MIB)
            assert image.shape[1:] == (8, 8, 3)  # behind the pipeline
            return image.float(), label

    class Learns(Pixels):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8 * 8 * 3, 1)

    data = FastDataModule.from_datasets(
        Images(64), batch_size=32, guard="accumulate", augment=A.RandomCrop(8, 8), augment_on="gpu"
    )
    data.register_transform(Upscale())
    assert Run(Learns(), device, data=data)().decision.batch_size == 8


def test_a_trainer_without_cuda_gets_no_guard():
    trainer = quiet_trainer()
    before = list(trainer.callbacks)
    data = FastDataModule.from_datasets(numbered(8), batch_size=4, guard="raise", options=INLINE)
    trainer.fit(Keeps(), datamodule=data)
    assert trainer.callbacks == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_trainer_on_cuda_gets_one_guard_and_it_comes_first():
    trainer = quiet_trainer(accelerator="cuda")
    for _ in range(2):
        trainer.fit_loop.epoch_progress.reset()
        data = FastDataModule.from_datasets(numbered(8), batch_size=4, guard="accumulate")
        trainer.fit(Keeps(), datamodule=data)
    assert [isinstance(own, BatchSizeGuard) for own in trainer.callbacks[:2]] == [True, False]
    assert trainer.callbacks[0].decision.action == "keep"


def test_batches_of_several_loaders_are_tried_as_they_make_them():
    seen = []

    class Both(Keeps):
        def training_step(self, batch, batch_idx):
            seen.append((batch["few"].shape, batch["many"].shape))
            device.take(GIB * len(batch["many"]))
            return batch["few"].mean() * self.scale

    numbers, device = torch.randn(40, 2), Device(6 * GIB)
    loaders = {
        "few": DataLoader(numbers, 4),
        "many": DataLoader(numbers, 8, collate_fn=lambda rows: torch.stack(rows).flatten(1)),
    }
    data = FastDataModule.from_loaders(loaders, guard="accumulate", num_workers=0)
    assert Run(Both(), device, data=data)().decision.batch_size == 2
    assert list(dict.fromkeys(seen)) == [((4, 2), (8, 2)), ((2, 2), (4, 2))]


# --- where steps cannot be tried ---------------------------------------------------------------


class ByHand(Keeps):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))


class Iterating(Keeps):
    def training_step(self, dataloader_iter):
        batch, number, _ = next(dataloader_iter)
        return super().training_step(batch, number)


class OfLBFGS(Keeps):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Lazy(Keeps):
    def __init__(self):
        super().__init__()
        self.layer = nn.LazyLinear(1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).mean()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(numbered(16))


@each(
    ("why", "kind", "dataset", "callbacks"),
    [
        ("optimizes by hand", ByHand, numbered(16), ()),
        ("takes the loader's iterator", Iterating, numbered(16), ()),
        ("LBFGS", OfLBFGS, numbered(16), ()),
        ("lazy layers", Lazy, numbered(16), ()),
        ("is a stream", Keeps, Stream(), ()),
        ("batch sampler", Keeps, DataLoader(numbered(16), batch_sampler=[[0, 1], [3]]), ()),
        (
            "GradientAccumulationScheduler", Keeps, numbered(16),
            [lightning.pytorch.callbacks.GradientAccumulationScheduler({0: 2})],
        ),
    ],
)  # fmt: skip
def test_where_steps_cannot_be_tried_the_guard_says_why_and_changes_nothing(
    why, kind, dataset, callbacks
):
    if isinstance(dataset, DataLoader):
        data = FastDataModule.from_loaders(dataset, guard="accumulate")
    else:
        how = {"batch_size": 8, "guard": "accumulate", "options": INLINE}
        data = FastDataModule.from_datasets(dataset, **how)
    before = data.batch_size
    run = Run(kind(), Steps(total=3 * GIB), data=data, callbacks=callbacks)()
    assert run.decision.action == "skipped"
    assert why in run.decision.reason
    assert data.notes == [run.decision.reason]
    assert data.batch_size == before


def test_the_model_is_copied_to_host_memory_once_and_put_back_once(monkeypatch):
    copied, put_back, real = [], [], snapshots._snapshot_tensor

    def counted(tensor):
        copied.append(tensor.nbytes)
        undo = real(tensor)

        def back():
            put_back.append(tensor.nbytes)
            undo()

        return back

    monkeypatch.setattr(snapshots, "_snapshot_tensor", counted)
    run = fit(Steps(fixed=0, per_row=MIB), "warn", batch_size="auto", rows=640)
    assert len(run.decision.probes) > 2
    assert sum(copied) == sum(put_back) == sum(p.nbytes for p in run.module.parameters())


@each("guard", ["accumulate", "auto"])
def test_without_room_in_host_memory_for_a_copy_of_the_model_nothing_is_tried(monkeypatch, guard):
    monkeypatch.setattr(guard_callback, "_COPY_SHARE", 2**62)
    auto = guard == "auto"
    run = fit(
        Steps(total=1000 * GIB), guard="warn" if auto else guard, batch_size=guard if auto else 32
    )
    assert run.decision.action == "skipped"
    assert "a copy of the model takes 0 MiB of host memory" in run.decision.reason
    assert run.tried == []
    assert run.module.sizes == [32, 32]


# --- batch_size="auto" -------------------------------------------------------------------------


def test_the_smallest_size_that_trains_as_many_rows_a_second_is_trained_with():
    device = Steps(fixed=0, per_row=MIB)
    run = fit(device, "warn", batch_size="auto", rows=4000, limit_train_batches=3)
    assert list(dict.fromkeys(run.tried)) == [4, 8, 16, 32, 64, 128, 256]
    assert (run.decision.action, run.decision.batch_size) == ("chosen", 64)
    assert set(run.module.sizes) == {64}
    assert 'batch_size="auto": 64 samples' in run.decision.reason
    assert "64: 6400" in run.decision.reason
    assert run.data.batch_size == 32  # as before, for another fit
    assert run.data.notes == [run.decision.reason]


def test_of_what_does_not_fit_and_of_less_than_ten_steps_an_epoch_nothing_is_chosen():
    small = fit(Steps(fixed=0, per_row=200 * MIB, total=4 * GIB), batch_size="auto", rows=4000)
    assert small.decision.batch_size == 16  # 17 fit
    assert fit(Steps(), batch_size="auto", rows=300).decision.batch_size == 30
    few = fit(Steps(fixed=0, total=4 * GIB), batch_size="auto", rows=400)
    assert few.decision.batch_size == 2  # less than it begins with


@each("asked", [64, 4096, "auto"])
@each("length", [50, 1000])
def test_a_size_that_is_chosen_has_run_however_long_the_dataset_is(asked, length):
    device = Steps(fixed=0, per_row=100 * MIB, total=4 * GIB)  # 35 fit with the reserve
    run = fit(device, batch_size=asked, rows=length)
    assert run.decision.batch_size in run.tried
    assert run.decision.batch_size <= 35
    assert len(set(run.tried)) <= 12
    assert sum(run.module.sizes) == length


def test_nothing_is_written_and_the_loader_of_the_training_is_made_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaders = []

    class Counts(FastDataModule):
        def train_dataloader(self):
            loaders.append(self.batch_size)
            return super().train_dataloader()

    run = fit(narrow(), batch_size=4096, rows=400, kind=Counts)
    assert loaders == [run.decision.batch_size]
    assert not any(tmp_path.iterdir())


def test_without_a_gpu_it_is_said_and_32_are_taken():
    data = FastDataModule.from_datasets(numbered(64), batch_size="auto", options=INLINE)
    model = Keeps()
    with pytest.warns(FastDataWarning, match="training is on cpu: batches have 32 samples"):
        quiet_trainer().fit(model, datamodule=data)
    assert {len(batch[0]) for batch in model.seen} == {32}


def test_nobody_would_choose_it():
    with pytest.raises(OptionsError, match='guard="off" contradict'):
        FastDataModule("auto", guard="off")


class Sentences(torch.utils.data.Dataset):
    """Short ones first, the longest of 64 words in the end."""

    def __len__(self):
        return 640

    def __getitem__(self, index):
        return torch.zeros(1 + index // 10)


class OfWords(Takes):
    def training_step(self, batch, batch_idx):
        self.device_memory.work("forward", batch.numel() / 64)
        return batch.mean() * self.scale


def test_what_is_padded_is_tried_nearly_as_long_as_the_longest():
    device = Steps(fixed=0, per_row=100 * MIB, total=4 * GIB)  # and 64 words; 35 of these fit
    data = FastDataModule.from_datasets(
        Sentences(), batch_size=320, guard="accumulate", options=INLINE,
        collate_fn=partial(nn.utils.rnn.pad_sequence, batch_first=True),
    )  # fmt: skip
    assert Run(OfWords(device), device, data=data)().decision.batch_size == 20

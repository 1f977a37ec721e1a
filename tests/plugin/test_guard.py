from __future__ import annotations

import importlib
import random
import weakref
from collections import deque
from pathlib import Path

import lightning.pytorch
import numpy as np
import pytest
import pytorch_lightning
import torch
from misses import each
from plugin.counted_device import GIB, Device
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_fastdata.host.memory import reserve_bytes
from lightning_fastdata.plugin.guard.snapshots import Snapshot
from lightning_fastdata.plugin.guard.steps import apply_decision, run_guard

ROWS = 48
BATCH = 16
FEATURES = 6
CLASSES = 3

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning|pytorch_lightning|torch")


@pytest.fixture
def pl():
    return lightning.pytorch


class Steps(Device):
    """A modelled device: a step of ``rows`` rows takes ``fixed + per_row * rows`` bytes.

    The module under test tells it, at the place named ``where``, how many rows are at work.
    """

    def __init__(self, where="forward", fixed=GIB, per_row=GIB, total=1000 * GIB):
        super().__init__(total)
        self.where, self.fixed, self.per_row = where, fixed, per_row
        self.rows_tried = []
        self.others = self.others_grow = 0

    def work(self, where, rows):
        self.rows_tried.append(rows)
        if where == self.where:
            self.take(self.fixed + self.per_row * rows)

    def free_bytes(self):
        free = self.total - self.others
        self.others = self.others_grow
        return free


class WorkInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, device):
        ctx.device, ctx.rows = device, len(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.device.work("backward", ctx.rows)
        return grad, None


def module_for(pl, device, optimizer="adam", **options):
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
            hidden = WorkInBackward.apply(self.frozen(self.hidden(self.norm(x))).relu(), device)
            logits = self.head(self.drop(hidden))
            loss = nn.functional.cross_entropy(logits, y)
            self.accuracy(logits, y)
            self.seen.update(loss.detach())
            self.average += logits.detach().mean(0)
            self.steps += 1
            self.outputs.append(loss.detach())
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


def data_for(pl, batch_size=BATCH):
    class Data(pl.LightningDataModule):
        def __init__(self):
            super().__init__()
            self.batch_size = batch_size
            generator = torch.Generator().manual_seed(1)
            x = torch.randn(ROWS, FEATURES, generator=generator)
            self.dataset = TensorDataset(x, torch.arange(ROWS) % CLASSES)

        def train_dataloader(self):
            return DataLoader(self.dataset, batch_size=self.batch_size, shuffle=True)

    return Data()


def batch_of(rows):
    torch.rand(3), random.random(), np.random.rand()  # a loader draws, too
    return torch.randn(rows, FEATURES), torch.arange(rows) % CLASSES


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
        "attributes": sorted(vars(module)),
        "trainer": [trainer.global_step, trainer.current_epoch, trainer.accumulate_grad_batches],
        "watchers": [*map(id, trainer.callbacks), *map(id, trainer.loggers), id(trainer.profiler)],
        "identities": [id(p) for p in module.parameters()] + [id(b) for b in module.buffers()],
    }


def same(one, other):
    if isinstance(one, (torch.Tensor, np.ndarray)):
        return type(one) is type(other) and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def guard_callback(pl, device, policy="accumulate", apply=True, **options):
    class Guard(pl.Callback):
        before = after = decision = sentence = error = None

        def on_fit_start(self, trainer, pl_module):
            self.before = state_of(trainer, pl_module) if hasattr(pl_module, "own") else None
            size = options.get("batch_size", trainer.datamodule.batch_size)
            own = options.get("batch_of", batch_of)
            try:
                self.decision = run_guard(
                    trainer, pl_module, batch_of=own, batch_size=size, policy=policy, reader=device
                )
            finally:
                self.after = state_of(trainer, pl_module) if self.before else None
                self.tried, device.rows_tried = device.rows_tried, []
            if apply:
                self.sentence = apply_decision(self.decision, trainer, trainer.datamodule)

    return Guard()


def fit(pl, module, data, callbacks=(), where=None, **options):
    logger = False
    if where is not None:
        csv = importlib.import_module(f"{pl.__name__}.loggers").CSVLogger
        logger = csv(where, name="", version="")
    quiet = ("enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    trainer = pl.Trainer(
        **{"max_epochs": 2, "accelerator": "cpu", "devices": 1, "logger": logger}
        | dict.fromkeys(quiet, False)
        | options,
        callbacks=[*callbacks],
        log_every_n_steps=1,
    )
    pl.seed_everything(3, verbose=False)
    trainer.fit(module, datamodule=data, ckpt_path=None)
    return trainer


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
    guard = guard_callback(pl, device)
    fit(pl, module_for(pl, device, **options), data_for(pl), [guard], tmp_path, max_epochs=1)
    assert {4, 8, 16} == set(guard.tried)
    for name, value in guard.before.items():
        assert same(value, guard.after[name]), name
    assert guard.decision.action == "keep"


def test_training_after_the_guard_is_the_training_without_it(pl, tmp_path):
    runs = []
    for guarded in (False, True):
        device = Steps()
        module, data = module_for(pl, device), data_for(pl)
        callbacks = [guard_callback(pl, device)] if guarded else []
        where = tmp_path / str(guarded)
        trainer = fit(pl, module, data, callbacks, where, gradient_clip_val=0.5)
        metrics = Path(where, "metrics.csv").read_text()
        runs.append([state_of(trainer, module)["parameters"], module.losses, metrics])
    assert same(*runs)
    assert len(runs[0][1]) == 2 * ROWS // BATCH


PLACES = ["before_transfer", "after_transfer", "forward", "backward", "optimizer"]


@pytest.mark.cases(4)
@each("where", PLACES)
@each(("total", "tried"), [(8, {4, 8, 2}), (4, {4, 2, 3})])
def test_out_of_memory_anywhere_is_undone_and_the_chosen_size_trains(
    pl, tmp_path, where, total, tried
):
    device = Steps(where, fixed=GIB, per_row=GIB, total=total * GIB)
    guard = guard_callback(pl, device)
    trainer = fit(
        pl,
        module_for(pl, device),
        data_for(pl),
        [guard],
        tmp_path,
        max_epochs=1,
    )
    assert set(guard.tried) == tried
    for name, value in guard.before.items():
        assert same(value, guard.after[name]), name
    chosen = guard.decision.batch_size
    assert guard.decision.action == "accumulate"
    assert device.fixed + device.per_row * chosen <= device.total - reserve_bytes(device.total)
    assert max(device.rows_tried) == chosen
    assert chosen * guard.decision.accumulate_grad_batches == BATCH
    assert trainer.global_step == ROWS // BATCH


def test_after_out_of_memory_nothing_of_the_step_is_alive_when_memory_is_read_again(pl):
    made, alive = weakref.WeakSet(), []
    device = Steps(total=8 * GIB)
    reset = device.reset_peak
    device.reset_peak = lambda: (alive.append(len(made)), reset())

    class Module(type(automatic(pl))):
        def training_step(self, batch, batch_idx):
            hidden = self.layer(batch[0])
            self.kept = hidden
            made.update([batch[0], hidden])
            device.work("forward", len(batch[0]))
            return hidden.mean()

    guard = guard_callback(pl, device, batch_of=lambda rows: (Doubled(rows),))
    fit(pl, Module(), data_for(pl), [guard], max_epochs=1)
    assert set(guard.tried) == {4, 8, 2}
    assert alive == [0] * 7  # at the start, before and after each size


class Doubled:
    """Becomes a tensor on its way to the device, so that nobody else holds it."""

    def __init__(self, rows):
        self.rows = rows

    def to(self, device, **_):
        return torch.ones(self.rows, FEATURES, device=device)


def test_another_error_is_raised_after_everything_is_restored(pl, tmp_path):
    device = Steps()

    def work(where, rows):
        if where == "optimizer" and rows == 8:
            raise RuntimeError("mat1 and mat2 do not fit")

    device.work = work
    guard = guard_callback(pl, device)
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        fit(pl, module_for(pl, device), data_for(pl), [guard], tmp_path)
    assert any("8 rows" in note and "'off'" in note for note in caught.value.__notes__)
    for name, value in guard.before.items():
        assert same(value, guard.after[name]), name


def test_the_gradient_scaler_is_restored_and_does_not_hide_the_optimizer_state(pl, tmp_path):
    from lightning.pytorch.plugins import MixedPrecision

    device = Steps()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)  # overflows in half precision
    module, states = module_for(pl, device, "sgd"), []
    step = type(module).training_step

    def training_step(self, batch, batch_idx):
        states.append(len(self.optimizers().optimizer.state))
        return step(self, batch, batch_idx)

    type(module).training_step = training_step
    seen = []

    class Watch(pl.Callback):
        def on_fit_start(self, trainer, pl_module):
            seen.append((dict(vars(scaler)), list(states)))

    guard = guard_callback(pl, device)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    callbacks = [Watch(), guard, Watch()]
    fit(pl, module, data_for(pl), callbacks, tmp_path, plugins=[plugin])
    assert seen[0][0] == seen[1][0]
    first, second, *_ = seen[1][1]
    assert first == 0 < second


# --- the steps are real ------------------------------------------------------------------------


@each("owner", ["datamodule", "module", "both"])
def test_a_tried_step_calls_the_data_hooks_as_the_first_real_batch_does(pl, owner):
    trace = []

    def traced(kind, label):
        def on_before(self, batch, dataloader_idx):
            trace.append((label, "before", type(batch), batch.dtype, dataloader_idx))
            return batch

        def on_after(self, batch, dataloader_idx):
            trace.append((label, "after", type(batch), batch.dtype, dataloader_idx))
            return batch

        hooks = {"on_before_batch_transfer": on_before, "on_after_batch_transfer": on_after}
        return type(kind.__name__, (kind,), hooks)

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(FEATURES, 1)

        def training_step(self, batch):
            trace.append(("step", batch.dtype, self.training, torch.is_grad_enabled()))
            return self.layer(batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    class Data(pl.LightningDataModule):
        batch_size = BATCH

        def train_dataloader(self):
            return DataLoader(torch.randn(ROWS, FEATURES), batch_size=self.batch_size)

    module = (traced(Module, "module") if owner != "datamodule" else Module)()
    data = (traced(Data, "datamodule") if owner != "module" else Data)()
    device = Steps()
    guard = guard_callback(pl, device, batch_of=lambda rows: torch.randn(rows, FEATURES))
    fit(pl, module, data, [guard], max_epochs=1, limit_train_batches=1, precision="bf16-true")
    each = len(trace) // 7
    parts = [trace[i * each : (i + 1) * each] for i in range(7)]
    assert each == 3
    assert parts == [parts[0]] * 7  # two steps at each of three sizes, then the real batch
    assert guard.decision.action == "keep"


def test_callbacks_and_profilers_do_not_see_the_steps(pl, tmp_path):
    calls = []

    class Watch(pl.Callback):
        def on_before_backward(self, *args):
            calls.append("backward")

        def on_before_optimizer_step(self, *args):
            calls.append("step")

    device = Steps()
    guard = guard_callback(pl, device)
    callbacks = [Watch(), guard]
    trainer = fit(pl, module_for(pl, device), data_for(pl), callbacks, tmp_path, profiler="simple")
    assert calls == ["backward", "step"] * (2 * ROWS // BATCH)
    recorded = trainer.profiler.recorded_durations
    assert len(recorded["run_training_batch"]) == 2 * ROWS // BATCH
    hook = "[LightningModule]Module.on_before_optimizer_step"
    hooks = [name for name in recorded if name.endswith("on_before_optimizer_step")]
    assert hook in hooks
    assert len(recorded[hook]) == 2 * ROWS // BATCH


def test_a_compiled_module_is_compiled_for_the_real_size_only(pl):
    compiled_for = []

    def backend(graph, inputs):
        compiled_for.append([d for i in inputs if hasattr(i, "shape") for d in i.shape])
        return graph.forward

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(FEATURES, 1)
            self.fast = torch.compile(lambda x: x.sin() * 2, backend=backend)

        def training_step(self, batch):
            return self.layer(self.fast(batch)).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    class Data(pl.LightningDataModule):
        batch_size = BATCH

        def train_dataloader(self):
            return DataLoader(torch.randn(ROWS, FEATURES), batch_size=self.batch_size)

    guard = guard_callback(pl, Steps(), batch_of=lambda rows: torch.randn(rows, FEATURES))
    fit(pl, Module(), Data(), [guard], max_epochs=1)
    assert compiled_for == [[BATCH, FEATURES]]


# --- deciding and applying ---------------------------------------------------------------------


def test_memory_that_another_process_takes_meanwhile_counts(pl, tmp_path):
    decisions = []
    for grow in (0, 8 * GIB):
        device = Steps(total=20 * GIB)
        device.others_grow = grow
        guard = guard_callback(pl, device)
        fit(pl, module_for(pl, device), data_for(pl), [guard], tmp_path)
        decisions.append(guard.decision)
    assert [each.action for each in decisions] == ["keep", "accumulate"]
    assert decisions[0].budget_bytes - decisions[1].budget_bytes == 8 * GIB
    assert decisions[1].batch_size == 8
    assert decisions[1].reason.endswith("Batch normalisation now averages over 8 rows.")


@each("estimate", [False, True])
def test_accumulation_keeps_the_optimizer_steps_also_if_the_loader_was_built_before(
    pl, tmp_path, estimate
):
    device = Steps(total=10 * GIB)
    module, data = module_for(pl, device, "sgd", estimate=estimate), data_for(pl)
    guard = guard_callback(pl, device)
    trainer = fit(pl, module, data, [guard], tmp_path, accumulate_grad_batches=3)
    assert (data.batch_size, trainer.accumulate_grad_batches) == (8, 6)
    assert set(device.rows_tried) == {8}
    assert trainer.global_step == 2 * ROWS // (3 * BATCH)
    assert guard.sentence == guard.decision.reason
    assert "Each optimizer step still sees 48 rows." in guard.sentence


# --- where steps cannot be tried ---------------------------------------------------------------


def by_hand(pl):
    class ByHand(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(FEATURES, 1)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.manual_backward(self.layer(batch[0]).mean())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    return ByHand()


def automatic(pl, **own):
    class Automatic(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = own.get("layer", nn.Linear)(*own.get("sizes", (FEATURES, 1)))

        def training_step(self, batch, batch_idx):
            loss = self.layer(batch[0]).mean()
            return loss if own.get("loss", True) else None

        def configure_optimizers(self):
            return own.get("optimizer", torch.optim.SGD)(self.parameters(), 0.1)

    return Automatic()


def iterating(pl):
    module = automatic(pl)

    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.layer(batch[0]).mean()

    type(module).training_step = training_step
    return module


def scheduler_of(pl):
    callbacks = importlib.import_module(f"{pl.__name__}.callbacks")
    return callbacks.GradientAccumulationScheduler({0: 2})


@each(
    ("why", "build", "options"),
    [
        ("below a batch size of 2", automatic, {"batch_size": 2}),
        ("fast_dev_run is on", automatic, {"fast_dev_run": True}),
        ("optimizes by hand", by_hand, {}),
        ("takes the loader's iterator", iterating, {}),
        ("returned no loss", lambda pl: automatic(pl, loss=False), {}),
        ("LBFGS", lambda pl: automatic(pl, optimizer=torch.optim.LBFGS), {}),
        ("lazy layers", lambda pl: automatic(pl, layer=nn.LazyLinear, sizes=(1,)), {}),
        ("GradientAccumulationScheduler", automatic, {"extra": scheduler_of}),
    ],
)
def test_where_steps_cannot_be_tried_the_guard_says_why_and_changes_nothing(
    pl, why, build, options
):
    options = {"max_epochs": 1, **options}
    data, module = data_for(pl), build(pl)
    guard_options = {key: options.pop(key) for key in ("batch_size",) if key in options}
    guard = guard_callback(pl, Steps(), **guard_options)
    extra = [options.pop("extra")(pl)] if "extra" in options else []
    fit(pl, module, data, [guard, *extra], **options)
    assert guard.decision.action == "skipped"
    assert why in guard.decision.reason
    assert guard.decision.accumulate_grad_batches == 1
    assert data.batch_size == BATCH
    assert guard.sentence == guard.decision.reason


def test_a_resumed_run_keeps_its_batch_size(pl, tmp_path):
    trainer = fit(pl, automatic(pl), data_for(pl), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    guard = guard_callback(pl, Steps(total=3 * GIB))
    again = pl.Trainer(
        max_epochs=2, accelerator="cpu", callbacks=[guard], logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    again.fit(automatic(pl), datamodule=data_for(pl), ckpt_path=tmp_path / "last.ckpt")
    assert guard.decision.action == "skipped"
    assert "resumed" in guard.decision.reason


# --- remembering -------------------------------------------------------------------------------


def test_remembered_containers_and_tensors_come_back_with_their_identities():
    class Holder(nn.Module):
        pass

    holder = Holder()
    holder.tensor = torch.tensor([1.0, float("nan"), -0.0])
    holder.nested = {"list": [1, [2, torch.ones(2)]], "set": {1, 2}, "deque": deque([1], maxlen=2)}
    holder.tied = holder.nested
    holder.wide = torch.zeros(1).expand(3)
    with torch.inference_mode():
        holder.inferred = torch.ones(2)
    tensor, nested, inner = holder.tensor, holder.nested, holder.nested["list"][1]
    undo = Snapshot(holder)
    for _ in range(2):  # as often as it is called
        holder.tensor.zero_()
        holder.tensor = None
        inner[1].mul_(3)
        inner.append(inner)
        nested["list"].clear()
        nested["set"].add(9)
        nested["deque"].extend([5, 6])
        del nested["set"]
        holder.added = 1
        with torch.inference_mode():
            holder.inferred.add_(1)
        undo()
        assert holder.tensor is tensor
        assert holder.tied is holder.nested is nested
        assert nested["list"][1] is inner
        np.testing.assert_array_equal(tensor.numpy(), [1.0, np.nan, -0.0])
        assert np.signbit(tensor[2].numpy())
        assert inner[0] == 2
        assert inner[1].tolist() == [1, 1]
        assert len(inner) == 2
        assert nested["set"] == {1, 2}
        assert list(nested["deque"]) == [1]
        assert holder.inferred.tolist() == [1, 1]
        assert not hasattr(holder, "added")

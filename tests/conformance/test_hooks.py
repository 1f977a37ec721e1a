"""Transfer hooks: who is called when, and that nobody's hook is lost."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from conformance.pieces import (
    Images,
    Linear,
    Pixels,
    Rows,
    RowsModule,
    add_one,
    make_trainer,
    quiet,
)
from lightning.pytorch import LightningDataModule
from misses import each
from torch.utils.data import DataLoader

from lightning_fastdata import FastDataModule
from lightning_fastdata.errors import BatchError

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Traced(Linear):
    """Writes down each of its transfer hooks, with the stage they ran in."""

    def __init__(self):
        super().__init__()
        self.trace = []

    def _note(self, name):
        trainer = self.trainer
        stage = "sanity" if trainer.sanity_checking else trainer.state.stage.value
        self.trace.append((stage, name))

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self._note("before")
        return super().on_before_batch_transfer(batch, dataloader_idx)

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self._note("transfer")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self._note("after")
        return super().on_after_batch_transfer(batch, dataloader_idx)


def test_row_1_hooks_run_in_lightnings_order_in_every_stage(tmp_path):
    model, module = Traced(), RowsModule(batch_size=16, length=32)
    module.register_transform(lambda batch: batch, stage="train")
    trainer = make_trainer(tmp_path, max_epochs=2, num_sanity_val_steps=1)
    trainer.fit(model, datamodule=module)
    once = ["before", "transfer", "after"]

    def steps(stage, count):
        return [(stage, name) for _ in range(count) for name in once]

    epoch = steps("train", 2) + steps("validate", 1)
    assert model.trace == steps("sanity", 1) + 2 * epoch
    for run, stage in ((trainer.validate, "validate"), (trainer.test, "test")):
        model.trace = []
        run(model, datamodule=module, verbose=False)
        assert model.trace == steps(stage, 1)
    model.trace = []
    trainer.predict(model, datamodule=module)
    assert model.trace == steps("predict", 1)


def test_row_2_the_modules_transform_runs_and_then_the_models_hook(tmp_path):
    class Doubling(Linear):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            x, i = batch
            return x * 2, i

    model, module = Doubling(), RowsModule(batch_size=32)
    module.register_transform(lambda batch: [batch[0] + 1, batch[1]])
    make_trainer(tmp_path).fit(model, datamodule=module)
    ((x, i),) = model.seen["train"]
    assert torch.equal(x[:, 0], (i + 1) * 2.0)


def test_row_2_a_data_modules_own_hook_builds_on_ours(tmp_path):
    class Own(RowsModule):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            x, i = super().on_after_batch_transfer(batch, dataloader_idx)
            return x * 2, i

        def on_before_batch_transfer(self, batch, dataloader_idx):
            staged = super().on_before_batch_transfer(batch, dataloader_idx)
            return staged.with_batch([staged.batch[0] + 0.5, staged.batch[1]])

    model, module = Linear(), Own(batch_size=32)
    module.register_transform(lambda batch: [batch[0] + 1, batch[1]])
    make_trainer(tmp_path, limit_val_batches=0).fit(model, datamodule=module)
    ((x, i),) = model.seen["train"]
    assert torch.equal(x[:, 0], (i + 1.5) * 2.0)


def test_row_2_a_data_modules_hook_that_forgets_super_is_told_so(tmp_path):
    class Forgets(RowsModule):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch

    module = Forgets()
    module.register_transform(lambda batch: batch)
    with pytest.raises(BatchError, match=r"super\(\)"):
        make_trainer(tmp_path, limit_val_batches=0).fit(Linear(), datamodule=module)


class ForeignModule(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Rows(32), batch_size=32)


class ForeignWithHook(ForeignModule):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] * 2, batch[1]]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("loaders", lambda i: i + 1.0),
        ("module", lambda i: i + 1.0),
        ("module with hook", lambda i: (i + 1) * 2.0),
        ("ours", lambda i: i + 1.0),
    ],
)
def test_row_4_the_callback_augments_every_batch_exactly_once(tmp_path, source, expected):
    data = {
        "loaders": {"train_dataloaders": DataLoader(Rows(32), batch_size=32)},
        "module": {"datamodule": ForeignModule()},
        "module with hook": {"datamodule": ForeignWithHook()},
        "ours": {"datamodule": RowsModule(batch_size=32)},
    }[source]
    model = Linear()
    callback = quiet(augment=add_one)
    trainer = make_trainer(tmp_path, callbacks=[callback], limit_val_batches=0)
    trainer.fit(model, **data)
    ((x, i),) = model.seen["train"]
    assert torch.equal(x[:, 0], expected(i))


@pytest.mark.parametrize("source", ["loaders", "ours"])
def test_row_6_example_inputs_are_not_taken_for_batches(tmp_path, source):
    """The model summary and the graph logger send ``example_input_array`` through the hooks."""
    from lightning.pytorch.loggers import TensorBoardLogger

    class Example(Linear):
        def __init__(self):
            super().__init__()
            self.example_input_array = torch.ones(2, 4)
            self.forwarded = []

        def forward(self, x):
            self.forwarded.append(x.detach().clone())
            return self.layer(x)

    calls = []

    def counted(batch):
        calls.append(1)
        return add_one(batch)

    def fit(callbacks, **data):
        model = Example()
        torch.manual_seed(1)
        make_trainer(
            tmp_path,
            logger=TensorBoardLogger(tmp_path, log_graph=True),
            enable_model_summary=True,
            callbacks=callbacks,
            limit_val_batches=0,
        ).fit(model, **data)
        return model, torch.get_rng_state()

    loader = DataLoader(Rows(32), batch_size=8)
    _, expected_state = fit([], train_dataloaders=loader)
    callback = quiet(augment=counted)
    if source == "ours":
        model, state = fit([callback], datamodule=RowsModule(batch_size=8))
    else:
        model, state = fit([callback], train_dataloaders=loader)
    assert torch.equal(state, expected_state)
    assert model.forwarded
    assert all(torch.equal(x, torch.ones(2, 4)) for x in model.forwarded)
    assert len(calls) == 4


def test_row_7_transforms_run_in_their_own_stage_only(tmp_path):
    model, module = Linear(), RowsModule(batch_size=32)
    module.register_transform(lambda b: [b[0] + 1000, b[1]], stage="train")
    module.register_transform(lambda b: [b[0] + 5, b[1]], stage="val")
    module.register_transform(lambda b: [b[0] + 7, b[1]], stage="test")
    trainer = make_trainer(tmp_path, num_sanity_val_steps=1)
    trainer.fit(model, datamodule=module)
    trainer.test(model, datamodule=module, verbose=False)
    trainer.predict(model, datamodule=module)
    assert len(model.seen["val"]) == 2  # the sanity check and one validation
    found = {stage: model.added(stage) for stage in model.seen}
    assert found == {"train": {1000}, "val": {5}, "test": {7}, "predict": {0}}


@pytest.mark.cases(2)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-true", "64-true"])
def test_row_8_uint8_batches_train_in_every_precision(tmp_path, precision):
    dtype = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
    model = Pixels()
    model.layer = torch.nn.Linear(12 * 10 * 3, 1)
    module = FastDataModule.from_datasets(Images(), batch_size=8)
    module.register_transform(lambda batch: [batch[0].float() / 255, batch[1]])
    trainer = make_trainer(tmp_path, precision=precision, limit_val_batches=0)
    trainer.fit(model, datamodule=module)
    assert model.seen["train"][0].dtype == dtype.get(precision, torch.float32)


@each("precision,dtype", [("bf16-true", torch.bfloat16), ("64-true", torch.float64)])
@each("form", [lambda rows: rows, lambda rows: {"one": rows, "other": rows}])
def test_row_8_every_hook_of_the_model_gets_the_dtype_of_the_precision(
    tmp_path, precision, dtype, form
):
    class Hooked(Traced):
        def training_step(self, batch, batch_idx):
            return self.layer.weight.sum()

    for name in HOOKS:

        def hook(self, batch, *rest, name=name):
            parts = batch.values() if isinstance(batch, dict) else [batch]
            self.trace += [(name, part[0].dtype) for part in parts]
            return getattr(Linear, name)(self, batch, *rest)

        setattr(Hooked, name, hook)
    rows, model = Rows(8), Hooked()
    parts = len(form(rows)) if isinstance(form(rows), dict) else 1
    data = FastDataModule.from_datasets(form(rows), batch_size=8, augment=add_one, num_workers=0)
    make_trainer(tmp_path, precision=precision).fit(model, datamodule=data)
    assert model.trace == [(name, dtype) for name in HOOKS for _ in range(parts)]


def test_row_9_constants_made_while_validating_serve_training(tmp_path):
    class Scale(torch.nn.Module):
        """Makes its constant on first use, as many transforms do, and needs it for backward."""

        constant = None

        def forward(self, batch):
            if self.constant is None:
                self.constant = torch.full((4,), 2.0)
            return [batch[0], self.constant]

    class Uses(Linear):
        def training_step(self, batch, batch_idx):
            return (self.layer.weight * batch[1]).pow(2).mean()

    scale, model, module = Scale(), Uses(), RowsModule(batch_size=32)
    module.register_transform(scale, stage="train")
    module.register_transform(scale, stage="val")
    trainer = make_trainer(tmp_path)
    trainer.validate(model, datamodule=module, verbose=False)
    trainer.fit(model, datamodule=module)
    assert not scale.constant.is_inference()


Named = namedtuple("Named", ["x", "i"])


@dataclass
class Typed:
    x: torch.Tensor
    i: torch.Tensor


class Movable:
    """A batch with a ``to`` of its own."""

    def __init__(self, x):
        self.x, self.moved = x, False

    def to(self, device, **_):
        self.moved = True
        return self


COLLATES = {
    "tensor": lambda s: torch.stack([x for x, _ in s]),
    "tuple": lambda s: (torch.stack([x for x, _ in s]), [i for _, i in s]),
    "list": lambda s: [torch.stack([x for x, _ in s]), "text"],
    "dict": lambda s: {"x": torch.stack([x for x, _ in s]), "deep": {"i": [(1, s[0][0])]}},
    "namedtuple": lambda s: Named(s[0][0], s[1][0]),
    "dataclass": lambda s: Typed(s[0][0], s[1][0]),
    "movable": lambda s: Movable(s[0][0]),
    "none": lambda s: None,
}


@pytest.mark.cases(5)
@pytest.mark.parametrize("kind", COLLATES)
@pytest.mark.parametrize("transformed", [False, True])
def test_row_10_the_structure_of_a_batch_is_kept(tmp_path, kind, transformed):
    class Keeps(Linear):
        def training_step(self, batch, batch_idx):
            self.seen["train"].append(batch)
            return self.layer(torch.ones(1, 4)).mean()

    model = Keeps()
    module = FastDataModule.from_datasets(Rows(4), batch_size=4, collate_fn=COLLATES[kind])
    if transformed:
        module.register_transform(lambda batch: batch)
    callback = quiet()
    trainer = make_trainer(tmp_path, callbacks=[callback], limit_val_batches=0)
    trainer.fit(model, datamodule=module)
    if kind == "none":  # Lightning skips the step
        assert model.seen["train"] == []
        return
    (batch,) = model.seen["train"]
    expected = COLLATES[kind]([Rows(4)[i] for i in range(4)])
    assert type(batch) is type(expected)
    if kind == "movable":
        assert batch.moved
    if kind == "dict":
        assert isinstance(batch["deep"]["i"][0], tuple)

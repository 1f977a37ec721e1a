"""Batches that run out of memory in a training are taken in parts, to the same parameters."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningModule
from plugin.counted_device import InBackward
from ragged import Sequences
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate
from trainers import Learner, quiet_trainer

from lightning_fastdata import BucketBatchSampler, FastDataModule, LoaderOptions
from lightning_fastdata.errors import BatchSizeError, FastDataWarning
from lightning_fastdata.plugin.bindings import BatchSizeGuard

torch.set_num_threads(1)
ROWS, BATCH, EPOCHS = 100, 23, 3
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Numbers(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(ROWS, 8, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, 3, (ROWS,), generator=generator)

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return self.x[index], self.y[index], f"row {index}"


class Data(FastDataModule):
    def train_dataset(self):
        return Numbers()

    def val_dataset(self):
        return Numbers()


class Model(LightningModule):
    """Fits a number of rows at each place; counts what is done and logs like others."""

    def __init__(self, *, error=FULL, batch_norm=False, as_dict=False, **fits):
        super().__init__()
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(16) if batch_norm else nn.Identity()
        self.first = nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU()).double()
        self.second = nn.Linear(16, 3).double()
        self.error, self.as_dict, self.fits = error, as_dict, fits
        self.failed, self.names, self.outputs = [], [], []

    def allocate(self, place, rows):
        if rows > self.fits.get(place, ROWS):
            self.failed.append((place, rows))
            raise self.error

    def training_step(self, batch, batch_idx):
        x, y, names = batch
        assert len(x) == len(y) == len(names)
        self.log("early", x.mean(), on_step=True, on_epoch=True)
        self.allocate("forward", len(x))
        logits = self.second(InBackward.apply(self.first(x), self.allocate))
        loss = nn.functional.cross_entropy(logits, y)
        self.log_dict({"loss": loss, "twice": 2 * loss}, on_step=True, on_epoch=True)
        for reduce_fx, value in (("sum", float(len(x))), ("max", x.max()), ("min", x.min())):
            self.log(reduce_fx, value, on_step=True, on_epoch=True, reduce_fx=reduce_fx)
        return {"loss": loss, "logits": logits} if self.as_dict else loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.outputs.append(outputs)

    def validation_step(self, batch, batch_idx):
        self.allocate("validation", len(batch[0]))

    def configure_optimizers(self):
        model = self

        class Optimizer(torch.optim.SGD):
            def step(self, closure=None):
                loss = closure()
                model.allocate("optimizer", BATCH)
                super().step()
                return loss

        return Optimizer(self.parameters(), 0.1, momentum=0.9)


def fit(model, *, guard="warn", accumulate=1, collate=None, **arguments):
    """Train, and return the parameters, what was logged, and the trainer."""
    options = LoaderOptions(num_workers=0, executor="inline", probe=False)
    trainer = quiet_trainer(
        callbacks=[BatchSizeGuard()],
        num_sanity_val_steps=0,
        accumulate_grad_batches=accumulate,
        **{"max_epochs": EPOCHS, **arguments},
    )
    trainer.fit(model, Data(BATCH, options=options, seed=3, guard=guard, collate_fn=collate))
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return parameters, metrics, trainer


@pytest.fixture(scope="module")
def calm():
    return {accumulate: fit(Model(), accumulate=accumulate) for accumulate in (1, 3)}


@pytest.mark.cases(2)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "fits",
    [
        {"forward": 12},
        {"forward": 11},
        {"backward": 12},
        {"backward": 3},
        {"forward": 9, "backward": 5},
    ],
    ids=str,
)
def test_parameters_metrics_and_steps_are_those_of_batches_that_fit(calm, accumulate, fits):
    model = Model(**fits)
    with pytest.warns(FastDataWarning, match="ran out of memory") as told:
        parameters, metrics, trainer = fit(model, accumulate=accumulate)
    expected, others, calm_trainer = calm[accumulate]
    assert model.failed
    torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-12)
    assert len(metrics) == 18
    assert metrics == pytest.approx(others, abs=1e-9)
    assert trainer.global_step == calm_trainer.global_step
    assert len([one for one in told if "ran out" in str(one.message)]) == 1
    # Once it is known what fits, nothing is tried in vain again.
    assert len(model.failed) <= 4


class Late(Model):
    """Fits all batches but the second one of an accumulation."""

    def allocate(self, place, rows):
        if self.trainer.fit_loop.batch_idx == 1:
            super().allocate(place, rows)


class Longer:
    """Collates each batch to a larger one than those before, as of sequences."""

    length = 0

    def __call__(self, samples):
        self.length += 1
        x, y, _ = default_collate(samples)
        return x, y, torch.zeros(len(x), self.length)


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_the_second_batch_of_an_accumulation_keeps_the_gradients_of_the_first(place):
    with pytest.warns(FastDataWarning, match="ran out of memory"):
        parameters, _, _ = fit(Late(**{place: 12}), accumulate=3, max_steps=2, collate=Longer())
    expected, _, _ = fit(Model(), accumulate=3, max_steps=2, collate=Longer())
    torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-12)


def test_gradients_are_not_copied_for_each_batch_of_a_size_that_has_fitted():
    with pytest.raises(BatchSizeError, match="gradients of the batches before"):
        fit(Late(backward=12), accumulate=3)


def test_other_errors_go_through():
    with pytest.raises(RuntimeError, match="other"):
        fit(Model(error=RuntimeError("other"), backward=12))


def test_a_batch_that_fits_is_trained_on_once(calm):
    model = Model()
    fit(model)
    assert len(model.outputs) == EPOCHS * 5


def test_what_a_step_returns_is_joined():
    model, whole = Model(as_dict=True, forward=6), Model(as_dict=True)
    with pytest.warns(FastDataWarning, match="ran out of memory"):
        fit(model, limit_train_batches=1)
    fit(whole, limit_train_batches=1)
    for one, other in zip(model.outputs, whole.outputs, strict=True):
        assert one["logits"].shape == (BATCH, 3)
        torch.testing.assert_close(one["logits"], other["logits"], rtol=0, atol=1e-12)
        torch.testing.assert_close(one["loss"], other["loss"], rtol=0, atol=1e-12)


def test_batch_normalisation_is_told_of_and_its_statistics_count_no_failed_try():
    model = Model(batch_norm=True, backward=12)
    with pytest.warns(FastDataWarning, match="Batch normalisation then averages over a part"):
        fit(model, max_epochs=1)
    # Two parts of 23 rows four times, and of the last batch of 8 one.
    assert int(model.first[1].num_batches_tracked) == 4 * 2 + 1


@pytest.mark.parametrize(
    ("model", "how", "why"),
    [
        ({"forward": 0}, {}, "not even one sample fits"),
        ({"optimizer": 0}, {}, "while the optimizer changed the parameters"),
        ({"backward": 12}, {"guard": "raise"}, 'guard="raise" was set'),
    ],
)
def test_where_parts_do_not_help_the_error_says_why_and_what_to_set(model, how, why):
    with pytest.raises(BatchSizeError, match=why) as raised:
        fit(Model(**model), **how)
    assert "Set a smaller batch_size" in str(raised.value)
    assert raised.value.__cause__ is FULL


def test_elsewhere_the_error_says_where_and_what_to_set():
    with pytest.raises(torch.OutOfMemoryError) as raised:
        fit(Model(validation=12))
    assert any("set a smaller batch_size" in note for note in raised.value.__notes__)


def test_without_a_guard_the_error_is_that_of_torch():
    with pytest.raises(torch.OutOfMemoryError):
        fit(Model(forward=12), guard="off")


class Compared(Model):
    """Compares the views of a batch with each other."""

    def training_step(self, batch, batch_idx):
        ours, theirs = ([self.first(view) for view in batch[name]] for name in ("ours", "theirs"))
        self.allocate("forward", len(ours[0]))
        return sum((one - other).square().mean() for one in ours for other in theirs)


def in_views(samples):
    x, _, _ = default_collate(samples)
    return {"ours": [x, x + 1], "theirs": [x + 2, x + 3]}


def test_views_in_lists_are_not_taken_for_samples():
    with pytest.raises(torch.OutOfMemoryError):
        fit(Compared(forward=12), collate=in_views)


def test_afterwards_the_module_is_as_it_was():
    model = Model(forward=12)
    with pytest.warns(FastDataWarning, match="ran out of memory"):
        _, _, trainer = fit(model)
    assert not {"training_step", "optimizer_zero_grad", "log"} & vars(model).keys()
    assert "run" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization)


class FewNumbers(Learner):
    """Fits 80 numbers, of however many samples."""

    def training_step(self, batch, batch_idx):
        if batch.numel() > 80:
            raise FULL
        return super().training_step(batch, batch_idx)


def test_batches_of_another_length_are_taken_in_parts_by_their_numbers():
    lengths = [20 if index < 24 else 2 for index in range(ROWS)]  # three batches are long
    batches = BucketBatchSampler(lengths, tokens=160)
    data = FastDataModule.from_loaders(
        DataLoader(Sequences(lengths), batch_sampler=batches), seed=3, num_workers=0
    )
    model = FewNumbers(lambda batch: batch.shape)
    trainer = quiet_trainer(callbacks=[BatchSizeGuard()], max_epochs=2)
    with pytest.warns(FastDataWarning, match="A training batch of"):
        trainer.fit(model, datamodule=data)
    assert sum(rows for rows, _ in model.seen) == 2 * ROWS
    long, short = ({rows for rows, length in model.seen if length == n} for n in (20, 2))
    assert max(long) in (3, 4)  # 60 or 80 numbers
    assert min(short) >= 36

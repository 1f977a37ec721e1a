"""``batch_size="auto"``: on a device whose memory and time are counted."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from conformance.pieces import Linear, Rows, RowsModule, make_trainer
from hypothesis import given
from hypothesis import strategies as st
from misses import each
from plugin.counted_device import GIB, MIB, Device

from lightning_fastdata import FastDataModule, LoaderOptions
from lightning_fastdata.errors import FastDataWarning, OptionsError
from lightning_fastdata.plugin.bindings import BatchSizeGuard
from lightning_fastdata.plugin.guard.prediction import (
    Probe,
    at_knee,
    decide,
    is_past_knee,
    probe_sizes,
)

QUIET = LoaderOptions(num_workers=0, probe=False)


class Timed(Device):
    """Of 4 GiB; a row takes 20 MiB, and a step 10 ms plus what its rows beyond 64 take."""

    def __init__(self, per_row=20 * MIB):
        super().__init__(4 * GIB)
        self.per_row, self.now_s, self.trained = per_row, 0, []

    def train(self, rows):
        self.trained.append(rows)
        self.now_s += 0.010 + max(0, rows - 64) * 0.010 / 64
        self.take(rows * self.per_row)

    def clock(self):
        return self.now_s


class Model(Linear):
    def __init__(self, device):
        super().__init__()
        self.memory = device

    def training_step(self, batch, batch_idx):
        assert self.training
        self.memory.train(len(batch[0]))
        return super().training_step(batch, batch_idx)


def fit(tmp_path, data, model, ckpt=None, **how):
    guard = BatchSizeGuard(reader=model.memory, clock_s=model.memory.clock)
    how = {"limit_val_batches": 2, **how}
    trainer = make_trainer(tmp_path, callbacks=[guard], num_sanity_val_steps=0, **how)
    trainer.fit(model, datamodule=data, ckpt_path=ckpt)
    return trainer, guard.decision


def sizes(batches):
    return {len(batch[0]) for batch in batches}


# --- the knee ----------------------------------------------------------------------------------


@given(
    fixed_s=st.floats(1e-4, 1.0), per_row_s=st.floats(1e-7, 1e-2), wide=st.integers(1, 4096),
    most=st.integers(3, 5000), total=st.integers(1, 64),
)  # fmt: skip
def test_what_is_chosen_has_run_fits_and_is_nearly_as_fast_as_anything_that_ran(
    fixed_s, per_row_s, wide, most, total
):
    def measure(rows):
        seconds = fixed_s + per_row_s * max(0, rows - wide)
        return Probe(rows, rows * 50 * MIB if rows * 50 * MIB <= total * GIB else None, seconds)

    def largest(probes):
        how = {"budget_bytes": total * GIB * 9 // 10, "policy": None, "dataset_rows": most}
        return decide(asked=most, probes=probes, **how)

    def to_run(probes):
        return None if is_past_knee(probes) else largest(probes).batch_size

    probes = probe_sizes(most, measure, to_run)
    found = at_knee(largest(probes), probes)
    if largest(probes).action == "raise":
        return
    assert found.action == "chosen"
    ran = {each.rows: each.rows / each.step_s for each in probes if each.peak_bytes is not None}
    assert ran[found.batch_size] >= 0.95 * max(ran.values())
    assert not any(
        rate >= 0.95 * max(ran.values()) for n, rate in ran.items() if n < found.batch_size
    )
    assert found.batch_size <= largest(probes).batch_size or found.batch_size in ran
    assert str(found.batch_size) in found.reason


def test_no_larger_size_is_tried_where_larger_ones_train_no_more_rows_a_second():
    tried = []

    def measure(rows):
        tried.append(rows)
        return Probe(rows, rows * MIB, 0.010 * max(1.0, rows / 64))

    probe_sizes(10_000, measure, lambda probes: None if is_past_knee(probes) else 10_000)
    assert tried == [4, 8, 16, 32, 64, 128, 256]
    assert not is_past_knee([Probe(4, 1, 1.0), Probe(8, 2, 1.0)])
    assert not is_past_knee([Probe(4, 1), Probe(8, 2), Probe(16, 4)])  # no times


# --- batch_size="auto" -------------------------------------------------------------------------


def test_the_smallest_size_that_trains_as_many_rows_a_second_is_trained_with(tmp_path):
    device = Timed()
    data = RowsModule("auto", length=4000, options=QUIET)
    assert data.batch_size == 32  # until it is chosen
    model = Model(device)
    _, decision = fit(tmp_path, data, model, limit_train_batches=3)
    assert decision.action == "chosen"
    assert decision.batch_size == 64
    assert sizes(model.seen["train"]) == {64}
    assert sizes(model.seen["val"]) == {64}
    assert 'batch_size="auto": 64 rows' in decision.reason
    assert "64: 6400" in decision.reason
    assert "would fit" in decision.reason
    assert data.batch_size == 32  # as before, for another fit
    assert data.notes[0] == decision.reason


def test_of_what_does_not_fit_nothing_is_chosen(tmp_path):
    device = Timed(per_row=200 * MIB)  # of which 17 fit
    model = Model(device)
    _, decision = fit(
        tmp_path, RowsModule("auto", length=4000, options=QUIET), model, limit_train_batches=3
    )
    assert 8 <= decision.batch_size <= 17
    assert sizes(model.seen["train"]) == {decision.batch_size}


def test_an_epoch_keeps_at_least_ten_steps(tmp_path):
    _, decision = fit(tmp_path, RowsModule("auto", length=300, options=QUIET), Model(Timed()))
    assert decision.batch_size <= 30


def test_a_resumed_run_trains_with_what_was_chosen(tmp_path):
    trainer, decision = fit(
        tmp_path,
        RowsModule("auto", length=4000, options=QUIET),
        Model(Timed()),
        max_steps=3,
        max_epochs=3,
    )
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    model = Model(Timed())
    data = RowsModule("auto", length=4000, options=QUIET)
    fit(tmp_path, data, model, ckpt=tmp_path / "one.ckpt", max_steps=6, max_epochs=3)
    assert sizes(model.seen["train"]) == {decision.batch_size} == {64}
    assert model.memory.trained == [64] * 3  # nothing was tried


def test_without_a_gpu_it_is_said_and_32_are_taken(tmp_path):
    data = RowsModule("auto", length=320, options=QUIET)
    model = Linear()
    with pytest.warns(FastDataWarning, match="training is on cpu: batches have 32 samples"):
        make_trainer(tmp_path, limit_val_batches=0).fit(model, datamodule=data)
    assert sizes(model.seen["train"]) == {32}


def test_nobody_would_choose_it():
    with pytest.raises(OptionsError, match='guard="off" contradict'):
        FastDataModule("auto", guard="off")


def test_a_saved_hyperparameter_and_from_datasets_say_so_as_well(tmp_path):
    class Own(FastDataModule):
        def __init__(self, batch_size="auto"):
            super().__init__(options=QUIET)
            self.save_hyperparameters()

        def train_dataset(self):
            return Rows(4000)

    model = Model(Timed())
    assert fit(tmp_path, Own(), model, max_steps=1)[1].batch_size == 64
    given = FastDataModule.from_datasets(Rows(4000), batch_size="auto", options=QUIET)
    assert fit(tmp_path, given, Model(Timed()), max_steps=1)[1].batch_size == 64


# --- samples of unequal length -----------------------------------------------------------------


class Sentences(torch.utils.data.Dataset):
    """Short ones first, the longest of 64 words in the end."""

    def __len__(self):
        return 640

    def __getitem__(self, index):
        return torch.zeros(1 + index // 10)


class OfWords(Model):
    def training_step(self, batch, batch_idx):
        self.memory.train(batch.numel() / 64)
        return (self.layer.weight * batch.mean()).sum()


def test_what_is_padded_is_tried_as_long_as_the_longest_that_was_read(tmp_path):
    device = Timed(per_row=100 * MIB)  # and 64 words; 35 of these fit
    data = FastDataModule.from_datasets(
        Sentences(), batch_size=320, guard="accumulate", options=QUIET,
        collate_fn=partial(torch.nn.utils.rnn.pad_sequence, batch_first=True),
    )  # fmt: skip
    _, decision = fit(tmp_path, data, OfWords(device))
    assert decision.batch_size == 32
    assert "longest of 64 samples" in decision.reason
    plain = RowsModule(8, length=64, guard="warn", options=QUIET)
    assert "longest" not in fit(tmp_path, plain, Model(Timed()))[1].reason


# --- what Lightning's BatchSizeFinder is known to get wrong ------------------------------------


@pytest.mark.cases(4)
@each("asked", [64, 256, 4096, "auto"])
@each("length", [50, 64, 1000])
def test_a_size_that_is_chosen_has_run_however_long_the_dataset_is(tmp_path, asked, length):
    device = Timed(per_row=100 * MIB)  # 40 rows fit, 35 with the reserve
    data = RowsModule(asked, length=length, guard="accumulate", options=QUIET)
    model = Model(device)
    _, decision = fit(tmp_path, data, model)
    tried = device.trained[: -len(model.seen["train"])]
    assert min(decision.batch_size, length) in tried
    assert decision.batch_size <= 35
    assert len(set(tried)) <= 10
    assert sizes(model.seen["train"]) <= {decision.batch_size, length % decision.batch_size}


def test_nothing_is_written_and_the_loader_of_the_training_is_made_once(tmp_path):
    made = []

    class Counts(RowsModule):
        def train_dataloader(self):
            made.append(self.batch_size)
            return super().train_dataloader()

    data = Counts(4096, length=400, guard="accumulate", options=QUIET)
    _, decision = fit(tmp_path, data, Model(Timed(per_row=100 * MIB)))
    assert made == [decision.batch_size]
    assert not any(tmp_path.iterdir())


@each("where", ["training_step", "on_before_batch_transfer"])
def test_it_knows_the_words_of_a_full_device_wherever_they_are_raised(tmp_path, where):
    def taking(self, rows):
        if rows > 8:
            raise RuntimeError("XPU out of memory. Tried to allocate")

    class Raises(Model):
        def training_step(self, batch, batch_idx):
            if where == "training_step":
                taking(self, len(batch[0]))
            return super().training_step(batch, batch_idx)

        def on_before_batch_transfer(self, batch, dataloader_idx):
            if where == "on_before_batch_transfer":
                taking(self, len(batch[0]))
            return batch

    data = RowsModule(64, length=320, guard="accumulate", options=QUIET)
    _, decision = fit(tmp_path, data, Raises(Timed(per_row=MIB)))
    assert decision.batch_size == 8
    assert decision.accumulate_grad_batches == 8

"""Padding is told where batches show it, with a remedy that pays, and not elsewhere."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from insight.made_up import stage
from ragged import Sequences, pad
from torch.utils.data import DataLoader
from trainers import Learner, quiet_trainer
from verdicts.known import evidence_with, judge

from benchmarks.lengths import drawn
from lightning_fastdata import BucketBatchSampler, DataThroughputCallback, StepTimer, pack
from lightning_fastdata.batches.staged import StagedBatch, batch_samples
from lightning_fastdata.insight.finding import closed_options
from lightning_fastdata.insight.step_costs import Padding, PaddingMeter
from lightning_fastdata.insight.verdict import judge as judge_all
from lightning_fastdata.plugin import throughput

LENGTHS = drawn("chat", 64 * 8).reshape(64, 8) // 40 + 1
SHARE = 1 - LENGTHS[:24].sum() / (8 * LENGTHS[:24].max(1)).sum()


def ids_of(lengths, pad=0, width=None):
    """Return ids from 1 on, padded at the end."""
    width = width or int(lengths.max())
    ids = torch.arange(len(lengths) * width).reshape(len(lengths), width) % 97 + 1
    return torch.where(mask_of(lengths, width), ids, pad)


def mask_of(lengths, width=None):
    return torch.arange(width or int(lengths.max())) < torch.from_numpy(lengths)[:, None]


def named_mask(lengths):
    return {"input_ids": ids_of(lengths, 7), "attention_mask": mask_of(lengths).long()}


FORMS = {
    "attention_mask": named_mask,
    "src_key_padding_mask": lambda n: {"x": ids_of(n, 7), "src_key_padding_mask": ~mask_of(n)},
    "text_lengths": lambda n: {
        "text_lengths": torch.from_numpy(n),
        "x": ids_of(n, 7, 200)[..., None].float(),
    },
    "lengths": lambda n: (ids_of(n, 7)[..., None].float(), torch.from_numpy(n), torch.zeros(8)),
    "pad id 0": lambda n: (ids_of(n), torch.zeros(8)),
    "pad id -100": lambda n: [ids_of(n, -100).flip(1)],
}


def met(form, lengths=LENGTHS):
    meter = PaddingMeter()
    for row in lengths:
        meter.look(form(row))
    return meter


@pytest.mark.parametrize("name", FORMS)
def test_what_is_padding_is_seen(name) -> None:
    meter = met(FORMS[name])
    found = meter.padding()
    assert found.shown_by == f"{name} of 24 batches"
    places = 200 * 24 * 8 if name == "text_lengths" else 8 * LENGTHS[:24].max(1).sum()
    assert found.share == pytest.approx(1 - LENGTHS[:24].sum() / places)
    lengths = np.sort(LENGTHS[:24].ravel()).reshape(24, 8)
    in_order = 1 - lengths.sum() / (8 * lengths.max(1)).sum()
    assert found.one_width == (name == "text_lengths")
    assert found.least_share == pytest.approx(SHARE if found.one_width else in_order)


def test_a_batch_that_is_staged_is_looked_into_and_one_on_a_device_is_not() -> None:
    assert met(lambda n: StagedBatch(named_mask(n), None, "train")).padding() is not None
    away = met(lambda n: {name: each.to("meta") for name, each in named_mask(n).items()})
    assert away.padding() is None


def rows(*values):
    return lambda _: torch.tensor(values)


NOTHING = {
    "images and classes": lambda _: (torch.zeros(8, 3, 4, 4), torch.arange(8)),
    "no tensors": lambda _: ["a", 1, None],
    "one width": lambda n: (ids_of(n, 0, 200), torch.zeros(8)),
    "pads inside": lambda n: (ids_of(n).roll(1, 1), torch.zeros(8)),
    "other pads in each": lambda n: (ids_of(n, -int(n[0]) - 1), torch.zeros(8)),
    "an end in each row": rows([5, 2], [6, 2], [3, 2]),
    "classes as large as the width": lambda _: (torch.zeros(8, 9), torch.arange(2, 10)),
    "marks of segments": lambda n: {"attention_mask": ids_of(n) % 3},
    "empty": lambda _: {"attention_mask": torch.zeros(0, 0), "x": torch.zeros(2, 0)},
}


@pytest.mark.parametrize("name", NOTHING)
def test_silent_where_it_cannot_be_shown(name) -> None:
    meter = met(NOTHING[name])
    assert meter.padding() is None


def test_a_last_batch_of_one_sample_is_no_objection_and_other_forms_are() -> None:
    few = [*LENGTHS[:11], LENGTHS[0, :1], *LENGTHS[11:22]]
    assert met(FORMS["pad id 0"], few).padding().shown_by == "pad id 0 of 22 batches"
    assert met(FORMS["pad id 0"], LENGTHS[:3]).padding() is None
    meter = met(FORMS["attention_mask"], LENGTHS[:12])
    for row in LENGTHS[:12]:
        meter.look(FORMS["lengths"](row))
    assert meter.padding() is None


def planted(share=0.4, least_share=0.04, *, one_width=False):
    shares = {"share": share, "least_share": least_share, "one_width": one_width}
    return Padding(**shares, shown_by="lengths of 24 batches", tokens=4000)


def judged(padding, *, stall_ms=0.0, closed=None):
    step_ms = stall_ms + 20.0
    how = {"stall_ms": stall_ms, "wait_ms": stall_ms, "step_ms": step_ms, "closed": closed or {}}
    return judge(stage(stall_ms, 20.0), None, evidence_with(padding=padding, **how))


def test_the_verdict_has_the_share_the_remedy_and_its_gain() -> None:
    found = judged(planted())
    assert found.code == "FD337"
    assert found.kind == "balanced"
    first = found.findings[0]
    assert first.severity == "high"
    assert first.cause.startswith("40% of the tokens of your batches are padding (lengths of 24")
    assert "BucketBatchSampler(lengths, tokens=4000), of which 4%" in first.remedy
    assert first.gain.after_ms == pytest.approx(20.0 * 0.6 / 0.96)
    assert first.gain.basis == "floor"


def test_of_one_width_for_all_the_remedy_is_the_longest_of_each_batch() -> None:
    (finding,) = [
        f for f in judged(planted(0.8, 0.5, one_width=True)).findings if f.code == "FD337"
    ]
    assert "longest sample of each batch in collate_fn" in finding.remedy
    assert "50%" in finding.remedy
    assert "BucketBatchSampler" not in finding.remedy
    assert finding.gain.after_ms == pytest.approx(20.0 * 0.2 / 0.5)
    # Batches of one width that is the longest sample of each are not padded to a fixed one.
    lengths = LENGTHS.copy()
    lengths[:, 0] = LENGTHS.max()
    assert not met(named_mask, lengths).padding().one_width


def test_what_is_no_matter_or_cannot_be_helped_is_no_finding() -> None:
    few = LENGTHS.ravel()[:40]
    loader = loader_of(few, batch_sampler=BucketBatchSampler(few, batch_size=8))
    of_few = met(named_mask, [few[batch] for batch in loader.batch_sampler]).padding()
    assert of_few.share > 0.1
    cases = {
        "little padding": judged(planted(0.09, 0.0)),
        "no gain": judged(planted(0.40, 0.39)),
        "like length already": judged(planted(), closed=closed_options(loader)),
        "few of like length": judged(of_few, closed=closed_options(loader)),
        "waits": judged(planted(), stall_ms=10.0),
    }
    for name, verdict in cases.items():
        assert "FD337" not in {each.code for each in verdict.findings}, name
        assert name == "waits" or verdict.kind == "compute-bound", name


def text(index, length):
    return torch.arange(length) % 97 + 1


def loader_of(lengths, **how):
    return DataLoader(Sequences(lengths, text), collate_fn=partial(pad, value=0), **how)


class Logs(Learner):
    """Remembers how much each batch weighs in the means that Lightning logs."""

    def training_step(self, batch, batch_idx):
        self.log("loss", 1.0, on_step=False, on_epoch=True)
        return super().training_step(self.trainer._results.batch_size, batch_idx)


@pytest.fixture
def fitted(tmp_path, monkeypatch):
    """Return what trains, and returns the report, what its verdict rests on, and the model."""

    def fit(loader):
        evidence = []
        monkeypatch.setattr(
            throughput, "judge", lambda known: evidence.append(known) or judge_all(known)
        )
        callback = DataThroughputCallback(summary=False, report=False)
        model = Logs()
        trainer = quiet_trainer(max_epochs=1, callbacks=[callback], default_root_dir=tmp_path)
        trainer.fit(model, loader)
        return callback.report, evidence[-1], model

    return fit


def test_a_plain_loader_is_told_of_its_padding_and_one_of_buckets_is_not(fitted) -> None:
    _, evidence, _ = fitted(loader_of(LENGTHS.ravel(), batch_size=8))
    assert evidence.padding.share == pytest.approx(SHARE)
    assert evidence.padding.shown_by == "pad id 0 of 24 batches"
    assert "batch_sampler" not in evidence.loader.closed
    sampler = BucketBatchSampler(LENGTHS.ravel(), batch_size=8)
    _, evidence, _ = fitted(loader_of(LENGTHS.ravel(), batch_sampler=sampler))
    assert "like length" in evidence.loader.closed["batch_sampler"]


@pytest.mark.filterwarnings("error:Trying to infer the `batch_size`")
def test_packed_documents_count_as_samples_and_as_lightnings_batch_size(fitted) -> None:
    packs = pack(Sequences(LENGTHS.ravel()[:200], text), 256)
    loader = DataLoader(packs, 1, collate_fn=packs.collate)
    documents = [len(batch["cu_seqlens"]) - 1 for batch in loader]
    assert [batch_samples(batch) for batch in loader] == documents
    report, evidence, model = fitted(loader)
    train = report.stages[0]
    assert train.samples == sum(documents)
    assert model.seen == documents
    assert evidence.padding is None


def test_a_loop_of_ones_own_is_told_too(virtual) -> None:
    timer = StepTimer(device="cpu")
    for _ in timer.batches([named_mask(row) for row in LENGTHS[:24]]):
        virtual.sleep(0.01)
    assert "FD337" in [found.code for found in timer.report().verdict.findings]

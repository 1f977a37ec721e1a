"""Which remedies the evidence names, which a changing world refuses, and their code."""

from __future__ import annotations

import pytest

from lightning_fastdata.prove.remedies import (
    FAST,
    PERSIST,
    Change,
    LoaderFacts,
    Remedy,
    code_of,
    named,
    together,
)

PLAIN = {
    "reader": "torch", "num_workers": 0, "cpus": 2, "used_cpus": 0.2,
    "start_share": 0.1, "free_bytes": 1e9, "keeps_bytes": 1e6,
}  # fmt: skip
CACHE = "a cache in memory"


def names(**facts):
    remedies, refused = named(LoaderFacts(**{**PLAIN, **facts}))
    return {each.name for each in remedies}, refused


@pytest.mark.parametrize(
    ("changes", "workers", "refused"),
    [
        ("nothing", 0, set()),
        ("nothing", 2, set()),
        ("steps", 0, {FAST, CACHE, "num_workers=2", "num_workers=8"}),
        ("steps", 2, {FAST, CACHE, PERSIST.name}),
        ("epochs", 0, {CACHE}),
        ("epochs", 2, {CACHE, PERSIST.name}),
        ("unknown", 0, set()),
        ("unknown", 2, set()),
    ],
)
def test_what_the_changing_world_refuses_is_not_tried(changes, workers, refused):
    tried, not_tried = names(changes=changes, num_workers=workers)
    assert set(not_tried) == refused
    assert not tried & refused
    assert all(not_tried.values())


def test_what_cannot_be_compared_is_tried_and_said():
    remedies, _ = named(LoaderFacts(**{**PLAIN, "changes": "unknown"}))
    assert all(any("cannot be compared" in said for said in each.says) for each in remedies)


def test_a_stream_keeps_its_workers():
    tried, not_tried = names(stream=True, num_workers=2)
    assert not tried
    assert {FAST, CACHE, PERSIST.name} <= set(not_tried)


def test_another_loader_and_one_that_chooses_are_left_alone():
    for reader in ("other", "ours"):
        tried, not_tried = names(reader=reader)
        assert not tried
        assert not_tried


def test_a_training_of_one_epoch_has_no_use_for_what_helps_later():
    tried, not_tried = names(epochs=1, num_workers=1)
    assert {CACHE, PERSIST.name} == set(not_tried)
    assert "num_workers=2" in tried


def test_more_workers_than_cpus_are_for_reading_that_waits():
    assert "num_workers=8" in names(used_cpus=0.2)[0]
    assert "num_workers=8" not in names(used_cpus=1.0)[0]
    assert names(num_workers=8, used_cpus=1.9)[0] & {"num_workers=2"}


def test_workers_that_keep_up_are_not_changed():
    tried, _ = names(num_workers=2, step_share=0.0)
    assert PERSIST.name in tried
    assert not any(name.startswith("num_workers") for name in tried)


def test_a_cache_that_does_not_fit_is_refused_with_its_size():
    assert "5 GB" in names(keeps_bytes=5e9)[1][CACHE]


def test_the_best_of_each_kind_go_together():
    remedies = {
        each.name: each
        for each in (
            Remedy(name="num_workers=2", change=Change(num_workers=2), effort=1),
            Remedy(name=FAST, change=Change(fast=True), effort=2),
            Remedy(name=CACHE, change=Change(cache="ram"), effort=3),
        )
    }
    gains = {"num_workers=2": 1.5, FAST: 1.4, CACHE: 1.2}
    joined = together(remedies, gains, may_persist=True)
    assert Change(num_workers=2, persistent_workers=True) in [each.change for each in joined]
    assert Change(fast=True, cache="ram") in [each.change for each in joined]
    assert not any(each.change.fast and each.change.num_workers for each in joined)
    never = together(remedies, gains, may_persist=False)
    assert not any(each.change.persistent_workers for each in never)


def test_of_two_changes_the_second_says_the_number_of_workers_none_too():
    both = Change(num_workers=4, cache="ram") | Change(num_workers=0, fast=True)
    assert both == Change(num_workers=0, cache="ram", fast=True)
    assert Change(num_workers=4) | Change(cache="ram") == Change(num_workers=4, cache="ram")


def test_what_to_write_is_the_call_with_the_change():
    how = {"given_to_fit": True, "validates": False}
    flags = Change(num_workers=4, persistent_workers=True)
    assert code_of(flags, **how) == [
        "loader = DataLoader(dataset, ..., num_workers=4, persistent_workers=True)"
    ]
    fast = code_of(Change(fast=True), **how)
    assert fast[1] == 'data = FastDataModule.from_loaders(train_loader, num_workers="auto")'
    there = code_of(Change(fast=True), **how, home="lightning_fastdata.other")
    assert there == ["from lightning_fastdata.other import FastDataModule", *fast[1:]]
    both = code_of(Change(fast=True), given_to_fit=True, validates=True)
    assert "from_loaders(train_loader, val_loader, " in both[1]
    own = code_of(Change(fast=True), given_to_fit=False, validates=False)
    assert own[1] == 'loader = FastDataLoader(dataset, ..., num_workers="auto")'
    for change in (Change(cache="ram"), Change(fast=True, cache="ram")):
        lines = code_of(change, **how)
        assert 'CachedDataset(dataset, "ram")' in lines[-1]
        compile("\n".join(lines), "written", "exec")

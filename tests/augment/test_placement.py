"""The choice of a place for pixels: laws of the pure decision."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import max_examples

from lightning_fastdata.plugin.placing.trial import (
    PlaceCosts,
    SampleCosts,
    choose_place,
)

ms = st.floats(0.01, 1000, allow_nan=False)
few = max_examples(150)


@st.composite
def costs(draw):
    read = draw(ms)
    deferred = read + draw(ms)
    return PlaceCosts(
        accelerator=True,
        batch_size=draw(st.integers(1, 512)),
        workers=draw(st.integers(0, 32)),
        cpus=draw(st.floats(0.5, 64)),
        sample=SampleCosts(
            whole_ms=read + draw(ms),
            deferred_ms=deferred,
            read_ms=read,
            waits_ms=draw(st.floats(0, 1)) * read,
        ),
        device_ms=draw(ms),
    )


def with_sample(known, **about):
    return replace(known, sample=replace(known.sample, **about))


@few
@given(costs())
def test_without_an_accelerator_or_anything_deferred_it_is_the_workers(known):
    for kept in ({"accelerator": False}, {"defers": False}, {"refusal": "no memory"}):
        assert choose_place(replace(known, **kept)).place == "workers"


@few
@given(costs(), st.floats(1, 10))
def test_dearer_pixels_in_the_workers_never_turn_device_into_workers(known, more):
    dearer = with_sample(known, whole_ms=known.sample.whole_ms * more)
    if choose_place(known).place == "device":
        assert choose_place(dearer).place == "device"


@few
@given(costs(), st.floats(0.1, 1))
def test_cheaper_deferring_never_turns_device_into_workers(known, less):
    sample = known.sample
    cheaper = sample.read_ms + less * (sample.deferred_ms - sample.read_ms)
    if choose_place(known).place == "device":
        assert choose_place(with_sample(known, deferred_ms=cheaper)).place == "device"


@few
@given(costs(), st.floats(1, 10))
def test_a_slower_device_never_turns_workers_into_device(known, more):
    if choose_place(known).place == "workers":
        assert choose_place(replace(known, device_ms=known.device_ms * more)).place == "workers"


def test_the_device_is_taken_if_it_needs_less_time_than_it_saves():
    sample = SampleCosts(whole_ms=5.0, deferred_ms=1.0, read_ms=0.5, samples=8)
    known = PlaceCosts(
        accelerator=True, batch_size=10, workers=4, cpus=8, sample=sample, device_ms=9.9
    )
    choice = choose_place(known)
    assert choice.place == "device"
    assert choice.saved_ms == pytest.approx(10 * 4.0 / 4)
    assert all(number in choice.reason for number in ("12.5 ms", "2.5 ms", "9.9 ms", "4 workers"))
    assert choose_place(replace(known, device_ms=10.1)).place == "workers"
    assert choose_place(with_sample(known, deferred_ms=5.0)).place == "workers"


def test_cpus_bound_what_computes_and_not_what_waits():
    sample = SampleCosts(whole_ms=10.0, deferred_ms=10.0, read_ms=9.0, waits_ms=8.0)
    known = PlaceCosts(accelerator=True, batch_size=1, workers=8, cpus=1, sample=sample)
    assert known.loader_ms("workers") == 2.0  # 2 ms of computing on one CPU
    assert replace(known, cpus=2).loader_ms("workers") == 10.0 / 8
    assert replace(known, workers=0).loader_ms("workers") == 10.0

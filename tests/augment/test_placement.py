"""The choice of a place for pixels: laws of the pure decision."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import max_examples

from lightning_fastdata.plugin.placing import (
    PlaceCosts,
    SampleCosts,
    choose_place,
)

ms = st.floats(0.01, 1000, allow_nan=False)
NUMBERS = st.fixed_dictionaries(
    {
        **dict.fromkeys(("reading", "pixels", "deferring", "device"), ms),
        "waits": st.floats(0, 1),
        "batch_size": st.integers(1, 512),
        "workers": st.integers(0, 32),
        "cpus": st.floats(0.5, 64),
    }
)
DEARER = {"pixels": "device", "deferring": "workers", "device": "workers"}
"""What may be dearer, and the place that this speaks for."""


def costs(*, reading, pixels, deferring, device, waits, **about):
    sample = SampleCosts(
        whole_ms=reading + pixels,
        deferred_ms=reading + deferring,
        read_ms=reading,
        waits_ms=waits * reading,
    )
    return PlaceCosts(accelerator=True, sample=sample, device_ms=device, **about)


@max_examples(150)
@given(NUMBERS)
def test_without_an_accelerator_or_anything_deferred_it_is_the_workers(numbers):
    for kept in ({"accelerator": False}, {"defers": False}, {"refusal": "no memory"}):
        assert choose_place(replace(costs(**numbers), **kept)).place == "workers"


@max_examples(450)
@given(NUMBERS, st.sampled_from(sorted(DEARER)), st.floats(1, 10))
def test_what_speaks_for_a_place_never_turns_it_into_the_other(numbers, dearer, more):
    if choose_place(costs(**numbers)).place == DEARER[dearer]:
        numbers[dearer] *= more
        assert choose_place(costs(**numbers)).place == DEARER[dearer]


def test_the_device_is_taken_if_it_needs_less_time_than_it_saves():
    sample = SampleCosts(whole_ms=5.0, deferred_ms=1.0, read_ms=0.5, samples=8)
    known = PlaceCosts(
        accelerator=True, batch_size=10, workers=4, cpus=8, sample=sample, device_ms=9.9
    )
    choice = choose_place(known)
    assert choice.place == "device"
    saved_ms = known.loader_ms("workers") - known.loader_ms("device")
    assert saved_ms == pytest.approx(10 * 4.0 / 4)
    assert all(number in choice.reason for number in ("12.5 ms", "2.5 ms", "9.9 ms", "4 workers"))
    assert choose_place(replace(known, device_ms=10.1)).place == "workers"
    assert choose_place(replace(known, sample=replace(sample, deferred_ms=5.0))).place == "workers"


def test_cpus_bound_what_computes_and_not_what_waits():
    sample = SampleCosts(whole_ms=10.0, deferred_ms=10.0, read_ms=9.0, waits_ms=8.0)
    known = PlaceCosts(accelerator=True, batch_size=1, workers=8, cpus=1, sample=sample)
    assert known.loader_ms("workers") == 2.0  # 2 ms of computing on one CPU
    assert replace(known, cpus=2).loader_ms("workers") == 10.0 / 8
    assert replace(known, workers=0).loader_ms("workers") == 10.0

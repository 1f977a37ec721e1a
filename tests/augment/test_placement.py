"""The choice of a place for pixels: laws of the pure decision, and of a world that follows it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import max_examples

from lightning_fastdata.plugin.placing.decision import (
    MOST_CHANGES,
    PlaceCosts,
    SampleCosts,
    StepSeen,
    choose_place,
    predicted_step_ms,
)

ms = st.floats(0.01, 1000, allow_nan=False)
few = max_examples(150)
other = {"device": "workers", "workers": "device"}


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


@st.composite
def seen(draw, place=None):
    step = draw(ms)
    place = place or draw(st.sampled_from(["device", "workers"]))
    wait = draw(st.floats(0, 0.9)) * step
    augment = draw(st.none() | st.floats(0, 1)) if place == "device" else None
    return StepSeen(
        place=place,
        steps=draw(st.integers(50, 500)),
        epochs=draw(st.integers(0, 3)),
        step_ms=step,
        wait_ms=wait,
        augment_ms=None if augment is None else augment * (step - wait),
    )


maybe_seen = st.none() | seen()


def with_sample(known, **about):
    return replace(known, sample=replace(known.sample, **about))


@few
@given(costs(), maybe_seen, st.integers(0, 2))
def test_without_an_accelerator_or_anything_deferred_it_is_the_workers(known, step, changes):
    for kept in ({"accelerator": False}, {"defers": False}, {"refusal": "no memory"}):
        assert choose_place(replace(known, **kept), step, changes=changes).place == "workers"


@few
@given(costs(), maybe_seen, st.floats(1, 10))
def test_dearer_pixels_in_the_workers_never_turn_device_into_workers(known, step, more):
    first = choose_place(known, step).place
    dearer = with_sample(known, whole_ms=known.sample.whole_ms * more)
    if first == "device":
        assert choose_place(dearer, step).place == "device"


@few
@given(costs(), maybe_seen, st.floats(0.1, 1))
def test_cheaper_deferring_never_turns_device_into_workers(known, step, less):
    first = choose_place(known, step).place
    sample = known.sample
    cheaper = sample.read_ms + less * (sample.deferred_ms - sample.read_ms)
    if first == "device":
        assert choose_place(with_sample(known, deferred_ms=cheaper), step).place == "device"


@few
@given(costs(), st.none() | seen(place="workers"), st.floats(1, 10))
def test_a_slower_device_never_turns_workers_into_device(known, step, more):
    if choose_place(known, step).place == "workers":
        slower = replace(known, device_ms=known.device_ms * more)
        assert choose_place(slower, step).place == "workers"


@few
@given(costs(), seen(place="device"), st.floats(0, 1))
def test_a_device_part_that_takes_less_of_the_same_step_never_sends_it_to_the_workers(
    known, step, less
):
    augment = step.step_ms - step.wait_ms
    fast, slow = (replace(step, augment_ms=share * augment) for share in (less, 1))
    if choose_place(known, slow).place == "device":
        assert choose_place(known, fast).place == "device"


@few
@given(costs(), seen(), st.integers(0, 4))
def test_a_change_is_worth_three_percent_and_there_are_two_at_most(known, step, changes):
    choice = choose_place(known, step, changes=changes)
    if choice.place != step.place:
        assert changes < MOST_CHANGES
        assert predicted_step_ms(known, step, choice.place) <= 0.97 * step.step_ms + 1e-9
    times = {"device": choice.device_step_ms, "workers": choice.workers_step_ms}
    assert times[step.place] == step.step_ms
    for number in times.values():
        assert f"{number:.4g} ms" in choice.reason


@few
@given(costs(), seen())
def test_steps_that_do_not_wait_with_everything_in_the_workers_are_left_alone(known, step):
    known = replace(known, workers=max(1, known.workers))
    calm = replace(step, place="workers", wait_ms=0.04 * step.step_ms, augment_ms=None)
    assert choose_place(known, calm).place == "workers"


@few
@given(costs(), seen(place="device"))
def test_steps_that_wait_for_deferring_workers_are_not_given_slower_ones(known, step):
    sample = known.sample
    known = with_sample(known, whole_ms=max(sample.whole_ms, sample.deferred_ms))
    known = replace(known, workers=max(1, known.workers))
    late = replace(step, wait_ms=max(step.wait_ms, 0.05 * step.step_ms), augment_ms=None)
    assert choose_place(known, late).place == "device"


@few
@given(costs(), ms, st.floats(0.2, 5), st.booleans())
def test_where_the_model_holds_a_run_ends_in_the_better_place_and_stays_there(
    known, compute, slower, starts_on_device
):
    """Workers may be slower or faster than the trial told, by the same factor in both places.

    Faster ones cannot be seen while the device is the slower of the two, and are then missed.
    """

    def world(place):
        loader = slower * known.loader_ms(place)
        augment = known.device_ms if place == "device" else 0.0
        busy = compute + augment
        step = max(loader, busy) if known.workers else loader + busy
        seen = StepSeen(
            place=place,
            steps=60,
            epochs=1,
            step_ms=step,
            wait_ms=step - busy,
            augment_ms=augment if place == "device" else None,
        )
        return step, seen

    start = place = "device" if starts_on_device else "workers"
    changed = []
    measured = {}
    for _ in range(6):
        measured[place] = world(place)[1]
        elsewhere = measured.get(other[place])
        choice = choose_place(known, measured[place], elsewhere=elsewhere, changes=len(changed))
        if choice.place != place:
            changed.append(choice.place)
        place = choice.place
    assert len(changed) <= (1 if start == "workers" else 2)
    # Waits of less than 5 % count as chance, and a change has to bring 3 %.
    best = min(world(place)[0], world(other[place])[0])
    assert world(place)[0] <= 1.06 * (best if slower >= 1 or not known.workers else world(start)[0])


@few
@given(costs(), ms, st.floats(1, 5), st.floats(0, 1), st.booleans())
def test_a_part_that_the_device_does_beside_the_steps_is_tried_in_the_workers_and_comes_back(
    known, compute, slower, share, starts_on_device
):
    """With ``prefetch`` a step gets longer by a share of the device's part, and does not tell."""

    def world(place):
        loader = slower * known.loader_ms(place)
        busy = compute + (share * known.device_ms if place == "device" else 0.0)
        step = max(loader, busy) if known.workers else loader + busy
        return StepSeen(place=place, steps=60, epochs=1, step_ms=step, wait_ms=step - busy)

    start = place = "device" if starts_on_device else "workers"
    measured, changes = {}, 0
    for _ in range(6):
        measured[place] = world(place)
        elsewhere = measured.get(other[place])
        choice = choose_place(known, measured[place], elsewhere=elsewhere, changes=changes)
        assert ("beside the steps" in choice.reason) == (place == "device")
        changes += choice.place != place
        place = choice.place
    assert changes <= MOST_CHANGES
    ends, began = world(place).step_ms, world(start).step_ms
    assert ends <= 1.06 * began
    if starts_on_device:
        assert ends <= 1.06 * world(other[place]).step_ms


def test_a_busy_device_that_augments_beside_its_steps_is_relieved():
    sample = SampleCosts(whole_ms=4.0, deferred_ms=1.0, read_ms=0.5, samples=8)
    known = PlaceCosts(
        accelerator=True, batch_size=64, workers=8, cpus=8, sample=sample, device_ms=23.0
    )
    assert choose_place(known).place == "device"
    busy = StepSeen(place="device", steps=60, epochs=1, step_ms=123.0, wait_ms=0.0)
    relieved = choose_place(known, busy)
    assert (relieved.place, relieved.workers_step_ms) == ("workers", 100.0)
    # The device had time to spare, and these workers have not.
    slower = StepSeen(place="workers", steps=60, epochs=1, step_ms=130.0, wait_ms=10.0)
    back = choose_place(known, slower, elsewhere=busy, changes=1)
    assert (back.place, back.device_step_ms) == ("device", 123.0)


def test_before_any_step_the_device_needs_less_time_than_it_saves_or_goes_unseen():
    sample = SampleCosts(whole_ms=5.0, deferred_ms=1.0, read_ms=0.5, samples=8)
    known = PlaceCosts(
        accelerator=True, batch_size=10, workers=4, cpus=8, sample=sample, device_ms=9.9
    )
    choice = choose_place(known)
    assert choice.place == "device"
    assert choice.saved_ms == pytest.approx(10 * 4.0 / 4)
    assert all(number in choice.reason for number in ("12.5 ms", "2.5 ms", "9.9 ms", "4 workers"))
    slow = replace(known, device_ms=10.1)
    assert choose_place(slow).place == "workers"
    assert choose_place(slow, known_step_ms=500).place == "workers"
    assert choose_place(slow, known_step_ms=506).place == "device"
    nothing = with_sample(slow, deferred_ms=5.0)
    assert choose_place(nothing, known_step_ms=1e6).place == "workers"


def test_cpus_bound_what_computes_and_not_what_waits():
    sample = SampleCosts(whole_ms=10.0, deferred_ms=10.0, read_ms=9.0, waits_ms=8.0)
    known = PlaceCosts(accelerator=True, batch_size=1, workers=8, cpus=1, sample=sample)
    assert known.loader_ms("workers") == 2.0  # 2 ms of computing on one CPU
    assert replace(known, cpus=2).loader_ms("workers") == 10.0 / 8
    assert replace(known, workers=0).loader_ms("workers") == 10.0


def test_few_steps_say_nothing():
    known = PlaceCosts(
        accelerator=True,
        batch_size=1,
        workers=1,
        cpus=1,
        sample=SampleCosts(whole_ms=9.0, deferred_ms=1.0, read_ms=1.0),
        device_ms=1.0,
    )
    wait = {"step_ms": 10.0, "wait_ms": 0.0, "augment_ms": 9.0}
    for steps, epochs, enough in ((49, 0, False), (50, 0, True), (3, 2, False), (4, 1, True)):
        step = StepSeen(place="device", steps=steps, epochs=epochs, **wait)
        assert step.enough == enough
        assert (choose_place(known, step).place == "workers") == enough


def test_what_only_keeps_the_distribution_is_named_in_the_reason():
    known = PlaceCosts(accelerator=True, batch_size=1, workers=1, cpus=1, redrawn=("GaussNoise",))
    choice = choose_place(known)
    assert choice.place == "device"
    assert "GaussNoise makes other pixels of the same distribution" in choice.reason

"""Which block runs when, and what the blocks say: on figures that are made up."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import asdict

import pytest

from lightning_fastdata.prove.remedies import Change, Remedy
from lightning_fastdata.prove.trials import (
    AS_IS,
    FREE,
    Block,
    Trial,
    bound_of,
    conclude,
    confirmed,
    epoch_s,
    gain_of,
    interval,
    log_gains,
    middle_step_s,
    of_dict,
    student_quantile,
    turns,
)


class Training:
    """A training whose epochs take what the test says, with some spread and a drift."""

    def __init__(self, epochs_s, *, spread=0.01, drift=0.0, seed=0, budget_s=600.0, remedies=()):
        self.epochs_s, self.spread, self.drift = epochs_s, spread, drift
        self.draw = random.Random(seed)
        self.left = budget_s
        self.trial = Trial(script="train.py")
        self.remedies = list(remedies)
        self.ran = []

    def run(self):
        for turn in turns(self.trial, lambda: self.left, self._name):
            self.ran.append(turn)
            wall_s = self.epochs_s[turn.arm] * math.exp(self.draw.gauss(0, self.spread))
            wall_s *= 1 + self.drift * len(self.ran)
            self.left -= wall_s
            if not turn.warm:
                block = Block(
                    arm=turn.arm, phase=turn.phase, epoch_s=wall_s, step_ms=wall_s, wall_s=wall_s
                )
                self.trial.blocks.append(block)
        self.trial.ended = True
        return conclude(self.trial)

    def _name(self):
        self.trial.remedies.update({each.name: each for each in self.remedies})


def workers(number, effort=1):
    name = f"num_workers={number}"
    return Remedy(name=name, change=Change(num_workers=number), effort=effort)


FAST = Remedy(name="fast", change=Change(fast=True), effort=2)
CACHE = Remedy(name="cache", change=Change(cache="ram"), effort=3)


@pytest.mark.parametrize(
    ("probability", "freedom", "quantile"),
    [(0.975, 1, 12.706), (0.975, 4, 2.776), (0.995, 9, 3.250), (0.9975, 5, 4.773),
     (0.975, 100, 1.984)],
)  # fmt: skip
def test_quantiles_are_those_of_the_tables(probability, freedom, quantile):
    assert student_quantile(probability, freedom) == pytest.approx(quantile, rel=1e-3)


def test_an_interval_holds_the_gain_as_often_as_it_says():
    draw = random.Random(1)
    held = 0
    for _ in range(400):
        found = interval([math.log(1.2) + draw.gauss(0, 0.1) for _ in range(6)])
        held += found.low <= 1.2 <= found.high
    assert 0.92 <= held / 400 <= 0.98


def test_more_tries_make_the_interval_wider():
    logs = [0.1, 0.12, 0.08, 0.11, 0.09]
    assert interval(logs, tries=8).low < interval(logs).low


def test_the_remedy_that_gains_is_recommended_with_its_gain():
    times = {AS_IS: 10.0, FREE: 4.0, "num_workers=2": 5.0, "num_workers=8": 9.9, "fast": 12.0}
    found = Training(times, remedies=[workers(2), workers(8), FAST]).run()
    assert found.outcome == "change"
    assert found.exit_code == 1
    assert found.remedy == "num_workers=2"
    assert found.gain.factor == pytest.approx(2.0, rel=0.03)
    assert found.gain.low < 2.0 < found.gain.high


def test_where_free_data_brings_nothing_no_remedy_is_tried():
    training = Training({AS_IS: 10.0, FREE: 9.95}, remedies=[workers(2)])
    found = training.run()
    assert found.outcome == "nothing to gain"
    assert found.exit_code == 0
    assert {turn.arm for turn in training.ran} == {AS_IS, FREE}


def test_nothing_to_gain_is_not_said_of_blocks_that_differ_a_lot():
    said = set()
    for seed in range(20):
        found = Training({AS_IS: 10.0, FREE: 10.0}, spread=0.3, seed=seed).run()
        bound = bound_of(found.trial)
        if bound.factor < 1.03:
            said.add(found.outcome)
            assert found.outcome == ("not known" if bound.high > 1.1 else "nothing to gain")
    assert "not known" in said


def test_a_cache_is_promised_for_the_epochs_that_the_script_has():
    training = Training({AS_IS: 10.0, FREE: 0.4, "cache": 0.5}, remedies=[CACHE])
    training.trial.facts["epochs"] = 5
    found = training.run()
    in_all = 5 / (1 + 4 / found.gain.factor)
    assert any(f"that is {in_all:.3g}x in all" in said for said in found.says)


@pytest.mark.parametrize(("epochs", "wins"), [(3, "fast"), (1000, "cache"), (None, "cache")])
def test_a_cache_is_taken_where_it_gains_most_in_all_epochs_of_the_script(epochs, wins):
    times = {AS_IS: 10.0, FREE: 2.0, "cache": 2.2, "fast": 2.6, "fast + cache": 2.6}
    training = Training(times, remedies=[CACHE, FAST])
    training.trial.facts["epochs"] = epochs
    assert training.run().remedy == wins


def test_the_first_epoch_of_a_cache_gains_what_the_rest_of_its_remedy_does():
    times = {AS_IS: 10.0, FREE: 0.9, "cache": 6.0, "fast": 5.0, "fast + cache": 1.0}
    training = Training(times, remedies=[CACHE, FAST])
    training.trial.facts["epochs"] = 3
    found = training.run()
    assert found.remedy == "fast + cache"
    [in_all] = [said for said in found.says if "in all" in said]
    assert float(re.search(r"is ([\d.]+)x", in_all)[1]) == pytest.approx(30 / (5 + 1 + 1), rel=0.05)


@pytest.mark.parametrize("drift", [0.03, -0.012])
def test_what_drifts_is_no_gain(drift):
    times = {AS_IS: 10.0, FREE: 5.0, "num_workers=2": 10.0, "fast": 10.0}
    training = Training(
        times, spread=0.002, drift=drift, remedies=[workers(2), FAST], budget_s=900.0
    )
    found = training.run()
    assert found.outcome == "nothing found"


def test_the_order_is_turned_round_from_one_time_to_the_next():
    times = EveryName({AS_IS: 10.0, FREE: 4.0, "num_workers=2": 5.0, "fast": 6.0, "cache": 7.0})
    training = Training(times, remedies=[workers(2), FAST, CACHE])
    found = training.run()
    ran = [turn.arm for turn in training.ran if turn.phase == "confirm"]
    assert ran[:4] == [AS_IS, found.remedy, found.remedy, AS_IS]
    counted = [t.arm for t in training.ran if t.phase == "try" and not t.warm and t.arm != AS_IS]
    assert counted[:6] == [*counted[:3], *reversed(counted[:3])]


def test_remedies_that_change_nothing_are_hardly_ever_recommended():
    times = {AS_IS: 5.0, FREE: 3.0, "fast": 5.0, "cache": 5.0} | {
        f"num_workers={n}": 5.0 for n in (2, 4, 8)
    }
    remedies = [workers(2), workers(4), workers(8), FAST, CACHE]
    recommended_ones = 0
    for seed in range(60):
        for name in (*times, "fast + cache"):
            times.setdefault(name, 5.0)
        training = Training(EveryName(times), spread=0.05, seed=seed, remedies=remedies)
        recommended_ones += training.run().remedy is not None
    assert recommended_ones <= 3


class EveryName(dict):
    """Times of remedies together: as those of the training as it is."""

    def __missing__(self, name):
        return self[AS_IS]


def test_of_two_that_gain_the_same_the_smaller_change_is_taken():
    times = EveryName({AS_IS: 10.0, FREE: 4.0, "num_workers=2": 5.05, "fast": 5.0})
    assert Training(times, remedies=[FAST, workers(2)]).run().remedy == "num_workers=2"


def test_a_remedy_that_fails_is_not_recommended():
    times = EveryName({AS_IS: 10.0, FREE: 4.0, "num_workers=2": 5.0, "fast": 3.0})
    training = Training(times, remedies=[FAST, workers(2)])
    training.trial.failed["fast"] = "WorkerError: it died"
    assert training.run().remedy == "num_workers=2"
    assert "fast" not in {turn.arm for turn in training.ran}


def test_a_small_budget_still_confirms_the_best():
    times = EveryName({AS_IS: 10.0, FREE: 4.0, "num_workers=2": 5.0, "fast": 6.0, "cache": 20.0})
    training = Training(times, remedies=[workers(2), FAST, CACHE], budget_s=170.0)
    found = training.run()
    assert found.remedy == "num_workers=2"
    assert sum(turn.phase == "confirm" for turn in training.ran) == 10
    assert training.left > -20.0


def test_a_gain_that_may_be_chance_is_not_called_none():
    times = EveryName({AS_IS: 10.0, FREE: 4.0, "num_workers=2": 8.5})
    outcomes = set()
    for seed in range(12):
        training = Training(times, remedies=[workers(2)], spread=0.3, seed=seed)
        found = training.run()
        outcomes.add(found.outcome)
        if "may be chance" in found.verdict:
            assert found.exit_code == 2
            assert found.gain is None
    assert "not known" in outcomes


def test_what_there_was_no_time_to_try_is_told():
    times = EveryName({AS_IS: 10.0, FREE: 4.0, "num_workers=2": 10.0, "fast": 10.0})
    found = Training(times, remedies=[workers(2), FAST], budget_s=118.0).run()
    assert found.outcome == "not known"
    assert re.search(
        r"free data would bring \d\.\d\dx at most, and there was no time to try ", found.verdict
    )


def test_each_block_is_compared_with_another_block_of_the_training_as_it_is():
    def block(arm, epoch_s, phase="confirm"):
        return Block(arm=arm, phase=phase, epoch_s=epoch_s, step_ms=1.0, wall_s=1.0)

    blocks = [block(AS_IS, 4.0), block("x", 2.0), block("x", 2.0), block(AS_IS, 8.0)]
    assert log_gains(blocks, "x") == pytest.approx([math.log(2), math.log(4)])
    assert log_gains([*blocks, block("x", 1.0)], "x") == log_gains(blocks, "x")
    assert log_gains([*blocks, block("x", 1.0, "try")], "x") == log_gains(blocks, "x")


def test_what_was_chosen_by_luck_is_promised_by_blocks_that_had_no_part_in_it():
    trial = Trial(script="train.py", remedies={"fast": FAST})

    def add(phase, arm, seconds):
        trial.blocks.append(
            Block(arm=arm, phase=phase, epoch_s=seconds, step_ms=1.0, wall_s=seconds)
        )

    for _ in range(2):
        add("try", AS_IS, 10.0)
        add("try", "fast", 5.0)
    for number in range(5):
        add("confirm", AS_IS, 10.0 + 0.01 * number)
        add("confirm", "fast", 9.0)
    assert gain_of(trial, "fast").factor == pytest.approx(10.02 / 9.0)
    name, gain = confirmed(trial)
    assert name == "fast"
    assert gain.holds


@pytest.mark.parametrize("steps", [40, 64, 100])
@pytest.mark.parametrize("validations", [0.0, 0.5, 1.0, 4.0])
def test_a_part_of_an_epoch_tells_of_the_whole(steps, validations):
    start_s, step_s, ahead = 0.7, 0.05, 6

    def asked(count):
        # The first batch is late, what was read ahead comes at once, and so do the last ones.
        times = [0.0, start_s]
        for number in range(1, count + 1):
            quick = number <= ahead or number > count - ahead
            times.append(times[-1] + (0.5 * step_s if quick else step_s))
        return times

    def cycle(count):
        return asked(count)[-1]

    whole = epoch_s(
        cycle_s=cycle(steps) + 0.3, rest_s=(1000 - steps) * middle_step_s(asked(steps)),
        validation_s=0.3, validation_rest_s=15 * 0.02, validations=validations,
    )  # fmt: skip
    assert whole == pytest.approx(cycle(1000) + validations * (0.3 + 15 * 0.02), rel=1e-9)


@pytest.mark.parametrize("ahead", [1, 4, 8, 16])
def test_a_part_in_which_all_was_read_ahead_is_no_faster_than_its_loader(ahead):
    """So many workers take a second for a batch each: a part of 8 steps waits once for all."""
    asked_s = [0.0]
    for number in range(8):
        asked_s.append(max(asked_s[-1], 1.0 + number // ahead) + 0.01)
    assert middle_step_s(asked_s, ahead=ahead) > 0.999 / ahead


def test_a_trial_comes_back_from_its_file():
    training = Training({AS_IS: 10.0, FREE: 4.0, "num_workers=2": 5.0}, remedies=[workers(2)])
    found = training.run()
    again = conclude(of_dict(json.loads(json.dumps(asdict(training.trial)))))
    assert again.text() == found.text()


@pytest.mark.parametrize("kept", range(0, 30, 3))
def test_a_trial_that_is_stopped_anywhere_says_what_is_known(kept):
    times = EveryName({AS_IS: 10.0, FREE: 4.0, "num_workers=2": 5.0, "fast": 7.0})
    training = Training(times, remedies=[workers(2), FAST])
    training.run()
    trial = training.trial
    trial.blocks, trial.ended, trial.stopped = trial.blocks[:kept], False, "it was interrupted"
    found = conclude(trial)
    assert found.outcome in ("not known", "change")
    assert (found.outcome == "change") == (found.remedy is not None)
    assert "interrupted" in found.text()

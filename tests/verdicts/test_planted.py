"""The first finding of a run is the cause that was planted in it, each time to the nanosecond."""

from __future__ import annotations

from misses import each
from rig.virtual_crew import on_machine
from thoroughness import some

from lightning_fastdata.insight.report import RunReport
from lightning_fastdata.insight.verdict import findings
from verdicts.healthy import HEALTHY, blames_data, healthy
from verdicts.known import evidence_with, judge
from verdicts.planted import LOADING
from verdicts.planted_costs import COSTS
from verdicts.test_gate import OPTIONS, stage, unlawful
from verdicts.workloads import train

PLANTS = sorted(LOADING + COSTS, key=lambda plant: plant.code)


def planted(plant, magnitude):
    """Return what was measured, but for lines: who looks for them goes by real time."""
    with plant.machine(magnitude):
        return evidence_with(plant.run(magnitude), lines=(), operations=())


def check_findings(plant):
    """Check that the first is what was planted, in two runs alike, and all advice lawful."""
    for magnitude in some(plant.magnitudes, 4):
        evidence = planted(plant, magnitude)
        if magnitude == plant.magnitudes[0]:
            assert planted(plant, magnitude) == evidence
        found = findings(evidence)
        assert [each.code for each in found][:1] == [plant.code], (
            magnitude,
            found,
            evidence.causes,
        )
        assert found[0].remedy, (magnitude, found[0])
    for closed in ({}, dict.fromkeys(OPTIONS, "chosen")) if plant in LOADING else ():
        told = judge(stage(), evidence=evidence_with(evidence, closed=closed))
        verdict = RunReport(stages=(stage(),), verdict=told).as_dict()["verdict"]
        assert unlawful(verdict, chosen=closed) == []


@each("plant", PLANTS)
def test_the_first_finding_is_the_planted_cause_and_two_runs_are_the_same_evidence(plant):
    """And what is advised is lawful."""
    check_findings(plant)


def test_data_of_a_healthy_training_are_not_blamed():
    for number in range(HEALTHY):
        with on_machine():
            evidence = train(healthy(number))
        assert not blames_data(evidence), (number, findings(evidence), evidence.causes)


def test_every_cause_is_planted_in_five_magnitudes():
    codes = [f"FD3{row:02}" for row in (*range(2, 9), 10, 12, 13, 15, 16, 18, 23, 24)]
    assert [plant.code for plant in PLANTS] == codes
    assert all(len(set(map(str, plant.magnitudes))) == 5 for plant in PLANTS)

"""All trainings by name."""

from __future__ import annotations

from trainings.decoding import DECODING
from trainings.healthy import HEALTHY
from trainings.looping import LOOPING
from trainings.parts import Training
from trainings.storage import STORAGE


def name_of(training: Training) -> str:
    """Return the cause and the magnitude."""
    return f"{training.cause}: {training.what}"


TRAININGS = {name_of(each): each for each in (*STORAGE, *DECODING, *LOOPING, *HEALTHY)}

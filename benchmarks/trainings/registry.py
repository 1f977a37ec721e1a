"""All trainings by name."""

from __future__ import annotations

from trainings.crowds import CROWDS
from trainings.decoding import DECODING
from trainings.epochs import EPOCHS
from trainings.healthy import HEALTHY
from trainings.looping import LOOPING
from trainings.opened import OPENED
from trainings.parts import Training
from trainings.storage import STORAGE


def name_of(training: Training) -> str:
    """Return the cause and the magnitude."""
    return f"{training.cause}: {training.what}"


_ALL = (*STORAGE, *OPENED, *DECODING, *CROWDS, *LOOPING, *EPOCHS, *HEALTHY)
TRAININGS = {name_of(each): each for each in _ALL}

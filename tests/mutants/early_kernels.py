"""Precautions of the early compiling of kernels, taken out: a law of ``test_compiled_early.py``."""

from __future__ import annotations

from augment.test_compiled_early import check_ranks

from lightning_fastdata.augment.replay import warm_up
from mutants.mutant import Mutant


def nothing(right):
    return lambda *_: None


def another_each_time(right):
    names = iter(range(100))
    return lambda asked: str(next(names))


MUTANTS = (
    Mutant("no rank waits", check_ranks, warm_up, "_wait_for", nothing),
    Mutant(
        "what is compiled is asked for again", check_ranks, warm_up, "_digest", another_each_time
    ),
    Mutant("no version of the kernels counts", check_ranks, warm_up, "_digest", nothing),
)

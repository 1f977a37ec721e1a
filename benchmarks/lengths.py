"""Five laws of the length of samples, at most 8,192, for what is measured and tested of batches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

MOST = 8192


def whole(values: np.ndarray) -> np.ndarray:
    """Return lengths int64 from 1 to :data:`MOST`."""
    return np.clip(np.round(values), 1, MOST).astype(np.int64)


def speech(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return lognormal lengths: recordings in frames of 10 ms, 9 s in the median."""
    return whole(rng.lognormal(np.log(900), 0.6, count))


def sentences(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return lengths by Zipf's law with the exponent 1.5, from 5 to 512."""
    return np.minimum(whole(4.0 + rng.zipf(1.5, count)), 512)


def uniform(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return lengths of which each is equally likely."""
    return rng.integers(1, MOST + 1, count)


def chat(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return lengths with two peaks: 70 % short questions, 30 % long answers."""
    short = rng.random(count) < 0.7
    return whole(np.where(short, rng.normal(150, 50, count), rng.normal(2500, 700, count)))


def documents(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return Pareto lengths with the exponent 1.1: a heavy tail, cut off."""
    return whole(100 * (1 + rng.pareto(1.1, count)))


LAWS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    law.__name__: law for law in (speech, sentences, uniform, chat, documents)
}


def drawn(name: str, count: int, seed: int = 0) -> np.ndarray:
    """Return so many lengths of a law, int64."""
    return LAWS[name](np.random.default_rng(seed), count)

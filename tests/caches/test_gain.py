"""The gain of a cache is measured on a few samples, and decides whether it is made."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from lightning_fastdata.caches.cached import CacheGain, measure_gain
from lightning_fastdata.host import clock

MADE_MS = 4.0


class OwnTime(clock.Clock):
    """Stands still until something is said to have taken time."""

    now_ns = 0

    def monotonic_ns(self):
        return self.now_ns

    def took(self, ms):
        self.now_ns += round(ms * 1e6)


class Slow(Dataset):
    """50 samples of 400 bytes, each of which takes 4 ms to make."""

    def __init__(self, time):
        self.time = time

    def __len__(self):
        return 50

    def __getitem__(self, index):
        self.time.took(MADE_MS)
        return torch.full((100,), float(index))

    def recognised_by(self):
        return "slow"


def test_costs_and_gains_are_those_of_the_cache(tmp_path):
    time = OwnTime()
    with clock.installed(time):
        found = measure_gain(Slow(time), str(tmp_path))
    assert (found.made_ms, found.first_ms, found.later_ms) == (MADE_MS, MADE_MS, 0)
    assert found.total_bytes == 50 * 400
    assert str(found) == ("samples as the dataset returns them: 2e-05 GB, 4 -> 0 ms a sample")


ms = st.floats(0.01, 100)


@given(ms, ms, ms, st.floats(1, 10), st.floats(0.5, 2), st.floats(0.5, 2))
def test_a_cache_is_worth_it_if_it_is_quick_fits_and_is_paid_back(
    made, first, later, epochs, disk, memory
):
    gain = CacheGain("", 1.0, made, first, later)
    refused = gain.why_not(disk_bytes=disk, memory_bytes=memory, epochs=epochs)
    worth = made >= 2 * later and disk >= 1 and memory >= 1
    assert (refused is None) == (worth and (epochs - 1) * (made - later) > max(0.0, first - made))


def test_global_generators_are_left_as_they_were(tmp_path):
    torch.manual_seed(3)
    random.seed(3)
    wanted = torch.rand(1), random.random()
    torch.manual_seed(3)
    random.seed(3)
    measure_gain(Slow(OwnTime()), str(tmp_path))
    assert (torch.rand(1), random.random()) == wanted

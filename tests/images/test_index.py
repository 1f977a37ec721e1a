"""A packed index gives back what was packed, in far less than a list of tuples."""

from __future__ import annotations

import os
import pickle

from hypothesis import given
from hypothesis import strategies as st
from thoroughness import max_examples

from lightning_fastdata.images.index import PathIndex

paths = st.binary(min_size=1, max_size=40).filter(lambda name: b"\0" not in name).map(os.fsdecode)


@given(st.lists(st.tuples(paths, st.integers(0, 2**31 - 1)), max_size=30))
@max_examples(100)
def test_any_path_a_file_system_can_hold_survives_packing_and_pickling(samples):
    index = pickle.loads(pickle.dumps(PathIndex.pack(samples)))
    assert len(index) == len(samples)
    assert index.samples() == samples
    assert [index.path(i) for i in range(len(index))] == [path for path, _ in samples]


def test_the_index_costs_its_bytes_and_six_more_per_sample():
    samples = [(f"/data/train/n{i % 1000:08d}/n{i:08d}.JPEG", i % 1000) for i in range(10_000)]
    index = PathIndex.pack(samples)
    payload = sum(len(path) for path, _ in samples)
    assert len(pickle.dumps(index)) < payload + 6 * len(samples) + 1000

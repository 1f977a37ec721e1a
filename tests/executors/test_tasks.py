"""How batches are divided into tasks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_fastdata.executors.pool.scheduler import rows_per_task

MS = 1_000_000.0


@given(
    samples=st.integers(1, 4096),
    sample_ns=st.none() | st.floats(0, 1e10),
    workers=st.integers(1, 64),
    before=st.integers(0, 80),
    look_ahead=st.integers(1, 80),
)
def test_a_task_has_at_least_one_sample_and_at_most_all(
    samples, sample_ns, workers, before, look_ahead
):
    rows = rows_per_task(samples, sample_ns, workers=workers, before=before, look_ahead=look_ahead)
    assert 1 <= rows <= samples


def test_batches_that_are_needed_next_are_spread_over_all_workers():
    for before in (0, 1):
        how = {"workers": 4, "before": before, "look_ahead": 8}
        assert rows_per_task(64, None, **how) == 16
        assert rows_per_task(64, 10 * MS, **how) == 1
        assert rows_per_task(64, 0.5 * MS, **how) == 4
        assert rows_per_task(64, 0.001 * MS, **how) == 64


def test_a_process_reads_a_batch_of_its_own_where_it_has_the_time():
    how = {"workers": 2, "look_ahead": 4, "alone_ns": 64 * MS}
    rows = [rows_per_task(64, 1 * MS, before=before, **how) for before in range(4)]
    assert rows == [2, 2, 64, 64]
    assert rows_per_task(64, 1.1 * MS, before=3, **how) < 32


def test_later_batches_go_in_fewer_tasks_that_keep_every_hand_busy():
    assert rows_per_task(64, 0.5 * MS, workers=2, before=2, look_ahead=8) == 32
    assert rows_per_task(64, 5 * MS, workers=2, before=2, look_ahead=8) == 5
    assert rows_per_task(64, 500 * MS, workers=2, before=2, look_ahead=8) == 1
    assert rows_per_task(64, 0.1 * MS, workers=16, before=7, look_ahead=8) == 11

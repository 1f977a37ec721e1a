"""The numbers that loggers get: their names, which end in their units, and what they are.

``docs/measuring.md`` prints these tables. Names are those of training; validation's begin with
``data_val`` in the place of ``data``, and those of other stages in the same way. What was not
measured has no number.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from lightning_fastdata.insight.waits.attribution import PART_WORDS


class Metric(NamedTuple):
    """One number."""

    name: str
    """As loggers get it."""
    meaning: str
    """In a few words of Markdown."""
    main: bool = False
    """Whether it is logged by default; the others are with ``scalars="all"``."""
    on_gpu: str = ""
    """How it is measured where a GPU computes; empty: follows from others."""
    on_cpu: str = ""
    """The same where the host computes."""


_BAND: Final = {"p50": "median", "p95": "95th percentile", "max": "maximum"}

STEPS: Final = (
    Metric("data/time_wait_ms", "the host waited for `next()`", True, "host clock", "host clock"),
    Metric(
        "data/stall_percent",
        "share of the step in which the **device** was idle because of data",
        True,
        "between two events recorded on the compute stream around `next()`",
        "the same as the wait",
    ),
    Metric("data/time_compute_ms", "forward, backward, optimizer", True, "events", "host clock"),
    Metric("data/step_ms", "stall + transfer + augment + compute", True),
    Metric("data/throughput_samples_per_s", "samples over `step_ms`", True),
    Metric(
        "data/throughput_if_data_were_free_samples_per_s",
        "the same without the stall: the most that faster data can give; "
        "the least without a GPU, as workers take CPUs from the model",
        True,
    ),
    Metric("data_step/transfer_ms", "host to device copy", True, "events", "host clock"),
    Metric(
        "data_step/augment_ms",
        "what runs in `on_after_batch_transfer`",
        True,
        "events",
        "host clock",
    ),
    Metric("data_headroom/speedup_possible", "throughput if data were free, over throughput"),
    *(
        Metric(
            f"data_band/{phase}_{key}_ms",
            f"{words} of the {phase}",
            phase == "stall" and key == "p95",
        )
        for phase in ("stall", "compute", "step")
        for key, words in _BAND.items()
    ),
    Metric(
        "data_run/samples_per_s",
        "samples over the wall time of the whole training so far; at ends of epochs",
        True,
    ),
    Metric(
        "data_run/steps_percent",
        "the part of that time that was training steps; at ends of epochs",
        True,
    ),
    Metric(
        "data_val/stall_percent",
        "the stall of validation; its other numbers begin with `data_val`, too",
        True,
    ),
)
"""Means over the steps since a number was last logged, unless said otherwise."""

WAITS: Final = tuple(
    Metric(f"data_wait/{part}", words, part.startswith("read_"))
    for part, words in PART_WORDS.items()
)
"""What the wait for a batch consisted of, the mean; the parts add up to it."""

RANKS: Final = (
    Metric("data_ranks/stall_max_ms", "stall of a step, where it is longest", True),
    Metric("data_ranks/stall_mean_ms", "the mean stall of a step"),
    Metric("data_ranks/stall_min_ms", "stall of a step, where it is shortest"),
    Metric("data_ranks/slowest_rank", "the rank with the longest stall"),
    Metric("data_ranks/step_max_ms", "the longest step"),
    Metric("data_ranks/compute_max_ms", "forward, backward, optimizer, where they take longest"),
    Metric("data_ranks/compute_min_ms", "the same, where they take shortest"),
)
"""Over the ranks."""

MACHINE: Final = (
    Metric(
        "data_host/cpu_pressure_percent",
        "share of the time in which something on the machine waited for a CPU",
    ),
    Metric("data_host/io_pressure_percent", "the same for storage"),
    Metric(
        "data_host/cpu_throttled_percent",
        "share of the scheduler's periods in which the CPU quota was used up; absent without one",
    ),
    Metric(
        "data_host/read_mb_per_s",
        "what read calls of this process and its workers returned, from the file cache or not; "
        "without memory maps",
    ),
    Metric("data_host/storage_read_mb_per_s", "what storage was read for them"),
    Metric("data_host/shm_used_percent", "share of `/dev/shm` in use"),
    Metric(
        "data_host/pss_mib", "memory of this process and its workers, shared pages counted once"
    ),
    Metric("data_workers/active", "worker processes alive"),
    Metric("data_workers/busy_percent", "share of the time in which a worker had a task"),
    Metric("data_device/peak_memory_mib", "the most that tensors took of the device's memory"),
    Metric("data_device/headroom_percent", "share of the device's memory that was never used"),
    Metric(
        "data_device/alloc_retries",
        "how often the device's allocator freed its cache and tried again",
    ),
)
"""What the training took of its machine: since a number was last logged; of the device, in all."""

FAULTS: Final = (
    Metric("data_faults/samples", "times that a bad sample was replaced or left out", True),
    Metric("data_faults/retries", "times that a sample was read again, as its error may pass"),
    Metric("data_faults/deaths", "worker processes that died and were replaced", True),
)
"""What went wrong in reading so far; absent while nothing has."""

TUNE: Final = (
    Metric("data_tune/workers", "side processes that read, while they are tuned", True),
    Metric(
        "data_tune/gain_expected_percent",
        "of a step: what the last change of their number was to save",
    ),
    Metric(
        "data_tune/gain_seen_percent",
        "the same as it was measured afterwards; a change that did not pay was taken back",
    ),
    Metric("data_tune/spent_s", "what tuning took so far"),
)
"""The number of workers, where it is tuned; gains are absent while it was not changed."""

METRICS: Final = (*STEPS, *WAITS, *RANKS, *MACHINE, *FAULTS, *TUNE)
MAIN: Final = frozenset(metric.name for metric in METRICS if metric.main)
"""What people look at: 20 at most, several of them only where there is something to measure."""

"""Where a section of tools/gpu.py measures, how, and what it has found."""

from __future__ import annotations

import json
import statistics
import time

import torch

_CYCLES_PER_MS = 2_000_000
"""Of a GPU at 2 GHz; a slower one is busy for longer."""


class Rehearsed(BaseException):
    """A rehearsal has come to the device, which there is none of."""


class Skipped(Exception):  # noqa: N818 - it is no error
    """A section, or a part of one, cannot run here; says why."""


def failure(error):
    """Return an error as the note of a row."""
    told = f"failed: {type(error).__name__}: {error}".replace("\n", " ").replace("|", "/")
    return told[:300]


class Run:
    """Where and how long to measure, and what was found.

    Rows go to ``rows_file`` as they are found, so that those of a section that is ended are kept.
    A ``rehearsal`` ends where a section would first use the device.
    """

    def __init__(self, device, *, quick, budget_s=60, rows_file=None, rehearsal=False):
        self.device = torch.device(device)
        self.cuda = self.device.type == "cuda"
        self.quick = quick
        self.ends = time.monotonic() + budget_s
        self.rows = []
        self._rows_file = rows_file
        self._rehearsal = rehearsal

    def begin(self):
        """Say that the device is used from now on."""
        if self._rehearsal:
            raise Rehearsed

    def left_s(self):
        return self.ends - time.monotonic()

    def add(self, section, what, value, unit, note=""):
        row = {"section": section, "what": what, "value": value, "unit": unit, "note": note}
        self.rows.append(row)
        if self._rows_file is not None:
            with self._rows_file.open("a") as out:
                out.write(json.dumps(row) + "\n")

    def settle(self):
        self.begin()
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def host_ms(self, function, *, repeats=20):
        """Return the median time in which the host has handed one call over, in milliseconds."""
        self.begin()
        function()
        times = []
        for _ in range(3 if self.quick else repeats):
            self.settle()
            at = time.perf_counter()
            function()
            times.append((time.perf_counter() - at) * 1e3)
        self.settle()
        return statistics.median(times)

    def time_ms(self, function, *, repeats=20, warm=3):
        """Return the median time of one call on the device, in milliseconds.

        The device is kept busy until the call has been handed over, so a device that would wait
        for the host in between is not counted: that is :meth:`host_ms`.
        """
        self.begin()
        for _ in range(warm):
            function()
        self.settle()
        busy_ms = min(100.0, 1.5 * self.host_ms(function, repeats=3) + 0.5) if self.cuda else 0.0
        times = []
        for _ in range(3 if self.quick else repeats):
            if self.cuda:
                began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(round(busy_ms * _CYCLES_PER_MS))
                began.record()
                function()
                ended.record()
                ended.synchronize()
                times.append(began.elapsed_time(ended))
            else:
                at = time.perf_counter()
                function()
                times.append((time.perf_counter() - at) * 1e3)
        return statistics.median(times)

    def launches(self, function):
        """Return how many kernels and copies one call gives the device; None on the CPU."""
        if not self.cuda:
            return None
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            function()
            self.settle()
        kinds = torch.autograd.DeviceType
        return sum(event.device_type == kinds.CUDA for event in seen.events())


def new_trainer(run, folder, **arguments):
    import lightning.pytorch as pl

    trainer = pl.Trainer(
        accelerator="gpu" if run.cuda else "cpu",
        devices=[run.device.index or 0] if run.cuda else 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **arguments,
    )
    run.begin()
    return trainer

"""How batches come to the device: at their turn, beside the computing, and one ahead."""

from __future__ import annotations

import time

import torch


def measure_prefetch(run):
    rows, side = (8, 32) if run.quick else (256, 224)
    name = f"to the device, {rows}x3x{side}x{side} uint8"
    images = torch.zeros(rows, 3, side, side, dtype=torch.uint8)
    batches = [images.pin_memory() if run.cuda else images for _ in range(4)]
    copy_ms = run.time_ms(lambda: batches[0].to(run.device, non_blocking=True))
    run.add(name, "copy alone", copy_ms, "ms", "page-locked")
    compute = _work_of(run, copy_ms)
    run.add(name, "compute alone", run.time_ms(compute), "ms", "made to last as long")
    for waits in (False, True):
        kind = "the host waits in each step" if waits else "the host runs ahead"
        for way in ("at its turn", "beside", "one ahead"):
            took = _steps_ms(run, batches, compute, way, waits=waits)
            run.add(name, f"a step, moved {way}", took, "ms", kind)
    _measure_loaders(run, rows, side, compute)


def _work_of(run, wanted_ms):
    """Return matrix products that take about as long as wanted."""
    size = 256 if run.quick else 4096
    left = torch.ones(size, size, device=run.device)
    out = torch.empty_like(left)
    once_ms = run.time_ms(lambda: torch.mm(left, left, out=out))
    times = max(1, round(wanted_ms / once_ms))

    def work():
        for _ in range(times):
            torch.mm(left, left, out=out)

    return work


def _steps_ms(run, batches, compute, way, *, waits):
    from lightning_fastdata import prefetch
    from lightning_fastdata.device import device_streams
    from lightning_fastdata.loading.prefetch import SideLane

    steps = 8 if run.quick else 100
    source = (batches[number % len(batches)] for number in range(steps))
    streams = device_streams(run.device)
    if way == "one ahead":
        moved = prefetch(source, run.device)
    elif way == "beside" and streams is not None:
        lane = SideLane(streams)
        moved = (lane.send(b, lambda b: b.to(run.device, non_blocking=True)).land() for b in source)
    else:
        moved = (b.to(run.device, non_blocking=True) for b in source)
    run.settle()
    at = time.perf_counter()
    for batch in moved:
        batch.sum()
        compute()
        if waits:
            run.settle()
    run.settle()
    return (time.perf_counter() - at) * 1e3 / steps


class Rows(torch.utils.data.Dataset):
    """Samples that cost nothing but their transport."""

    def __init__(self, count, side):
        self.count = count
        self.sample = torch.zeros(3, side, side, dtype=torch.uint8)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.sample


def _measure_loaders(run, rows, side, compute):
    from lightning_fastdata import FastDataLoader, prefetch

    name = f"a step with pinned batches, {rows}x3x{side}x{side} uint8"
    count = rows * (4 if run.quick else 40)
    for way in ("torch", "workers", "workers, one ahead"):
        loader = FastDataLoader(
            Rows(count, side),
            rows,
            num_workers=2,
            executor=way.split(",")[0],
            pin_memory=run.cuda,
            persistent_workers=True,
            multiprocessing_context="forkserver",
        )
        for waits in (False, True):
            kind = "the host waits in each step" if waits else "the host runs ahead"
            for _ in range(2):  # of two epochs the second is kept
                moved = (batch.to(run.device, non_blocking=True) for batch in loader)
                run.settle()
                at = time.perf_counter()
                for batch in prefetch(loader, run.device) if way.endswith("ahead") else moved:
                    batch.sum()
                    compute()
                    if waits:
                        run.settle()
                run.settle()
                took_ms = (time.perf_counter() - at) * 1e3 * rows / count
            run.add(name, way, took_ms, "ms", f"2 workers, {kind}")
        loader.close()

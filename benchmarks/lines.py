"""What it costs a reading process that its lines of code are named.

    python benchmarks/lines.py [--seconds 20]

Tasks are looked at in turn and not, in one process, and the CPU time of the process is compared. A
worker is looked at for one of 32 parts of its time: the last column is that part of what it costs
to be looked at all the time, of the time that the tasks took.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time

import numpy as np
from PIL import Image

from lightning_fastdata.stamps.batch_stamps import TaskWatch
from lightning_fastdata.stamps.lines import EVERY, LineWatch


def jpeg():
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (300, 400, 3), np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG")
    data = buffer.getvalue()
    return lambda: np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def python():
    return lambda: sum(k * k for k in range(20_000))


def wait():
    return lambda: time.sleep(0.004)


def tiny():
    row = np.zeros(64)
    return lambda: row + 1


READS = {"jpeg": (jpeg, 32), "python": (python, 32), "wait": (wait, 32), "tiny": (tiny, 4096)}
"""What a sample is, and samples in a task."""


def timed_task(watch, read, samples):
    """Return the CPU time of the process for a task, and how long it took, in seconds."""
    began, cpu = time.monotonic(), time.process_time()
    watch.begin()
    for index in range(samples):
        sample_ns = time.monotonic_ns()
        read()
        watch.read(index, sample_ns)
    watch.end()
    return time.process_time() - cpu, time.monotonic() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="for each kind of sample")
    seconds = parser.parse_args().seconds
    print("| a task reads | ms | CPU ms | more if looked at (quartiles) | of a worker's time |")
    print("|---|---:|---:|---:|---:|")
    for name, (make, samples) in READS.items():
        read = make()
        watches = TaskWatch(0), TaskWatch(0, LineWatch(every=1))
        for watch in watches * 3:
            timed_task(watch, read, samples)
        pairs = []
        until = time.monotonic() + seconds
        while time.monotonic() < until or len(pairs) < 8:
            pairs.append([timed_task(watch, read, samples) for watch in watches])
        wall = statistics.median(plain[1] for plain, _ in pairs)
        cpu = statistics.median(plain[0] for plain, _ in pairs)
        more = [looked[0] - plain[0] for plain, looked in pairs]
        low, middle, high = (each * 1e3 for each in statistics.quantiles(more, n=4))
        print(
            f"| {samples} of {name} | {wall * 1e3:.1f} | {cpu * 1e3:.1f} "
            f"| {middle:+.2f} ms ({low:+.2f} to {high:+.2f}) "
            f"| {middle / 1e3 / wall / EVERY:.2%} |"
        )


if __name__ == "__main__":
    main()

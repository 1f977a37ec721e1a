"""Trainings whose samples come from something that is slow, shared, or opened anew each time."""

from __future__ import annotations

import fcntl
import multiprocessing
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from trainings.parts import Accepted, Load, Made, Model, several

FORK = multiprocessing.get_context("fork")


class ObjectStore(Dataset[torch.Tensor]):
    """Objects of a remote store: each takes its own time to come."""

    def __init__(self, count: int, mean_s: float) -> None:
        draw = np.random.default_rng(0).lognormal(0.0, 0.5, count)
        self.latency_s = draw / draw.mean() * mean_s
        self.sample = torch.rand(1000)

    def __len__(self) -> int:
        return len(self.latency_s)

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.latency_s[index])
        return self.sample


def latency(_: Path, form: Any, workers: int, sample_s: float, **options: Any) -> Made:
    batches = min(120, int(3.5 * max(1, workers) / (16 * sample_s)))
    options = {"num_workers": workers, **options}
    return Made(
        load=Load(dataset=ObjectStore(16 * batches, sample_s), form=form, options=options),
        model=Model(0.01),
    )


class OneAtATime(Dataset[torch.Tensor]):
    """A reader that is not safe to be used twice at once, so that somebody put a lock around it."""

    def __init__(self, count: int, sample_s: float) -> None:
        self.count, self.sample_s = count, sample_s
        self.lock = FORK.Lock()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.lock:
            time.sleep(self.sample_s)
        return torch.full((500,), float(index))


class FileLocked(OneAtATime):
    """The same, with a lock file beside the data."""

    def __init__(self, count: int, sample_s: float, file: Path) -> None:
        self.count, self.sample_s, self.file = count, sample_s, file
        file.touch()

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.file.open("r+") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            time.sleep(self.sample_s)
        return torch.full((500,), float(index))


def locked(folder: Path, form: Any, workers: int, sample_s: float, file: bool, **more: Any) -> Made:
    count = 16 * min(100, int(4 / (16 * sample_s)))
    dataset: Any = OneAtATime(count, sample_s)
    if file:
        dataset = FileLocked(count, sample_s, folder / "lock")
    return Made(load=Load(dataset=dataset, form=form, options={"num_workers": workers, **more}))


class Throttled(Dataset[torch.Tensor]):
    """Files of a mount whose bandwidth all readers share: a token bucket in shared memory."""

    def __init__(self, folder: Path, count: int, size: int, bytes_per_s: float) -> None:
        self.paths = [folder / f"{number}.bin" for number in range(16)]
        for path in self.paths:
            path.write_bytes(bytes(size))
        self.count, self.rate = count, bytes_per_s
        self.free_at = FORK.Value("d", 0.0)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        data = self.paths[index % len(self.paths)].read_bytes()
        with self.free_at.get_lock():
            begins = max(self.free_at.value, time.monotonic())
            self.free_at.value = ends = begins + len(data) / self.rate
        time.sleep(max(0.0, ends - time.monotonic()))
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def serve(listening: socket.socket, bytes_per_s: float) -> None:
    """Send as many bytes as are asked for, at a rate that all connections share."""
    pipe = threading.Lock()

    free_at = [0.0]

    def answer(connection: socket.socket) -> None:
        while asked := connection.recv(8):
            left = int.from_bytes(asked, "big")
            while left:
                part = min(left, 16_384)
                with pipe:
                    free_at[0] = max(free_at[0], time.monotonic() - 0.01) + part / bytes_per_s
                    ends = free_at[0]
                time.sleep(max(0.0, ends - time.monotonic()))
                connection.sendall(bytes(part))
                left -= part

    while True:
        connection, _ = listening.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


class FromServer(Dataset[torch.Tensor]):
    """Samples that a server sends; each worker keeps a connection."""

    def __init__(self, count: int, size: int, address: Any) -> None:
        self.count, self.size, self.address = count, size, address
        self.connection: socket.socket | None = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.connection is None:
            self.connection = socket.create_connection(self.address)
        self.connection.sendall(self.size.to_bytes(8, "big"))
        data = bytearray()
        while len(data) < self.size:
            data += self.connection.recv(65_536)
        return torch.frombuffer(data, dtype=torch.uint8)


def bandwidth(
    folder: Path, form: Any, workers: int, size: int, mb_s: float, server: bool = False, **more: Any
) -> Made:
    rate = mb_s * 1e6
    count = 16 * min(120, int(4 * rate / (16 * size)))
    options = {"num_workers": workers, **more}
    if not server:
        dataset: Any = Throttled(folder, count, size, rate)
        return Made(load=Load(dataset=dataset, form=form, options=options))
    listening = socket.create_server(("127.0.0.1", 0))
    process = FORK.Process(target=serve, args=(listening, rate), daemon=True)
    process.start()
    dataset = FromServer(count, size, listening.getsockname())
    return Made(load=Load(dataset=dataset, form=form, options=options), close=process.kill)


class SlowOnes(Dataset[torch.Tensor]):
    """Samples of which some are far away: retries, a cold replica, a damaged file."""

    def __init__(self, count: int, every: int, slow_s: float) -> None:
        self.count, self.every, self.slow_s = count, every, slow_s

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.slow_s if index % self.every == 7 else 0.0005)
        return torch.full((200,), float(index))


def slow_ones(_: Path, form: Any, every: int, slow_s: float, batches: int, **options: Any) -> Made:
    dataset = SlowOnes(16 * batches, every, slow_s)
    load = Load(dataset=dataset, form=form, options={"num_workers": 2, **options})
    return Made(load=load, model=Model(0.006))


def at_index(every: int) -> tuple[str, ...]:
    """Return what a text has to hold one of that names a slow sample by its index."""
    return tuple(f" {index} (" for index in range(7, 7000, every))


DATA = Accepted(codes=("FD303",), words=("num_workers",))
SHARED = Accepted(codes=("FD304",))

STORAGE = [
    *several(
        "latency", DATA, latency,
        {
            "4 ms a sample, 1 worker": {"form": "fast", "workers": 1, "sample_s": 0.004},
            "8 ms, FastDataModule, 2 workers": {"form": "module", "workers": 2, "sample_s": 0.008},
            "3 ms, our workers, 2": {
                "form": "fast", "workers": 2, "sample_s": 0.003, "executor": "workers",
            },
        },
    ),
    *several(
        "latency, torch's loader", Accepted(codes=("FD102", "FD303"), words=("num_workers",)),
        latency,
        {
            "4 ms, 1 worker": {"form": "torch", "workers": 1, "sample_s": 0.004},
            "6 ms, 2 workers, module's own": {"form": "own", "workers": 2, "sample_s": 0.006},
        },
    ),
    *several(
        "latency, no workers", Accepted(codes=("FD101", "FD303"), words=("num_workers",)), latency,
        {
            "2 ms, FastDataLoader": {"form": "fast", "workers": 0, "sample_s": 0.002},
            "2 ms, torch's DataLoader": {"form": "torch", "workers": 0, "sample_s": 0.002},
        },
    ),
    *several(
        "lock between workers", SHARED, locked,
        {
            "3 ms, 4 workers": {"form": "fast", "workers": 4, "sample_s": 0.003, "file": False},
            "2 ms, FastDataModule, 2 workers": {
                "form": "module", "workers": 2, "sample_s": 0.002, "file": False,
                "multiprocessing_context": "fork",
            },
        },
    ),
    *several(
        "file lock", SHARED, locked,
        {
            "3 ms, 2 workers": {"form": "fast", "workers": 2, "sample_s": 0.003, "file": True},
            "2 ms, our workers, 4": {
                "form": "fast", "workers": 4, "sample_s": 0.002, "file": True,
                "executor": "workers",
            },
        },
    ),
    *several(
        "bandwidth", SHARED, bandwidth,
        {
            "20 MB/s, 2 workers": {"form": "fast", "workers": 2, "size": 60_000, "mb_s": 20},
            "40 MB/s, 6 workers": {"form": "fast", "workers": 6, "size": 100_000, "mb_s": 40},
            "20 MB/s server, 3 workers": {
                "form": "fast", "workers": 3, "size": 60_000, "mb_s": 20, "server": True,
            },
        },
    ),
    *several(
        "one slow sample in 160",
        Accepted(codes=("FD302",), words=at_index(160)), slow_ones,
        {
            "300 ms": {"form": "fast", "every": 160, "slow_s": 0.3, "batches": 150},
            "150 ms, FastDataModule": {
                "form": "module", "every": 160, "slow_s": 0.15, "batches": 200, "shuffle": False,
            },
        },
    ),
    *several(
        "one slow sample in 1000",
        Accepted(codes=("FD302",), words=at_index(1000)), slow_ones,
        {"800 ms": {"form": "fast", "every": 1000, "slow_s": 0.8, "batches": 250}},
    ),
]  # fmt: skip

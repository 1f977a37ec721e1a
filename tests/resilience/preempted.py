"""A training that is ended by signals again and again, and goes on from its newest file each time.

Arguments: folder, seed, number of signals. Three runs over one epoch leave their records in folders
of their own: ``straight`` without a signal, ``lives`` with signals in one rank, two, and one again,
``requeued`` by SLURM. A file ``<life>-<rank>`` has lines of ``step index:digest ...``: the samples
of the step in this rank, with a digest of what each held, its draws included. ``told`` has a line
of JSON for each life.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from pickle import UnpicklingError

import psutil
import torch
from conformance.forked_ranks import started
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from processes import runs, until
from resilience.cells import LOADERS, Augmented, Draws, Module
from resilience.runs import Recorder, digest, train

GLOBAL = 8
"""Samples of a step, of all ranks."""
STEPS_OF_SIGNAL = 4
"""Of the epoch, so that each signal finds steps to come."""
SIGNALS = {"TERM": signal.SIGTERM, "KILL": signal.SIGKILL, "INT": signal.SIGINT}
READERS = ("workers-2", "inline", "workers-1", "workers-4")
GRACE_S = {1: 20, 2: 4}
"""By number of ranks. Lightning broadcasts in its handler of SIGTERM, where ranks may be at
different operations and then wait for each other until they are killed."""


class Images(Augmented, Draws):
    """Draws from the three global generators, and in a pipeline of its own."""


class Steps(Recorder):
    """Writes a line with the samples of each step, and takes a while for it."""

    def record(self, batch, batch_idx):
        each = [
            f"{int(index)}:{digest({name: part[at] for name, part in batch.items()})}"
            for at, index in enumerate(batch["index"])
        ]
        with self.file.open("a") as file:
            file.write(f"{self.global_step} {' '.join(each)}\n")
        self.lines += 1
        time.sleep(0.02)


def newest(folder: Path) -> Path | None:
    """The file of the latest step that is whole: a kill may come while one is written."""
    found = []
    for file in folder.glob("*.ckpt"):
        with suppress(EOFError, RuntimeError, UnpicklingError, OSError):
            found.append((torch.load(file, weights_only=True)["global_step"], file))
    return max(found)[1] if found else None


def live(
    folder: Path, name: str, ranks: int, reader: str, length: int, resume: Path | None
) -> None:
    """Train to the end of the epoch."""
    torch.set_num_threads(1)
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    often = ModelCheckpoint(folder, f"{name}-{{step}}", every_n_train_steps=3, save_top_k=-1)
    train(
        Steps(folder / f"{name}-{rank}"),
        Module(LOADERS[reader], dataset=Images, batch_size=GLOBAL // ranks, length=length),
        folder,
        resume=resume,
        callbacks=[often, OnExceptionCheckpoint(folder, f"{name}-exception")],
        strategy="ddp" if ranks > 1 else "auto",
        devices=ranks,
        max_epochs=1,
    )


def left_of(leader: int) -> list[int]:
    """Processes that live on in a group."""
    members = []
    for process in psutil.pids():
        with suppress(ProcessLookupError):
            if os.getpgid(process) == leader and runs(process):
                members.append(process)
    return members


def ended(running: list[int], *, patient: bool) -> list[int]:
    """Exit codes of ranks; where one was killed, a launcher kills the others."""
    codes: dict[int, int] = {}
    late = time.monotonic() + GRACE_S[len(running)]

    def all_ended() -> bool:
        for process in set(running) - codes.keys():
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                codes[process] = os.waitstatus_to_exitcode(status)
        if (codes and not patient) or time.monotonic() > late:
            for process in set(running) - codes.keys():
                os.kill(process, signal.SIGKILL)
        return len(codes) == len(running)

    until(all_ended)
    return [codes[process] for process in running]


def last_step(folder: Path, name: str) -> int:
    """The step that a life took last; -1: none."""
    file = folder / f"{name}-0"
    lines = file.read_text().splitlines() if file.exists() else []
    return int(lines[-1].split(" ")[0]) if lines else -1


def wait_for_step(aim: int, folder: Path, life: str, running: list[int]) -> None:
    """Wait until a life has taken a step, or has ended."""
    until(lambda: last_step(folder, life) >= aim or not all(map(runs, running)))


def wait_for_file(file: Path, running: list[int]) -> None:
    """Wait until a life has written a file, or has ended."""
    until(lambda: file.exists() or not all(map(runs, running)))


def preempt(folder: Path, seed: int, signals: int, length: int) -> list[dict]:
    """Return what became of each life of a run: one for each signal, and one to the end."""
    draws, told = random.Random(seed), []
    kinds = [(name, whom) for name in SIGNALS for whom in ("one", "all", "group")]
    planned = [kinds[n % len(kinds)] for n in range(signals)]
    draws.shuffle(planned)
    for number, (name, whom) in enumerate([*planned, ("none", "none")]):
        ranks = (1, 2, 1)[3 * number // (signals + 1)]
        life, reader = f"life-{number}", READERS[number % len(READERS)]
        file = newest(folder)
        begun = 0 if file is None else torch.load(file, weights_only=True)["global_step"]
        aim = begun + draws.randrange(-1, STEPS_OF_SIGNAL)
        running = started(ranks, partial(live, folder, life, ranks, reader, length, file))
        if name != "none":
            wait_for_step(aim, folder, life, running)
            if whom == "group":
                os.killpg(running[0], SIGNALS[name])
            else:
                for process in running[: 1 if whom == "one" else ranks]:
                    os.kill(process, SIGNALS[name])
        codes = ended(running, patient=name != "KILL")
        about = {"ranks": ranks, "signal": name, "whom": whom, "reader": reader, "begun": begun}
        about |= {"took": last_step(folder, life) - begun + 1, "codes": codes}
        told.append({**about, "left": left_after(running[0])})
    return told


def left_after(leader: int) -> int:
    """Number of processes that never end of a group whose ranks have ended."""
    try:
        until(lambda: not left_of(leader))
    except AssertionError:
        return len(left_of(leader))
    return 0


def requeue(folder: Path, length: int) -> list[dict]:
    """Have SLURM announce the end of a life and kill it; the next one finds the file itself."""
    (folder / "scontrol").write_text(f"#!/bin/sh\necho $@ >> {folder}/asked\n")
    (folder / "scontrol").chmod(0o700)
    slurm = {"JOB_ID": "7", "JOB_NAME": "train", "NTASKS": "1", "PROCID": "0", "LOCALID": "0"}
    os.environ |= {f"SLURM_{name}": value for name, value in slurm.items()}
    os.environ |= {"PATH": f"{folder}:{os.environ['PATH']}"}
    told = []
    for number in range(3):
        life = f"life-{number}"
        running = started(1, partial(live, folder, life, 1, "workers-2", length, None))
        if number < 2:
            wait_for_step(4 * (number + 1), folder, life, running)
            os.kill(running[0], signal.SIGUSR1)
            wait_for_file(folder / f"hpc_ckpt_{number + 1}.ckpt", running)
            wait_for_step(last_step(folder, life) + 1, folder, life, running)  # it goes on
            os.kill(running[0], signal.SIGKILL)
        codes = ended(running, patient=False)
        told.append({"codes": codes, "left": left_after(running[0])})
    return told


def main(folder: Path, seed: int, signals: int) -> None:
    length = GLOBAL * STEPS_OF_SIGNAL * (signals + 1)
    runs = {
        "straight": lambda own: preempt(own, seed, 0, length),
        "lives": lambda own: preempt(own, seed, signals, length),
        "requeued": lambda own: requeue(own, length),
    }
    for name, run in runs.items():
        own = folder / name
        own.mkdir()
        told = run(own)
        (own / "told").write_text("\n".join(map(json.dumps, told)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

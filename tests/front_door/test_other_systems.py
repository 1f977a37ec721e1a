"""On Windows and macOS, Python lacks much of what it has on Linux; trainings run all the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# Torch and Lightning chose what to call when they were installed, so the names are missing for the
# package alone: as it imports them. Workers import this script as they start, and lack them too.
SCRIPT = '''
import builtins, ctypes, faulthandler, importlib, json, mmap, multiprocessing, os, select, signal
import socket, sys, types

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

SYSTEM = sys.argv[1]
NOT_ON_MACOS = {
    os: "memfd_create MFD_CLOEXEC pidfd_open pipe2 posix_fallocate posix_fadvise sched_getaffinity "
    "sched_setaffinity O_DIRECT eventfd splice",
    select: "epoll EPOLLIN EPOLLOUT EPOLLEXCLUSIVE",
    socket: "SOCK_SEQPACKET SOCK_CLOEXEC SOCK_NONBLOCK",
    mmap: "MADV_HUGEPAGE",
}
NOT_ON_WINDOWS = {
    os: "statvfs nice fork register_at_fork getuid geteuid getloadavg sysconf uname getpriority "
    "setpriority pread pwrite preadv killpg getpgid setsid mkfifo fchmod chown sched_yield "
    "O_CLOEXEC O_NONBLOCK get_blocking WNOHANG",
    select: "poll POLLIN POLLOUT PIPE_BUF",
    signal: "SIGKILL SIGUSR1 SIGUSR2 SIGCHLD SIGALRM SIGHUP setitimer pthread_sigmask",
    socket: "AF_UNIX CMSG_LEN CMSG_SPACE send_fds recv_fds",
    mmap: "MAP_PRIVATE MAP_SHARED PROT_READ PROT_WRITE",
    faulthandler: "register unregister",
}
NO_MODULES = ("fcntl", "resource", "pwd", "grp", "termios")


def other_system():
    """Return the modules as the other system has them, by name; None: it does not have it."""
    changes = {module: names.split() for module, names in NOT_ON_MACOS.items()}
    modules = {}
    if SYSTEM == "win32":
        modules |= dict.fromkeys(NO_MODULES)
        for module, names in NOT_ON_WINDOWS.items():
            changes.setdefault(module, []).extend(names.split())
    for module, names in {**changes, sys: []}.items():
        twin = types.ModuleType(module.__name__)
        vars(twin).update({k: v for k, v in vars(module).items() if k not in names})
        modules[module.__name__] = twin
    modules["sys"].platform = SYSTEM
    modules["os"].open = open_there
    return modules


def open_there(path, *args, **kwargs):
    """Open a file, but not one of the kernel of Linux."""
    if str(path).startswith(("/proc", "/sys")):
        raise FileNotFoundError(path)
    return os.open(path, *args, **kwargs)


OTHERS = other_system()
import_module = builtins.__import__


def import_there(name, globals=None, locals=None, fromlist=(), level=0):
    asks = (globals or {}).get("__name__", "")
    if asks.split(".")[0] != "lightning_fastdata" or level or name not in OTHERS:
        return import_module(name, globals, locals, fromlist, level)
    if OTHERS[name] is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return OTHERS[name]


class Rows(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.full((4,), float(i)), i


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.full((4,), float(i)) for i in range(12))


class Images(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return np.full((8, 8, 3), i, np.uint8), i


builtins.__import__ = import_there

def read():
    """Return what loaders of the package give here, and why a data module chose its settings."""
    from lightning_fastdata import FastDataLoader, FastDataModule, LoaderOptions

    told = {}
    for workers in (None, 0, 1):
        options = {} if workers is None else {"num_workers": workers}
        loader = FastDataLoader(Rows(), 4, shuffle=True, **options)
        rows = [int(row) for _ in range(2) for _, numbers in loader for row in numbers]
        loader.close()
        told[f"loader {workers}"] = sorted(rows)
    module = FastDataModule.from_datasets(
        Rows(), batch_size=4, options=LoaderOptions(num_workers=1, executor="auto")
    )
    told["explained"] = module.explain()
    return told


def train():
    """Return what trainings with a data module have seen, and whether they left a report."""
    import albumentations as A
    from trainers import Learner, quiet_trainer

    from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions

    def first_numbers(batch):
        x = (batch if torch.is_tensor(batch) else batch[0]).flatten(1)
        return x[:, 0].int().tolist()

    tensors = TensorDataset(torch.arange(12.0)[:, None])
    flip = A.Compose([A.HorizontalFlip()])
    seen = {}
    for name, dataset, workers, augment in (
        ("rows", Rows(), "auto", None),
        ("stream", Stream(), 0, None),
        ("tensors", tensors, "auto", None),
        ("images", Images(), 0, flip),
    ):
        module = FastDataModule.from_datasets(
            dataset, batch_size=4, options=LoaderOptions(num_workers=workers), augment=augment
        )
        model = Learner(first_numbers)
        trainer = quiet_trainer(callbacks=[DataThroughputCallback(report=name + ".json")])
        trainer.fit(model, datamodule=module)
        seen[name] = sorted(model.joined)
        seen[name + " report"] = os.path.exists(name + ".json")
    return seen


if __name__ == "__main__":
    import lightning_fastdata
    import lightning_fastdata.sources

    multiprocessing.set_start_method("spawn", force=True)
    for package in (lightning_fastdata, lightning_fastdata.sources):
        assert all(hasattr(package, name) for name in package.__all__)
    from lightning_fastdata.cli import main

    main(["doctor"])
    print(json.dumps({**read(), **(train() if SYSTEM == "win32" else {})}))
'''


@pytest.mark.slow
@pytest.mark.timeout(320)
@pytest.mark.cases(1)  # macOS lacks a part of what Windows does
@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_a_training_runs_where_the_calls_of_linux_are_missing(tmp_path, system):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join(map(str, Path(__file__).parents[1:3]))
    done = subprocess.run(
        [sys.executable, str(script), system],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert "What limits loading here" in done.stdout or "Nothing here limits" in done.stdout
    for workers in (None, 0, 1):
        assert told[f"loader {workers}"] == sorted([*range(12), *range(12)])
    executor = re.search(r"^executor +(\w+) +auto +(.*)$", told["explained"], re.MULTILINE)
    assert executor[1] == "torch"
    assert "this system has no memory files for side processes" in executor[2]
    for name in () if system == "darwin" else ("rows", "stream", "tensors", "images"):
        assert told[name] == list(range(12))
        assert told[f"{name} report"]

"""Kernels compiled before the first batch, by a process beside the start of the workers.

Triton compiles a kernel where it is launched first: seconds for each, one after the other, on every
rank. Here a process of its own compiles those that the first batches will take, several at a time,
into Triton's cache on disk, where a launch finds them. One rank of a node starts it, and all of
them wait for it before their first launch, through a lock on a file in that cache.

Nothing rests on it: a kernel that is not there by then is compiled where it is launched.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, TypeAlias

import torch

from lightning_fastdata.device.backend import capability_of
from lightning_fastdata.host import clock
from lightning_fastdata.host.cpu import read_cpu_limit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning_fastdata.augment.stage_transform import StageTransform
    from lightning_fastdata.types import Batch, SampleKey

Kernel: TypeAlias = dict[str, Any]
"""What a kernel is compiled for, as JSON has it: `name`, `constants`, and `arguments`, in which the
name of a dtype stands for a tensor."""
Compiler: TypeAlias = Callable[[dict[str, Any], IO[str]], "subprocess.Popen[str] | None"]
"""Starts to compile, and holds the lock on a file until that has ended."""

_PROGRAM: Final = "lightning_fastdata.augment.replay.kernels.compiling"
_MOST_S: Final = 60.0
_LOOK_S: Final = 0.02
_ENDS_S: Final = 1.0
_DONE: Final = "done"
_TRIAL: Final[Kernel] = {"name": "trial", "arguments": ["int32"], "constants": {}}
_pending: list[tuple[Path, subprocess.Popen[str] | None]] = []


def may_compile(device: torch.device) -> bool:
    """Return whether kernels may be compiled early for a device: CUDA, with Triton's compiler."""
    wanted = device.type == "cuda" and torch.version.cuda is not None and os.name == "posix"
    return wanted and find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") != "1"


def prepare_kernels(
    transform: StageTransform,
    samples: Sequence[Batch],
    key: SampleKey,
    rows: int,
    device: torch.device,
    *,
    first_of_node: bool,
) -> None:
    """Have the kernels of the first batches compiled, if there are any; never raise.

    Args:
        transform: what is to run on the device.
        samples: some of the dataset.
        key: of the first sample of the training.
        rows: samples in a batch.
        device: where batches are transformed.
        first_of_node: whether this rank is the one of its node that has them compiled.
    """
    if not (samples and may_compile(device)):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kernels = list(transform.first_kernels(samples, key, rows))
        capability = capability_of(device)
        compile_early(kernels, capability, first_of_node=first_of_node)
    except Exception:
        return  # Training goes on without, and reports what it meets itself.


def compile_early(
    kernels: Iterable[Kernel],
    capability: tuple[int, int],
    *,
    first_of_node: bool,
    compiler: Compiler | None = None,
) -> None:
    """Have kernels compiled, or know that another rank of this node does it; never raise.

    Args:
        kernels: what they are compiled for; those that are alike count once.
        capability: of the device, such as ``(9, 0)``.
        first_of_node: whether this rank is to start it.
        compiler: what compiles them; None: a process of its own.
    """
    each = {json.dumps(kernel, sort_keys=True): kernel for kernel in kernels}
    if not each:
        return
    listed = [_TRIAL, *(each[told] for told in sorted(each))]
    asked = {"kernels": listed, "capability": 10 * capability[0] + capability[1]}
    # Triton cannot be had, no file can be written or locked: kernels are compiled later.
    with contextlib.suppress(OSError, ImportError, importlib.metadata.PackageNotFoundError):
        import fcntl

        path = _cache_folder() / f"lightning-fastdata-{_digest(asked)}"
        if path.exists() and path.read_text() == _DONE:
            return
        process = None
        if first_of_node:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Another training on this node may be at it.
            with path.open("a") as lock, contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                process = (compiler or _compile_apart)(asked, lock)
        _pending.append((path, process))


def wait() -> None:
    """Wait until what was asked for is compiled, for a minute at most."""
    while _pending:
        path, process = _pending.pop()
        with contextlib.suppress(OSError), path.open() as lock:
            _wait_for(lock)
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ENDS_S)  # it lets go of the lock as it ends


def _wait_for(lock: IO[str]) -> None:
    import fcntl

    until = clock.monotonic() + _MOST_S
    while clock.monotonic() < until:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            clock.sleep(_LOOK_S)
        else:
            return


def _compile_apart(asked: dict[str, Any], lock: IO[str]) -> subprocess.Popen[str]:
    """Start a process that compiles kernels; it holds the lock for as long as it lives."""
    paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    process = subprocess.Popen(
        [sys.executable, "-m", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[lock.fileno()],
        env={**os.environ, "PYTHONPATH": paths},
        text=True,
    )
    cpus = max(1, int(read_cpu_limit().usable_cpus))
    known = {"cpus": cpus, "parent": os.getpid(), "lock": lock.fileno(), "done": _DONE}
    with process.stdin as end:  # type: ignore[union-attr]  # it was asked for
        json.dump(asked | known, end)
    return process


def _cache_folder() -> Path:
    """Return where Triton keeps what it has compiled."""
    home = os.environ.get("TRITON_HOME") or Path.home()
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home) / ".triton" / "cache")


def _digest(asked: dict[str, Any]) -> str:
    """Return a name for kernels, of this version of Triton and of their source."""
    told = hashlib.sha256(json.dumps(asked, sort_keys=True).encode())
    told.update(importlib.metadata.version("triton").encode())
    for source in sorted(Path(__file__).with_name("kernels").glob("*.py")):
        told.update(source.read_bytes())
    return told.hexdigest()[:16]

"""What the training process says about side processes that fail, hang or die."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.errors import WorkerError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning_fastdata.loading.executors.fetch import FetchPlan
    from lightning_fastdata.loading.executors.processes import PendingBatch, SideProcess

_IDLE_SIDES: Final = 4


def stillborn(number: int, code: int | None, times: int) -> WorkerError:
    """Return the error for a side process that dies before it has read a sample."""
    return WorkerError(
        f"Side process {number} {_death(code)} {times} times before it read a sample. Its own "
        'message is on the standard error output. With the start methods "spawn" and '
        '"forkserver" the script needs `if __name__ == "__main__":`.'
    )


def stream_broken(number: int, code: int | None, delivered: int, *, answered: bool) -> WorkerError:
    """Return the error for a side process that dies before the end of its stream.

    Args:
        number: Of the process.
        code: Its exit code.
        delivered: Batches of this epoch that it had made and the training has got.
        answered: It has ever made a batch.
    """
    start = (
        ""
        if answered
        else ' With the start methods "spawn" and "forkserver" the script needs '
        '`if __name__ == "__main__":`.'
    )
    return WorkerError(
        f"Side process {number} {_death(code)} before the end of its stream. The {delivered} "
        "batches that it had made in this epoch were delivered; the rest of its stream is "
        "missing, because a stream cannot be read again from its middle. Begin the epoch anew, or "
        f"use a dataset with __getitem__, whose samples are read again.{start}"
    )


def stream_timed_out(timeout_s: float, sides: Iterable[SideProcess]) -> WorkerError:
    """Return the error for a batch of a stream that is late, with what the processes do."""
    late = f"No batch within timeout={timeout_s:g} s."
    lines = [f"{late} Reading may be slow (raise the timeout) or stuck:"]
    lines += [
        f"side process {side.number} (pid {side.process.pid}), reading its stream:\n{side.stack()}"
        for side in sides
        if side.tasks
    ]
    return WorkerError("\n".join(lines))


def poisonous(index: Any, code: int | None, times: int) -> WorkerError:
    """Return the error for a sample that ends whichever process reads it."""
    return WorkerError(
        f"Sample {index!r} of the dataset was being read each of the {times} times that a side "
        f"process {_death(code)}. Read dataset[{index!r}] in a script of its own to see why, and "
        "leave it out or repair it."
    )


def timed_out(
    plan: FetchPlan, batches: Iterable[PendingBatch], sides: list[SideProcess]
) -> WorkerError:
    """Return the error for a batch that is late, with what each side process is doing."""
    late = f"No batch within timeout={plan.timeout_s:g} s."
    lines = [f"{late} Reading may be slow (raise the timeout) or stuck:"]
    by_number = {batch.number: batch for batch in batches}
    reading = {
        side.number: [
            repr(by_number[number].indices[at] if plan.batched else at)
            for number, at in side.working_on()
            if number in by_number
        ]
        for side in sides
    }
    busy = [side for side in sides if reading[side.number] or side.tasks or side.is_stopped()]
    # Where nobody seems to have anything to do, some of them are to tell what they do instead.
    lines.extend(
        f"side process {side.number} (pid {side.process.pid}), reading sample "
        f"{', '.join(reading[side.number]) or 'none'}:\n{side.stack()}"
        for side in (busy or sides[:_IDLE_SIDES])
    )
    return WorkerError("\n".join(lines))


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        hint = " (the kernel kills so when memory runs out)" if code == -signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{hint}"
    return f"left with exit code {code}"


def as_error(kind: type[BaseException], number: int, text: str) -> BaseException:
    """Return an error of the same class as one that was raised in a side process."""
    message = f"Caught {kind.__name__} in side process {number} {text}"
    if issubclass(kind, StopIteration) or not issubclass(kind, Exception):
        # Raised from __next__, it would end the epoch, or the program, early and without a word.
        return RuntimeError(message)
    try:
        # A KeyError shows its argument quoted, which no traceback survives.
        return kind(_Verbatim(message)) if issubclass(kind, KeyError) else kind(message)
    except Exception:  # whatever an exception class of the user asks of its arguments
        return RuntimeError(message)


class _Verbatim(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

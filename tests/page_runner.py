"""Runs scripts, each in a process of its own that has the large libraries imported already.

Reads a JSON object from each line of its input: ``script`` to run as ``__main__``, ``folder`` to
run it in, ``log`` for what it prints. Answers each with a line that has its exit status.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys
import traceback
import types
import warnings
from pathlib import Path

LIMIT_S = 120


def run(script: str, folder: str, log: str) -> int:
    os.chdir(folder)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    signal.alarm(LIMIT_S)
    sys.argv = [script]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = script
    try:
        exec(compile(Path(script).read_bytes(), script, "exec"), vars(main))
    except BaseException:  # a SystemExit, too: a page does not end early
        traceback.print_exc()
        return 1
    return 0


def serve() -> int:
    import albumentations  # noqa: F401
    import lightning.pytorch  # noqa: F401
    import torchvision.datasets  # noqa: F401

    import lightning_fastdata

    for name in lightning_fastdata.__all__:
        getattr(lightning_fastdata, name)
    # Pages are no scripts that another process could import once more.
    multiprocessing.set_start_method("fork")
    warnings.simplefilter("error", lightning_fastdata.FastDataWarning)
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        child = os.fork()
        if not child:
            return run(**asked)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{status}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(serve())

"""The head of the cluster ends: Ray would end the program; an error comes before, and says how on.

The training goes on in another cluster with the batch after the last one of its checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile

import pytest
from ext.ray import head_that_ends

ENDINGS = {
    "gcs_server": r"The head of the Ray cluster at \S+ has not answered for \d+ s",
    "raylet": r"Ray has ended on this machine",
}


def started(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    # A minute is what Ray gives a head to come back.
    environment = {**os.environ, "RAY_gcs_rpc_server_reconnect_timeout_s": "20", **environment}
    return subprocess.Popen(
        [sys.executable, head_that_ends.__file__, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_training_whose_cluster_ends_says_so_and_goes_on_from_its_checkpoint(
    cluster, tmp_path
) -> None:
    folders = {what: tmp_path / what for what in ENDINGS}
    with contextlib.ExitStack() as stack:
        broken = {}
        for what, folder in folders.items():
            # Clusters of their own, in short folders, as sockets are in there.
            own = tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True)
            broken[what] = started(what, str(folder), RAY_TMPDIR=stack.enter_context(own))
        said = {what: program.communicate(timeout=400)[0] for what, program in broken.items()}
    for what, folder in folders.items():
        assert (folder / "error.txt").exists(), said[what][-3000:]
        told = (folder / "error.txt").read_text()
        assert re.search(ENDINGS[what], told)
        assert 'trainer.fit(..., ckpt_path="last")' in told
    then = started("nothing", *map(str, folders.values()), RAY_ADDRESS=cluster.address)
    output, _ = then.communicate(timeout=400)
    assert then.returncode == 0, output[-3000:]
    for folder in folders.values():
        before = json.loads((folder / "before.json").read_text())
        rest, whole = json.loads((folder / "after.json").read_text())
        assert len(whole) == 300
        assert 10 <= len(before) < 300
        assert before == whole[: len(before)]
        taken = len(whole) - len(rest)  # of those, so many are in the checkpoint
        assert 0 < taken <= len(before)
        assert rest == whole[taken:]

"""The head of the cluster ends: Ray would end the program; an error comes before, and says how on.

The training goes on in another cluster with the batch after the last one of its checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile

import pytest
from remote import head_that_ends


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    # A minute is what Ray gives a head to come back.
    environment = {**os.environ, "RAY_gcs_rpc_server_reconnect_timeout_s": "20", **environment}
    return subprocess.run(
        [sys.executable, head_that_ends.__file__, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("gcs_server", r"The head of the Ray cluster at \S+ has not answered for \d+ s"),
        ("raylet", r"Ray has ended on this machine"),
    ],
    ids=["the head", "Ray on the training's machine"],
)
def test_a_training_whose_cluster_ends_says_so_and_goes_on_from_its_checkpoint(
    what, says, cluster, tmp_path
) -> None:
    # Apart from the cluster of the other tests, and short, as its sockets are in there.
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        broken = run(what, str(tmp_path), RAY_TMPDIR=folder)
    told = (tmp_path / "error.txt").read_text()
    assert re.search(says, told), broken.stderr[-3000:]
    assert 'trainer.fit(..., ckpt_path="last")' in told
    done = run("nothing", str(tmp_path), RAY_ADDRESS=cluster.address)
    assert done.returncode == 0, done.stderr[-3000:]
    before = json.loads((tmp_path / "before.json").read_text())
    rest, whole = json.loads((tmp_path / "after.json").read_text())
    assert len(whole) == 300
    assert before == whole[: len(before)]
    assert 10 <= len(before) < 300
    taken = len(whole) - len(rest)  # of those, so many are in the checkpoint
    assert 0 < taken <= len(before)
    assert rest == whole[taken:]

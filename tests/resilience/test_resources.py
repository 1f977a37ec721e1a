"""Where files, processes or disk run out, that is told with a remedy; nothing hangs or is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from programs import run_program

ROOT = Path(__file__).parents[2]
LIMITED = """
    import resource, sys, time
    import torch, numpy, psutil
    from torch.utils.data import Dataset
    from lightning_fastdata import FastDataLoader

    class Rows(Dataset):
        def __len__(self):
            return 400

        def __getitem__(self, index):
            return torch.full((100,), index)

    kind, executor, soft, hard = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    loader = FastDataLoader(Rows(), 8, num_workers=2, executor=executor)
    resource.setrlimit(getattr(resource, kind), (soft, hard))
    try:
        got = [int(row[0]) for batch in loader for row in batch]
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0])
    else:
        print(got == list(range(400)))
    loader.close()
    print(len(psutil.Process().children(recursive=True)))
"""


def run(code: str, *arguments: object) -> list[str]:
    """Return what a program printed, which must come to its end."""
    done = run_program("-c", textwrap.dedent(code), *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
@pytest.mark.parametrize("files", [10, 12, 14, 16, 18, 20, 24, 32, 48])
@pytest.mark.cases(2)
def test_with_few_open_files_all_samples_come_or_the_error_says_what_to_raise(files):
    outcome, processes = run(LIMITED, "RLIMIT_NOFILE", "workers", files, files)
    assert processes == "0"
    if outcome != "True":
        assert outcome.startswith("WorkerError")
        assert "open" in outcome
        assert "ulimit -n" in outcome


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_a_soft_limit_of_open_files_is_raised_where_it_may_be():
    assert run(LIMITED, "RLIMIT_NOFILE", "workers", 24, 1024) == ["True", "0"]


FULL_DISK = """
    import sys
    import torch
    from torch.utils.data import Dataset
    from trainers import Learner, quiet_trainer
    from lightning_fastdata import BadSamples, DataThroughputCallback, FastDataModule, LoaderOptions

    class Rows(Dataset):
        def __len__(self):
            return 80

        def __getitem__(self, index):
            if index % 40 == 7:
                raise ValueError("bad")
            return torch.full((4,), float(index))

    folder = sys.argv[1]
    data = FastDataModule.from_datasets(Rows(), batch_size=8, options=LoaderOptions(
        num_workers=2, executor="workers",
        on_bad_sample=BadSamples("replace", quarantine_file=folder + "/bad.jsonl")))
    trainer = quiet_trainer(
        folder, max_epochs=2, callbacks=[DataThroughputCallback(summary=False)]
    )
    trainer.fit(Learner(), data)
    print(trainer.global_step)
"""


@pytest.mark.slow
def test_a_full_disk_ends_no_training(tmp_path):
    """What a training writes beside its checkpoints is worth less than the training."""
    disk = tmp_path / "disk"
    disk.mkdir()
    fill = f"mount -t tmpfs -o size=64k tmpfs {disk} && cat /dev/zero > {disk}/full 2>/dev/null; "
    if subprocess.run(["unshare", "-m", "sh", "-c", fill + "true"], check=False).returncode:
        pytest.skip("may mount nothing")
    command = fill + f'exec {sys.executable} -W ignore -c "$CODE" {disk}'
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": path, "CODE": textwrap.dedent(FULL_DISK)}
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", command],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == "20"

"""All batches of an epoch can be kept, however few files a process may have open."""

from __future__ import annotations

import sys
import textwrap

import pytest
from programs import run_program

KEEP = """
    import resource, sys, warnings
    import numpy as np, torch
    from torch.utils.data import Dataset, TensorDataset
    from trainers import Learner, quiet_trainer
    from lightning_fastdata import FastDataLoader

    resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))

    class Images(Dataset):
        def __init__(self, length=2000):
            self.length = length

        def __len__(self):
            return self.length

        def __getitem__(self, index):
            return torch.full((3, 80, 80), index % 256, dtype=torch.uint8), index

    class Rows(Images):
        def __getitem__(self, index):
            return np.full(2500, index % 256, np.float32), index

    def trained(loader):
        model = Learner()
        quiet_trainer().fit(model, loader)
        return model.seen

    column = torch.arange(2000.0) % 256
    table = TensorDataset(column[:, None].expand(-1, 2500).clone(), torch.arange(2000))
    ways = [("workers", Images(100)), ("workers", Rows()), ("gather", table)]
    for executor, dataset in ways:
        loader = FastDataLoader(dataset, 2, num_workers=2, executor=executor)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            kept = trained(loader) if len(dataset) < 2000 else list(loader)
        assert len(kept) == len(dataset) // 2
        for number, (data, index) in enumerate(kept):
            assert index.tolist() == [2 * number, 2 * number + 1]
            assert (data.flatten(1) == (index % 256)[:, None]).all()
        print(executor, sum("as copies" in str(warning.message) for warning in told))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_a_thousand_batches_are_kept_where_128_files_may_be_open(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(KEEP))
    done = run_program(script)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["workers 1", "workers 1", "gather 0"]

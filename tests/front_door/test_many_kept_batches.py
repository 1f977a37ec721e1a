"""All batches of an epoch can be kept, however few files a process may have open."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest
from programs import run_program

KEEP = """
    import resource, sys, warnings
    import lightning, numpy as np, torch
    from torch.utils.data import Dataset, TensorDataset
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

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.kept = []

        def training_step(self, batch, number):
            self.kept.append(batch)

        def configure_optimizers(self):
            return None

    def trained(loader):
        model = Model()
        lightning.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        ).fit(model, loader)
        return model.kept

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


def run(tmp_path: Path, program: str, *arguments: str) -> str:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(program))
    done = run_program(script, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_a_thousand_batches_are_kept_where_128_files_may_be_open(tmp_path):
    told = run(tmp_path, KEEP).splitlines()
    assert told == ["workers 1", "workers 1", "gather 0"]

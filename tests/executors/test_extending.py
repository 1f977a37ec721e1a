"""An executor of another package is found by its name, and held to what torch's loader gives."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from alike import alike
from ragged import stopped_epoch
from torch.utils.data import DataLoader, Dataset

from lightning_fastdata import FastDataLoader, FastDataModule, LoaderOptions, registry
from lightning_fastdata.errors import OptionsError

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


class Drawing(Dataset):
    def __len__(self):
        return 30

    def __getitem__(self, index):
        return torch.tensor([index, *np.random.rand(2), *torch.rand(2)])


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package of the page, as its metadata says, and one that is broken; nothing else."""
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    names = re.search(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    (group, name, value) = re.search(r'entry-points."(\S+)"\]\n(\S+) = "(\S+)"', names).groups()
    (tmp_path / "their_package").mkdir()
    (tmp_path / "their_package" / "executor.py").write_text(code)
    about = tmp_path / "their_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    others = "gone = no_such_module:KIND\nodd = their_package.executor:Plain\n"
    (about / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n{others}")
    registry.executor.cache_clear()
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    registry.executor.cache_clear()


def test_it_gives_the_samples_of_torch_in_its_order(installed):
    data, orders = torch.arange(30), [torch.Generator().manual_seed(3) for _ in range(2)]
    loader = FastDataLoader(data, 4, shuffle=True, executor=installed, generator=orders[0])
    theirs = DataLoader(data, 4, shuffle=True, generator=orders[1])
    for _ in range(2):
        assert alike(list(loader), list(theirs))


def test_it_draws_as_any_other_and_goes_on_within_an_epoch(installed):
    def loader(executor):
        order = torch.Generator().manual_seed(5)
        how = {"shuffle": True, "generator": order, "seed": 3}
        return FastDataLoader(Drawing(), 4, executor=executor, **how)

    wanted = list(loader("inline"))
    assert alike(list(loader(installed)), wanted)
    assert alike(stopped_epoch(lambda: loader(installed), 3), wanted)


def test_a_data_module_takes_it(installed):
    options = LoaderOptions(executor=installed)
    module = FastDataModule.from_datasets(Drawing(), batch_size=4, options=options, seed=3)
    plain = FastDataModule.from_datasets(Drawing(), batch_size=4, num_workers=0, seed=3)
    ours, theirs = module.train_dataloader(), plain.train_dataloader()
    assert alike(list(ours), list(theirs))


def test_what_cannot_be_used_is_named(installed):
    with pytest.raises(OptionsError, match="'ray', 'gone', 'odd', 'plain'"):
        LoaderOptions(executor="plane")
    with pytest.raises(OptionsError, match=r"no_such_module:KIND of an installed package.*Module"):
        LoaderOptions(executor="gone")
    with pytest.raises(OptionsError, match=r"'odd' is registered as .*no ExecutorKind"):
        FastDataLoader(Drawing(), executor="odd")

"""What is said of a cache before it is made."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset

import lightning_fastdata as ld
from lightning_fastdata import cli
from lightning_fastdata.caches.forecast import Forecast, forecast_caches, forecast_time, why_not
from lightning_fastdata.errors import DatasetError
from lightning_fastdata.host import clock


class Planned(clock.Clock):
    """A clock that stands until it is told how long something took, on a CPU or off it."""

    now_ns = cpu_ns = 0

    def monotonic_ns(self):
        return self.now_ns

    def process_time_ns(self):
        return self.cpu_ns


@pytest.fixture
def planned():
    times = Planned()
    with clock.installed(times):
        yield times


class Slow(Dataset):
    """Samples of 400 bytes, each of which takes 2 ms of CPU time."""

    def __init__(self, count=50, times=None):
        self.count = count
        self.times = Planned() if times is None else times

    def recognised_by(self):
        return (self.count,)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.times.cpu_ns += 2_000_000
        return torch.full((100,), float(index))


def test_costs_and_gains_are_those_of_the_cache(planned):
    (found,) = forecast_caches(Slow(times=planned))
    assert found.kept == "samples as the dataset returns them"
    assert found.total_bytes == 50 * 400
    assert (found.made_ms, found.first_ms, found.later_ms) == pytest.approx((2, 2, 0))


ms = st.floats(0.01, 100)


@given(ms, ms, ms)
def test_it_is_paid_back_when_it_has_cost_less_than_it_saved(made, first, later):
    after = Forecast("", 1.0, made, first, later).paid_back_epochs
    if made <= later:
        assert after is None
        return
    assert after >= 1
    with_cache, without = first + (after - 1) * later, made * after
    assert with_cache <= without * (1 + 1e-9) + 1e-6


def test_waits_count_as_time(planned, tmp_path):
    class Waits(Slow):
        def __getitem__(self, index):
            self.times.now_ns += 4_000_000
            return torch.full((100,), float(index))

    found = forecast_time(Waits(times=planned), str(tmp_path), budget_s=0.2)
    assert (found.made_ms, found.later_ms) == pytest.approx((4, 0))
    assert found.total_bytes == 50 * 400
    assert "ms of time a sample" in str(found)


@given(ms, ms, ms, st.floats(1, 10), st.floats(0.5, 2), st.floats(0.5, 2))
def test_a_cache_is_worth_it_if_it_is_quick_fits_and_is_paid_back(
    made, first, later, epochs, disk, memory
):
    forecast = Forecast("", 1.0, made, first, later)
    after = forecast.paid_back_epochs
    refused = why_not(forecast, disk_bytes=disk, memory_bytes=memory, epochs=epochs)
    worth = made >= 2 * later and disk >= 1 and memory >= 1
    assert (refused is None) == (worth and after is not None and after < epochs)


def folder_of(root, **options):
    order = np.random.default_rng(0)
    (root / "a").mkdir(parents=True)
    for number in range(5):
        pixels = order.integers(0, 256, (80, 90, 3), np.uint8)
        Image.fromarray(pixels).save(root / "a" / f"{number}.png")
    return ld.FastImageFolder(root, size=32, **options)


@pytest.mark.parametrize(
    ("side", "kept"),
    [
        (None, ["pictures as rgb"]),
        (48, [f"pictures as {form}, shorter side 48" for form in ("rgb", "yuv", "jpeg")]),
    ],
)
@pytest.mark.parametrize("part", [False, True])
def test_each_form_of_pictures_is_said(tmp_path, side, kept, part):
    data = folder_of(tmp_path / "photos", shorter_side=side)
    found = forecast_caches(Subset(data, [4, 1, 2]) if part else data)
    assert [one.kept for one in found] == kept
    sizes = [one.total_bytes for one in found]
    assert sizes == sorted(sizes, reverse=True)


def test_global_generators_are_left_as_they_were():
    torch.manual_seed(3)
    random.seed(3)
    wanted = torch.rand(1), random.random()
    torch.manual_seed(3)
    random.seed(3)
    forecast_caches(Slow(10))
    assert (torch.rand(1), random.random()) == wanted


def test_what_cannot_be_cached_is_said():
    class Endless(IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(DatasetError, match="Endless has no length"):
        forecast_caches(Endless())
    assert forecast_caches(Slow(1)) == []


def test_the_command_line_measures_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    folder_of(tmp_path / "photos")
    monkeypatch.setenv("LIGHTNING_FASTDATA_CACHE", str(tmp_path / "kept"))
    file = tmp_path / "training.py"
    file.write_text(
        "import lightning_fastdata as ld\n"
        f"root = {str(tmp_path / 'photos')!r}\n"
        "class Photos(ld.FastDataModule):\n"
        "    def train_dataset(self):\n"
        "        return ld.FastImageFolder(root, size=32, shorter_side=48)\n"
        "    def val_dataset(self):\n"
        "        return ld.FastImageFolder(root, size=32, crop='center')\n"
    )
    cli.main(["cache", f"{file}:Photos", "--dry_run=true"])
    said = capsys.readouterr().out
    assert "training: FastImageFolder" in said
    assert "pictures as jpeg, shorter side 48" in said
    assert "validation: FastImageFolder\n  samples as the dataset returns them" in said
    assert not (tmp_path / "kept" / "samples").exists()
    cli.main(["cache", f"{file}:Photos"])
    said = capsys.readouterr().out
    assert "5 of 5" in said
    assert "pictures as rgb, shorter side 48" in said

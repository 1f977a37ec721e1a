"""The examples run as they are printed, at a small size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
CLI_SMALL = [
    *("fit", "--config", str(EXAMPLES / "config.yaml")),
    *("--trainer.max_epochs", "1", "--data.crops", "16", "--data.folder", "demo_data/few"),
]
COMMANDS = {
    "augment_without_lightning.py": ["--small"],
    "quickstart.py": ["--small"],
    "segmentation.py": ["--small"],
    "plain_loaders.py": ["--small"],
    "plain_loop.py": ["--small"],
    "sequences.py": ["--small"],
    "cli.py": CLI_SMALL,
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_example_trains_and_tells_where_the_steps_went(name, tmp_path):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *COMMANDS[name]],
        cwd=tmp_path,
        env={**os.environ, "NO_ALBUMENTATIONS_UPDATE": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "fastdata · train" in done.stdout
    assert list(tmp_path.rglob("report.json"))


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(COMMANDS)


def test_the_readme_shows_an_example_that_runs(tmp_path):
    """The first Python block of the README, after the photographs that it trains on are there."""
    from lightning_fastdata.demo.photos import Cut, cut_photographs

    text = (ROOT / "README.md").read_text()
    block = text.split("```python\n", 1)[1].split("```", 1)[0]
    cut_photographs(tmp_path / "photos", Cut(train_per_class=6, val_per_class=2))
    (tmp_path / "example.py").write_text(block)
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env={**os.environ, "NO_ALBUMENTATIONS_UPDATE": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "fastdata · train" in done.stdout

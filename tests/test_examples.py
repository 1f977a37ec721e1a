"""The examples run as they are printed, at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from programs import run_program

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "first_training.ipynb"
CLI_SMALL = [
    *("fit", "--config", str(EXAMPLES / "config.yaml")),
    *("--trainer.max_epochs", "1", "--data.crops", "16", "--data.folder", "demo_data/few"),
]
TRAININGS = {
    "augment_without_lightning.py": ["--small"],
    "quickstart.py": ["--small"],
    "segmentation.py": ["--small"],
    "packed.py": ["--small"],
    "plain_loaders.py": ["--small"],
    "plain_loop.py": ["--small"],
    "sequences.py": ["--small"],
    "mixture.py": ["--small"],
    "cli.py": CLI_SMALL,
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", sorted(TRAININGS))
def test_the_example_trains_and_tells_where_the_steps_went(name, tmp_path):
    done = run_program(EXAMPLES / name, *TRAININGS[name], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "fastdata · train" in done.stdout
    assert list(tmp_path.rglob("report.json"))


def test_the_picture_of_a_pipeline_shows_each_draw_by_both_and_their_difference(tmp_path):
    done = run_program(EXAMPLES / "show_augment.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "4 draws, at most" in done.stdout
    with Image.open(tmp_path / "augmented.png") as page:
        assert page.size == (3 * 192, 4 * 192)


def cells_of(notebook):
    return json.loads(notebook.read_text(encoding="utf-8"))["cells"]


def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for number, cell in enumerate(cells_of(NOTEBOOK)):
        if cell["cell_type"] == "code":
            # Of few files, which take less time.
            source = "".join(cell["source"]).replace("[:512]", "[:128]")
            exec(compile(source, f"cell {number}", "exec"), names)
    assert names["before"].stages[0].samples == names["after"].stages[0].samples == 2 * 128
    assert capsys.readouterr().out.count("fastdata · train · 16 steps") == 2


def test_the_notebook_is_whole_and_shows_nothing_of_another_machine():
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.read(NOTEBOOK, as_version=4))
    code = [cell for cell in cells_of(NOTEBOOK) if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in code] == [[]] * len(code)
    assert list(EXAMPLES.glob("*.ipynb")) == [NOTEBOOK]


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*TRAININGS, "show_augment.py"}

"""A real notebook, run by a real kernel: what stands below its cells."""

from __future__ import annotations

import json

import pytest
from warm_python import warm_python

SETUP = """
import warnings
from front_door.timed import Model, Rows
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning_fastdata import DataThroughputCallback, FastDataModule, LoaderOptions
from trainers import quiet_trainer
warnings.simplefilter("ignore")

def fit(folder, **options):
    callbacks = [DataThroughputCallback(), TQDMProgressBar()]
    how = {"max_epochs": 2, "enable_progress_bar": True, "callbacks": callbacks}
    quiet_trainer(folder, **how, **options).fit(Model(), datamodule=data)

data = FastDataModule.from_datasets(Rows(), batch_size=4, options=LoaderOptions(num_workers=1))
"""
CELLS = {
    "setup": SETUP,
    "fit": "fit('one')",
    "two ranks": "fit('two', strategy='ddp_notebook', devices=2)",
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Name of a cell -> its outputs; ``"widgets"`` -> the state of all widgets as text."""
    nbclient, nbformat = map(pytest.importorskip, ("nbclient", "nbformat"))
    pytest.importorskip("ipykernel")
    folder = tmp_path_factory.mktemp("notebook")
    kernels = folder / "kernels" / "ours"
    kernels.mkdir(parents=True)
    launch = '["{}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"]'
    kernel = launch.format(warm_python(folder))
    (kernels / "kernel.json").write_text(
        f'{{"argv": {kernel}, "display_name": "ours", "language": "python"}}'
    )
    book = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, CELLS.values())])
    patch = pytest.MonkeyPatch()
    patch.setenv("JUPYTER_PATH", str(folder))
    patch.setenv("IPYTHONDIR", str(folder / "ipython"))
    try:
        nbclient.NotebookClient(
            book, timeout=280, kernel_name="ours", resources={"metadata": {"path": str(folder)}}
        ).execute()
    finally:
        patch.undo()
    found = {name: cell.outputs for name, cell in zip(CELLS, book.cells, strict=True)}
    return {**found, "widgets": json.dumps(book.metadata.get("widgets", {}))}


def printed(outputs):
    return "".join(each.text for each in outputs if each.output_type == "stream")


@pytest.mark.slow
def test_the_summary_of_a_fit_stands_below_its_bar(outputs):
    said = printed(outputs["fit"])
    # With ipywidgets the bar is a widget.
    assert "Epoch 1: 100%" in said + outputs["widgets"]
    # Nothing is drawn over it: the bar is closed when the summary comes.
    _, found, summary = said.partition("fastdata · train · 16 steps in")
    assert found
    assert "Epoch" not in summary
    assert summary.rstrip().endswith("page  one/report.html")


def test_processes_that_the_kernel_does_not_hear_print_their_summary(outputs):
    assert "fastdata · train · 8 steps in" in printed(outputs["two ranks"])

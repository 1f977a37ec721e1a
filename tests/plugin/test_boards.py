"""What is logged can be read back from the real boards, and no logger is asked for too much."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import lightning.pytorch as lightning
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, Dataset
from trainers import quiet_trainer

from lightning_fastdata import DataThroughputCallback, FastDataLoader
from lightning_fastdata.insight.measure.metrics import StepHistory, StepTiming
from lightning_fastdata.insight.measure.stage import window_means
from lightning_fastdata.insight.report.html import report_html
from lightning_fastdata.insight.report.run_report import WIDTH
from lightning_fastdata.plugin.loggers import boards
from lightning_fastdata.plugin.loggers.boards import chosen, custom_scalar_layout


@pytest.fixture
def history():
    history = StepHistory()
    for i in range(60):
        stall = 32 * np.exp(-i / 20) + 1.5
        history.append(
            StepTiming(
                step=i,
                wait_ms=stall,
                stall_ms=stall,
                transfer_ms=1.1,
                augment_ms=3.2,
                compute_ms=41.6,
                step_ms=stall + 45.9,
                samples=64,
                cold=False,
            )
        )
    return history


def read_back(folder):
    events = EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0, "scalars": 0})
    return events.Reload()


def test_wandb_still_takes_the_parameters_that_are_used():
    assert {"key", "columns", "data", "step"} <= set(
        inspect.signature(WandbLogger.log_text).parameters
    )
    assert {"key", "images", "step"} <= set(inspect.signature(WandbLogger.log_image).parameters)


def test_layout_names_only_scalars_that_are_logged(history):
    logged = chosen(window_means(history.newest()))
    laid_out = custom_scalar_layout()["Data"]
    assert len(laid_out) == 2
    for _, tags in laid_out.values():
        assert {tag.removesuffix("$") for tag in tags} <= set(logged)


SHOWN_PX = 350
"""TensorBoard shows a picture so wide."""


def test_a_figure_is_legible_where_tensorboard_shows_it(history):
    figure = boards.phase_figure(history.newest())  # all four phases
    figure.canvas.draw()
    (axes,) = figure.axes
    figure_px = figure.bbox
    letters = [*axes.get_legend().get_texts(), axes.xaxis.label, *figure.texts]
    for text in [*letters, *axes.get_yticklabels()]:
        assert text.get_fontsize() * figure.dpi / 72 * SHOWN_PX / figure_px.width >= 12
    for text in letters:
        box = text.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure_px.x1
        assert box.y1 <= figure_px.y1


def test_of_many_steps_a_column_is_the_mean_of_several():
    steps = [
        StepTiming(step=i, compute_ms=i % 2 * 20.0, step_ms=i % 2 * 20.0, samples=1, cold=False)
        for i in range(1000)
    ]
    figure = boards.phase_figure(steps)
    (axes,) = figure.axes
    (area,) = axes.collections
    heights = area.get_paths()[0].vertices[:, 1]
    assert len(heights) < 1000
    assert set(np.round(heights[heights > 0])) <= {9, 10, 11}
    assert "several" in axes.get_xlabel()


def test_a_figure_draws_only_measured_phases_and_the_floor_below_the_wait():
    steps = [
        StepTiming(step=i, compute_ms=10.0, stall_ms=5.0, step_ms=15.0, samples=1, cold=False)
        for i in range(10)
    ]
    figure = boards.phase_figure(steps)
    (axes,) = figure.axes
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["wait 5.0", "compute 10.0"]
    assert axes.lines[0].get_ydata()[0] == 10.0
    assert figure.get_suptitle() == "step 15.0 ms   ····· 10.0 if data were free"


class Photos(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.full((4,), float(index))


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def test_a_training_fills_every_chart_and_leaves_both_reports(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="run", version=0)
    trainer = quiet_trainer(
        max_epochs=2,
        logger=logger,
        callbacks=[watch := DataThroughputCallback(summary=False)],
        log_every_n_steps=2,
    )
    trainer.fit(Model(), FastDataLoader(Photos(), batch_size=4, num_workers=0))
    events = read_back(logger.log_dir)
    scalars = set(events.Tags()["scalars"])
    for charts in custom_scalar_layout().values():
        for _, tags in charts.values():
            assert {tag.removesuffix("$") for tag in tags} <= scalars
    folder = Path(logger.log_dir)
    told = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert told == json.loads(json.dumps(watch.report.as_dict()))
    assert (folder / "report.html").read_text(encoding="utf-8") == report_html(watch.report)
    # The last text is the summary of the whole run, as it is printed.
    last = events.Tensors("data/verdict/text_summary")[-1]
    printed = watch.report.text(WIDTH)
    assert "fastdata · train · 24 steps" in printed
    assert last.tensor_proto.string_val[0].decode() == f"```\n{printed}\n```"


@pytest.mark.parametrize("suffix", [".json", ".html"])
def test_the_page_never_takes_the_place_of_the_json(tmp_path, suffix, capsys):
    callback = DataThroughputCallback(report=tmp_path / f"mine{suffix}")
    trainer = quiet_trainer(max_epochs=None, max_steps=2, callbacks=[callback])
    trainer.fit(Model(), DataLoader(Photos(), batch_size=4))
    assert json.loads((tmp_path / "mine.json").read_text(encoding="utf-8"))
    assert (tmp_path / "mine.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert f" page  {tmp_path / 'mine.html'}\n" in capsys.readouterr().out

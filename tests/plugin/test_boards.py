"""What is logged can be read back from the real boards, and no logger is asked for too much."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import numpy as np
import pytest
from conformance.pieces import Linear, Rows
from insight.made_up import history_of, timing
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader
from trainers import quiet_trainer

from lightning_fastdata import DataThroughputCallback, FastDataLoader
from lightning_fastdata.insight.html import report_html
from lightning_fastdata.insight.report import WIDTH
from lightning_fastdata.plugin import boards
from lightning_fastdata.plugin.boards import custom_scalar_layout


@pytest.fixture
def newest():
    stalls = (32 * np.exp(-i / 20) + 1.5 for i in range(60))
    known = {"transfer_ms": 1.1, "augment_ms": 3.2}
    return history_of(*(timing(i, s, 41.6, **known) for i, s in enumerate(stalls))).newest()


def read_back(folder):
    events = EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0, "scalars": 0})
    return events.Reload()


def test_wandb_still_takes_the_parameters_that_are_used():
    assert {"key", "columns", "data", "step"} <= set(
        inspect.signature(WandbLogger.log_text).parameters
    )
    assert {"key", "images", "step"} <= set(inspect.signature(WandbLogger.log_image).parameters)


SHOWN_PX = 350
"""TensorBoard shows a picture so wide."""


def test_a_figure_is_legible_where_tensorboard_shows_it(newest):
    figure = boards.phase_figure(newest)  # all four phases
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
    steps = [timing(i, None, i % 2 * 20.0, step_ms=i % 2 * 20.0) for i in range(1000)]
    figure = boards.phase_figure(history_of(*steps).newest())
    (axes,) = figure.axes
    (area,) = axes.collections
    heights = area.get_paths()[0].vertices[:, 1]
    assert len(heights) < 1000
    assert set(np.round(heights[heights > 0])) <= {9, 10, 11}
    assert "several" in axes.get_xlabel()


def test_a_figure_draws_only_measured_phases_and_the_floor_below_the_wait():
    figure = boards.phase_figure(history_of(*(timing(i, 5.0, 10.0) for i in range(10))).newest())
    (axes,) = figure.axes
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["wait 5.0", "compute 10.0"]
    assert axes.lines[0].get_ydata()[0] == 10.0
    assert figure.get_suptitle() == "step 15.0 ms   ····· 10.0 if data were free"


def test_the_means_of_a_figure_add_up_where_some_steps_have_a_phase_that_others_lack():
    others, some = timing(0, 2.0, 5.0), timing(0, 2.0, 5.0, augment_ms=8.0)
    figure = boards.phase_figure(history_of(*[others, others, others, some] * 5).newest())
    (axes,) = figure.axes
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert sorted(legend) == ["augment 2.0", "compute 5.0", "wait 2.0"]
    assert figure.get_suptitle() == "step 9.0 ms   ····· 7.0 if data were free"


def test_a_training_fills_every_chart_and_leaves_both_reports(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="run", version=0)
    trainer = quiet_trainer(
        max_epochs=2,
        logger=logger,
        callbacks=[watch := DataThroughputCallback(summary=False)],
        log_every_n_steps=2,
    )
    trainer.fit(Linear(), FastDataLoader(Rows(48), batch_size=4, num_workers=0))
    events = read_back(logger.log_dir)
    scalars = set(events.Tags()["scalars"])
    charts = custom_scalar_layout()["Data"]
    assert len(charts) == 2
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
    trainer.fit(Linear(), DataLoader(Rows(48), batch_size=4))
    assert json.loads((tmp_path / "mine.json").read_text(encoding="utf-8"))
    assert (tmp_path / "mine.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert f" page  {tmp_path / 'mine.html'}\n" in capsys.readouterr().out

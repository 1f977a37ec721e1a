"""Reports of runs that have ended are printed as they were, and side by side."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import webbrowser

import pytest
from conformance.pieces import Linear, Rows, make_trainer
from hypothesis import given
from hypothesis import strategies as st
from programs import refused
from thoroughness import max_examples

from lightning_fastdata import DataThroughputCallback, FastDataModule
from lightning_fastdata.cli import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A training with validation and workers: its callback, and the folder of its report."""
    folder = tmp_path_factory.mktemp("run")
    callback = DataThroughputCallback(summary=False)
    trainer = make_trainer(folder, max_epochs=2, callbacks=[callback])
    rows = Rows(64)
    trainer.fit(Linear(), FastDataModule.from_datasets(rows, rows, batch_size=2, num_workers=2))
    return callback, folder


@pytest.mark.parametrize("name", ["", "report.json"])
def test_the_command_prints_the_summary_again_and_where_its_page_is(trained, capsys, name):
    callback, folder = trained
    main(["report", str(folder / name)])
    assert capsys.readouterr().out == f"{callback.report.text()}\n page  {folder / 'report.html'}\n"


@pytest.mark.parametrize("asked", [["report", "é"], ["compare", "é", "é"], ["doctor"]])
def test_commands_print_to_an_output_of_ascii_and_to_none(trained, monkeypatch, tmp_path, asked):
    shutil.copytree(trained[1], tmp_path / "é")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdout", None)
    main(asked)
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, "ascii", write_through=True))
    main(asked)
    assert (b"?/report." in out.getvalue()) == ("é" in asked)


def test_pages_are_opened_only_if_that_was_asked_for(trained, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    _, folder = trained
    main(["report", str(folder)])
    assert opened == []
    main(["report", str(folder), "--open"])
    assert opened == [(folder / "report.html").as_uri()]


def test_a_folder_with_several_reports_or_none_names_what_there_is(tmp_path, trained):
    report = (trained[1] / "report.json").read_text()
    for version in ("version_0", "version_1"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "report.json").write_text(report)
    with refused("version_1"):
        main(["report", str(tmp_path)])
    os.remove(tmp_path / "version_0" / "report.json")
    main(["report", str(tmp_path)])
    os.remove(tmp_path / "version_1" / "report.json")
    with refused(r"^fastdata: .* has no report\.json"):
        main(["report", str(tmp_path)])


def test_a_report_of_another_version_says_where_to_see_it(trained, tmp_path):
    report = json.loads((trained[1] / "report.json").read_text()) | {"schema_version": 5}
    (tmp_path / "report.json").write_text(json.dumps(report))
    with refused("schema version 5"):
        main(["report", str(tmp_path)])


def changed(value, draw, depth):
    """Put something else in the place of one part of a report, some levels down."""
    if depth == 0 or not isinstance(value, dict | list) or not value:
        return draw(
            st.none() | st.integers(-9, 9) | st.text(max_size=3) | st.just([]) | st.just({})
        )
    key = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
    whole = dict(value) if isinstance(value, dict) else list(value)
    whole[key] = changed(value[key], draw, depth - 1)
    return whole


@given(data=st.data())
@max_examples(100)
def test_whatever_a_report_holds_it_is_printed_or_refused(trained, data):
    whole = json.loads((trained[1] / "report.json").read_bytes())
    path = trained[1] / "changed.json"
    path.write_text(json.dumps(changed(whole, data.draw, data.draw(st.integers(1, 6)))))
    code = 0
    try:
        main(["report", str(path)])
    except SystemExit as error:
        code = error.code
    assert code in (0, 2)


def test_a_summary_gives_no_orders_to_a_terminal(trained, tmp_path, capsys):
    report = json.loads((trained[1] / "report.json").read_text())
    report["summary"].append("\x1b[2Jgone")
    (tmp_path / "report.json").write_text(json.dumps(report))
    main(["report", str(tmp_path)])
    assert "\\x1b[2Jgone" in capsys.readouterr().out

"""What notebooks show is escaped."""

from __future__ import annotations

import html

import pytest

from lightning_fastdata.errors import printable
from lightning_fastdata.insight.report.run_report import Explanation, RunReport


@pytest.mark.parametrize("name", ["<b>.jpg", "a&b", "\x1b[2J"])
def test_names_of_runs_and_plans_are_escaped(name):
    pages = [
        Explanation(f"{name}\nvalue")._repr_html_(),
        RunReport(stages=(), notes=(name,))._repr_html_().partition("<details>")[0],
    ]
    for page in pages:
        assert html.escape(printable(name, keep="")) in page
        assert name not in page


def test_a_plan_stays_a_text():
    plan = Explanation("train\noption\n\nprefetch off")
    assert isinstance(plan, str)
    assert plan == "train\noption\n\nprefetch off"
    assert f"{plan}".splitlines()[0] == "train"
    assert plan in plan._repr_html_()

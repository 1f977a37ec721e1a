"""What notebooks show is escaped, legible on any paper, and needs nothing else."""

from __future__ import annotations

import html
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import max_examples

from lightning_fastdata.errors import printable
from lightning_fastdata.insight.report import summary_text
from lightning_fastdata.insight.report.run_report import RunReport
from lightning_fastdata.insight.report.summary_text import (
    BADGES,
    COLORS,
    Explanation,
    lines_html,
    style_css,
)
from lightning_fastdata.plugin.loggers.report_files import notebook_display

PAPERS = ("#ffffff", "#111111", "#1e1e1e")
"""Of light notebooks, of dark ones, and of VS Code."""
STYLES = ["", "bold", "dim", "bold white on red", "bold reverse", *COLORS]


def luminance(color):
    shares = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [s / 12.92 if s <= 0.03928 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    darker, lighter = sorted(map(luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_letters_can_be_read_on_light_and_on_dark_paper():
    for color in COLORS.values():
        assert min(contrast(color, paper) for paper in PAPERS) >= 3.5
    for color in BADGES.values():
        assert contrast("#ffffff", color) >= 4.5


@given(
    st.lists(
        st.lists(st.tuples(st.text(st.characters(exclude_categories=["C", "Z"])),
                           st.sampled_from(STYLES))),
        max_size=5,
    )
)  # fmt: skip
@max_examples(100)
def test_every_text_is_shown_as_it_is_and_never_obeyed(lines):
    shown = lines_html(lines)
    seen = html.unescape(re.sub(r"<[^>]*>", "", shown))
    assert seen == "\n".join("".join(text for text, _ in line) for line in lines)
    assert set(re.findall(r"</?([a-z]*)", shown)) <= {"pre", "span"}
    assert set(re.findall(r"<[^>]*>", shown)) <= {
        lines_html([]).removesuffix("</pre>"), "</pre>", "</span>",
        *(f'<span style="{style_css(style)}">' for style in STYLES if style),
    }  # fmt: skip


def test_every_style_of_a_summary_has_its_looks():
    kinds = [*summary_text._KIND_COLORS.values(), summary_text._PAUSE_COLOR]
    for style in (*kinds, *summary_text._PHASE_COLORS.values(), "bold red"):
        assert style_css(style)


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
    assert plan._repr_html_().count("font-weight:600") == 1


def test_outside_of_a_notebook_nothing_is_shown_there():
    assert notebook_display() is None

"""The ratios in README are those that the benchmarks noted, over the best of torch's loaders."""

from __future__ import annotations

import re
import runpy
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[1]
published = SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "published.py")))
in_turn = runpy.run_path(str(ROOT / "benchmarks" / "turns.py"))["in_turn"]


@pytest.mark.parametrize("page", published.PAGES)
def test_the_table_of_a_page_is_what_was_noted(page):
    text = (ROOT / page).read_text()
    assert text == published.between(text, published.PAGES[page](published.read()))


def test_what_is_noted_is_published():
    noted = published.read()
    assert set(noted) <= set(published.NAMES)
    for name, one in noted.items():
        assert one["rounds"] >= 2, name
        assert set(one["torch_workers"]) <= set(published.TORCH_WORKERS)
        assert one["lowest"] <= one["median"] <= one["highest"]


def test_the_command_of_each_row_publishes_it():
    for row in published.ROWS:
        source = (ROOT / "benchmarks" / row.command).read_text()
        assert "add_publish(parser)" in source
        kinds = {name.partition("/")[0] for name in row.names}
        assert all(f'"{kind}/' in source for kind in kinds), row.command


def test_readme_has_no_other_ratio_over_torch():
    text = (ROOT / "README.md").read_text()
    outside = text.split(published.BEGIN)[0] + text.split(published.END)[1]
    assert not re.search(r"\\d times|of torch with|over torch[^']", outside)


def test_a_lucky_round_does_not_choose_itself():
    torchs = {0: [4.0, 4.0, 4.0], 1: [3.0, 3.0, 3.0], 2: [2.0, 2.0, 2.0], 4: [0.1, 9.0, 9.0]}
    found = published.over_best([1.0, 1.0, 1.0], torchs)
    assert found.torch_workers == [2]
    assert (found.lowest, found.median, found.highest) == (2.0, 2.0, 2.0)


def test_a_ratio_is_over_the_best_with_0_1_2_and_4_workers_of_two_rounds_at_least():
    torchs = {n: [1.0, 1.0] for n in published.TORCH_WORKERS}
    assert published.over_best([2.0, 2.0], torchs).text == "0.50"
    with pytest.raises(ValueError, match="not with"):
        published.over_best([1.0, 1.0], {2: [1.0, 1.0]})
    with pytest.raises(ValueError, match="two are needed"):
        published.over_best([1.0], {n: [1.0] for n in published.TORCH_WORKERS})


def test_a_table_shows_what_was_measured_and_what_was_not():
    torchs = {n: [1.0, 1.0] for n in published.TORCH_WORKERS}
    ratio = asdict(published.over_best([0.5, 0.4], torchs))
    about = {"torch": "2", "usable_cpus": 2}
    noted = {"train/augment": {**ratio, "date": "2026-01-01", "about": about}}
    (line,) = [line for line in published.readme_table(noted) if "train.py" in line]
    assert "2.2 `ImageFolder` and `augment=`" in line
    assert f"{published.NOT_MEASURED} with the very same dataset" in line
    page = f"before\n{published.BEGIN}\nold\n{published.END}\nafter\n"
    assert published.between(page, ["new"]) == page.replace("old", "new")
    rows = published.results_table(noted)
    assert any("| train/augment | 2.25 | 2.00-2.50 |" in row for row in rows)


def rounds_of(paces_s, *, rounds=2):
    """The numbers of the rounds that count, and how many there were."""
    ran, paces_s = [], iter(paces_s)

    def run():
        ran.append(len(ran))
        return ran[-1]

    return in_turn({"one": run}, rounds=rounds, pace_s=lambda: next(paces_s))["one"], len(ran)


def test_rounds_count_in_which_known_work_took_no_longer_than_in_others():
    """It is timed before and after each run; the first round warms up."""
    assert rounds_of([1.0] * 6) == ([1, 2], 3)
    assert rounds_of([1.0] * 4 + [1.0, 1.5] + [1.0, 1.0]) == ([1, 3], 4)
    assert rounds_of([1.0, 1.0, 1.9, 1.0] + [1.0] * 4) == ([2, 3], 4)
    slowing = [1.0 + 0.3 * (number // 2) for number in range(14)]
    assert rounds_of(slowing) == ([1, 2], 7)

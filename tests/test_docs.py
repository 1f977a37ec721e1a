"""The documentation says what is so: its code runs, its links lead somewhere, nothing is left out.

Python blocks of a page run in order, in one namespace and a folder of their own that has some
photographs in ``photos``. A comment ``<!-- not run: why -->`` before a block has it compiled only;
what stands in a comment that begins with ``<!-- setup`` is run with the blocks and not shown.
"""

from __future__ import annotations

import inspect
import os
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from misses import each
from programs import run_program
from torch.utils.data import Subset
from trainers import Keeps, quiet_trainer

import lightning_fastdata.data
import lightning_fastdata.errors
from lightning_fastdata import sources
from lightning_fastdata.augment import mixing

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
RESULTS = sorted((ROOT / "benchmarks/results").glob("*.md"))
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")), *DOCS]
FENCED = re.compile(
    r"(?:<!-- not run: (?P<why>[^>]+) -->\n+)?^```python\n(?P<shown>.*?)^```$"
    r"|^<!-- setup\n(?P<hidden>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)
IN_CODE = re.compile(r"`([^`\n]+)`")
CALL = re.compile(r"(?<![\w.])([A-Z]\w+)\(((?:[^()]|\([^()]*\))*)\)")
INNER = re.compile(r"\([^()]*\)|\[[^]]*\]|\{[^}]*\}")
ANY_FENCED = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """Some code of a page."""

    code: str
    line: int
    """Of the page, from 0, in which it begins."""
    runs: bool


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@cache
def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in FENCED.finditer(text):
        part = "hidden" if match["shown"] is None else "shown"
        line = text.count("\n", 0, match.start(part))
        found.append(Block(match[part], line, match["why"] is None))
    return found


AT_ITS_END = "The page is at its end."
"""What a script prints last: one that exits before, and be it with 0, has not run its page."""


def of_few_files(code: str) -> str:
    """Return the first block with fewer files, which takes less time and shows the same."""
    return code.replace("[:1024]", "[:256]")


def script_of(page: Path) -> str:
    """Return the code that runs, each line where it is in the page; our warnings are errors."""
    lines = ["import warnings; from lightning_fastdata import FastDataWarning as _Ours"]
    lines[0] += '; warnings.simplefilter("error", _Ours)'
    for block in blocks_of(page):
        if block.runs:
            lines += [""] * (block.line - len(lines)) + of_few_files(block.code).splitlines()
    return "\n".join([*lines, f"print({AT_ITS_END!r})\n"])


README, START = ROOT / "README.md", ROOT / "docs/start.md"
FIRST_PAGES = (README, START)
# What runs of README runs as the first block of the page on starting.
WITH_CODE = [page for page in PAGES if any(b.runs for b in blocks_of(page)) and page != README]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    from demo.photos import Cut, cut_photographs

    folder = tmp_path_factory.mktemp("photographs") / "photos"
    return cut_photographs(folder, Cut(train_per_class=6, val_per_class=2))


@pytest.fixture(scope="module")
def cache_of_pages(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_the_code_of_a_page_runs(page, cache_of_pages, photos, tmp_path):
    (tmp_path / "photos").symlink_to(photos)
    script = tmp_path / "page.py"
    script.write_text(script_of(page))
    environ = {**os.environ, "LIGHTNING_FASTDATA_CACHE": cache_of_pages}
    done = run_program(script, cwd=tmp_path, env=environ, threads=1)
    assert done.returncode == 0, (
        f"{name_of(page)} (line numbers are those of the page):\n" + done.stderr[-4000:]
    )
    assert done.stdout.endswith(f"{AT_ITS_END}\n")
    assert page != START or tells_a_summary(done.stdout)


def tells_a_summary(printed: str) -> bool:
    # What there is to try depends on what else the machine does.
    lines = (r"^fastdata · train · \d+ steps in", r"^ wait {6}")
    return all(re.search(line, printed, re.MULTILINE) for line in lines)


@each("page", PAGES)
def test_code_that_is_not_run_compiles(page):
    for block in blocks_of(page):
        compile("\n" * block.line + block.code, str(page), "exec")


MOST_LINES = 10


def test_the_first_block_is_ten_lines_that_need_nothing_before_them():
    firsts = [blocks_of(page)[0] for page in FIRST_PAGES]
    assert len({first.code for first in firsts}) == 1
    assert [block for block in blocks_of(README) if block.runs] == firsts[:1]
    assert firsts[1].runs
    assert len([line for line in firsts[0].code.splitlines() if line.strip()]) <= MOST_LINES
    for page, first in zip(FIRST_PAGES, firsts, strict=True):
        before = "\n".join(page.read_text().splitlines()[: first.line])
        assert "<!-- setup" not in before


def test_a_wheel_is_called_as_it_is_called():
    name = f"lightning_fastdata-{lightning_fastdata.__version__}-py3-none-any.whl"
    called = [re.findall(r"[\w.-]+\.whl", page.read_text()) for page in PAGES]
    assert {found for each in called for found in each} == {name}


# -- what code means -------------------------------------------------------------------------------


def modules_of(page: Path) -> list[object]:
    """Return the data module that each block makes, as it was when the block had run."""
    found, names = [], {}
    for block in blocks_of(page):
        if block.runs:
            names["data"] = None
            exec(compile("\n" * block.line + block.code, str(page), "exec"), names)
            found += [] if names["data"] is None else [names["data"]]
    return found


def trained_on(data, folder, dataset=None, epochs=2):
    """Return the images and labels of each batch of each epoch, of ``dataset`` or its own."""
    model = Keeps()
    if dataset is not None:
        data.train_dataset = lambda: dataset
    quiet_trainer(folder, max_epochs=epochs).fit(model, datamodule=data)
    return [(image.float(), label) for image, label in model.seen]


def test_the_modules_of_the_page_on_migrating_keep_counts_order_and_draws(
    cache_of_pages, photos, tmp_path, monkeypatch
):
    (tmp_path / "photos").symlink_to(photos)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_FASTDATA_CACHE", cache_of_pages)
    modules = modules_of(ROOT / "docs/howto/migrating.md")
    assert len(modules) > 2
    for data in modules:
        source = data.train_dataset()
        dataset = getattr(source, "dataset", source)
        labels = list(dataset.targets)
        taken = trained_on(data, tmp_path)
        half = len(taken) // 2
        epochs = [torch.cat([label for _, label in part]) for part in (taken[:half], taken[half:])]
        for epoch in epochs:
            assert sorted(epoch.tolist()) == sorted(labels)  # each once
            assert epoch.tolist() != labels
        assert epochs[0].tolist() != epochs[1].tolist()
        assert [len(label) for _, label in taken[: half - 1]] == [16] * (half - 1)
        # Of one sample again and again: what draws, draws for each sample of a batch.
        again = trained_on(data, tmp_path, Subset(dataset, [0] * 32))
        kinds = [{one.numpy().tobytes() for one in image} for image, _ in again]
        assert len(set.union(*kinds)) == 1 or all(len(of_batch) > 1 for of_batch in kinds)


# -- links -----------------------------------------------------------------------------------------

LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]*)\)")
IN_A_MESSAGE = re.compile(r"docs/[\w/-]+\.md(?:#[\w-]+)?")


def without_code(text: str) -> str:
    return re.sub(r"^(```|~~~).*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """Return the anchors of a page, as GitHub makes them of its headings."""
    text, times = without_code(page.read_text()), Counter()
    found = set(re.findall(r'<a id="([\w-]+)">', text))
    for heading in re.findall(r"^#+ +(.*?)\s*#*$", text, re.MULTILINE):
        shown = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.add(f"{slug}-{times[slug]}" if times[slug] else slug)
        times[slug] += 1
    return frozenset(found)


def broken(link: str, page: Path, folder: Path) -> bool:
    path, _, anchor = link.partition("#")
    target = (folder / path).resolve() if path else page
    return not target.exists() or bool(anchor and anchor not in anchors_of(target))


@each("page", [*PAGES, *RESULTS])
def test_links_lead_somewhere(page):
    links = LINK.findall(re.sub(r"`[^`\n]*`", "", without_code(page.read_text())))
    assert [link for link in links if broken(link, page, page.parent)] == []


def test_pages_that_the_code_names_are_there():
    files = [*ROOT.glob("lightning_fastdata/**/*.py"), *ROOT.glob("examples/**/*.py")]
    named = {link for file in files for link in IN_A_MESSAGE.findall(file.read_text())}
    assert named
    assert [link for link in named if broken(link, ROOT, ROOT)] == []


# -- nothing is left out ---------------------------------------------------------------------------

REFERENCE = "\n".join(path.read_text() for path in (ROOT / "docs/reference").glob("*.md"))
MODULES = (lightning_fastdata, lightning_fastdata.data, lightning_fastdata.errors, sources, mixing)


def public_names(module):
    """Return the names that a module offers to users: without __all__, those of its classes."""
    classes = [name for name, one in vars(module).items() if isinstance(one, type)]
    return {name for name in getattr(module, "__all__", classes) if name[0] != "_"}


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_the_reference_has_every_public_name(module):
    entries = re.findall(r"^\.\. auto\w+:: ([\w.]+)$", REFERENCE, flags=re.MULTILINE)
    parts = [name.rpartition(".") for name in entries]
    own = {name for home, _, name in parts if home == module.__name__}
    assert own <= public_names(module)
    # A name may stand where it is from.
    assert public_names(module) <= {name for _, _, name in parts}


def test_every_page_is_listed_for_readers_on_github():
    lists = [ROOT / "docs/README.md", *(path for path in DOCS if path.name == "index.md")]
    listed = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in lists
        for link in LINK.findall(page.read_text())
    }
    stand_ins = {path for path in DOCS if path.read_text().startswith("This page of the site")}
    assert set(DOCS) - listed - stand_ins - set(lists) == set()


def test_calls_in_the_pages_take_arguments_that_there_are():
    public = {name: getattr(module, name) for module in MODULES for name in public_names(module)}
    wrong = []
    for page in PAGES:
        text = page.read_text()
        code = [*(block for _, block in ANY_FENCED.findall(text)), *IN_CODE.findall(text)]
        for name, given in (call for one in code for call in CALL.findall(one)):
            known = set(inspect.signature(public[name]).parameters) if name in public else None
            named = re.findall(r"(?:^|,)\s*(\w+)=(?!=)", re.sub(INNER, "", given))
            wrong += [(page.name, name, a) for a in named if known is not None and a not in known]
    assert wrong == []


def test_files_that_the_pages_name_are_there():
    named = {
        path
        for page in PAGES
        for path in re.findall(
            r"(?<![\w/.])(?:tests|benchmarks|examples|lightning_fastdata|docs)/[\w/.*-]+\.(?:py|md)",
            page.read_text(),
        )
    }
    assert len(named) > 20
    assert [path for path in named if not list(ROOT.glob(path))] == []


def test_commands_in_the_pages_are_those_of_the_program():
    blocks = [block for page in PAGES for block in ANY_FENCED.findall(page.read_text())]
    lines = "\n".join(code for language, code in blocks if language in ("bash", ""))
    used = set(re.findall(r"^(?:srun )?fastdata ([\w-]+)", lines, re.MULTILINE))
    shown = run_program("-m", "lightning_fastdata", "--help", cwd=ROOT)
    assert shown.returncode == 0, shown.stderr
    assert used
    assert used <= set(re.search(r"\{([\w,-]+)\}", shown.stdout)[1].split(","))

"""What `fastdata top` shows of trainings: one page, in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lightning_fastdata.errors import printable
from lightning_fastdata.insight.model.finding import duration_text
from lightning_fastdata.insight.waits.attribution import PART_WORDS

if TYPE_CHECKING:
    from rich.console import RenderableType

    from lightning_fastdata.insight.live.status import Status, WorkerStatus

_MOST_WORKERS: Final = 24
_MOST_WAITS: Final = 3
_MIB: Final = 2**20
NOTHING_RUNS: Final = (
    "No training of this user runs on this machine with a DataThroughputCallback.",
    "Start one with Trainer(callbacks=[DataThroughputCallback()]), and this in another terminal.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of texts under their heads; rows in ``alarming`` are what to look at."""

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    alarming: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePage:
    """What is shown, in the order of its fields."""

    title: str
    alarms: Sequence[str] = ()
    """What hangs, and where."""
    figures: Sequence[tuple[str, str]] = ()
    """Value and what it is."""
    tables: Sequence[Table] = ()
    notes: Sequence[tuple[str, str]] = ()
    """Label and text."""


def chosen(statuses: Sequence[Status], run: str | None) -> list[Status]:
    """Return all ranks of those trainings that a text means.

    Args:
        statuses: Of all processes.
        run: The number of a process, or a part of a script or of a log folder; None: all.
    """
    if run is None:
        return list(statuses)
    meant = {each.group for each in statuses if run == str(each.pid)} or {
        each.group for each in statuses if run in each.log_dir or run in each.script
    }
    return [each for each in statuses if each.group in meant]


def live_page(statuses: Sequence[Status], run: str | None, now_s: float) -> LivePage:
    """Return the page of one training, the list of several, or that there is none.

    Args:
        statuses: Of all processes.
        run: As of :func:`chosen`.
        now_s: Seconds since 1970.
    """
    shown = chosen(statuses, run)
    groups: dict[str, list[Status]] = {}
    for each in shown:
        groups.setdefault(each.group, []).append(each)
    if len(groups) == 1:
        return _training(shown, now_s)
    if groups:
        return _overview(list(groups.values()), now_s)
    notes = [("", line) for line in NOTHING_RUNS]
    if statuses:
        notes = [("", f"No training is {run!r}. There are:")]
        names = {each.group: f"{each.pid}: {each.script}, {each.log_dir}" for each in statuses}
        notes += [("", name) for name in names.values()]
    return LivePage(title="fastdata top", notes=notes)


def _training(ranks: Sequence[Status], now_s: float) -> LivePage:
    first = ranks[0]
    worst = max(ranks, key=lambda each: (each.silent_s(now_s), each.hangs, each.quiet_s))
    of_ranks = f" · {len(ranks)} of {first.world_size} ranks" if first.world_size > 1 else ""
    lasted = duration_text(max(0.0, now_s - first.started_s))
    share = first.stall_share
    free = f"{1 / (1 - share):.2f}x" if share is not None and share < 1 else None
    memory = first.memory_bytes
    # Of before it hung: no step has ended since.
    now = ", when it last went on" if first.hangs else ""
    figures = {
        f"steps/s{now}": _number(first.steps_per_s),
        "ms a step": _number(first.step_ms),
        "of it waiting for data": _percent(share),
        "if data were free, at most": free,
        "epoch": str(first.epoch),
        "step": str(first.step),
        "batches ready": _text(first.batches_ready),
        "batches being made": _text(first.batches_under_way),
        "MiB of this process alone": None if memory is None else str(memory // _MIB),
    }
    tables = [_ranks(ranks, now_s)] if len(ranks) > 1 else []
    workers = [(rank, worker) for rank in ranks for worker in rank.workers]
    if workers:
        tables.append(_workers(workers, several=len(ranks) > 1))
    notes = [("now", first.activity)] if len(ranks) == 1 else []
    waits = sorted(first.waits.items(), key=lambda part: -part[1])[:_MOST_WAITS]
    words = [f"{share:.0%} {PART_WORDS.get(name, name)}" for name, share in waits]
    notes += [("wait", "; ".join(words))] if words else []
    notes += [("data", reader) for reader in first.readers]
    told = {"found": first.verdict, "try": first.remedy, "done": first.move}
    notes += [(label, text) for label, text in told.items() if text]
    notes.append(("logs", first.log_dir))
    return LivePage(
        title=f"{_name(first)} · {first.method} · pid {first.pid}{of_ranks} · {lasted}",
        alarms=[*_alarms(worst, now_s, several=len(ranks) > 1)],
        figures=[(value, label) for label, value in figures.items() if value is not None],
        tables=tables,
        notes=notes,
    )


def _alarms(status: Status, now_s: float, *, several: bool) -> list[str]:
    who = f"rank {status.rank}: " if several else ""
    silent_s = status.silent_s(now_s)
    if silent_s:
        silent = f"nothing heard for {duration_text(silent_s)}, last it was {status.activity}"
        return [f"{who}{silent}: the process is stopped, or code in C keeps Python's lock"]
    if not status.hangs:
        return []
    head = f"{who}no step for {duration_text(status.quiet_s)}: {status.activity}"
    if status.quiet_s - status.activity_s > 1:
        head += f" for {duration_text(status.activity_s)}"
    return [head, *(f"at {line}" for line in status.stack)]


def _overview(groups: Sequence[Sequence[Status]], now_s: float) -> LivePage:
    heads = ("pid", "script", "now", "steps/s", "ms a step", "wait", "epoch", "step", "ranks")
    rows, alarming = [], set()
    for number, ranks in enumerate(groups):
        first = ranks[0]
        trouble = [line for each in ranks for line in _alarms(each, now_s, several=False)[:1]]
        if trouble:
            alarming.add(number)
        rows.append(
            (
                str(first.pid),
                _name(first),
                trouble[0] if trouble else first.activity,
                *_figures(first),
                f"{len(ranks)} of {first.world_size}",
            )
        )
    table = Table(title="", heads=heads, rows=rows, alarming=frozenset(alarming))
    hint = "fastdata top PID shows one of them; a part of a script's or log folder's name does, too"
    return LivePage(title=f"{len(groups)} trainings", tables=[table], notes=[("", hint)])


def _ranks(ranks: Sequence[Status], now_s: float) -> Table:
    heads = ("rank", "pid", "now", "steps/s", "ms a step", "wait", "epoch", "step")
    rows = []
    for each in ranks:
        # With where it is: one rank hangs, and the others wait for it.
        trouble = " ".join(_alarms(each, now_s, several=False)[:2])
        rows.append((str(each.rank), str(each.pid), trouble or each.activity, *_figures(each)))
    alarming = frozenset(
        number for number, each in enumerate(ranks) if each.hangs or each.silent_s(now_s)
    )
    return Table(title="ranks", heads=heads, rows=rows, alarming=alarming)


def _figures(status: Status) -> tuple[str, ...]:
    return (
        _number(status.steps_per_s) or "-",
        _number(status.step_ms) or "-",
        _percent(status.stall_share) or "-",
        str(status.epoch),
        str(status.step),
    )


def _workers(workers: Sequence[tuple[Status, WorkerStatus]], *, several: bool) -> Table:
    busy_first = sorted(workers, key=lambda each: (each[1].state == "idle", -each[1].for_s))
    shown = busy_first[:_MOST_WORKERS]
    left = len(workers) - len(shown)
    if not left:
        shown = list(workers)
    rows = []
    for rank, worker in shown:
        doing = worker.state
        if worker.index is not None:
            doing = f"sample {worker.index}"
        if worker.path:
            doing += f" ({worker.path})"
        row = [str(worker.worker), str(worker.pid), doing, duration_text(worker.for_s)]
        rows.append([str(rank.rank), *row] if several else row)
        rows[-1].append(" < ".join(worker.lines))
    alarming = frozenset(n for n, (_, worker) in enumerate(shown) if worker.lines)
    heads = ["worker", "pid", "does", "for", "at"]
    more = f" ({left} more, which have less to do)" if left else ""
    return Table(
        title=f"workers{more}",
        heads=["rank", *heads] if several else heads,
        rows=rows,
        alarming=alarming,
    )


def _name(status: Status) -> str:
    return Path(status.script).name or "python"


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.0%}"


def _text(value: int | None) -> str | None:
    return None if value is None else str(value)


def as_rich(page: LivePage) -> RenderableType:
    """Return the page for a console of rich; what files are called cannot give it orders."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    def text(words: str, style: str = "") -> Text:
        return Text(printable(words, keep=""), style=style)

    lines: list[RenderableType] = [text(page.title, "bold")]
    lines += [text(f" {alarm}", "bold red") for alarm in page.alarms]
    if page.figures:
        figures = RichTable.grid(padding=(0, 2))
        for value, label in page.figures:
            figures.add_row(text(value, "bold"), text(label))
        lines += [Text(), figures]
    for table in page.tables:
        drawn = RichTable(box=SIMPLE_HEAD, pad_edge=False)
        for head in table.heads:
            drawn.add_column(text(head), overflow="fold")
        for number, row in enumerate(table.rows):
            style = "bold red" if number in table.alarming else ""
            drawn.add_row(*(text(cell) for cell in row), style=style)
        lines += [Text(), text(table.title, "bold"), drawn]
    notes = RichTable.grid(padding=(0, 2))
    for label, words in page.notes:
        notes.add_row(text(label, "bold"), text(words))
    return Group(*lines, Text(), notes)

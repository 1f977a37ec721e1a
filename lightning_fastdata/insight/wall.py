"""Where every second of a run went: at each moment to one part, the innermost that is under way.

What runs beside the steps pauses them, and a long pause is a finding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

from lightning_fastdata.host import clock
from lightning_fastdata.insight.finding import (
    KEEP,
    KEEP_UNSEEN,
    Advice,
    Finding,
    Gain,
    Rule,
    duration_text,
    make_finding,
)
from lightning_fastdata.insight.steps import StageSummary, mean_ms
from lightning_fastdata.types import STAGE_WORDS

if TYPE_CHECKING:
    from lightning_fastdata.insight.evidence import Evidence

STEP_PARTS: Final = ("wait", "compute")
PART_NAMES: Final = {
    "wait": "wait",
    "compute": "compute",
    "epoch_starts": "starts of epochs",
    "validation": "validation",
    "checkpoints": "checkpoints",
    "logging": "logging",
    "callbacks": "callbacks",
    "setup": "setup",
    "measuring": "measuring this",
    "other": "other",
}
"""Part of a run -> its name for people, in the order in which the parts are listed."""
_SHOWN_S: Final = 0.05
"""Seconds below which a part is left out of the text, as it would be listed as 0.0."""
_PAUSE_HIGH: Final = 0.05
"""Share of a run below which a pause is no finding."""
_FASTER_START: Final = Advice(text="a dataset and a sampler that start faster, or longer epochs")
_MADE_ONCE: Final = Advice(
    text="reload_dataloaders_every_n_epochs=0, and a dataset that is built once, in setup()"
)
_KEPT_OPEN: Final = Advice(text="have the dataset keep what its __iter__ opens")
_RARER: Final = Advice(
    text="validate less often (check_val_every_n_epoch), or on fewer batches (limit_val_batches)"
)
_BESIDE: Final = {
    "callbacks": "run {name} less often, or make it cheaper",
    "checkpoints": "save less often (every_n_train_steps, train_time_interval), to a faster disk, "
    "or fewer weights (save_weights_only=True)",
    "logging": "log less often (Trainer(log_every_n_steps=...)), with fewer "
    "self.log(..., on_step), or to a logger that writes faster",
}
"""Part of the wall time beside steps -> what to try."""
_BESIDE_HIGH_S: Final = 1.0
"""Seconds below which what runs beside steps is no finding."""
_ONCE: Final = tuple(
    f".{hook}"
    for hook in (
        *("setup", "teardown", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end"),
        *("on_sanity_check_start", "on_sanity_check_end"),
    )
)
"""Ends of the names of hooks that run once, and so cannot run less often."""


class Activity(NamedTuple):
    """What a run is doing at a moment."""

    part: str
    """Part of the run: a key of ``PART_NAMES``."""
    name: str = ""
    """Name of what is done, e.g. ``"ModelCheckpoint.on_validation_end"``; empty: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WallTime:
    """The wall time of a run in parts that add up to it."""

    total_s: float
    """Seconds from the start of the measuring to its end."""
    parts_s: Mapping[str, float]
    """Part, a key of ``PART_NAMES`` -> seconds. ``compute`` is the host's time in steps without
    that in ``wait``; it includes transfer and augmentation."""
    named_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Part -> name of what it was spent on -> seconds, which are among those of the part."""
    steps: int = 0
    """Number of steps that the run is for, within this time: in a fit, training steps."""
    samples: int = 0
    """Number of samples in ``steps``."""

    @property
    def training_s(self) -> float:
        """Seconds without the setup, which a longer run has only once, too."""
        return max(0.0, self.total_s - self.parts_s.get("setup", 0.0))

    @property
    def samples_per_s(self) -> float | None:
        """Samples of ``steps`` per second of ``training_s``; None: there were none."""
        return self.samples / self.training_s if self.samples and self.training_s else None

    def share(self, seconds: float) -> float:
        """Return seconds as a share of ``training_s``, 0 to 1."""
        return seconds / self.training_s if self.training_s else 0.0

    def names_of(self, part: str) -> list[tuple[str, float]]:
        """Return the names of what a part was spent on, with seconds, the longest first."""
        return sorted(self.named_s.get(part, {}).items(), key=lambda pair: -pair[1])

    def as_dict(self) -> dict[str, object]:
        """Return plain JSON types."""
        return {**asdict(self), "samples_per_s": self.samples_per_s}


NO_TIME: Final = WallTime(total_s=0.0, parts_s={})


class WallClock:
    """Counts each moment of a run towards what is under way in it.

    Blocks may be nested, and the innermost counts. Where no block is under way, the state of the
    run counts, which :meth:`turn_to` changes at any time.

    Attributes:
        state: Activity that counts where no block is under way.
    """

    __slots__ = (
        "_began_ns", "_blocks", "_clock_ns", "_now", "_since_ns", "_spent_ns", "state",
    )  # fmt: skip

    def __init__(self, clock_ns: Callable[[], int] | None = None) -> None:
        self._clock_ns = clock_ns or clock.reader_ns()
        self._began_ns = self._since_ns = self._clock_ns()
        self._spent_ns: defaultdict[Activity, int] = defaultdict(int)
        self.state = self._now = Activity("setup")
        self._blocks: list[Activity] = []

    def turn_to(self, activity: Activity) -> None:
        """Change the state of the run."""
        self.state = activity
        if not self._blocks:
            self._change(activity)

    def enter(self, activity: Activity) -> None:
        """Begin a block; one within a block of the same part counts towards that block."""
        now, blocks = self._now, self._blocks
        blocks.append(now)
        if activity is not now and (activity.part != now.part or len(blocks) == 1):
            self._change(activity)

    def leave(self) -> None:
        """End the innermost block; without effect if there is none."""
        blocks = self._blocks
        if blocks:
            outer = blocks.pop()
            self._change(outer if blocks else self.state)

    def forget(self) -> None:
        """Count everything so far as setup: it was tried before the run began."""
        self._change(self._now)
        self._spent_ns.clear()
        self._spent_ns[Activity("setup")] = self._since_ns - self._began_ns

    def read(self, *, steps: int = 0, samples: int = 0) -> WallTime:
        """Return what was counted until now; ``steps`` and ``samples`` are those in this time."""
        self._change(self._now)
        parts: dict[str, float] = dict.fromkeys(PART_NAMES, 0.0)
        named: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for (part, name), ns in self._spent_ns.items():
            parts[part] += ns / 1e9
            if name:
                named[part][name] = ns / 1e9
        return WallTime(
            total_s=(self._since_ns - self._began_ns) / 1e9,
            parts_s={part: seconds for part, seconds in parts.items() if seconds},
            named_s=dict(named),
            steps=steps,
            samples=samples,
        )

    def _change(self, activity: Activity) -> None:
        now_ns = self._clock_ns()
        self._spent_ns[self._now] += now_ns - self._since_ns
        self._since_ns = now_ns
        self._now = activity


def loop_time(train: StageSummary, val: StageSummary | None = None) -> WallTime:
    """Return where the time of a loop went that is not measured as a whole, by its stages.

    An epoch takes as long to start as its first wait is longer than the mean of the others.
    """
    wait_ms, stall_ms = mean_ms(train.wait) or 0.0, mean_ms(train.stall) or 0.0
    later, cold_ms = max(0, train.cold_steps - 1), train.cold_wait_ms or 0.0
    first_ms = cold_ms if train.first_wait_ms is None else train.first_wait_ms
    starts_s = max(0.0, cold_ms * train.cold_steps - first_ms - wait_ms * later) / 1e3
    named, parts = {"epoch_starts": {"later epochs": starts_s}}, {"epoch_starts": starts_s}
    parts["wait"] = stall_ms * train.steps / 1e3
    if val is not None:
        parts["validation"] = val.duration_s
        waited_s = min(val.duration_s, (mean_ms(val.stall) or 0.0) * val.steps / 1e3)
        named["validation"] = {"waiting for batches": waited_s}
    return WallTime(
        total_s=train.duration_s + parts.get("validation", 0.0),
        parts_s=parts,
        named_s=named,
        steps=train.steps,
        samples=train.samples,
    )


def wall_text(wall: WallTime, stage: str = "train") -> str:
    """Return the parts in one line: ``of 72.9 s: training steps 0.7 (wait 0.1, ...), ...``."""
    what = STAGE_WORDS.get(stage, stage)
    steps = {part: wall.parts_s[part] for part in STEP_PARTS if part in wall.parts_s}
    shown = {part: seconds for part, seconds in steps.items() if seconds >= _SHOWN_S}
    inside = ", ".join(f"{PART_NAMES[part]} {seconds:.1f}" for part, seconds in shown.items())
    listed = [f"{what} steps {sum(steps.values()):.1f}" + (f" ({inside})" if inside else "")]
    listed += [
        f"{name} {wall.parts_s.get(part, 0.0):.1f}"
        for part, name in PART_NAMES.items()
        if part not in STEP_PARTS and wall.parts_s.get(part, 0.0) >= _SHOWN_S
    ]
    return f"of {wall.total_s:.1f} s: {', '.join(listed)}"


def _epoch_starts(e: Evidence) -> Finding | None:
    later_s = dict(e.wall.names_of("epoch_starts")).get("later epochs", 0.0)
    each_s = later_s / max(1, e.summary.cold_steps - 1)
    what = (
        f"starting epochs after the first took {duration_text(later_s)} of "
        f"{duration_text(e.wall.training_s)}, {duration_text(each_s)} each"
    )
    ends = e.loader.persistent_workers is False
    # A worker that is kept asks the sampler, or iterates a stream, anew all the same.
    faster = replace(_KEPT_OPEN if e.loader.streamed else _FASTER_START, joins=ends)
    keep = KEEP if e.loader.compared else KEEP_UNSEEN
    advice = (keep, faster) if ends else (faster,)
    if e.loaders_anew:
        what = f"loaders are made anew in the course of the training, and {what}"
        advice = (_MADE_ONCE,)
    leave = "" if e.step_times.stalls else "the loader within epochs"
    return _pause(e.wall, later_s, what, advice, leave)


def _validation(e: Evidence) -> Finding | None:
    which = "the validation loader" if e.val_loader is None else f"validation's {e.val_loader}"
    wall = e.wall
    waited_s = dict(wall.names_of("validation")).get("waiting for batches", 0.0)
    all_s = wall.parts_s.get("validation", 0.0)
    text = f"have workers read {which} (num_workers)"
    cpus, closed, enough, least_s = e.loader.usable_cpus, e.loader.closed, False, 0.0
    if e.val_workers is not None and cpus is not None:
        free = e.machine.left_of(cpus)
        text = f"num_workers {e.val_workers} -> {free} for {which}"
        enough = e.val_workers >= free  # a worker for each free CPU is enough
        # Workers make at most one batch each in the time that one takes now.
        least_s = all_s * e.val_workers / free if e.val_workers else waited_s / free
    gain = _gain(wall, min(waited_s, all_s - least_s))
    workers = Advice(text=text, changes=("val.num_workers",), gain=gain)
    useless = gain is not None and not gain.worthwhile and not set(workers.changes) & set(closed)
    advice = () if enough else (_RARER if useless else workers,)
    what = (
        f"validation waited {duration_text(waited_s)} of its {duration_text(all_s)} for data, "
        f"{wall.share(waited_s):.0%} of the run"
    )
    return _pause(wall, waited_s, what, advice)


def _beside_steps(e: Evidence) -> Finding | None:
    """Return the finding that what Python does beside steps takes long, with its longest part."""
    wall = e.wall
    spent = {
        part: wall.parts_s.get(part, 0.0)
        - sum(once_s for name, once_s in wall.names_of(part) if name.endswith(_ONCE))
        for part in _BESIDE
    }
    part, seconds = max(spent.items(), key=itemgetter(1))
    if seconds < _BESIDE_HIGH_S:
        return None
    names = [each for each in wall.names_of(part) if not each[0].endswith(_ONCE)]
    name = names[0][0] if names else part
    most = f", {duration_text(names[0][1])} of it in {name}" if names else ""
    what = f"{part} took {duration_text(seconds)} of {duration_text(wall.training_s)}{most}"
    return _pause(wall, seconds, what, _BESIDE[part].format(name=name))


def _pause(
    wall: WallTime,
    seconds: float,
    what: str,
    remedy: str | Advice | tuple[Advice, ...],
    leave: str = "",
) -> Finding | None:
    share = wall.share(seconds)
    if share < _PAUSE_HIGH or not wall.steps:
        return None
    return make_finding(share, what, remedy, _gain(wall, seconds), leave)


def _gain(wall: WallTime, seconds: float) -> Gain | None:
    """Return the gain of a run that takes so many seconds less; None: it has no steps."""
    if not wall.steps:
        return None
    before_ms = 1000 * wall.training_s / wall.steps
    after_ms = max(0.0, before_ms - 1000 * seconds / wall.steps)
    return Gain(before_ms=before_ms, after_ms=after_ms, basis="floor")


RULES: Final = (
    Rule("FD310", "epochs start slowly", _epoch_starts, "run", kind="paused between epochs"),
    Rule("FD318", "validation waits for data", _validation, "run", kind="starved in validation"),
    Rule("FD320", "what runs beside steps takes long", _beside_steps, "run", kind="held up"),
)

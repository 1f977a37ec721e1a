"""A training whose epochs are parts of a trial: who reads the next one, and what it took."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from lightning_fastdata.caches.cached import CachedDataset
from lightning_fastdata.device import synchronize
from lightning_fastdata.errors import FastDataError
from lightning_fastdata.fingerprint import Fingerprint, fingerprint
from lightning_fastdata.host import clock
from lightning_fastdata.host.cpu import CpuUse, read_cpu_limit, read_cpu_use
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.host.system_calls import write_atomically
from lightning_fastdata.prove import loaders as made
from lightning_fastdata.prove.remedies import Change, Changes, LoaderFacts, Refused, named
from lightning_fastdata.prove.settings import ProveSettings
from lightning_fastdata.prove.trials import (
    AS_IS,
    FREE,
    Block,
    Trial,
    Turn,
    candidate,
    epoch_s,
    middle_step_s,
    turns,
)
from lightning_fastdata.sources.attributes import held_objects
from lightning_fastdata.types import Batch, Stage

if TYPE_CHECKING:
    import torch

_FIRST_STEPS: Final = 8
_PROBE_S: Final = 2.0
_KEPT: Final = 8
"""Batches that are used again and again in place of free data."""
_LOOK_S: Final = 0.5
"""CPU time that a comparison of what is read may take."""
_BLOCKS: Final = 60
"""About so many blocks make a trial; the budget is shared out among them."""
_BLOCK_S: Final = (0.7, 10.0)
_EVEN_STEPS: Final = 32
"""A part of an epoch has so many steps, if that does not take much longer than a block may."""
_TUNED_STEPS: Final = 100
"""Behind so many steps the number of workers of this package's loader has settled."""
_WARM_BLOCKS: Final = 3
"""It has no more blocks than these to do so."""
_OVER: Final = 0.25
"""Of the budget, what it may take longer to confirm a remedy that was found in time."""
_LARGE_BYTES: Final = 64 * 2**20
"""Of objects that each worker would copy."""
_CACHE_SHARE: Final = 0.25
"""Of the memory that is free."""


class TrialEndedError(SystemExit):
    """The trial has come to its end: the script goes no further."""


class TrialLoader:
    """Stands where a loader of the script stood; each iteration reads what is its turn."""

    def __init__(self, session: Session, place: Place) -> None:
        self._session, self._place = session, place

    def __len__(self) -> int:
        return self._place.steps

    def __iter__(self) -> Iterator[Batch]:
        batches = self._session.read(self._place)
        self._session.opened(batches)
        return batches

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._place.own, name)


class Place:
    """A loader of the script, and what takes its place."""

    def __init__(self, stage: Stage, own: Any, limit: int | None) -> None:
        self.stage, self.own = stage, own
        length = made.batches_in(own)
        known = [number for number in (length, limit) if number is not None]
        self.batches: int | None = min(known) if known else None
        """Of an epoch; None: not known."""
        self.steps = min(_FIRST_STEPS, self.batches or _FIRST_STEPS)
        """Of the part of an epoch that is read in one go."""
        self.kept: list[Batch] = []
        self.arms: dict[str, Any] = {}
        self.pieces: made.Pieces | None = None
        self.asked_s: list[float] = []
        """When each batch was asked for; behind the last one, when its step had ended."""
        self.given = 0
        """Batches that were handed out."""
        self.aside_s = 0.0
        """What was spent on looking at what is read, which is no part of a step."""

    @property
    def is_whole(self) -> bool:
        """A part of an epoch is all of it."""
        return self.batches is not None and self.steps >= self.batches

    def loader(self, arm: str, change: Change, make: Callable[[Any], Any] | None) -> Any:
        """Return the loader of an arm; it stays the same one until :meth:`cut`."""
        if arm not in self.arms:
            self.arms[arm] = self._made(change, make)
        return self.arms[arm]

    def _made(self, change: Change, make: Callable[[Any], Any] | None) -> Any:
        cuts = made.can_be_cut(self.own) and not self.is_whole
        if made.reader_of(self.own) == "other" or (change == Change() and not cuts):
            return self.own
        cut = None
        if cuts:
            self.pieces = self.pieces or made.Pieces(self.own.batch_sampler)
            cut = made.Cut(self.pieces, self.steps, again=change.cache is not None)
        if make is not None:
            return make(made.remade(self.own, Change(), cut))
        return made.remade(self.own, change, cut)

    def cut(self, steps: int) -> None:
        """Read so many batches in one go from now on."""
        self.steps = max(1, steps if self.batches is None else min(steps, self.batches))
        for arm in list(self.arms):
            self.close(arm)

    def ended(self, at_s: float) -> None:
        """Note when the last step had ended, if nothing was asked for behind it."""
        if self.given and self.given == len(self.asked_s):
            self.asked_s.append(max(at_s - self.aside_s, self.asked_s[-1]))

    def step_s(self, arm: str) -> float:
        """Return what a step took in the part that was read, of an arm."""
        return middle_step_s(self.asked_s, ahead=made.batches_ahead(self.arms.get(arm)))

    def close(self, arm: str) -> None:
        """Let go of an arm's workers."""
        loader = self.arms.pop(arm, None)
        if loader is not None and loader is not self.own:
            with suppress(Exception):
                made.close(loader)


class Session:
    """The trial of one training, which is written to ``file`` after each part of an epoch.

    ``make_fast`` makes the loader that ``from_loaders`` would make of one, by its stage; None:
    FastDataLoader takes its place.
    """

    def __init__(
        self,
        trial: Trial,
        file: Path,
        *,
        budget_s: float,
        device: torch.device,
        make_fast: Callable[[str, Any], Any] | None = None,
    ) -> None:
        self.trial, self.file = trial, file
        self.device, self.make_fast = device, make_fast
        self.budget_s, self._until_s = budget_s, clock.monotonic() + budget_s
        self.validations = 0.0
        """How often an epoch validates."""
        self.epochs = math.inf
        """Of the training."""
        self.block_s = min(max(budget_s / _BLOCKS, _BLOCK_S[0]), _BLOCK_S[1])
        self._places: dict[Stage, list[Place]] = {"train": [], "val": []}
        self._turns = turns(trial, self.left_s, self._name_remedies)
        self._turn: Turn | None = None
        self._repeats = 1
        self._parts: list[tuple[float, float, float, float]] = []
        """Of the block that runs: epoch, step and wall time of each part, and CPUs of others."""
        self._probes = 0
        self._bad = False
        self._looks: dict[int, Fingerprint | None] = {}
        self._before: dict[int, Fingerprint | None] = {}
        """As it was before the step that runs."""
        self._changes: set[Changes] = set()
        self._open: list[Generator[Batch]] = []
        self._in_place = False
        self._began_s = 0.0
        self._stepped_s = self._validated_s = 0.0
        self._first_s: list[float] = []
        """Of parts of an epoch as it is: until the first batch was there."""
        self._use: CpuUse | None = None
        self._used: list[float] = []

    # -- what the loops ask ------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """How many steps a part of an epoch has will not change any more."""
        return self._turn is not None

    def left_s(self) -> float:
        """Return what is left of the budget."""
        return self._until_s - clock.monotonic()

    def loader(self, stage: Stage, own: Any, limit: int | None = None) -> TrialLoader:
        """Return what takes the place of a loader of the script."""
        place = Place(stage, own, limit)
        self._places[stage].append(place)
        return TrialLoader(self, place)

    def opened(self, batches: Generator[Batch]) -> None:
        """Note what is to be closed when the part of an epoch ends, as its workers end by it."""
        self._open.append(batches)

    def stepped(self) -> None:
        """Note that a training step has ended."""
        self._stepped_s = self._validated_s = clock.monotonic()
        for place in self._places["train"] if self._turn is None else ():
            self._look_behind(place)

    def validated(self) -> None:
        """Note that the validation after the last step has ended, if there is one."""
        self._validated_s = clock.monotonic()

    def advance(self) -> None:
        """End a part of an epoch, if one runs, and begin the next.

        Raises:
            TrialEndedError: There is none.
        """
        for batches in self._open:
            batches.close()
        self._open = []
        synchronize(self.device)
        now_s = clock.monotonic()
        for place in self._places["train"]:
            place.ended(self._stepped_s)
        for place in self._places["val"]:
            place.ended(self._validated_s)
        if self._began_s:
            self._part_ended(now_s)
        self._write()
        self._next_part()
        for places in self._places.values():
            for place in places:
                place.asked_s, place.given, place.aside_s = [], 0, 0.0
        self._use = read_cpu_use(_tree())
        self._began_s = self._stepped_s = self._validated_s = clock.monotonic()

    def read(self, place: Place) -> Generator[Batch]:
        """Yield the batches of the part of an epoch that is its turn."""
        arm = AS_IS if self._turn is None else self._turn.arm
        place.asked_s.append(clock.monotonic())
        if arm == FREE and place.kept:
            for number in range(place.steps):
                batch = place.kept[number % len(place.kept)]
                place.given += 1
                yield made.copied(batch) if self._in_place else batch
                place.asked_s.append(clock.monotonic())
            return
        probing = self._turn is None
        if probing and place.stage == "train":
            self._look_between(place)
        batches = self._batches(place, arm)
        for number, batch in enumerate(batches):
            place.given += 1
            if probing:
                yield from self._probed(place, batch)
                place.asked_s.append(clock.monotonic() - place.aside_s)
            else:
                if number == 0 and arm == AS_IS and place.stage == "train":
                    self._first_s.append(clock.monotonic() - place.asked_s[0])
                yield batch
                place.asked_s.append(clock.monotonic())
            if number + 1 == place.steps:
                return  # what is behind it is not read; the iterator ends with this generator

    def _batches(self, place: Place, arm: str) -> Generator[Batch]:
        remedy = self.trial.remedies.get(arm)
        if remedy is None:
            yield from place.loader(AS_IS, Change(), None)
            return
        make = None
        if remedy.change.fast and not remedy.change.cache and self.make_fast is not None:
            fast = self.make_fast
            make = lambda loader: fast(place.stage, loader)  # noqa: E731
        try:
            yield from place.loader(arm, remedy.change, make)
        except Exception as error:  # whatever the dataset raises in other hands
            self._failed(arm, error)

    def _failed(self, arm: str, error: BaseException) -> None:
        text = str(error).strip().partition("\n")[0].partition(". ")[0]
        self.trial.failed[arm] = f"{type(error).__name__}: {text:.300}"
        if isinstance(error, FastDataError):  # it is not for this dataset
            self.trial.refused.append(Refused(name=arm, why=f"{text:.300}"))
        self._bad = True

    def ended_by(self, error: BaseException) -> None:
        """Note that the training has ended by an error."""
        if isinstance(error, TrialEndedError | KeyboardInterrupt):
            return
        text = str(error).strip().partition("\n")[0]
        self.trial.stopped = f"the script ended by {type(error).__name__}: {text:.300}"
        self._write()

    # -- the first parts: how long a step is, what its steps change --------------------------------

    def _probed(self, place: Place, batch: Batch) -> Generator[Batch]:
        if len(place.kept) < _KEPT:
            place.kept.append(made.copied(batch))
        if place.stage != "train":
            yield batch
            return
        tensors = made.tensors_in(batch)
        before = [tensor._version for tensor in tensors]
        self._before[id(place)] = self._look(place)
        yield batch
        self._in_place |= before != [tensor._version for tensor in tensors]
        self._look_behind(place)

    def _look_behind(self, place: Place) -> None:
        """Look whether the step that has ended changed what is read."""
        if id(place) not in self._before:
            return
        before, after = self._before.pop(id(place)), self._look(place)
        if before is None or after is None:
            self._changes.add("unknown")
        elif before != after:
            self._changes.add("steps")
        self._looks[id(place)] = after

    def _look_between(self, place: Place) -> None:
        before = self._looks.get(id(place))
        now = None if before is None else self._look(place)
        if now is not None and before != now:
            self._changes.add("epochs")

    def _look(self, place: Place) -> Fingerprint | None:
        began_s = clock.monotonic()
        seen = fingerprint(*made.what_is_read(place.own), within_s=_LOOK_S, roughly=True)
        place.aside_s += clock.monotonic() - began_s
        return seen

    # -- the parts of an epoch ---------------------------------------------------------------------

    def _next_part(self) -> None:
        if not self._began_s:
            return
        if self._probes < 2:
            self._probes += 1
            if self._probes == 1:
                self._cut(_PROBE_S)
                return
            self._settle()
        turn = self._turn
        confirms = turn is not None and turn.phase == "confirm"
        over = self.left_s() <= (-_OVER * self.budget_s if confirms else 0.0)
        goes_on = not self._bad and not over
        if turn is not None and goes_on and len(self._parts) < self._parts_of(turn):
            return
        self._block_ended()
        if over:
            self._end("the time was over; --budget gives more")
        self._turn = next(self._turns, None)
        if self._turn is None:
            self._end("")
        stays = candidate(self.trial) if self._turn.phase == "confirm" else None
        for arm in self.trial.remedies:
            if arm in self.trial.failed or (stays is not None and arm != stays):
                for place in (*self._places["train"], *self._places["val"]):
                    place.close(arm)

    def _parts_of(self, turn: Turn) -> int:
        if not turn.warm:
            return self._repeats
        remedy = self.trial.remedies.get(turn.arm)
        if remedy is None or not remedy.change.fast:
            return 1
        settled = -(-_TUNED_STEPS // self._places["train"][0].steps)
        return max(1, min(settled, _WARM_BLOCKS * self._repeats))

    def _end(self, why: str) -> NoReturn:
        self.trial.stopped = why
        self.trial.ended = not why
        self._write()
        for place in (*self._places["train"], *self._places["val"]):
            for arm in list(place.arms):
                place.close(arm)
        raise TrialEndedError(0)

    def _cut(self, seconds: float) -> None:
        for place in self._places["train"]:
            step_s = place.step_s(AS_IS) or 1e-3
            place.cut(max(_FIRST_STEPS, int(seconds / step_s)))
        for place in self._places["val"]:
            place.cut(_FIRST_STEPS)

    def _settle(self) -> None:
        """Decide how much of an epoch a block is."""
        train, val = self._places["train"], self._places["val"]
        first = train[0]
        step_s = max(first.step_s(AS_IS), 1e-5)
        val_s = sum((p.batches or p.steps) * p.step_s(AS_IS) for p in val)
        train_s = (first.batches or first.steps) * step_s
        enough_s = 1.5 * self.block_s
        whole = first.batches is not None and train_s + val_s <= enough_s
        if whole:
            steps = max(place.batches or 1 for place in train)
            self._repeats = max(1, round(self.block_s / max(train_s + val_s, 1e-3)))
        else:
            steps = int(self.block_s / step_s)
            if _EVEN_STEPS * step_s <= 2 * enough_s:
                steps = max(steps, _EVEN_STEPS)
        for place in train:
            place.cut(max(_FIRST_STEPS, steps))
        for place in val:
            share = 1.0 if whole else min(1.0, 0.4 * self.block_s / max(val_s, 1e-3))
            place.cut(max(_FIRST_STEPS, int(share * (place.batches or place.steps))))
        self.trial.facts["batches"] = first.batches

    def _part_ended(self, now_s: float) -> None:
        train, val = self._places["train"], self._places["val"]
        first = train[0]
        if self._turn is None or len(first.asked_s) < 2:
            return
        steps = len(first.asked_s) - 1
        cycle_s = now_s - self._began_s
        arm = self._turn.arm
        step_s = first.step_s(arm)
        val_read = [place for place in val if len(place.asked_s) > 1]
        val_steps = sum(len(place.asked_s) - 1 for place in val_read)
        val_spent = sum((len(place.asked_s) - 1) * place.step_s(arm) for place in val_read)
        val_batches = sum(place.batches or len(place.asked_s) - 1 for place in val_read)
        validation_s = max(0.0, self._validated_s - self._stepped_s) if val_read else 0.0
        whole_s = epoch_s(
            cycle_s=cycle_s,
            validation_s=validation_s,
            steps=steps,
            batches=max(place.batches or steps for place in train),
            step_s=step_s,
            validation_batches=val_batches,
            validation_steps=val_steps,
            validation_step_s=val_spent / val_steps if val_steps else 0.0,
            validations=self.validations,
        )
        use, before = read_cpu_use(_tree()), self._use
        others = 0.0
        if use is not None and before is not None:
            own_s = use.own_s - before.own_s
            others = max(0.0, use.all_s - before.all_s - own_s) / max(cycle_s, 1e-3)
            if arm == AS_IS:
                self._used.append(own_s / max(cycle_s, 1e-3))
        self._parts.append((max(whole_s, 1e-9), step_s, cycle_s, others))

    def _block_ended(self) -> None:
        turn, parts, bad = self._turn, self._parts, self._bad
        self._parts, self._bad = [], False
        if turn is None or turn.warm or bad or not parts:
            return
        count = len(parts)
        epoch, step, wall, others = (sum(each) for each in zip(*parts, strict=True))
        self.trial.blocks.append(
            Block(
                arm=turn.arm,
                phase=turn.phase,
                epoch_s=epoch / count,
                step_ms=1e3 * step / count,
                wall_s=wall,
                others_cpus=others / count,
            )
        )

    def _name_remedies(self) -> None:
        facts = self._facts()
        remedies, refused = named(facts)
        self.trial.remedies.update({remedy.name: remedy for remedy in remedies})
        self.trial.refused.extend(refused)
        self.trial.facts |= {
            "changes": facts.changes,
            "epochs": None if math.isinf(facts.epochs) else facts.epochs,
            "validates": bool(self._places["val"]),
            "may_persist": facts.epochs > 1 and facts.changes in ("nothing", "unknown"),
        }

    def _facts(self) -> LoaderFacts:
        train = self._places["train"]
        own = train[0].own
        order: tuple[Changes, ...] = ("steps", "epochs", "unknown")
        reader = made.reader_of(own) if len(train) == 1 else "other"
        is_loader = reader != "other"
        blocks = self.trial.blocks
        as_is = [block.epoch_s for block in blocks if block.arm == AS_IS]
        steps = [
            statistics.median(block.step_ms for block in blocks if block.arm == arm)
            for arm in (AS_IS, FREE)
        ]
        sizes = [sum(t.nbytes for t in made.tensors_in(batch)) for batch in train[0].kept]
        batch_bytes = sum(sizes) / max(1, len(sizes))
        return LoaderFacts(
            reader=reader,
            num_workers=own.num_workers if is_loader else 0,
            cpus=read_cpu_limit().usable_cpus,
            used_cpus=sum(self._used) / max(1, len(self._used)),
            step_share=1 - steps[1] / max(steps[0], 1e-9),
            start_share=(sum(self._first_s) / max(1, len(self._first_s)))
            / max(sum(as_is) / max(1, len(as_is)), 1e-9),
            persistent=bool(own.persistent_workers) if is_loader else False,
            stream=made.is_stream(own),
            changes=next((each for each in order if each in self._changes), "nothing"),
            epochs=self.epochs,
            cached=is_loader and isinstance(own.dataset, CachedDataset),
            keeps_bytes=batch_bytes * (train[0].batches or 0),
            free_bytes=_CACHE_SHARE * read_host_memory().available_bytes,
            objects=_large_objects(own.dataset) if is_loader else "",
        )

    def _write(self) -> None:
        turn = self._turn
        self.trial.facts["now"] = "" if turn is None else f"{turn.phase}: {turn.arm}"
        write_atomically(self.file, json.dumps(asdict(self.trial)))


def trial_of_loop(settings: ProveSettings, loader: Any, device: torch.device) -> Iterator[Batch]:
    """Yield the batches of a trial, one part of an epoch after the other, until it ends.

    Raises:
        TrialEndedError: It has ended.
    """
    trial = Trial(script=settings.script)
    session = Session(trial, Path(settings.file), budget_s=settings.budget_s, device=device)
    trial.notes.append(
        "The loop was timed from batch to batch, within one epoch of its own; validation and what "
        "it does between epochs are in no figure."
    )
    given = session.loader("train", loader)
    try:
        while True:
            session.advance()
            yield from given
    except Exception as error:
        session.ended_by(error)
        raise


def _large_objects(dataset: object) -> str:
    """Return in words the largest list or dict of a dataset that workers would copy.

    Only one of the dataset itself: of what it holds, a shallow copy has the same, and the training
    as it is would read what is shared.
    """
    held = next(iter(held_objects(dataset)), None)
    own = held is not None and held.name.count(".") == 1
    large = held is not None and held.counted_bytes >= _LARGE_BYTES
    return f"{held.name} ({held.kind})" if held is not None and own and large else ""


def _tree() -> list[int]:
    """Return this process and its children, which may be workers."""
    import psutil

    with suppress(psutil.Error):
        children = psutil.Process().children(recursive=True)
        return [os.getpid(), *(child.pid for child in children)]
    return [os.getpid()]

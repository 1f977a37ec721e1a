"""A training whose epochs become parts of a trial: which loader reads each, and its time.

The loaders of the script are made anew with one thing changed, in the same order of samples.
"""

from __future__ import annotations

import copy
import json
import math
import os
import statistics
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    default_collate,
    default_convert,
)

from lightning_fastdata.caches.cached import CachedDataset
from lightning_fastdata.device.backend import synchronize
from lightning_fastdata.errors import FastDataError
from lightning_fastdata.fingerprint import Fingerprint, fingerprint
from lightning_fastdata.host import clock
from lightning_fastdata.host.cpu import CpuUse, read_cpu_limit, read_cpu_use, worker_processes
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.host.system_calls import write_atomically
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.loading.source import setup_of
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.order.samplers import is_drawn_at_start
from lightning_fastdata.prove import ProveSettings
from lightning_fastdata.prove.remedies import Change, Changes, LoaderFacts, Reader, named
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
from lightning_fastdata.torch_internals import MAKES_BATCHES
from lightning_fastdata.tree import HOLD_NOTHING, children, leaves, rebuilt, replace_leaves
from lightning_fastdata.types import AroundLoader, Batch, Stage

_FIRST_STEPS: Final = 8
_PROBE_S: Final = 2.0
_KEPT: Final = 8
"""Number of batches that are given again and again, as data that costs nothing."""
_LOOK_S: Final = 0.5
"""CPU seconds that one comparison of the data may take."""
_BLOCKS: Final = 60
"""Number of blocks in a trial, about; the budget is divided by it."""
_BLOCK_S: Final = (0.7, 10.0)
_EVEN_STEPS: Final = 32
"""Least steps in a part of an epoch, unless they take much longer than a block should."""
_TUNED_STEPS: Final = 100
"""Number of steps after which this package's loader has settled on a number of workers."""
_WARM_BLOCKS: Final = 3
"""Most blocks of warm-up in which this package's loader may settle."""
_OVER: Final = 0.25
"""Share of the budget by which confirming a remedy that was found in time may exceed it."""
_CACHE_SHARE: Final = 0.25
"""Share of the available memory that a cache may take."""


class TrialEndedError(SystemExit):
    """The trial has come to its end: the script goes no further."""


class TrialLoader(AroundLoader[Batch]):
    """Takes the place of a loader of the script; each iteration reads the part whose turn it is."""

    def __init__(self, session: Session, place: Place) -> None:
        self.loader, self._session, self._place = place.own, session, place

    def __len__(self) -> int:
        return self._place.steps

    def __iter__(self) -> Iterator[Batch]:
        batches = self._session.read(self._place)
        self._session.open.append(batches)
        return batches


class Place:
    """A loader of the script, and the loaders that take its place."""

    def __init__(self, stage: Stage, own: Any, limit: int | None) -> None:
        self.stage, self.own = stage, own
        length = dataset_length(own)
        known = [number for number in (length, limit) if number is not None]
        self.batches: int | None = min(known) if known else None
        """Batches of an epoch; None: not known."""
        self.steps = min(_FIRST_STEPS, self.batches or _FIRST_STEPS)
        """Steps of a part of an epoch, which is read in one go."""
        self.kept: list[Batch] = []
        self.arms: dict[str, Any] = {}
        self.pieces: Pieces | None = None
        self.asked_s: list[float] = []
        """Times at which batches of this part were asked for, and at which its last step ended."""
        self.given = 0
        """Number of batches of this part that were handed out."""
        self.aside_s = 0.0
        """Seconds of this part spent on comparing the data, which belong to no step."""

    @property
    def is_whole(self) -> bool:
        """Whether a part of an epoch is the whole epoch."""
        return self.batches is not None and self.steps >= self.batches

    def loader(self, arm: str, change: Change, make: Callable[[Any], Any] | None) -> Any:
        """Return the loader of an arm; it stays the same one until :meth:`cut` or :meth:`close`."""
        if arm not in self.arms:
            self.arms[arm] = self._made(change, make)
        return self.arms[arm]

    def _made(self, change: Change, make: Callable[[Any], Any] | None) -> Any:
        cuts = can_be_cut(self.own) and not self.is_whole
        if reader_of(self.own) == "other" or (change == Change() and not cuts):
            return self.own
        cut = None
        if cuts:
            self.pieces = self.pieces or Pieces(self.own.batch_sampler)
            cut = Cut(self.pieces, self.steps, again=change.cache is not None)
        if make is not None:
            return make(remade(self.own, Change(), cut))
        return remade(self.own, change, cut)

    def cut(self, steps: int) -> None:
        """Have a part of an epoch be ``steps`` steps from now on."""
        self.steps = max(1, steps if self.batches is None else min(steps, self.batches))
        for arm in list(self.arms):
            self.close(arm)

    def ended(self, at_s: float) -> None:
        """Note when the last step had ended, if no batch was asked for after it."""
        if self.given and self.given == len(self.asked_s):
            self.asked_s.append(max(at_s - self.aside_s, self.asked_s[-1]))

    def step_s(self, arm: str) -> float:
        """Return the seconds of a step in the part that was read, with the loader of an arm."""
        return middle_step_s(self.asked_s, ahead=batches_ahead(self.arms.get(arm)))

    def close(self, arm: str) -> None:
        """Drop the loader of an arm, and stop its workers."""
        loader = self.arms.pop(arm, None)
        if loader is None or loader is self.own:
            return
        with suppress(Exception):
            if isinstance(loader, FastDataLoader):
                loader.close()
            else:
                loader._iterator = None


class Session:
    """The trial of one training, which is written to ``file`` after each part of an epoch.

    ``make_fast`` makes the loader that ``from_loaders`` would make of a loader of a stage; None: a
    plain FastDataLoader is used.

    Raises:
        TrialEndedError: A trial has come to its end already; the script went on all the same.
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
        if _is_over(file):
            raise TrialEndedError(0)
        self.trial, self.file = trial, file
        self.device, self.make_fast = device, make_fast
        self.budget_s, self._until_s = budget_s, clock.monotonic() + budget_s
        self.validations = 0.0
        """Number of validations in an epoch."""
        self.epochs = math.inf
        """Number of epochs of the training; infinity: no limit is known."""
        self.block_s = min(max(budget_s / _BLOCKS, _BLOCK_S[0]), _BLOCK_S[1])
        self._places: dict[Stage, list[Place]] = {"train": [], "val": []}
        self._course = self._settled_parts()
        self._turn: Turn | None = None
        self._repeats = 1
        self._parts: list[tuple[float, float, float, float]] = []
        """Seconds of an epoch, a step and the part, and CPUs of others, per part of the block."""
        self._bad = False
        self._looks: dict[int, Fingerprint | None] = {}
        self._before: dict[int, Fingerprint | None] = {}
        """Fingerprint of each place's data before the step that runs, by the id of the place."""
        self._changes: set[Changes] = set()
        self.open: list[Generator[Batch]] = []
        """Iterators to close when the part of an epoch ends, which ends their workers."""
        self._in_place = False
        self._began_s = 0.0
        self._stepped_s = self._validated_s = 0.0
        self._first_s: list[float] = []
        """Seconds until the first batch was there, in each part of the training as it is."""
        self._use: CpuUse | None = None
        self._used: list[float] = []

    # -- called by the loops -----------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether the number of steps of a part of an epoch is final."""
        return self._turn is not None

    def left_s(self) -> float:
        """Return how many seconds are left of the budget."""
        return self._until_s - clock.monotonic()

    def loader(self, stage: Stage, own: Any, limit: int | None = None) -> TrialLoader:
        """Return the loader that takes the place of a loader of the script."""
        place = Place(stage, own, limit)
        self._places[stage].append(place)
        return TrialLoader(self, place)

    def ends_after(self, steps: int) -> None:
        """Note that the training ends after so many batches, if not before."""
        batches = self._places["train"][0].batches
        if batches:
            self.epochs = min(self.epochs, steps / batches)

    def stepped(self) -> None:
        """Note that a training step has ended."""
        self._stepped_s = self._validated_s = clock.monotonic()
        for place in self._places["train"] if self._turn is None else ():
            self._look_behind(place)

    def validated(self) -> None:
        """Note that a validation has ended."""
        self._validated_s = clock.monotonic()

    def advance(self) -> None:
        """End a part of an epoch, if one runs, and begin the next.

        Raises:
            TrialEndedError: There is no next part.
        """
        for batches in self.open:
            batches.close()
        self.open = []
        synchronize(self.device)
        now_s = clock.monotonic()
        for place in self._places["train"]:
            place.ended(self._stepped_s)
        for place in self._places["val"]:
            place.ended(self._validated_s)
        self._part_ended(now_s)
        self._write()
        next(self._course)
        for places in self._places.values():
            for place in places:
                place.asked_s, place.given, place.aside_s = [], 0, 0.0
        self._use = read_cpu_use([os.getpid(), *worker_processes()])
        self._began_s = self._stepped_s = self._validated_s = clock.monotonic()

    def read(self, place: Place) -> Generator[Batch]:
        """Yield the batches of the part of an epoch whose turn it is."""
        arm = AS_IS if self._turn is None else self._turn.arm
        place.asked_s.append(clock.monotonic())
        probing, trains = self._turn is None, place.stage == "train"
        if probing and trains:
            self._look_between(place)
        # Later batches are not read; the iterator ends with this generator.
        for number, batch in enumerate(islice(self._batches(place, arm), place.steps)):
            place.given += 1
            if probing:
                yield from self._probed(place, batch)
            else:
                if number == 0 and arm == AS_IS and trains:
                    self._first_s.append(clock.monotonic() - place.asked_s[0])
                yield batch
            place.asked_s.append(clock.monotonic() - place.aside_s)

    def _batches(self, place: Place, arm: str) -> Generator[Batch]:
        if arm == FREE and place.kept:
            for batch in cycle(place.kept):
                yield apart(copied(batch) if self._in_place else batch)
        remedy = self.trial.remedies.get(arm)
        if remedy is None:
            yield from place.loader(AS_IS, Change(), None)
            return
        make = None
        if remedy.change.fast and not remedy.change.cache and self.make_fast is not None:
            make = partial(self.make_fast, place.stage)
        try:
            yield from place.loader(arm, remedy.change, make)
        except Exception as error:  # whatever the dataset raises in another loader
            self._failed(arm, error)

    def _failed(self, arm: str, error: BaseException) -> None:
        text = str(error).strip().partition("\n")[0].partition(". ")[0]
        self.trial.failed[arm] = f"{type(error).__name__}: {text:.300}"
        if isinstance(error, FastDataError):  # the remedy does not suit this dataset
            self.trial.refused[arm] = f"{text:.300}"
        self._bad = True

    def ended_by(self, error: BaseException) -> None:
        """Note that the training has ended by an error."""
        if isinstance(error, TrialEndedError):
            return
        text = str(error).strip().partition("\n")[0]
        said = f"{type(error).__name__}: {text:.300}" if text else type(error).__name__
        self.trial.stopped = f"the script ended by {said}"
        self._write()

    # -- the first parts: how long a step takes, and what steps change -----------------------------

    def _probed(self, place: Place, batch: Batch) -> Generator[Batch]:
        if len(place.kept) < _KEPT:
            place.kept.append(apart(copied(batch)))
        if place.stage != "train":
            yield batch
            return
        tensors = tensors_in(batch)
        before = [tensor._version for tensor in tensors]
        self._before[id(place)] = self._look(place)
        yield batch
        self._in_place |= before != [tensor._version for tensor in tensors]
        self._look_behind(place)

    def _look_behind(self, place: Place) -> None:
        """Note whether the step that has ended changed the data."""
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
        seen = fingerprint(*what_is_read(place.own), within_s=_LOOK_S)
        place.aside_s += clock.monotonic() - began_s
        return seen

    # -- the parts of an epoch ---------------------------------------------------------------------

    def _settled_parts(self) -> Iterator[None]:
        """Yield before each part of an epoch, once it is settled what the part reads."""
        yield
        self._cut(_PROBE_S)
        yield
        self._settle()
        for turn in turns(self.trial, self.left_s, self._name_remedies):
            self._turn, self._parts, self._bad = turn, [], False
            confirms = turn.phase == "confirm"
            stays = candidate(self.trial) if confirms else None
            for arm in self.trial.remedies:
                if arm in self.trial.failed or (stays is not None and arm != stays):
                    self._close(arm)
            least_s = -_OVER * self.budget_s if confirms else 0.0
            while not (over := self.left_s() <= least_s) and not self._bad:
                if len(self._parts) >= self._parts_of(turn):
                    break
                yield
            self._block_ended(turn)
            if over:
                self._end("the time was over; --budget gives more")
        self._end("")

    def _close(self, arm: str) -> None:
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
        self.trial.facts["over"] = True
        self._write()
        for arm in (AS_IS, *self.trial.remedies):
            self._close(arm)
        raise TrialEndedError(0)

    def _cut(self, seconds: float) -> None:
        for place in self._places["train"]:
            step_s = place.step_s(AS_IS) or 1e-3
            place.cut(max(_FIRST_STEPS, int(seconds / step_s)))
        for place in self._places["val"]:
            place.cut(_FIRST_STEPS)

    def _settle(self) -> None:
        """Decide how many steps a part of an epoch has, and how many parts a block has."""
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
        if self._turn is None or len(train[0].asked_s) < 2:
            return
        first = train[0]
        steps = len(first.asked_s) - 1
        cycle_s = now_s - self._began_s
        arm = self._turn.arm
        step_s = first.step_s(arm)
        # Each loader of validation, and the number of batches that were read of it.
        read = [(place, len(place.asked_s) - 1) for place in val if len(place.asked_s) > 1]
        whole_s = epoch_s(
            cycle_s=cycle_s,
            rest_s=(max(place.batches or steps for place in train) - steps) * step_s,
            validation_s=max(0.0, self._validated_s - self._stepped_s) if read else 0.0,
            validation_rest_s=sum(((p.batches or n) - n) * p.step_s(arm) for p, n in read),
            validations=self.validations,
        )
        use, before = read_cpu_use([os.getpid(), *worker_processes()]), self._use
        others = 0.0
        if use is not None and before is not None:
            own_s = use.own_s - before.own_s
            others = max(0.0, use.all_s - before.all_s - own_s) / max(cycle_s, 1e-3)
            if arm == AS_IS:
                self._used.append(own_s / max(cycle_s, 1e-3))
        self._parts.append((max(whole_s, 1e-9), step_s, cycle_s, others))

    def _block_ended(self, turn: Turn) -> None:
        parts = self._parts
        if turn.warm or self._bad or not parts:
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
        self.trial.refused.update(refused)
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
        reader = reader_of(own) if len(train) == 1 else "other"
        is_loader = reader != "other"
        blocks = self.trial.blocks
        as_is = [block.epoch_s for block in blocks if block.arm == AS_IS]
        steps = [
            statistics.median(block.step_ms for block in blocks if block.arm == arm)
            for arm in (AS_IS, FREE)
        ]
        sizes = [sum(t.nbytes for t in tensors_in(batch)) for batch in train[0].kept]
        return LoaderFacts(
            reader=reader,
            num_workers=own.num_workers if is_loader else 0,
            cpus=read_cpu_limit().usable_cpus,
            used_cpus=_mean(self._used),
            step_share=1 - steps[1] / max(steps[0], 1e-9),
            start_share=_mean(self._first_s) / max(_mean(as_is), 1e-9),
            persistent=bool(own.persistent_workers) if is_loader else False,
            stream=is_stream(own),
            changes=next((each for each in order if each in self._changes), "nothing"),
            epochs=self.epochs,
            cached=is_loader and isinstance(own.dataset, CachedDataset),
            keeps_bytes=_mean(sizes) * (train[0].batches or 0),
            free_bytes=_CACHE_SHARE * read_host_memory().available_bytes,
        )

    def _write(self) -> None:
        turn = self._turn
        self.trial.facts["now"] = "" if turn is None else f"{turn.phase}: {turn.arm}"
        write_atomically(self.file, json.dumps(asdict(self.trial)))


def _is_over(file: Path) -> bool:
    with suppress(OSError, ValueError):
        return bool(json.loads(file.read_text("utf-8"))["facts"].get("over"))
    return False


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def trial_of_loop(settings: ProveSettings, loader: Any, device: torch.device) -> Iterator[Batch]:
    """Yield the batches of a trial, one part of an epoch after the other, until it ends.

    Raises:
        TrialEndedError: The trial has ended.
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


# -- loaders with one thing changed, and parts of an epoch of them ---------------------------------


def reader_of(loader: object) -> Reader:
    """Return the kind of a loader, which decides how it can be changed."""
    if isinstance(loader, FastDataLoader):
        return "ours"
    if not isinstance(loader, DataLoader):
        return "other"
    return "torch" if own_method(loader) is None else "other"


def own_method(loader: DataLoader[Any]) -> str | None:
    """Return the method by which a subclass of DataLoader makes its own batches; None: none."""
    kind = type(loader)
    own = (n for n in MAKES_BATCHES if getattr(kind, n) is not getattr(DataLoader, n))
    return next(own, None)


def is_stream(loader: object) -> bool:
    """Return whether a loader reads an iterable dataset, which has no index."""
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


def batches_ahead(loader: object) -> int:
    """Return how many batches a loader makes before they are asked for; 0: it is not known."""
    if not isinstance(loader, DataLoader):
        return 0
    if isinstance(loader, FastDataLoader):
        setup = setup_of(loader, cpus=1.0, step_cpus=1.0)
        if setup is not None:
            return setup.look_ahead
    return loader.num_workers * (loader.prefetch_factor or 2)


def can_be_cut(loader: object) -> bool:
    """Return whether a part of an epoch can be read as an epoch of its own."""
    made = isinstance(loader, DataLoader) and loader.batch_sampler is not None
    return reader_of(loader) == "torch" and made and not is_stream(loader)


def what_is_read(loader: object) -> tuple[object, ...]:
    """Return the objects that decide the samples of a loader, except a sampler of torch's own."""
    if not isinstance(loader, DataLoader):
        return (loader,)
    source = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    order = () if is_stream(loader) or is_drawn_at_start(source) else (source,)
    return (loader.dataset, loader.collate_fn, *order)


class Pieces:
    """The batches of a sampler; each part of an epoch takes the next few of them."""

    def __init__(self, batch_sampler: Iterable[Any]) -> None:
        self._sampler = batch_sampler
        self._batches: Iterator[Any] = iter(())

    def take(self, count: int) -> list[Any]:
        """Return the next ``count`` batches of indices; after its last one the sampler restarts."""
        taken = list(islice(self._batches, count))
        while len(taken) < count:
            self._batches = iter(self._sampler)
            more = list(islice(self._batches, count - len(taken)))
            if not more:
                break
            taken += more
        return taken


class Cut(Sampler[Any]):
    """A batch sampler that gives one part after the other; ``again``: the same part each time."""

    def __init__(self, pieces: Pieces, count: int, *, again: bool = False) -> None:
        self._pieces, self._count, self._again = pieces, count, again
        self._kept: list[Any] = []

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        # Taken when the first batch is asked for: torch calls iter() twice.
        taken = self._kept or self._pieces.take(self._count)
        self._kept = taken if self._again else []
        yield from taken


def remade(loader: DataLoader[Any], change: Change, cut: Cut | None = None) -> DataLoader[Any]:
    """Return a copy of a loader with a change; with ``cut``, it reads parts of an epoch."""
    workers = loader.num_workers if change.num_workers is None else change.num_workers
    given: dict[str, Any] = {
        "worker_init_fn": loader.worker_init_fn,
        "generator": loader.generator,
        **({"timeout": loader.timeout} if loader.timeout else {}),
        "in_order": loader.in_order,
        "pin_memory": loader.pin_memory,
        **_order(loader, cut, keyed=change.fast),
    }
    if loader.collate_fn not in (default_collate, default_convert):
        given["collate_fn"] = loader.collate_fn
    dataset: Any = loader.dataset
    if change.cache:
        dataset = CachedDataset(dataset, change.cache)
    if change.fast:
        return FastDataLoader(dataset, num_workers="auto", **given)
    given |= {"num_workers": workers}
    if workers:
        given["persistent_workers"] = loader.persistent_workers or change.persistent_workers
        given["multiprocessing_context"] = loader.multiprocessing_context
        given["prefetch_factor"] = loader.prefetch_factor
    return DataLoader(dataset, **given)


def _order(loader: DataLoader[Any], cut: Cut | None, *, keyed: bool) -> dict[str, Any]:
    if cut is not None:
        return {"batch_sampler": cut}
    batches = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        return {"batch_sampler": batches}
    own: dict[str, Any] = {"batch_size": loader.batch_size}
    if isinstance(loader.dataset, IterableDataset):
        return own | {"drop_last": loader.drop_last}
    own |= {"drop_last": loader.drop_last} if loader.batch_size is not None else {}
    if keyed and is_shuffled(loader):
        return own | {"shuffle": True}
    return own | {"sampler": loader.sampler}


def is_shuffled(loader: DataLoader[Any]) -> bool:
    """Return whether a loader was made with ``shuffle=True``, as far as it can be told."""
    sampler: object = loader.sampler
    if type(sampler) is not RandomSampler or sampler.replacement:
        return False
    source: object = sampler.data_source
    return source is loader.dataset and sampler.num_samples == len(sampler.data_source)


def copied(batch: Batch) -> Batch:
    """Return a batch with copies of its tensors."""
    return replace_leaves(
        batch, lambda _, leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf
    )


def apart(batch: Batch, depth: int = 8) -> Batch:
    """Return a batch that a step may take apart: in containers and objects of its own.

    Its tensors are the same. Containers are entered down to a ``depth``.
    """
    if isinstance(batch, HOLD_NOTHING):
        return batch
    try:
        if depth and (isinstance(batch, Mapping | list | tuple) or is_dataclass(batch)):
            return rebuilt(batch, [apart(part, depth - 1) for _, part in children(batch) or ()])
        return copy.copy(batch)  # a step may set attributes of an object, such as a graph
    except Exception:
        return batch


def tensors_in(batch: Batch) -> list[torch.Tensor]:
    """Return the tensors of a batch."""
    return [leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)]

"""What an executor fetches, and how one batch is fetched in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from lightning_fastdata.batches.bad_samples import (
    NO_SAMPLES,
    SKIPPED,
    Fault,
    FaultLog,
    Gone,
    SampleGuard,
    described,
)
from lightning_fastdata.batches.keyed import (
    KeyedDataset,
    ReadsTogether,
    asked_together,
    fetches_in_batches,
    own_dataset,
    read_item,
)
from lightning_fastdata.executors.columns import Rows, rows_of
from lightning_fastdata.fingerprint import Watched
from lightning_fastdata.host import clock
from lightning_fastdata.host.memory import read_host_memory
from lightning_fastdata.order.epoch_order import Rank
from lightning_fastdata.randomness.global_generators import (
    GENERATORS,
    DrawWatch,
    kept_random_state,
)
from lightning_fastdata.randomness.seeds import OwnGenerators, lasting, seed_global_generators
from lightning_fastdata.sources.source import read_ahead, reads_ahead
from lightning_fastdata.torch_internals import default_collate_fn_map
from lightning_fastdata.tree import find_composes
from lightning_fastdata.types import Batch, Repeated, repeats, unmarked

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from lightning_fastdata.augment import WorkerTransform
    from lightning_fastdata.fingerprint import Fingerprint
    from lightning_fastdata.stamps.batch_stamps import TaskWatch

_Asked = TypeVar("_Asked")
_Fetched = TypeVar("_Fetched")
AT_START_BYTES: Final = 2**25
"""Most bytes of an epoch that is read at once when it begins."""
COPIED_BYTES: Final = 2**30
"""Most bytes of columns that are copied when an epoch begins."""
_PART_OF_FREE: Final = 8
_OTHERS = 8
"""Most samples that are tried in place of a skipped one, to learn what samples look like."""
_COLLATION = -1
"""First part of the key of a collate function's draws, in place of a sample's index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPlan:
    """Everything an executor needs to know before the first epoch."""

    dataset: Dataset[Any]
    """A map-style dataset, or a stream."""
    collate_fn: Callable[[Any], Batch]
    """Function from samples to a batch; not ``batched``: from one sample to what is delivered."""
    default_collation: bool = False
    """Whether ``collate_fn`` is torch's default, so that samples may be written in place."""
    batched: bool = True
    """Whether each request is a list of indices; False: a single index."""
    drop_last: bool = False
    """Whether the last batch of a stream is left out if it is not full; for streams only."""
    seed: int | None = None
    """Seed of the per-sample randomness of ``random``, ``numpy.random`` and torch; None: these
    generators are left alone."""
    own: OwnGenerators | None = None
    """Generators that the dataset itself holds, also seeded for each sample; None: left alone."""
    base_seed: int = 0
    """Seed from which, with its number, each side process seeds its generators when it starts."""
    worker_init_fn: Callable[[int], None] | None = None
    """Function called in each side process with its number; None: there is none."""
    timeout_s: float | None = None
    """Seconds without progress after which a side process is stuck; 0: never; None: 60, or 20 times
    the 99th percentile of the times of tasks if that is more."""
    in_order: bool = True
    """Whether batches come in the order of the plan; False: as they are ready."""
    compared: tuple[object, ...] = ()
    """Objects that are read, and compared to see changes; empty: nothing is compared."""
    transform: WorkerTransform | None = None
    """Part of a transform that runs on each sample: its pipelines are compared, too."""
    at_start: bool = False
    """Whether the training process reads in place of side processes: from the dataset as it is when
    an epoch begins, as far as that takes little memory."""
    gathered: bool = False
    """Whether batches are rows of the dataset's columns; False: they are made sample by sample."""
    context: Any = None
    """How side processes start: a ``multiprocessing`` context, its name, or None for Python's."""
    look_ahead: int = 8
    """Number of batches under way at once."""
    prefetch: int = 2
    """Least number of batches under way for each side process as an epoch ends, where a training
    computes on the CPUs of the side processes; no more than ``look_ahead`` in all."""
    cpus: float = math.inf
    """CPUs that the training process and the side processes share; infinite: they share none, or
    which batches are under way must not depend on it."""
    ahead_bytes: int = 2**28
    """Most bytes of batches under way if these are more than one for each side process."""
    memory_limit_bytes: int = 2**31
    """Most bytes that the slots may take together."""
    guard: SampleGuard = field(default_factory=SampleGuard)
    """Rule for samples that cannot be read."""
    faults: FaultLog = field(default_factory=FaultLog)
    """Log in which the training process counts samples that cannot be read."""
    rank: Rank = field(default_factory=lambda: Rank(0, 1))
    """Rank of the training process that the batches are for."""
    watched: Watched = field(default_factory=Watched)
    """Newest state of ``compared``, shared by all plans that are made of this one."""

    def state(self, within_s: float) -> Fingerprint | None:
        """Return a fingerprint of what is read now; None: it cannot be, or is not, compared."""
        if not self.compared:
            return None
        pipelines = () if self.transform is None else self.transform.pipelines()
        read = *self.compared, *pipelines, default_collate_fn_map  # which programs may add to
        return self.watched.now(read, within_s, self._keyed)

    def _keyed(self) -> dict[int, object]:
        """Return, by ``id``, what generators that are seeded for each sample are compared by.

        Their own state is that of the last sample; compared is what else their draws depend on.
        """
        keyed: dict[int, object] = {}
        if isinstance(self.dataset, KeyedDataset):
            keyed |= lasting(find_composes(own_dataset(self.dataset)))
        if self.transform is not None:
            keyed |= lasting(find_composes(self.transform.pipelines()))
        if self.own is not None and self.seed is not None:
            keyed |= self.own.origins()
        return keyed

    def with_other_draws(self) -> FetchPlan:
        """Return the plan for a process that replaces another, and must not repeat its draws."""
        return replace(self, base_seed=(self.base_seed + 2**32) % 2**63)


def copy_limit_bytes() -> int:
    """Return the most bytes of columns that may be copied when an epoch begins."""
    return min(COPIED_BYTES, read_host_memory().available_bytes // _PART_OF_FREE)


def _in_key(index: Any) -> Any:
    return index + repeats(index) if type(index) is Repeated else index


class Fetcher:
    """Reads samples and batches of a plan in the calling thread.

    Each sample's draws from the global generators have a key of their own, if the plan has a seed.
    A generator is seeded only once reading was seen to draw from it, and then for each sample. The
    first sample, and the first collation, are read with all of them seeded: a dataset may give each
    sample to whoever asks first. A later fetch that is the first to draw from one is done again.
    A ``guest`` leaves the generators as the calling program had them.
    """

    def __init__(self, plan: FetchPlan, *, guest: bool = False) -> None:
        self.plan = plan
        self.dataset = plan.dataset
        self.guest = guest
        self.drawn: tuple[str, ...] = ()
        """Names of the global generators that a fetch has drawn from."""
        self.position = 0
        """Position in the batch of the sample that is being read, or has failed; -1: collation."""
        self.faults: list[Fault] = []
        """Faults of the samples of the present task."""
        self.stamps: TaskWatch | None = None
        """Watch that notes the times of samples and collation; None: no stamps are taken."""
        self.reads_ahead = reads_ahead(plan.dataset)
        """Whether the dataset can begin to read the samples that come next."""
        self.coming: Sequence[Any] = ()
        """Indices of the batch after the present one, as far as they are known."""
        self._skips = plan.guard.policy == "skip"
        self._watch = DrawWatch() if plan.seed is not None else None
        self._own = plan.own if plan.seed is not None else None
        self._own_draws = bool(self._own)
        self._looked = False
        self._begun: set[bool] = set()
        """Whether there was a first reading (False), and a first collation (True)."""
        self._kept = ExitStack()
        """What restores the generators that the present task of a guest seeds."""
        self._looked_in: dict[bool, int] = {}
        """Epoch in which generators were looked for behind reading (False) and collating (True)."""
        self._rows: Rows | None = None
        self._rows_in_epoch: int | None = None

    @property
    def draws(self) -> bool:
        """Whether reading was seen to draw from generators, or generators are held to draw from."""
        return bool(self.drawn) or self._own_draws

    def attempt(self, fetch: Callable[[], _Fetched]) -> _Fetched:
        """Return what ``fetch`` returns, with draws that depend on the keys of its samples alone.

        ``fetch`` calls :meth:`sample` and :meth:`collate`, and is called again if it is the first
        one to draw from a generator, other than by its first sample or the first collation.
        """
        watch = self._watch
        if watch is None:
            return fetch()
        with ExitStack() as kept:
            self._kept = kept
            if self.guest:
                if self._own is not None and self._own_draws:
                    kept.enter_context(self._own.kept())
                watch.begin()
                if self.drawn:
                    kept.enter_context(kept_random_state(self.drawn))
            while True:
                try:
                    result = fetch()
                except Exception:
                    drawn = watch.drawn()
                    if not drawn:
                        raise
                else:
                    drawn = watch.drawn()
                    if not drawn:
                        return result
                watch.restore()
                self._seed_from_now_on(drawn)
                if self.stamps is not None:
                    self.stamps.begin()

    def sample(self, index: object, epoch: int) -> Batch:
        """Return ``dataset[index]``, drawn under its own key; ``SKIPPED`` if it is left out."""
        if self._skips and type(index) is Gone:
            return SKIPPED
        try:
            if self.stamps is None and not self.drawn and self._knows_draws(epoch):
                return self._item(index)
            return self._watched(index, epoch)
        except Exception as error:
            failed = error
        # No closure, which would cost each good sample some nanoseconds.
        return self.rescued(failed, partial(self._watched, epoch=epoch), index, epoch)

    def rescued(
        self, error: Exception, read: Callable[[Any], Batch], index: object, epoch: int
    ) -> Batch:
        """Return a sample although ``read`` has failed, as :meth:`SampleGuard.rescue` does.

        To be called after the ``except`` block has ended, so that further errors do not seem to
        come from this one.
        """
        how: dict[str, Any] = {"dataset": self.dataset, "position": self.position}
        return self.plan.guard.rescue(error, read, index, epoch, faults=self.faults, **how)

    def another(self, index: object, epoch: int) -> Batch:
        """Return another sample in place of a skipped one; ``SKIPPED`` if there is none."""
        guard = self.plan.guard
        for attempt in range(1, 1 + min(_OTHERS, len(guard.candidates))):
            with suppress(Exception):
                return self._watched(guard.stand_in(index, epoch, attempt), epoch)
        return SKIPPED

    def _watched(self, index: object, epoch: int) -> Batch:
        began_ns = clock.monotonic_ns()
        sample = self._read(self._item, index, index, epoch)
        if self.stamps is not None:
            self.stamps.read(index, began_ns)
        self._looked = True
        return sample

    def _item(self, index: object) -> Batch:
        return read_item(self.dataset, index)

    def _knows_draws(self, epoch: int) -> bool:
        """Return whether it is known that samples draw from no generators but the global ones."""
        own = self._own is not None and (self._own_draws or epoch != self._looked_in.get(False))
        return self._looked and not own

    def _read(
        self, read: Callable[[_Asked], _Fetched], asked: _Asked, index: object, epoch: int
    ) -> _Fetched:
        """Return ``read(asked)`` under the key of a sample.

        It is called again if its first call in an epoch made the dataset, or its ``collate_fn``,
        create generators.
        """
        collates = read is self.plan.collate_fn
        if self._watch is None or collates in self._begun:
            self._key(epoch, index)
            result = read(asked)
        else:
            self._begun.add(collates)
            result = self._first(partial(read, asked), index, epoch)
        if self._own is not None and epoch != self._looked_in.get(collates):
            self._looked_in[collates] = epoch
            if self._own.look_again():
                self._own_draws = True
                self._key(epoch, index)
                return read(asked)
        return result

    def _first(self, read: Callable[[], _Fetched], index: object, epoch: int) -> _Fetched:
        """Return ``read()`` with all generators seeded, and learn from which of them it draws.

        Not of those from which samples of this fetch have drawn: it is done again for these.
        """
        known = self.drawn
        apart = known if self._watch is None else (*known, *self._watch.drawn())
        left = [name for name in GENERATORS if name not in apart]
        before, self.drawn = DrawWatch(left), GENERATORS
        self._key(epoch, index)
        seeded, self.drawn = DrawWatch(left), known
        try:
            return read()
        finally:
            drawn = seeded.drawn()
            before.restore()
            self._seed_from_now_on(drawn)

    def _seed_from_now_on(self, names: Collection[str]) -> None:
        """Have each sample seed some generators, which are as the calling program had them."""
        if self._watch is not None:
            self._watch.leave(names)
        self.drawn = (*self.drawn, *names)
        if self.guest:
            self._kept.enter_context(kept_random_state(names))

    def batch(self, indices: Any, epoch: int, mark: Callable[[int], None] | None = None) -> Batch:
        """Return the collated batch of the indices; ``NO_SAMPLES`` if all of them are skipped."""
        self.position = 0
        self.faults.clear()
        if not self.plan.batched:
            sample = self.sample(indices, epoch)
            return NO_SAMPLES if sample is SKIPPED else self.plan.collate_fn(sample)
        if self.plan.gathered and (gathered := self._gathered(indices, epoch)) is not None:
            return gathered
        if fetches_in_batches(self.dataset):
            samples = self._together(self.dataset, indices, epoch)
        else:
            if self.reads_ahead:
                read_ahead(self.dataset, unmarked([*indices, *self.coming]))
            samples = self._one_by_one(indices, epoch, mark)
        if self._skips:
            samples = [sample for sample in samples if sample is not SKIPPED]
            if not samples and len(indices):
                return NO_SAMPLES
        self.position = -1
        if self.stamps is not None:
            self.stamps.all_read()
        return self.collate(samples, indices, epoch)

    def _one_by_one(
        self, indices: Any, epoch: int, mark: Callable[[int], None] | None
    ) -> list[Batch]:
        samples: list[Batch] = []
        plain = mark is None and self.stamps is None and not self._skips
        if plain and self._knows_draws(epoch):
            # As torch does it: the checks of each sample would cost as much as a cheap sample.
            dataset, drawn, failed = self.dataset, self.drawn, None
            try:
                for index in indices:
                    if drawn:
                        self._key(epoch, index)
                    plainly = type(index) is int
                    samples.append(dataset[index] if plainly else read_item(dataset, index))
            except Exception as error:
                failed = error
            if failed is None:
                return samples
            self.position = len(samples)
            read = partial(self._watched, epoch=epoch)
            samples.append(self.rescued(failed, read, index, epoch))
        for position, index in enumerate(indices):
            if position >= len(samples):
                self.position = position
                if mark is not None:
                    mark(position)
                samples.append(self.sample(index, epoch))
        return samples

    def _gathered(self, indices: Any, epoch: int) -> Batch | None:
        """Return a batch of rows; None: the dataset itself has to make it, or to refuse it."""
        if epoch != self._rows_in_epoch:
            self._rows, self._rows_in_epoch = rows_of(self.dataset, tried=False), epoch
        index = None if self._rows is None else self._rows.index_of(indices)
        if self._rows is None or index is None:
            return None
        began_ns = clock.monotonic_ns()
        batch = self._rows.gathered(index)
        self.position = -1
        if self.stamps is not None:
            self.stamps.read(indices[0], began_ns, len(index))
            self.stamps.all_read()
        return batch

    def _together(
        self, dataset: ReadsTogether, indices: Sequence[object], epoch: int
    ) -> list[Batch]:
        """Return samples that the dataset reads in one call, or one by one if that fails."""
        asked, read = indices, dataset.__getitems__
        if self._skips:
            asked = [index for index in indices if type(index) is not Gone]
        first = next(iter(asked), None)
        began_ns = clock.monotonic_ns()
        try:
            samples = self._read(read, asked_together(self.dataset, asked), first, epoch)
        except Exception as error:
            failed = error
        else:
            if self.stamps is not None:
                self.stamps.read(first, began_ns, len(asked))
            return samples
        samples = [
            self._alone(dataset, index, epoch) for self.position, index in enumerate(indices)
        ]
        if not self.faults:
            self.position = 0
            found = self.plan.guard.all_read_alone(failed, self.dataset, first, epoch)
            self.faults.append(found)
        return samples

    def _alone(self, dataset: ReadsTogether, index: object, epoch: int) -> Batch:
        """Return a single sample of a dataset that reads several in one call."""

        def read(asked: object) -> Batch:
            together = asked_together(dataset, [asked])
            return self._read(dataset.__getitems__, together, asked, epoch)[0]

        if type(index) is Gone:
            return SKIPPED
        try:
            return read(index)
        except Exception as error:
            failed = error
        return self.rescued(failed, read, index, epoch)

    def collate(self, samples: Sequence[Batch], indices: Collection[object], epoch: int) -> Batch:
        """Return the batch of samples."""
        began_ns = clock.monotonic_ns()
        if self.plan.default_collation or not len(indices):
            batch = self.plan.collate_fn(samples)
        else:
            key = _COLLATION, _in_key(next(iter(indices)))
            batch = self._read(self.plan.collate_fn, samples, key, epoch)
        if self.stamps is not None:
            self.stamps.collated(began_ns)
        return batch

    def _key(self, epoch: int, index: object) -> None:
        if self.plan.seed is None:
            return
        index = _in_key(index)
        if self._own is not None and self._own_draws:
            self._own.key(self.plan.seed, epoch, index)
        if self.drawn:
            seed_global_generators(self.plan.seed, epoch, index, self.drawn)

    def where(self, indices: Any) -> str:
        """Return what was being done, for the text of an error."""
        if self.position < 0:
            return f"in collate_fn of samples {indices!r:.400}"
        index = [*indices][self.position] if self.plan.batched else indices
        raised = (fault for fault in reversed(self.faults) if fault.outcome == "raised")
        known = described(next(raised, None))
        return f"while reading sample {index!r} of the dataset{known}"

    def note(self, indices: object) -> str | None:
        """Return a note to add to an error that the caller sees as it was raised."""
        if not self.plan.batched and not self.faults:
            return None
        where = self.where(indices)
        return f"{where[0].upper()}{where[1:]}."

"""A trial of leaving a dataset's own pipelines to the device: does it pay, and is all the same?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.utils.data import Dataset, IterableDataset

from lightning_fastdata.augment import DatasetPipelines
from lightning_fastdata.batches.collate import collate_samples
from lightning_fastdata.batches.keyed import fetches_in_batches, keyed
from lightning_fastdata.batches.staged import RecordedCollate
from lightning_fastdata.order.epoch_order import dataset_length
from lightning_fastdata.planning.facts.probe import spread_indices
from lightning_fastdata.randomness.global_generators import DrawWatch
from lightning_fastdata.randomness.search import find_composes
from lightning_fastdata.randomness.seeds import EpochCell

if TYPE_CHECKING:
    from lightning_fastdata.augment import DatasetRecording, PlaceSwitch
    from lightning_fastdata.types import Batch

IN_WORKERS: Final = "all of it in the workers, by Albumentations itself"
_SAMPLES: Final = 3


class Trial(NamedTuple):
    """What came of a trial."""

    pipelines: DatasetPipelines
    """The dataset's own."""
    fields: tuple[str, ...]
    """Fields of a batch that the device would compute; none: the workers do it all."""
    why: str

    def recording(self, switch: PlaceSwitch | None = None) -> DatasetRecording:
        """Return what has the dataset's pipelines recorded; with a switch, in some epochs."""
        return self.pipelines.recording(switch)

    def outcome(self) -> Trial:
        """Return what came of it alone: the training process has the user's pipelines itself."""
        return self._replace(pipelines=DatasetPipelines(()))

    def refused(self, why: str) -> Trial:
        """Return the trial with all of it in the workers, for another reason."""
        return self._replace(fields=(), why=why)

    @property
    def defers(self) -> bool:
        """Whether the device is to compute something."""
        return bool(self.fields)

    def explain(self) -> str:
        """Return what was found, and where each operation runs."""
        if not self.defers:
            return f"{IN_WORKERS}: {self.why}"
        return f"{self.why}\n{self.pipelines.explain()}"


def try_recording(
    dataset: Dataset[Any], *, seed: int, collate_fn: Callable[[list[Any]], Any] | None
) -> Trial | None:
    """Read samples as always and once more with their pixels deferred, and compare.

    Each operation that the device would run is tried by itself, too, however seldom it is drawn
    (:mod:`~lightning_fastdata.augment.pipeline.trial`). The dataset and the global random state
    stay as they were, but for what the dataset keeps of samples that it reads. What is deferred is
    computed here, by one thread. None: the dataset holds no pipeline.
    """
    pipelines = DatasetPipelines(find_composes(dataset))
    if not pipelines:
        return None
    refused = Trial(pipelines, (), "").refused
    if (why_not := pipelines.why_not) is not None:
        return refused(why_not)
    if isinstance(dataset, IterableDataset):
        return refused("a stream, of which no sample can be tried without losing it")
    reader = _Reader(dataset, seed, pipelines, DrawWatch())
    threads = torch.get_num_threads()
    # A few small images; and threads of a process that was forked may wait for ever.
    torch.set_num_threads(1)
    try:
        if reader.keeps_what_it_returns():
            return refused(
                "it keeps what its pipeline returns: read again in the next epoch, a sample ran no "
                "pipeline, so that nothing would be left to the device but once"
            )
        fields, why = _compare(reader, collate_fn or collate_samples)
        return Trial(pipelines, fields, why)
    except Exception as error:  # whatever the code around the pipeline raises
        return refused(f"tried out, it ended in {type(error).__name__}: {error}")
    finally:
        reader.state.restore()
        torch.set_num_threads(threads)


class _Reader:
    """Reads the same samples of a dataset again and again, each time with the same draws."""

    def __init__(
        self,
        dataset: Dataset[Any],
        seed: int,
        pipelines: DatasetPipelines,
        state: DrawWatch,
    ) -> None:
        self.dataset, self.seed, self.pipelines, self.state = dataset, seed, pipelines, state
        length = dataset_length(dataset) or 1
        self.indices = spread_indices(length, min(length, _SAMPLES))

    def read(
        self, recording: DatasetRecording | None = None, *, epoch: int = 0, most: int = _SAMPLES
    ) -> list[Any]:
        """Return the samples of an epoch, or the first ones of them."""
        cell = EpochCell()
        cell.set(epoch)
        self.state.restore()  # whether it calls a pipeline may be drawn
        twin: Any = keyed(
            self.dataset, seed=self.seed, epoch=cell, transform=None, recording=recording
        )
        indices = self.indices[:most]
        if fetches_in_batches(self.dataset):
            return list(twin.__getitems__(indices))
        return [twin[index] for index in indices]

    def keeps_what_it_returns(self) -> bool:
        """Return whether a sample that is read once more, in another epoch, runs no pipeline."""
        recording, watch = self.pipelines.watched(records=False)
        self.read(recording, most=1)
        first = watch.calls
        self.read(recording, epoch=1, most=1)
        return 0 < first == watch.calls


def _compare(reader: _Reader, collate: Callable[[list[Any]], Batch]) -> tuple[tuple[str, ...], str]:
    """Return the fields that the device can compute, and why these; none if anything differs."""
    pipelines = reader.pipelines
    recording, watch = pipelines.watched()
    try:
        plain = collate(reader.read())
    except Exception:  # images of several sizes come in batches of one
        reader.indices = reader.indices[:1]
        plain = collate(reader.read())
    stage = RecordedCollate(collate, recording, "train")
    waiting = stage.collated(reader.read(recording))
    batch, draws = stage.taken(waiting)
    if draws is None:
        return (), watch.fate()
    difference = pipelines.difference(
        plain, waiting, draws.apply(batch), again=lambda: collate(reader.read())
    )
    if difference is not None:
        return (), f"tried out, {difference}"
    tried = pipelines.try_operations(watch, seed=reader.seed)
    fault = next((one for one in tried if one.fault is not None), None)
    if fault is not None:
        return (), f"tried out by itself on the device, {fault.name}: {fault.fault}"
    alone = _many(len({one.name for one in tried}), "operation")
    samples = _many(len(reader.indices), "sample")
    return draws.fields, (
        f"on the device: {', '.join(draws.fields)}; {samples} tried, and {alone} alone"
    )


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"

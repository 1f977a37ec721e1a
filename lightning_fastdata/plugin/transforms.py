"""The transforms of each stage, and the transfer of batches to where they run.

Batches move with their step, or one ahead on a stream beside it. What the workers drew for a batch
moves with it, and is carried out on the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from lightning_fastdata.augment import StageTransform, as_batch_transform, left_undone
from lightning_fastdata.batches.staged import StagedBatch, move
from lightning_fastdata.device.backend import reads_page_locked
from lightning_fastdata.device.prefetch import (
    BATCHES_AHEAD,
    Crossing,
    OneAhead,
    SideLane,
    drawn_under,
)
from lightning_fastdata.device.shared_draws import told_of_shared_draws
from lightning_fastdata.errors import FastDataWarning, TransformError, check_among
from lightning_fastdata.loading.loader import PIPELINE_CHANGED
from lightning_fastdata.loading.position import StateWatch
from lightning_fastdata.plugin import seams
from lightning_fastdata.randomness.seeds import derived_seed
from lightning_fastdata.tree import held
from lightning_fastdata.types import STAGES, Batch, PixelPlace, SampleKey, Stage

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins import Precision

    from lightning_fastdata.plugin.module import DataModule

PrefetchName: TypeAlias = Literal["auto", "off"]

_HOOK: Final = seams.HOOKS[2]
_STEPS: Final = "fastdata_steps"
"""Attribute of the function in the hook's place: what runs before the user's hook."""

_ALSO_NORMALISED: Final[Mapping[str, str]] = {
    "Albumentations": "A.Compose([A.Normalize(), A.ToTensorV2()])",
    "torchvision": "v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])",
}
"""Library -> a pipeline of it, as code, that only makes floats of images and normalises them."""


class StageTransforms:
    """The transforms of each stage in their order; a pipeline is always the first.

    ``augment`` is a transform for training, or a dict with stages as keys, or None.

    Raises:
        TransformError: As :meth:`register`.
    """

    def __init__(self, augment: object, *, image: str | int | None, mask: str | int | None) -> None:
        self._image, self._mask = image, mask
        self._of: dict[Stage, list[StageTransform]] = {stage: [] for stage in STAGES}
        self._explained: dict[Stage, tuple[StageTransform, StageTransform]] = {}
        """Stage -> the transform as registered, and what was made of it for the last dataset."""
        self._told = False
        self._of_runs: dict[Stage, tuple[int, list[StageTransform]]] = {}
        """Stage -> the last run in which transforms were registered, and these."""
        self.assign(augment)

    def assign(self, augment: object) -> None:
        """Replace all transforms by these, in the form that :class:`StageTransforms` takes."""
        self.given = augment
        for registered in self._of.values():
            registered.clear()
        by_stage: Mapping[Any, object]
        by_stage = augment if isinstance(augment, Mapping) else {"train": augment}
        for stage, transform in by_stage.items():
            if transform is not None:
                self.register(transform, stage)

    def __getitem__(self, stage: Stage) -> list[StageTransform]:
        return self._of[stage]

    def worker_part(self, stage: Stage) -> StageTransform | None:
        """Return the transform of a stage that starts in the workers, if there is one."""
        registered = self._of[stage]
        return registered[0] if registered and registered[0].starts_in_worker else None

    def worker_part_for(self, stage: Stage, samples: Iterable[object]) -> StageTransform | None:
        """Return what starts in the workers, as it suits a dataset, and explain it so from now on.

        ``samples`` of the dataset are read as far as needed; without any, it suits all datasets.
        """
        part = self.worker_part(stage)
        if part is None:
            return None
        suited = part.for_samples(samples)
        self._explained[stage] = part, suited
        return suited

    def run_on_device(self, stage: Stage, *, pipeline: bool) -> bool:
        """Return whether anything of a stage runs on the device; ``pipeline``: pipelines may."""
        return any(pipeline or not made.starts_in_worker for made in self._of[stage])

    def register(
        self, transform: object, stage: Stage, *, run: int | None = None
    ) -> Callable[[], None]:
        """Add a transform to a stage, and return a function that removes it again.

        ``run``: number of the trainer's run that goes on; the transform takes the place of those
        that were registered in an earlier one. None: none does.

        Raises:
            TransformError: The stage does not exist, the transform is of no known kind, or it
                would be a second pipeline or one that comes too late.
        """
        if stage not in STAGES:
            raise TransformError(
                f"There is no stage {stage!r} to register a transform for; stages are "
                f"{', '.join(STAGES)}."
            )
        made = as_batch_transform(transform, image=self._image, mask=self._mask)
        registered = self._of[stage]
        last, own = self._of_runs.get(stage, (run, []))
        if run is not None and run != last:
            registered[:] = [one for one in registered if one not in own]
            own = []
        if registered:
            made = made.behind()
        if made.starts_in_worker and registered:
            raise TransformError(
                f"The {made.library} pipeline {made.name} was registered for stage {stage!r} after "
                f"{registered[0].name}. It starts in the workers and has to be the first and only "
                "one: register it first, or join two pipelines in one Compose."
            )
        registered.append(made)
        if run is not None:
            self._of_runs[stage] = run, [*own, made]

        def remove() -> None:
            if made in registered:
                registered.remove(made)

        return remove

    def warn_if_unlike_training(self, stage: Stage, name: str, sample: object) -> None:
        """Warn, once, if training normalises the images and a stage does not.

        ``sample`` is from the stage's dataset, which is called ``name``. There is no warning where
        a stage has callables, as it is not known what they do to the sample.
        """
        callables = any(not one.starts_in_worker for one in self._of[stage])
        if self._told or stage == "train" or callables:
            return
        undone = left_undone(self._of["train"], self._of[stage], sample, self._image)
        if undone is not None:
            self._told = True
            part = self.worker_part("train")
            example = _ALSO_NORMALISED["Albumentations" if part is None else part.library]
            warnings.warn(
                f"{name}: training runs {undone}. Nothing in augment= does the same for stage "
                f"{stage!r}, so that the model gets other numbers there than it learns on. Give "
                f"each stage its pipeline: augment={{'train': compose, {stage!r}: {example}}}.",
                FastDataWarning,
                stacklevel=3,
            )

    def explain(self, where: Callable[[Stage], tuple[PixelPlace, str]]) -> list[str]:
        """Return, for each transform, where each of its operations runs and why.

        ``where`` returns for a stage where the pixels of its pipeline are computed, and why.
        """
        parts = []
        for stage, registered in self._of.items():
            place, why = where(stage)
            for made in registered:
                known, used = self._explained.get(stage, (None, made))
                text = (used if known is made else made).explain()
                if made.starts_in_worker and place == "workers":
                    text = f"all of it in the workers, by {made.library} itself: {why}"
                elif made.starts_in_worker:
                    text = f"on the device: {why}\n{text}"
                parts.append(f"augment, {stage}\n{text}")
        return parts


# -- what a callable does to a batch ---------------------------------------------------------------


def augment_foreign_batches(
    trainer: Trainer,
    pl_module: LightningModule,
    transform: StageTransform,
    *,
    seed: int,
    in_transfer: Callable[[], bool],
) -> None:
    """Run a transform on every training batch of a trainer, until its run ends.

    Lightning asks one object for the hook: the data module if it overrides it, else the
    LightningModule. That instance gets an attribute of the hook's name, which runs the transform
    and then what was there before; the class is not touched.

    ``in_transfer`` says whether the trainer is moving a batch of a loader right now: the model
    summary and loggers send an example input through the same hook.
    """
    datamodule = seams.attributes_of(trainer).datamodule
    owner = pl_module if seams.overridden_hook(datamodule, _HOOK) is None else datamodule
    epoch = -1
    watch = StateWatch((), "")

    def augment(batch: Batch) -> Batch:
        nonlocal transform, epoch, watch
        if batch is None or not trainer.training or not in_transfer():
            return batch
        place = seams.training_place(trainer)
        if place.epoch != epoch:
            epoch, transform = place.epoch, transform.renewed()
            watch = StateWatch(transform.made_of(), PIPELINE_CHANGED)
        watch.asked()
        # Other ranks, other callbacks and the loader draw other numbers. Those of a batch rest on
        # no other batch, so that a run may go on from any of them.
        number = steps.index(augment), seams.part_of_rank(trainer), place.taken
        key = SampleKey(derived_seed(seed, "callback", *number), epoch, 0)
        draws = drawn_under(key.seed, epoch, 0, trainer.strategy.root_device)
        with draws, told_of_shared_draws(transform, batch):
            batch = transform.apply_unprepared(batch, key)
        # Lightning converts to the precision's dtype before the transfer; uint8 images became
        # floating point only now.
        watch.handed_out()
        return trainer.precision_plugin.convert_input(batch)

    earlier = getattr(owner, _HOOK)
    others: list[Callable[[Batch], Batch]] | None = held(earlier, _STEPS)
    steps = [] if others is None else others  # of other callbacks, which come first
    steps.append(augment)
    if others is not None:
        return

    # A plain function without __wrapped__: Lightning compares its code with the default hook's.
    def on_after_batch_transfer(batch: Batch, dataloader_idx: int) -> Batch:
        for step in steps:
            batch = step(batch)
        return earlier(batch, dataloader_idx)

    setattr(on_after_batch_transfer, _STEPS, steps)
    seams.replace_for_one_run(trainer, owner, _HOOK, on_after_batch_transfer)


# -- the way of a batch to its transforms, alone or combined from several loaders ------------------


def inside(batch: Batch, function: Callable[[Batch], Batch]) -> Batch:
    """Apply a function to a batch as the user knows it, leaving its draws where they are."""
    if isinstance(batch, StagedBatch):
        return batch.with_batch(function(batch.batch))
    if not _is_combined(batch):
        return function(batch)
    plain = function(_each(batch, lambda b: b.batch if isinstance(b, StagedBatch) else b))
    if type(batch) is dict:
        return {key: _restaged(batch[key], value) for key, value in plain.items()}
    return type(batch)(map(_restaged, batch, plain))


def is_staged(batch: Batch) -> bool:
    """Return whether a batch, or one of several loaders' batches, has transforms before it."""
    return isinstance(batch, StagedBatch) or _is_combined(batch)


def convert_staged(batch: Batch, convert: Callable[[Batch], Batch]) -> Batch:
    """Convert what is in staged batches, into which Lightning's own conversion does not look."""
    if isinstance(batch, StagedBatch):
        return batch.with_batch(convert(batch.batch))
    if _is_combined(batch):
        return _each(batch, lambda part: convert_staged(part, convert))
    return batch


def _restaged(staged: Batch, value: Batch) -> Batch:
    return staged.with_batch(value) if isinstance(staged, StagedBatch) else value


def transfer(batch: Batch, move: Callable[[Batch], Batch], device: torch.device) -> Batch:
    """Move a batch as the user knows it, and what was drawn for its transform, to the device."""
    if isinstance(batch, StagedBatch):
        if batch.crossing is not None:
            return batch.crossing.land()
        draws = batch.draws
        if draws is not None:
            draws = draws.to(device, non_blocking=reads_page_locked(device.type))
        return StagedBatch(move(batch.batch), draws, batch.stage)
    if _is_combined(batch):
        return _each(batch, lambda part: transfer(part, move, device))
    return move(batch)


def carry_out_draws(batch: Batch, transforms: StageTransforms) -> Batch:
    """Carry out what the workers drew for a batch, or for several combined, on the device.

    Only that: it reads the batch and nothing else. Callables may read what the training writes and
    draw from generators that it draws from, so they run where they would without prefetching.
    """
    if isinstance(batch, StagedBatch):
        first = next((t for t in transforms[batch.stage] if t.starts_in_worker), None)
        if batch.draws is None or first is None:
            return batch
        return StagedBatch(first.apply(batch.batch, batch.draws), None, batch.stage)
    if _is_combined(batch):
        return _each(batch, lambda part: carry_out_draws(part, transforms))
    return batch


def finish(
    batch: Batch,
    transforms: StageTransforms,
    drawing: Callable[..., AbstractContextManager[None]],
) -> tuple[Batch, bool]:
    """Run what is left to do for a batch on the device; return it plain, and whether it was staged.

    ``drawing`` returns a block in which the callables of a stage draw.
    """
    if _is_combined(batch):
        places = count()

        def finished(part: Batch) -> Batch:
            return finish(part, transforms, partial(drawing, part=next(places)))[0]

        return _each(batch, finished), True
    if not isinstance(batch, StagedBatch):
        return batch, False
    plain = carry_out_draws(batch, transforms).batch
    # All others ran in the workers, and in carry_out_draws.
    callables = [each for each in transforms[batch.stage] if not each.starts_in_worker]
    if callables and plain is not None:  # Lightning skips a training batch that is None
        with drawing(batch.stage):
            for transform in callables:
                with told_of_shared_draws(transform, plain):
                    plain = transform.apply(plain, None)
    return plain, True


def _is_combined(batch: Batch) -> bool:
    """Return whether these are batches of several loaders, some of which are staged."""
    values = batch.values() if type(batch) is dict else batch
    several = type(batch) in (dict, list, tuple)
    return several and any(isinstance(value, StagedBatch) for value in values)


def _each(batches: Batch, function: Callable[[Batch], Batch]) -> Batch:
    if type(batches) is dict:
        return {key: function(batch) for key, batch in batches.items()}
    return type(batches)(map(function, batches))


class Prefetching:
    """Sends the batches of one data module ahead, if the user asked for it and it can be done.

    Raises:
        OptionsError: There is no such way to prefetch.
    """

    def __init__(self, asked: PrefetchName) -> None:
        check_among("prefetch", asked, get_args(PrefetchName))
        self.asked: PrefetchName = asked
        self.why_not: str | None = (
            "not asked for" if asked == "off" else "decided when the training starts"
        )
        """Reason why batches are not sent ahead; None: they are."""
        self._lanes: dict[torch.device, SideLane | None] = {}

    def __getstate__(self) -> dict[str, object]:
        # Streams belong to one process.
        return {**vars(self), "_lanes": {}}

    def decide(self, module: DataModule) -> None:
        """Decide for the trainer of a data module, which is asked for its hooks and its streams."""
        trainer = module.trainer
        if trainer is None or self.asked == "off":
            return
        device = trainer.strategy.root_device
        if device not in self._lanes:
            streams = module.device_streams(device)
            self._lanes[device] = None if streams is None else SideLane(streams)
        early = module.hooks_before_device()
        if self._lanes[device] is None:
            self.why_not = "this type of device does not copy beside its computing"
        elif early:
            self.why_not = f"{', '.join(sorted(early))} of yours runs in the batch's own step"
        else:
            self.why_not = None

    def batches_ahead(self, module: DataModule) -> int:
        """Return how many batches are on the device beside the one that is trained on, at most."""
        self.decide(module)
        return BATCHES_AHEAD if self.why_not is None else 0

    def drop_ahead(self) -> bool:
        """Let go of batches that were sent ahead, and send no more; return whether there was one.

        Each is made anew when it is its turn.
        """
        return sum(lane.drop() for lane in self._lanes.values() if lane is not None) > 0

    def look_ahead(
        self, trainer: Trainer | None, stage: Stage, transforms: StageTransforms
    ) -> Callable[[Iterator[Batch]], Iterator[Batch]] | None:
        """Return what sends the batches of a loader one ahead; None: they are not sent ahead."""
        if trainer is None or self.why_not is not None:
            return None
        return partial(self._one_ahead, trainer, stage, transforms)

    def _one_ahead(
        self, trainer: Trainer, stage: Stage, transforms: StageTransforms, batches: Iterator[Batch]
    ) -> Iterator[Batch]:
        """Return the batches of an epoch as :class:`StagedBatch` that cross to the device."""
        device = trainer.strategy.root_device
        lane = self._lanes.get(device)
        if lane is None:  # a copy of the loader in another process
            return batches

        def work(batch: Batch) -> Batch:
            return carry_out_draws(move(batch, device, non_blocking=True), transforms)

        def receive(crossing: Crossing) -> StagedBatch:
            lane.note_landing()  # it lands when Lightning's hooks are called, behind the next send
            return StagedBatch(None, None, stage, _Converted(crossing, trainer.precision_plugin))

        return OneAhead(batches, lambda b: lane.send(b, work), receive, lambda: lane.has_room)

    def explain(self) -> str:
        """Return in a line whether batches are sent ahead, and why not."""
        if self.why_not is None:
            return "prefetch  one batch ahead, on a stream beside the computing"
        return f"prefetch  off  {self.why_not}"


class _Converted:
    """A crossing that converts its batch to the precision's dtype, as Lightning would before it."""

    def __init__(self, crossing: Crossing, precision: Precision) -> None:
        self._crossing = crossing
        self._precision = precision

    @property
    def source(self) -> Batch:
        """The batch as Lightning would have brought it to the device."""
        return self._in_precision(self._crossing.source)

    def land(self) -> Batch:
        return self._in_precision(self._crossing.land())

    def _in_precision(self, batch: Batch) -> Batch:
        return batch if isinstance(batch, StagedBatch) else self._precision.convert_input(batch)

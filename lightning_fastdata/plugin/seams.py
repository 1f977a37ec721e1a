"""The only place that reads private names of Lightning, of which it sets some counts.

``docs/seams.md`` lists them, and what this package replaces on single objects, never on a class,
until the run of a trainer ends; here that is done by :func:`replace_for_one_run`.
``tests/plugin/test_seams.py`` pins each of them against the installed Lightning.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, cast

import torch
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_fastdata.batches.staged import packed_documents
from lightning_fastdata.errors import OptionsError, TransformError
from lightning_fastdata.loading.position import Place
from lightning_fastdata.tree import children, held
from lightning_fastdata.types import STAGES, Stage

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import Strategy

    from lightning_fastdata.plugin.module import DataModule

_Value = TypeVar("_Value")

HOOKS: Final = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
PACKAGES: Final = ("lightning.pytorch.", "pytorch_lightning.")
"""Prefixes of the names of modules in Lightning's two packages."""
_BASES: Final = frozenset({"Callback", "DataHooks", "LightningModule", "ModelHooks"})
"""Names of Lightning's classes that declare hooks, so that it finds one wherever it asks."""
STAGES_OF: Final[Mapping[str, tuple[Stage, ...]]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
}
"""A trainer's method -> its stages, the main one first."""


class TrainerAttributes(Protocol):
    """Attributes of a trainer that other classes of Lightning set, unseen by a type checker."""

    datamodule: object
    callbacks: list[Callback]
    profiler: Any
    log_every_n_steps: int
    fast_dev_run: int | bool
    overfit_batches: int | float
    reload_dataloaders_every_n_epochs: int


def attributes_of(trainer: Trainer) -> TrainerAttributes:
    """Return the trainer, with types for the attributes that its class does not declare."""
    return cast("TrainerAttributes", trainer)


def _private(owner: object, *path: str) -> Any:
    """Return the attribute at the end of a path of names; None where a version lacks one."""
    for name in path:
        owner = getattr(owner, name, None)
    return owner


def data_source(loop: object) -> Any:
    """Return the object that a loop asks for its loaders by ``dataloader()``; None: there is none.

    Lightning calls no hook between getting a loader and starting its workers.
    """
    source = _private(loop, "_data_source")
    replaceable = _private(source, "__dict__") is not None
    return source if replaceable and callable(_private(source, "dataloader")) else None


def loaders_owner(loop: object) -> object:
    """Return what a loop has its loaders from: a module with hooks, or loaders themselves.

    None: there are none, or it is not known.
    """
    owner: object = _private(loop, "_data_source", "instance")
    return owner


def spreads_samples(trainer: Trainer) -> bool:
    """Return what ``use_distributed_sampler`` was given; its default, True, where not known."""
    given = _private(trainer, "_accelerator_connector", "use_distributed_sampler")
    return given is None or bool(given)


def forget_training_loader(trainer: Trainer) -> None:
    """Have a trainer ask for its training loader again, as Lightning's batch-size finder does.

    Where a version lacks the private name, a loader that was made already keeps its batch size.
    """
    if _private(trainer.fit_loop, "_combined_loader") is not None:
        trainer.fit_loop._combined_loader = None


def hook_selector(trainer: Trainer) -> Any:
    """Return the object whose ``get_instance(name)`` chooses whose hook runs; None: not known.

    Each run has one of its own, made before the data module gets its trainer.
    """
    selector = _private(trainer, "_data_connector", "_datahook_selector")
    return selector if callable(_private(selector, "get_instance")) else None


def run_of(trainer: Trainer) -> Callable[[], bool]:
    """Return a function that says whether a trainer's run, as it is now, still goes on.

    A run that has ended, or that another one has followed, calls no more hooks. Loaders that are
    then given to the trainer by themselves are not those of a data module.
    """
    return partial(_goes_on, trainer, hook_selector(trainer))


def _goes_on(trainer: Trainer, selector: object) -> bool:
    return not trainer.state.stopped and hook_selector(trainer) is selector


def count_documents(trainer: Trainer, batch: object) -> None:
    """Have the means that Lightning logs weigh a batch of packed documents by their number.

    Lightning would warn that their tensors are of different lengths, and weigh each batch the same.
    """
    documents = packed_documents(batch)
    # The trainer takes some microseconds to find them, which most batches need not pay.
    results = None if documents is None else _private(trainer, "_results")
    if results is not None and hasattr(results, "batch_size"):
        results.batch_size = documents


def results_of(trainer: Trainer) -> dict[str, Any]:
    """Return what a trainer has logged in this epoch, by name; empty where it is not known."""
    results = _private(trainer, "_results")
    return results if isinstance(results, dict) else {}


def itself(value: _Value) -> _Value:
    """Return what was given; unlike a lambda, this can be pickled.

    By it a copy of a trainer gets what was there before a replacement, and a data module a dataset.
    """
    return value


def replace_for_one_run(trainer: Trainer, owner: object, name: str, value: object) -> None:
    """Replace an attribute of one object, and put it back when the trainer's run ends.

    Every run ends in ``strategy.teardown()``, after an exception, too. The hooks of a data module
    or LightningModule, which users override without ``super()``, would not do.

    The value has to be picklable, and is copied with the trainer.
    """
    ending = vars(trainer.strategy).get("teardown")
    if not isinstance(ending, _PutsBack):
        ending = _PutsBack(trainer.strategy)
        ending.replace(trainer.strategy, "teardown", ending)
    ending.replace(owner, name, value)


class _PutsBack:
    """A strategy's ``teardown`` that first puts back what was replaced."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.before: list[tuple[object, str, dict[str, object]]] = []

    def replace(self, owner: object, name: str, value: object) -> None:
        attributes = vars(owner)
        self.before.append((owner, name, {n: v for n, v in attributes.items() if n == name}))
        attributes[name] = value

    def __call__(self) -> None:
        for owner, name, before in reversed(self.before):
            vars(owner).pop(name, None)
            vars(owner).update(before)
        self.strategy.teardown()


# -- Lightning's two packages, and hooks that users wrote ------------------------------------------


def package_of(one: object) -> str:
    """Return the package of Lightning that an object's class belongs to; empty: neither."""
    modules = (base.__module__ for base in type(one).__mro__)
    return next((p[:-1] for name in modules for p in PACKAGES if name.startswith(p)), "")


def home_of(package: str) -> str:
    """Return the module that has the data module which a Trainer of a package takes."""
    return "lightning_fastdata" + ".pytorch_lightning" * (package == "pytorch_lightning")


def overridden_hook(owner: object, name: str) -> Callable[..., Any] | None:
    """Return the bound hook that a user wrote on this object or in its class, or None."""
    # Asked anew each time: in a notebook a class gets hooks between two fits.
    if owner is None or not (name in vars(owner) or _written_in_class(type(owner), name)):
        return None
    hook: Callable[..., Any] = getattr(owner, name)
    return hook


def _written_in_class(cls: type[object], name: str) -> bool:
    for base in cls.__mro__:
        if name in vars(base):
            return base.__name__ not in _BASES or not base.__module__.startswith(PACKAGES)
    return False


def choose_own_hooks(datamodule: object, trainer: Trainer, names: Collection[str]) -> None:
    """Have Lightning call transfer hooks of a data module, in one run, without its warning.

    Lightning calls the data module's hook and warns that the LightningModule's is not called. Ours
    calls it, so that the warning would be false.
    """
    selector = hook_selector(trainer)
    if selector is not None:
        chooses = partial(_choose, datamodule, frozenset(names), selector.get_instance)
        replace_for_one_run(trainer, selector, "get_instance", chooses)


def _choose(
    datamodule: object, names: frozenset[str], ask: Callable[[str], object], hook_name: str
) -> object:
    return datamodule if hook_name in names else ask(hook_name)


def augmenting_stages(trainer: Trainer, pl_module: LightningModule) -> Callable[[Stage], bool]:
    """Return a function that says whether ``on_after_batch_transfer`` does anything in a stage.

    A FastDataModule knows that once it has made the stage's loaders.
    """
    ours = own_datamodule(trainer)
    owners = [pl_module] if ours is not None else [pl_module, attributes_of(trainer).datamodule]
    written = any(overridden_hook(owner, "on_after_batch_transfer") for owner in owners)
    return ours.augments_on_device if ours is not None and not written else lambda _stage: written


def written_hook(trainer: Trainer, name: str) -> str:
    """Return which transfer hook of the user runs, e.g. ``"Net.on_after_batch_transfer"``, or "".

    Lightning calls the data module's hook, if it has one of its own.
    """
    data, module = attributes_of(trainer).datamodule, trainer.lightning_module
    ours = own_datamodule(trainer)
    if overridden_hook(data, name) if ours is None else name in ours.written_hooks():
        return f"{type(data).__name__}.{name}"
    return f"{type(module).__name__}.{name}" if overridden_hook(module, name) else ""


def check_hooks_run(pl_module: LightningModule) -> None:
    """Refuse to augment for a training step whose batches pass no transfer hook."""
    if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
        raise TransformError(
            f"{type(pl_module).__name__}.training_step(dataloader_iter) fetches its batches "
            "itself, and Lightning then calls no on_after_batch_transfer, so that `augment` would "
            "never run. Use training_step(batch, batch_idx), or call the transform in the step "
            "and leave out `augment`."
        )


# -- the loaders of a trainer ----------------------------------------------------------------------


def combined_mode(loaders: object) -> str | None:
    """Return how a CombinedLoader combines, such as ``"max_size"``; None: it is none."""
    mode: str | None = _private(loaders, "_mode")
    return None if _private(loaders, "flattened") is None else mode


def watch_sources(
    trainer: Trainer,
    stages: Collection[Stage],
    watch: Callable[[Stage, object], object],
) -> None:
    """Show a trainer's loaders before they are iterated, in one run.

    ``watch`` returns None, or what is to be iterated in their place.

    Lightning calls no hook between getting a loader and starting its workers. Where a version has
    no data source, the loaders are seen when the training starts.
    """
    loops: list[tuple[Stage, object]] = [
        ("train", trainer.fit_loop),
        ("val", trainer.fit_loop.epoch_loop.val_loop),
        ("val", trainer.validate_loop),
        ("test", trainer.test_loop),
        ("predict", trainer.predict_loop),
    ]
    for stage, loop in loops:
        source = data_source(loop) if stage in stages else None
        if source is not None:
            shown = _ShownLoaders(source.dataloader, stage, watch)
            replace_for_one_run(trainer, source, "dataloader", shown)


class _ShownLoaders:
    """A data source's ``dataloader``, which shows what it returns."""

    def __init__(
        self,
        ask: Callable[[], object],
        stage: Stage,
        watch: Callable[[Stage, object], object],
    ) -> None:
        self.ask = ask
        self.stage = stage
        self.watch = watch

    def __call__(self) -> object:
        loaders = self.ask()
        others = self.watch(self.stage, loaders)
        return loaders if others is None else others

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object]]:
        # A copy of the trainer is not measured.
        return itself, (self.ask,)


class EmptyLoaders:
    """Makes Lightning's CombinedLoader one that has no loaders.

    Lightning takes an empty list or dict for a loader itself, whose length is 0, and warns of that.
    """

    @property
    def flattened(self) -> list[Any]:
        """The loaders: none at all."""
        return []

    @flattened.setter
    def flattened(self, flattened: list[Any]) -> None:
        """Ignore what Lightning has prepared, which is none, too."""


def flattened(loaders: object) -> Iterator[Any]:
    """Return a trainer's loaders one by one, in whatever form they come."""
    return (loader for _, loader in with_paths(loaders))


def mapped(loaders: Any, function: Callable[[Any], object]) -> Any:
    """Return a trainer's loaders in the same form, each replaced by what the function returns."""
    mode = combined_mode(loaders)
    if mode is not None:
        kind: Callable[..., Any] = type(loaders)
        return kind(mapped(loaders.iterables, function), mode=mode)
    if isinstance(loaders, Mapping):
        return {key: mapped(loader, function) for key, loader in loaders.items()}
    if isinstance(loaders, list | tuple):
        return [mapped(loader, function) for loader in loaders]
    return None if loaders is None else function(loaders)


def labelled(loaders: object) -> list[tuple[str, Any]]:
    """Return several loaders, each with its key as the user wrote it; empty if there is one.

    For sentences, e.g. ``loader 'images'``, ``loader 1`` or ``loader 'pairs'[0]``.
    """
    found = [
        (f"loader {path[0]!r}{''.join(f'[{key!r}]' for key in path[1:])}", loader)
        for path, loader in with_paths(loaders)
        if path
    ]
    return found if len(found) > 1 else []


def with_paths(
    loaders: Any, path: tuple[object, ...] = ()
) -> Iterator[tuple[tuple[object, ...], Any]]:
    """Yield a trainer's loaders with the keys and positions under which each is found."""
    if hasattr(loaders, "iterables") and hasattr(loaders, "flattened"):  # a CombinedLoader
        loaders = loaders.iterables
    # A loader of the user's may be a sequence of another class.
    inner = children(loaders) if isinstance(loaders, Mapping | list | tuple) else None
    for key, loader in inner or ():
        yield from with_paths(loader, (*path, key))
    if inner is None and loaders is not None:
        yield path, loaders


def average_exactly(trainer: Trainer) -> None:
    """Keep a trainer's strategy from rounding the mean of whole numbers over the ranks, in one run.

    An epoch's mean in ``self.log(..., sync_dist=True)`` is the mean of the ranks' sums over the
    mean of their counts. Lightning rounds the latter down, because counts are integers: 11 samples
    on two ranks count as 2 * 5, and the logged mean is a tenth too large.
    """
    strategy = trainer.strategy
    if not isinstance(strategy.reduce, _ExactMeans):
        replace_for_one_run(trainer, strategy, "reduce", _ExactMeans(strategy.reduce))


class _ExactMeans:
    """A strategy's ``reduce`` whose means of integers are floating-point numbers.

    It is no ``functools.partial``: Lightning makes one of it for each value that is logged, and
    copies that. A partial of a partial holds the inner function alone, so that the copy would be
    one of the strategy, with the weights and the processes that it started. Nor is it a dataclass,
    which Lightning would look into.

    It equals what it replaces: a trainer keeps what was logged, and refuses a value that is logged
    again, in a later run or once there is validation, with another function for the ranks.
    """

    def __init__(self, reduce: Callable[..., object]) -> None:
        self.reduce = reduce

    def __eq__(self, other: object) -> bool:
        return self.reduce == (other.reduce if isinstance(other, _ExactMeans) else other)

    def __hash__(self) -> int:
        return hash(self.reduce)

    def __call__(self, tensor: object, group: object = None, reduce_op: object = "mean") -> object:
        if isinstance(tensor, torch.Tensor) and reduce_op in ("mean", "avg"):
            whole = not (tensor.is_floating_point() or tensor.is_complex())
            tensor = tensor.to(torch.get_default_dtype()) if whole else tensor
        return self.reduce(tensor, group=group, reduce_op=reduce_op)


# -- how far a training has come -------------------------------------------------------------------


def running_stage(trainer: Trainer | None) -> Stage | None:
    """Return the stage of the trainer method that runs now; ``"train"`` during all of a fit."""
    method = None if trainer is None else trainer.state.fn
    return None if method is None else STAGES_OF[method.value][0]


def is_running(trainer: Trainer | None) -> bool:
    """Return whether a method of a trainer runs now."""
    return trainer is not None and trainer.state.fn is not None and not trainer.state.stopped


def training_place(trainer: Trainer | None) -> Place:
    """Return how far a training has come.

    A batch is taken when its training step has ended: if the step fails, or a checkpoint is written
    before, the weights know nothing of it.
    """
    if trainer is None:
        return Place(0, 0, last=False)
    loop: Any = trainer.fit_loop
    epochs, batches = loop.epoch_progress.current, loop.epoch_loop.batch_progress
    if not epochs.ready == epochs.started == epochs.processed + 1:  # between two epochs
        if _was_cut(trainer):
            return Place(int(epochs.processed) - 1, int(batches.current.processed), last=False)
        return Place(int(epochs.processed), 0, last=False)
    taken = int(batches.current.processed)
    last = bool(batches.is_last_batch) and taken == batches.current.ready
    return Place(int(epochs.processed), taken, last=last, within=began_from_file(trainer))


def batches_per_epoch(trainer: Trainer | None) -> int | None:
    """Return how many batches a fit takes in each epoch; None: not known, or as a stream has."""
    count = None if trainer is None else trainer.num_training_batches
    return int(count) if count and count != float("inf") else None


def _was_cut(trainer: Trainer) -> bool:
    """Return whether a training was ended within its last epoch, which Lightning counts as over.

    ``max_steps``, ``max_time`` and ``should_stop`` end it so.
    """
    loop: Any = trainer.fit_loop
    batches, steps = loop.epoch_loop.batch_progress, trainer.max_steps
    stopped = trainer.should_stop or 0 <= steps <= trainer.global_step
    return stopped and not batches.is_last_batch and batches.current.processed > 0


def forget_unfinished_epoch(trainer: Trainer) -> None:
    """Have a trainer count an epoch within which its last fit was interrupted as not begun.

    The next fit begins that epoch anew, which Lightning counts as a second one: until the end of
    the fit its counts would say that no epoch is under way.
    """
    loop: Any = trainer.fit_loop
    for counts in (loop.epoch_progress.current, loop.epoch_progress.total):
        counts.ready = counts.started = counts.completed = counts.processed


def is_to_be_restored(trainer: Trainer) -> bool:
    """Return whether a fit goes on from a checkpoint, whose counts are not restored yet."""
    total: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    fits = running_stage(trainer) == "train" and trainer.ckpt_path is not None
    return fits and not began_from_file(trainer) and not total.ready


def began_from_file(trainer: Trainer) -> bool:
    """Return whether a fit that was resumed from a file is still in its first epoch."""
    return bool(_private(trainer.fit_loop, "_loaded_from_state_dict"))


def mend_counts(trainer: Trainer, epoch_saved: int) -> None:
    """Mend the counts of a checkpoint that is about to be loaded, for Lightning 2.6.

    Lightning tells what comes next from which of its counts differ, and is wrong in five cases. A
    batch whose step was interrupted stays in the totals for ever, so that the next checkpoint after
    a step goes on one batch short. After a checkpoint of an epoch's last step, the next epoch is
    not counted as begun. Between two epochs, an epoch is left out or counted twice where the
    batches of the one before are still counted. And an epoch within which the training was ended is
    counted as over, where by our own ``epoch_saved`` it is not. Behind the last batch of an epoch,
    in its validation, the number of batches is compared with that of the loader now, which may give
    others: at 0 that comparison comes out right for any number.
    """
    loops = _loaded_counts(trainer)
    if not {"epoch_progress", "epoch_loop.batch_progress", "epoch_loop.state_dict"} <= loops.keys():
        return
    epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
    epoch, batch = epochs["current"], batches["current"]
    if epoch["processed"] == epoch_saved + 1 and batch["processed"]:
        for name in ("processed", "completed"):
            epochs["total"][name] -= epoch[name] - epoch_saved
            epoch[name] = epoch_saved
    if batch["ready"] > batch["processed"]:
        batches["is_last_batch"] = False
    stepped = batch["processed"] - batch["completed"]
    within = epoch["ready"] == epoch["started"] == epoch["processed"] + 1
    if within and stepped and batches["is_last_batch"]:
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] += 1
        over = epoch["started"]
    else:
        over = epoch["processed"]
        if within and batches["is_last_batch"]:
            batch.update(dict.fromkeys(batch, 0))
    if not within or over == epoch["started"]:
        for name in epoch:
            epochs["total"][name] += over - epoch[name]
            epoch[name] = over
            batch[name] = 0
        batches["is_last_batch"], stepped = False, 0
    total = batches["total"]
    batch["ready"] = batch["started"] = batch["processed"]
    total["ready"] = total["started"] = total["processed"]
    total["completed"] = total["processed"] - stepped


def _loaded_counts(trainer: Trainer) -> dict[str, Any]:
    """Return the counts of a checkpoint from which a fit goes on; empty: there are none."""
    loaded = _private(trainer, "_checkpoint_connector", "_loaded_checkpoint") or {}
    counts: dict[str, Any] = loaded.get("loops", {}).get("fit_loop", {})
    return counts


def move_place(trainer: Trainer, place: Place, given: Collection[tuple[int, int]]) -> Place:
    """Have a training that goes on at a place count its batches as its loaders give them now.

    They give what is left of the epoch in larger or smaller batches, and Lightning ends the epoch
    by the number of batches. ``given``: for each loader that may end the epoch, its batches in all
    of it, and those from here on. Return the new place, or the old one if the run is not there.
    """
    early = is_to_be_restored(trainer)
    if not given or not (early or training_place(trainer)[:2] == place[:2]):
        return place
    loop: Any = trainer.fit_loop
    counts: dict[str, int] = vars(loop.epoch_loop.batch_progress.current)
    if early:  # Lightning has the counts of the checkpoint still to restore
        counts = _loaded_counts(trainer).get("epoch_loop.batch_progress", {}).get("current", {})
    ends = min if combined_mode(_private(loop, "_combined_loader")) == "min_size" else max
    length, left = (ends(numbers) for numbers in zip(*given, strict=True))
    taken, counted = place.taken, length - left
    counts.update({name: number + counted - taken for name, number in counts.items()})
    if _private(loop, "_data_fetcher", "fetched") == taken:
        loop._data_fetcher.fetched = counted  # batches of before the resume
    return place._replace(taken=counted)


def steps_logged_by(trainer: Trainer, counted: int) -> int:
    """Return the step at which Lightning itself logs; where that is not known, what was counted.

    Lightning counts batches that ended in an optimizer step, which differs from ``global_step``
    with several optimizers.
    """
    stepped = _private(trainer.fit_loop.epoch_loop, "_batches_that_stepped")
    return counted if stepped is None else int(stepped)


def end_validations_by_clock(trainer: Trainer) -> bool:
    """Have a trainer validate by its batches; return whether it did so by the clock.

    Lightning 2.6 does, if ``val_check_interval`` is a time; the trainer then has no such attribute.
    """
    by_clock = _private(trainer, "_val_check_time_interval") is not None
    if by_clock:
        vars(trainer)["_val_check_time_interval"] = None
    return by_clock


# -- what else a data module and a callback ask of their trainer -----------------------------------


def own_datamodule(trainer: Trainer) -> DataModule | None:
    """Return the trainer's data module if it is a FastDataModule, else None."""
    from lightning_fastdata.plugin.module import DataModule  # which imports this

    datamodule = attributes_of(trainer).datamodule
    return datamodule if isinstance(datamodule, DataModule) else None


def refuse_other_tree(datamodule: object, trainer: Trainer) -> None:
    """Raise OptionsError if a Trainer and a data module are of different packages of Lightning.

    Lightning itself would say "Expected a parent".
    """
    ours, its = package_of(datamodule), package_of(trainer)
    if ours and its and ours != its:
        raise OptionsError(
            f"{type(datamodule).__name__} is a data module of {ours}, and the Trainer one of "
            f"{its}, which takes its own only. Write `from {home_of(its)} import FastDataModule, "
            f"DataThroughputCallback`, or `from {ours} import Trainer`."
        )


def loss_scaler(trainer: Trainer) -> torch.amp.GradScaler | None:
    """Return what scales the loss of a trainer in half precision; None: nothing does."""
    return getattr(trainer.precision_plugin, "scaler", None)


def part_of_rank(trainer: Trainer) -> int:
    """Return the number of the part of the data that this rank takes.

    Ranks that compute one model together (``ModelParallelStrategy``) take the same part.
    """
    kwargs = trainer.distributed_sampler_kwargs
    return trainer.global_rank if kwargs is None else int(kwargs["rank"])


def of_ranks(trainer: Trainer, value: int) -> int:
    """Return the largest value that any rank gives; all ranks have to call this."""
    shared = torch.tensor(value, dtype=torch.int64, device=trainer.strategy.root_device)
    if trainer.world_size > 1:
        torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX)
    return int(shared)


def log_folder(trainer: Trainer) -> str:
    """Return ``trainer.log_dir``, or its root folder; what it is on the first rank counts.

    ``log_dir`` waits until all ranks ask for it, and some may have no callback of this package.
    """
    logger: Any = trainer.logger
    loggers = importlib.import_module(f"{package_of(trainer)}.loggers")
    known = isinstance(logger, loggers.TensorBoardLogger | loggers.CSVLogger)
    folder: str | None = getattr(logger, "log_dir" if known else "save_dir", None)
    return folder or trainer.default_root_dir


def print_line(trainer: Trainer, text: str) -> None:
    """Print a line above the bar, if there is one."""
    bar: Any = trainer.progress_bar_callback
    if getattr(bar, "is_enabled", False) and hasattr(bar, "print"):
        bar.print(text)
        return
    sys.stdout.write(f"{text}\n")


def close_progress_bar(trainer: Trainer) -> None:
    """Close the bar, whose own teardown may come after ours and would draw over the summary.

    Both of Lightning's bars are closed by these public names, and closing twice is harmless.
    """
    bar = trainer.progress_bar_callback
    rich_progress = held(bar, "progress")
    if rich_progress is not None:
        rich_progress.stop()
        return
    for stage in STAGES:
        with suppress(AttributeError, TypeError):  # TQDM's raise a TypeError before first use
            getattr(bar, f"{stage}_progress_bar").close()


def trainer_like(datamodule: object) -> Trainer:
    """Return a trainer on the CPU, of the package that a data module belongs to."""
    package = package_of(datamodule)
    said = logging.getLogger(f"{package}.utilities.rank_zero")
    level = said.level
    said.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer: Trainer = importlib.import_module(package).Trainer(
                accelerator="cpu",
                devices=1,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
    finally:
        said.setLevel(level)
    return trainer


def hide_loggers(trainer: Trainer, folder: str) -> list[Path]:
    """Have a trainer log nowhere, and return the folders in which its loggers would have written.

    Who asks for these is told ``folder``. Loggers wrote nothing so far, as Lightning took this
    process for another than the first.
    """
    rank_zero_only.rank = trainer.global_rank
    named = [getattr(one, "log_dir", None) for one in trainer.loggers]
    _silence(trainer, folder)
    return [Path(each) for each in named if each is not None]


def _silence(trainer: Trainer, folder: str | None = None) -> None:
    """Have a trainer log nowhere; it and its loggers name this folder, or the one as before."""
    dummy = importlib.import_module(f"{package_of(trainer)}.loggers.logger").DummyLogger

    def silent(logger: Any) -> Any:
        place = folder or getattr(logger, "log_dir", None) or logger.save_dir
        # The trainer takes the second from loggers that it does not know.
        return type("SilentLogger", (dummy,), {"log_dir": place, "save_dir": place})()

    trainer.loggers = [silent(logger) for logger in trainer.loggers]


@contextmanager
def unseen_steps(trainer: Trainer, pl_module: LightningModule) -> Iterator[None]:
    """Hide what happens in the block from callbacks, loggers and profiler; ``self.log`` is silent.

    After the block, all that was replaced for it is as before.
    """
    profilers = importlib.import_module(f"{package_of(trainer)}.profilers")
    hidden, attributes = attributes_of(trainer), vars(pl_module)
    kept = hidden.callbacks, trainer.loggers, hidden.profiler
    shadowed = {name: attributes[name] for name in {"log", "log_dict"} & attributes.keys()}
    hidden.callbacks = []
    _silence(trainer)
    hidden.profiler = profilers.PassThroughProfiler()
    attributes.update(log=nothing, log_dict=nothing)
    try:
        yield
    finally:
        hidden.callbacks, trainer.loggers, hidden.profiler = kept
        del attributes["log"], attributes["log_dict"]
        attributes.update(shadowed)


def nothing(*_: object, **__: object) -> None:
    """Take the place of ``self.log``, ``self.log_dict`` and ``trainer.save_checkpoint``."""

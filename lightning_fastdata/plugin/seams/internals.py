"""The only place that reads private names of Lightning; ``docs/seams.md`` says what for.

Read: ``_data_source`` of a loop, and its ``instance``; ``_loaded_from_state_dict``,
``_combined_loader`` and ``_data_fetcher`` of the fit loop, of the latter ``fetched``, which is set,
too; ``epoch_progress`` and ``batch_progress`` of its loops; ``_batches_that_stepped`` of the epoch
loop; ``_accelerator_connector``, ``_data_connector`` of a trainer, of the latter
``_datahook_selector``; ``_loaded_checkpoint`` of its ``_checkpoint_connector``, whose counts are
set, too; ``_results`` of a trainer, whose ``batch_size`` is set; ``_mode`` of a CombinedLoader.

Replaced on one object, never on a class, until the run of its trainer ends:

- in :mod:`.profiler_tee`: ``trainer.profiler``
- in :mod:`.loaders`: ``dataloader`` of a loop's data source, ``reduce`` of the strategy
- in :mod:`.hooks`: ``on_after_batch_transfer`` of a module, ``get_instance`` of the hook selector
- in :mod:`..module`: its own ``val_dataloader``, where nothing is to be validated
- here: ``teardown`` of the strategy, which puts back what :func:`replace_for_one_run` replaced
- in :mod:`..watch.recording`: ``batch_to_device`` of the strategy
- in :mod:`..guard.callback`: ``run`` of the automatic optimization, ``batch_to_device`` of the
  strategy; in :mod:`..guard.parts`, for one batch: ``training_step``, ``optimizer_zero_grad`` and
  ``log`` of the module
- in :mod:`..proving`, until the script ends: ``save_checkpoint``, ``callbacks`` and ``loggers`` of
  the trainer
- in :mod:`.trainer`, during the steps that the batch-size guard tries: ``callbacks``, ``loggers``
  and ``profiler`` of the trainer, ``log`` and ``log_dict`` of the module

``tests/plugin/test_seams.py`` pins each of them against the installed Lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from lightning_fastdata.batches.staged import packed_documents

if TYPE_CHECKING:
    from lightning.pytorch import Callback, Trainer
    from lightning.pytorch.strategies import Strategy

_Value = TypeVar("_Value")


class TrainerAttributes(Protocol):
    """Attributes of a trainer that other classes of Lightning set, unseen by a type checker."""

    datamodule: object
    callbacks: list[Callback]
    profiler: Any
    log_every_n_steps: int
    overfit_batches: int | float
    reload_dataloaders_every_n_epochs: int


def attributes_of(trainer: Trainer) -> TrainerAttributes:
    """Return the trainer, with types for the attributes that its class does not declare."""
    return cast("TrainerAttributes", trainer)


def _private(owner: object, *path: str) -> Any:
    """Return an attribute, or that of an attribute and so on; None where a version lacks one."""
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


def began_from_file(trainer: Trainer) -> bool:
    """Return whether a fit that resumes from a file has not ended its first epoch; else False."""
    return bool(_private(trainer.fit_loop, "_loaded_from_state_dict"))


def counts_to_load(trainer: Trainer) -> dict[str, Any]:
    """Return the counts of its loops that a fit that resumes is about to load; empty: not known."""
    loaded = _private(trainer, "_checkpoint_connector", "_loaded_checkpoint") or {}
    counts: dict[str, Any] = loaded.get("loops", {}).get("fit_loop", {})
    return counts


def count_fetched(trainer: Trainer, fetched: int, counted: int) -> None:
    """Have a fetcher that counts so many batches of before the resume count another number."""
    fetcher = _private(trainer.fit_loop, "_data_fetcher")
    if fetcher is not None and _private(fetcher, "fetched") == fetched:
        fetcher.fetched = counted


def batches_that_stepped(trainer: Trainer) -> int | None:
    """Return the step at which Lightning itself logs; None: not known.

    It counts batches that ended in an optimizer step, which differs from ``global_step`` with
    several optimizers.
    """
    stepped: int | None = _private(trainer.fit_loop.epoch_loop, "_batches_that_stepped")
    return stepped


def spreads_samples(trainer: Trainer) -> bool:
    """Return what ``use_distributed_sampler`` was given; its default, True, where not known."""
    given = _private(trainer, "_accelerator_connector", "use_distributed_sampler")
    return given is None or bool(given)


def forget_training_loader(trainer: Trainer) -> None:
    """Have a trainer ask for its training loader again, as Lightning's batch-size finder does.

    Without the name a loader that was made already keeps its batch size.
    """
    if _private(trainer.fit_loop, "_combined_loader") is not None:
        trainer.fit_loop._combined_loader = None


def hook_selector(trainer: Trainer) -> Any:
    """Return what chooses, by ``get_instance(name)``, whose transfer hook runs; None: not known.

    Each run has one of its own, made before the data module gets its trainer.
    """
    selector = _private(trainer, "_data_connector", "_datahook_selector")
    return selector if callable(_private(selector, "get_instance")) else None


def count_documents(trainer: Trainer, batch: object) -> None:
    """Have the means that Lightning logs weigh a batch of packed documents by their number.

    It would warn that their tensors are of different lengths, and weigh each batch the same.
    """
    documents = packed_documents(batch)
    # The trainer takes some microseconds to find them, which most batches need not pay.
    results = None if documents is None else _private(trainer, "_results")
    if results is not None and hasattr(results, "batch_size"):
        results.batch_size = documents


def combined_mode(loaders: object) -> str | None:
    """Return how a CombinedLoader combines, such as ``"max_size"``; None: it is none."""
    mode: str | None = _private(loaders, "_mode")
    return None if _private(loaders, "flattened") is None else mode


def itself(value: _Value) -> _Value:
    """Return what was given: so a copy of a trainer gets what was there before a replacement.

    And so a data module gets a dataset that was given to it; unlike a lambda, it can be pickled.
    """
    return value


def replace_for_one_run(trainer: Trainer, owner: object, name: str, value: object) -> None:
    """Replace an attribute of one object, and put it back when the trainer's run ends.

    Every run ends in ``strategy.teardown()``, after an exception, too. The hooks of a data module
    or LightningModule, which users override without ``super()``, would not do.

    The value is to be picklable, and is copied with the trainer.
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

"""Everything that is asked of Lightning beyond its documented hooks, and nothing anywhere else.

Private names that are read, all of them in :mod:`~lightning_fastdata.plugin.seams.internals`:

- ``_data_source`` of a loop: to see loaders before their workers start
- ``_loaded_from_state_dict`` of the fit loop: which epoch a resumed fit begins with
- ``_batches_that_stepped`` of the epoch loop: Lightning's own x axis
- ``_combined_loader`` of the fit loop: to ask again for a loader of another batch size
- ``_accelerator_connector`` of a trainer: whether Lightning spreads samples over the ranks
- ``_data_connector`` of a trainer, with ``_datahook_selector`` and ``_prepare_dataloader``: where
  Lightning warns of what a FastDataModule does not do
- ``_mode`` of a CombinedLoader: to combine loaders again in the same way
- ``_prefix`` of a TensorBoardLogger: to write all scalars of a step at once
- ``_compiler_ctx`` of a LightningModule: whether its step was compiled

Attributes that are replaced on one object, never on a class, until the run of its trainer ends:

- ``trainer.profiler``: :mod:`~lightning_fastdata.plugin.seams.profiler_tee`
- ``dataloader`` of a loop's data source: :mod:`~lightning_fastdata.plugin.seams.loaders`
- ``on_after_batch_transfer`` of a module:
  :mod:`~lightning_fastdata.plugin.seams.hooks`
- ``reduce`` of the strategy, ``_prepare_dataloader`` of the data connector:
  :mod:`~lightning_fastdata.plugin.seams.loaders`
- ``get_instance`` of the hook selector: :mod:`~lightning_fastdata.plugin.seams.hooks`
- ``teardown`` of the strategy, which puts back what the last two lines name:
  :mod:`~lightning_fastdata.plugin.seams.internals`
- ``callbacks``, ``loggers``, ``profiler`` of the trainer, ``log`` and ``log_dict`` of the module,
  for the steps that the batch-size guard tries:
  :mod:`~lightning_fastdata.plugin.seams.trainer`

``tests/plugin/test_seams.py`` pins each of them against the installed Lightning, and
``docs/seams.md`` says what happens where one is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import Strategy


class TrainerAttributes(Protocol):
    """Attributes of a trainer that other classes of Lightning set, unseen by a type checker."""

    datamodule: object
    callbacks: list[Callback]
    profiler: Any
    fast_dev_run: bool | int
    log_every_n_steps: int


def attributes_of(trainer: Trainer) -> TrainerAttributes:
    """Return the trainer, with types for the attributes that its class does not declare."""
    return cast("TrainerAttributes", trainer)


def data_source(loop: object) -> Any:
    """Return the object that a loop asks for its loaders by ``dataloader()``; None: there is none.

    Lightning calls no hook between getting a loader and starting its workers.
    """
    source = getattr(loop, "_data_source", None)
    replaceable = hasattr(source, "__dict__") and callable(getattr(source, "dataloader", None))
    return source if replaceable else None


def began_from_file(trainer: Trainer) -> bool:
    """Return whether a fit that resumes from a file has not ended its first epoch; else False."""
    return bool(getattr(trainer.fit_loop, "_loaded_from_state_dict", False))


def batches_that_stepped(trainer: Trainer) -> int | None:
    """Return the step at which Lightning itself logs; None: not known.

    It counts batches that ended in an optimizer step, which differs from ``global_step`` with
    several optimizers.
    """
    return getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", None)


def spreads_samples(trainer: Trainer) -> bool:
    """Return what ``use_distributed_sampler`` was given; its default, True, where not known."""
    connector = getattr(trainer, "_accelerator_connector", None)
    return bool(getattr(connector, "use_distributed_sampler", True))


def forget_training_loader(trainer: Trainer) -> None:
    """Have a trainer ask for its training loader again, as Lightning's batch-size finder does.

    Without the name a loader that was made already keeps its batch size.
    """
    if getattr(trainer.fit_loop, "_combined_loader", None) is not None:
        trainer.fit_loop._combined_loader = None


def data_connector(trainer: Trainer) -> Any:
    """Return what asks a FastDataModule for its loaders and spreads them; None: not known."""
    connector = getattr(trainer, "_data_connector", None)
    return connector if callable(getattr(connector, "_prepare_dataloader", None)) else None


def hook_selector(trainer: Trainer) -> Any:
    """Return what chooses, by ``get_instance(name)``, whose transfer hook runs; None: not known.

    Each run has one of its own, made before the data module gets its trainer.
    """
    connector = getattr(trainer, "_data_connector", None)
    selector = getattr(connector, "_datahook_selector", None)
    return selector if callable(getattr(selector, "get_instance", None)) else None


def combined_mode(loaders: object) -> str | None:
    """Return how a CombinedLoader combines, such as ``"max_size"``; None: it is none."""
    return getattr(loaders, "_mode", None) if hasattr(loaders, "flattened") else None


def scalar_prefix(logger: object) -> str | None:
    """Return what a logger puts before the name of each scalar; None: not known."""
    return getattr(logger, "_prefix", None)


def is_compiled(pl_module: LightningModule) -> bool:
    """Return whether a module was made by ``torch.compile``; False where that is not known."""
    return getattr(pl_module, "_compiler_ctx", None) is not None


def replace_for_one_run(trainer: Trainer, owner: object, name: str, value: object) -> None:
    """Replace an attribute of one object, and put it back when the trainer's run ends.

    Every run ends in ``strategy.teardown()``, after an exception, too. The hooks of a data module
    or LightningModule, which users override without ``super()``, would not do.

    Args:
        trainer: In its run, or before it.
        owner: Has the attribute; its class is not touched.
        name: Of the attribute.
        value: What it is from now on. To be picklable, and copied with the trainer.
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
        self.before: list[tuple[object, str, dict[str, Any]]] = []

    def replace(self, owner: object, name: str, value: object) -> None:
        attributes = vars(owner)
        self.before.append((owner, name, {n: v for n, v in attributes.items() if n == name}))
        attributes[name] = value

    def __call__(self) -> None:
        for owner, name, before in reversed(self.before):
            vars(owner).pop(name, None)
            vars(owner).update(before)
        self.strategy.teardown()

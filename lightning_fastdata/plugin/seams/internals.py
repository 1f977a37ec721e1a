"""The private names of Lightning that are read, and what holds where a version has none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


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

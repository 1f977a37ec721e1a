"""Training steps that the callbacks, loggers and the profiler of a trainer do not see."""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightning_fastdata.plugin.seams.hooks import PACKAGES
from lightning_fastdata.plugin.seams.trainer_facts import attributes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning.pytorch import LightningModule, Trainer


@contextmanager
def unseen_steps(trainer: Trainer, pl_module: LightningModule) -> Iterator[None]:
    """Hide what happens in the block from callbacks, loggers and profiler; ``self.log`` is silent.

    All that is replaced for it is as it was behind the block.
    """
    modules = (kind.__module__ for kind in type(trainer).__mro__)
    package = next(name for name in modules if name.startswith(PACKAGES)).split(".trainer")[0]
    loggers = importlib.import_module(f"{package}.loggers.logger")
    profilers = importlib.import_module(f"{package}.profilers")
    hidden = attributes_of(trainer)
    kept = hidden.callbacks, trainer.loggers, hidden.profiler
    attributes = vars(pl_module)
    shadows = {name: attributes.get(name) for name in ("log", "log_dict")}
    hidden.callbacks = []
    trainer.loggers = [loggers.DummyLogger() for _ in trainer.loggers]
    hidden.profiler = profilers.PassThroughProfiler()
    attributes.update(dict.fromkeys(shadows, lambda *_, **__: None))
    try:
        yield
    finally:
        hidden.callbacks, trainer.loggers, hidden.profiler = kept
        for name, shadow in shadows.items():
            del attributes[name]
            if shadow is not None:
                attributes[name] = shadow

"""Training steps that the callbacks, loggers and the profiler of a trainer do not see."""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lightning.pytorch import LightningModule, Trainer

PACKAGES: Final = ("lightning.pytorch.", "pytorch_lightning.")
"""How the modules of Lightning's two packages begin."""


@contextmanager
def unseen_steps(trainer: Trainer, pl_module: LightningModule) -> Iterator[None]:
    """Hide what happens in the block from callbacks, loggers and profiler; ``self.log`` is silent.

    All that is replaced for it is as it was behind the block.
    """
    modules = (kind.__module__ for kind in type(trainer).__mro__)
    package = next(name for name in modules if name.startswith(PACKAGES)).split(".trainer")[0]
    loggers = importlib.import_module(f"{package}.loggers.logger")
    profilers = importlib.import_module(f"{package}.profilers")
    hidden: Any = trainer  # Lightning types these attributes as its own lists
    kept = hidden.callbacks, hidden.loggers, hidden.profiler
    attributes = vars(pl_module)
    shadows = {name: attributes.get(name) for name in ("log", "log_dict")}
    hidden.callbacks = []
    hidden.loggers = [loggers.DummyLogger() for _ in hidden.loggers]
    hidden.profiler = profilers.PassThroughProfiler()
    attributes.update(dict.fromkeys(shadows, lambda *_, **__: None))
    try:
        yield
    finally:
        hidden.callbacks, hidden.loggers, hidden.profiler = kept
        for name, shadow in shadows.items():
            del attributes[name]
            if shadow is not None:
                attributes[name] = shadow

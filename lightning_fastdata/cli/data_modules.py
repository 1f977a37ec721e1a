"""What the command line does with a data module that a user names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lightning_fastdata.errors import OptionsError
from lightning_fastdata.host.machine import import_by_name
from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.plugin.data.time_travel import TimeTravel
from lightning_fastdata.plugin.seams.loaders import flattened
from lightning_fastdata.tree import name_of

if TYPE_CHECKING:
    from lightning_fastdata.executors.ray.cluster_seen import ClusterOffer


def open_datamodule(spec: str, hyperparameters: Mapping[str, object]) -> Any:
    """Return the data module that a user named as ``MODULE:NAME``; nothing else is imported.

    Raises:
        OptionsError: The text does not name one.
    """
    module_name, _, name = spec.rpartition(":")
    if not module_name or not name:
        raise OptionsError(
            f"{spec!r} does not say where the data module is. Write MODULE:NAME, for example "
            "train:Data for `class Data(FastDataModule)` in train.py."
        )
    found = vars(import_by_name(module_name, "the data module"))
    if name not in found:
        raise OptionsError(f"{module_name} has no {name!r}.")
    return _made(found[name], hyperparameters)


def _made(found: object, hyperparameters: Mapping[str, Any]) -> TimeTravel:
    """Return a data module, with its datasets, from what a user named.

    Args:
        found: A data module, a function that returns one, or a class.
        hyperparameters: What the class is made with, of what it takes.

    Raises:
        OptionsError: It is none of these, or cannot be made.
    """
    given: Mapping[str, Any] = {}
    if isinstance(found, type):
        taken = inspect.signature(found).parameters
        several = any(one.kind is one.VAR_KEYWORD for one in taken.values())
        given = {n: v for n, v in hyperparameters.items() if several or n in taken}
    made: Any = found
    if callable(found) and not isinstance(found, TimeTravel):
        try:
            made = found(**given)
        except TypeError as error:
            raise OptionsError(
                f"{name_of(found)} cannot be called with "
                f"{', '.join(given) or 'no arguments'}: {error}. Name a function without arguments "
                "that returns the data module of the run."
            ) from error
    if not isinstance(made, TimeTravel):
        raise OptionsError(
            f"{made!r:.200} is no FastDataModule. Name one, its class, or a function that returns "
            "it."
        )
    made.prepare_data()  # type: ignore[attr-defined]  # Lightning's, as its trainer calls it
    made.setup("fit")  # type: ignore[attr-defined]
    return made


def plan_actors(
    spec: str, offer: ClusterOffer, step_ms: float, tell: Callable[[str], object]
) -> None:
    """Say how many actors of a cluster would feed the training loaders of a data module.

    Args:
        spec: Names the data module.
        offer: What the cluster has.
        step_ms: What a training step takes besides waiting for its batch.
        tell: Is given texts to be printed.
    """
    from lightning_fastdata.insight.remote_plan import CORES, plan_remote

    mb_per_s, latency_ms = offer.slowest_link
    room = max(1, offer.room)
    cores = sorted({room, *(each for each in CORES if each < room)})
    for loader in flattened(open_datamodule(spec, {}).train_dataloader()):
        if isinstance(loader, FastDataLoader):
            plan = plan_remote(
                loader, step_ms=step_ms, cores=cores, mb_per_s=mb_per_s, latency_ms=latency_ms
            )
            tell(f"\n{spec}, {type(loader.dataset).__name__}\n{plan.text()}\n{plan.advice(room)}")

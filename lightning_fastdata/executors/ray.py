"""Actors of a Ray cluster that fetch: on this machine, or on others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_fastdata.errors import OptionsError, is_number

__all__ = ["Ray"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Ray:
    """``executor=Ray(...)``: ``num_workers`` actors of a Ray cluster read, each with these options.

    ``executor="ray"`` is ``Ray()``. Ray itself need not be installed to make one.

    Args:
        num_cpus: CPUs that each actor holds; 0: it runs beside whoever holds them.
        memory: Bytes that each actor holds; None: not counted.
        resources: Amounts of the cluster's own resources that each actor holds, by name.
        label_selector: Labels of the nodes where actors may run, as ``{"zone": "a"}``.
        scheduling_strategy: As ``ray.remote`` takes it; None: ``"SPREAD"``.
        runtime_env: Files, packages and variables of each actor, as ``ray.remote`` takes them.
        options: Whatever else ``ray.remote`` takes, as ``{"accelerator_type": "A100"}``.

    Raises:
        OptionsError: A value is impossible.
    """

    # Described above and not below each field, because that is where LightningCLI takes its help.
    num_cpus: float = 1
    memory: float | None = None
    resources: Mapping[str, float] | None = None
    label_selector: Mapping[str, str] | None = None
    scheduling_strategy: Any = None
    runtime_env: Mapping[str, Any] | None = None
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("num_cpus", "memory"):
            value = getattr(self, name)
            number = is_number(value) and type(value) is not bool and value >= 0
            if not (number or (value is None and name == "memory")):
                raise OptionsError(f"{name} of Ray is {value!r}; allowed are numbers from 0.")
        for name in ("resources", "label_selector", "runtime_env", "options"):
            value = getattr(self, name)
            if not isinstance(value, Mapping | None):
                raise OptionsError(f"{name} of Ray is {value!r}; allowed are None and a dict.")

    def __repr__(self) -> str:
        given = (f"{name}={value!r}" for name, value in self.given.items())
        return f"Ray({', '.join(given)})"

    @property
    def given(self) -> dict[str, Any]:
        """Arguments that differ from those of ``Ray()``, by name."""
        values = ((each, getattr(self, each.name)) for each in fields(self))
        return {each.name: value for each, value in values if value != each.default}


def options_of_actors(executor: str | Ray) -> dict[str, Any]:
    """Return what each actor is started with, as ``ray.remote`` takes it."""
    ray = executor if isinstance(executor, Ray) else Ray()
    given = {"num_cpus": ray.num_cpus, **ray.given}
    return {**given.pop("options", {}), **given}

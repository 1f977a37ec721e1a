"""What waiting for data costs: hours of devices, money and energy, so far, an epoch, and a day."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Final

from lightning_fastdata.planning.options import check

if TYPE_CHECKING:
    from collections.abc import Mapping

_VARIABLES: Final = {
    "cost_per_gpu_hour": "LIGHTNING_FASTDATA_COST_PER_GPU_HOUR",
    "gpu_watts": "LIGHTNING_FASTDATA_GPU_WATTS",
}
"""What was not said -> the environment variable that is read for it."""
_DAY_H: Final = 24.0
_LEAST_H: Final = 0.001
_WORTH_TELLING: Final = 0.01
"""Share of the time below which people are not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRates:
    """What one device costs and draws; None: not known."""

    cost_per_gpu_hour: float | None = None
    """Money for an hour, in any currency."""
    gpu_watts: float | None = None
    """Power."""

    @classmethod
    def given(
        cls,
        cost_per_gpu_hour: float | None,
        gpu_watts: float | None,
        environment: Mapping[str, str] | None = None,
    ) -> GpuRates:
        """Return what was said, or else what the environment says.

        Args:
            cost_per_gpu_hour: Money for an hour of one device.
            gpu_watts: What one device draws.
            environment: Default: ``os.environ``.

        Raises:
            OptionsError: A value is no number above 0.
        """
        environment = os.environ if environment is None else environment
        said = {"cost_per_gpu_hour": cost_per_gpu_hour, "gpu_watts": gpu_watts}
        return cls(**{name: _rate(name, value, environment) for name, value in said.items()})


def _rate(name: str, value: float | None, environment: Mapping[str, str]) -> float | None:
    if value is None:
        name, text = _VARIABLES[name], environment.get(_VARIABLES[name], "").strip()
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            check(name, text, fine=False, allowed="numbers above 0")
            raise
    number = isinstance(value, Real | int | float) and not isinstance(value, bool)
    check(name, value, number and 0 < float(value) < math.inf, "None and numbers above 0")
    return float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What was lost in some time."""

    device_hours: float
    """Hours in which devices had nothing to do because of data, added up over the devices; of a
    training on CPUs, those in which it waited."""
    money: float | None = None
    """In the currency of the price; None: no price is known."""
    energy_kwh: float | None = None
    """What the devices drew in these hours; None: their power is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingCost:
    """What a training loses to waiting for data.

    Counted are the waits of training and validation steps, and the starts of epochs but for the
    first. What a training does once (its setup, the start of the first epoch) belongs neither to
    them nor to the time that they are a share of. In a loop of one's own, whose setup is not known,
    each epoch's first wait counts.
    """

    device: str
    """Type of the devices: ``cuda``, ``cpu``, ..."""
    devices: int
    """How many: one for each rank."""
    idle_share: float
    """Part of the time in which they waited, 0 to 1."""
    rates: GpuRates
    """What one device costs and draws."""
    so_far: Loss
    per_epoch: Loss | None
    """Of a whole epoch; None: its length is not known."""
    per_day: Loss
    """Of 24 hours at this rate."""

    @property
    def worth_telling(self) -> bool:
        """Whether it is 1 % of the time at least."""
        return self.idle_share >= _WORTH_TELLING

    @property
    def hours(self) -> str:
        """How hours of the devices are called."""
        named = {"cuda": "GPU hours", "mps": "GPU hours", "cpu": "hours"}
        return named.get(self.device, f"{self.device} hours")

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> WaitingCost:
        """Return what :meth:`as_dict` wrote."""
        epoch = values["per_epoch"]
        return cls(
            **{
                **values,
                "rates": GpuRates(**values["rates"]),
                "so_far": Loss(**values["so_far"]),
                "per_epoch": None if epoch is None else Loss(**epoch),
                "per_day": Loss(**values["per_day"]),
            }
        )

    def scalars(self) -> dict[str, float]:
        """Return what loggers get, as ``metric_names.COST`` has it."""
        named = {"so_far": self.so_far, "per_epoch": self.per_epoch, "per_day": self.per_day}
        return {
            f"data_cost/{name}_{when}": value
            for when, loss in named.items()
            if loss is not None
            for name, value in asdict(loss).items()
            if value is not None
        }


def waiting_cost(
    rates: GpuRates,
    *,
    device: str,
    devices: int,
    idle_s: float,
    elapsed_s: float,
    idle_per_epoch_s: float | None,
) -> WaitingCost | None:
    """Return what waiting costs; None if that means nothing: on CPUs without a price or a power.

    Args:
        rates: What one device costs and draws.
        device: Type of the devices.
        devices: How many of them wait at the same time.
        idle_s: How long each of them had nothing to do because of data, in ``elapsed_s``.
        elapsed_s: The time that was looked at; 0: nothing is known.
        idle_per_epoch_s: How long each of them has nothing to do in one epoch; None: not known.
    """
    if elapsed_s <= 0 or (device == "cpu" and rates == GpuRates()):
        return None
    share = min(1.0, idle_s / elapsed_s)

    def loss(hours: float) -> Loss:
        price, watts = rates.cost_per_gpu_hour, rates.gpu_watts
        return Loss(
            device_hours=hours,
            money=None if price is None else hours * price,
            energy_kwh=None if watts is None else hours * watts / 1e3,
        )

    return WaitingCost(
        device=device,
        devices=devices,
        idle_share=share,
        rates=rates,
        so_far=loss(devices * share * elapsed_s / 3600),
        per_epoch=None if idle_per_epoch_s is None else loss(devices * idle_per_epoch_s / 3600),
        per_day=loss(devices * share * _DAY_H),
    )


def cost_text(cost: WaitingCost) -> str:
    """Return it in one sentence; empty if it is not worth telling."""
    if not cost.worth_telling:
        return ""
    verb = "takes" if cost.device == "cpu" else "idles"
    price, watts = cost.rates.cost_per_gpu_hour, cost.rates.gpu_watts
    at_price = "" if price is None else f" at {price:g} per {cost.hours.removesuffix('s')}"
    at_watts = "" if watts is None else f" at {watts:.0f} W"
    hours = amount_text(cost.per_day.device_hours)
    paid = _paid(cost.per_day, at_price, at_watts)
    text = f"waiting for data {verb} {hours} {cost.hours} a day{paid}"
    if cost.per_epoch is None or cost.per_epoch.device_hours < _LEAST_H:
        return text
    return f"{text}, {amount_text(cost.per_epoch.device_hours)} an epoch{_paid(cost.per_epoch)}"


def _paid(loss: Loss, at_price: str = "", at_watts: str = "") -> str:
    """Return money and energy in brackets; empty if neither is known."""
    paid = []
    if loss.money is not None:
        paid.append(f"{amount_text(loss.money)}{at_price}")
    if loss.energy_kwh is not None:
        paid.append(f"{amount_text(loss.energy_kwh)} kWh{at_watts}")
    return f" ({', '.join(paid)})" if paid else ""


def amount_text(amount: float) -> str:
    """Return an amount with three digits, or all before the point."""
    if amount >= 100:
        return f"{amount:,.0f}"
    return f"{amount:.3g}" if amount >= _LEAST_H or not amount else "below 0.001"

"""What earlier trainings took of a device's memory: all that ``guard="quick"`` looks at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from lightning_fastdata.plugin.data.datasets import named
from lightning_fastdata.plugin.guard.memory import MemoryReader, reserve_bytes
from lightning_fastdata.plugin.guard.prediction import GuardDecision, Probe, decide, skipped
from lightning_fastdata.tuning.prior import KeptFile, about_dataset, fingerprint

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_fastdata.plugin.contracts import DataModule

_KEPT_SIZES: Final = 8


def earlier_peaks(trainer: Trainer, pl_module: LightningModule, datamodule: DataModule) -> KeptFile:
    """Return where the peaks of trainings are kept that differ in their batch size at most."""
    device = trainer.strategy.root_device
    datasets = [dataset for _, dataset in named(datamodule.train_dataset(), "")]
    about = {
        "module": f"{type(pl_module).__module__}.{type(pl_module).__qualname__}",
        "parameters": sum(weight.numel() for weight in pl_module.parameters()),
        "optimizers": [type(each).__name__ for each in trainer.optimizers],
        "precision": str(trainer.precision),
        "strategy": type(trainer.strategy).__name__,
        "datasets": [fingerprint(each) for each in datasets],
        "attributes": [about_dataset(each) for each in datasets],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "torch": torch.__version__,
    }
    return KeptFile("memory", about)


def keep(kept: KeptFile, probes: Iterable[Probe]) -> None:
    """Keep the peaks of sizes that ran, the newest of each."""
    known = {rows: peak for rows, peak, *_ in _kept(kept)}
    known |= {each.rows: each.peak_bytes for each in probes if each.peak_bytes is not None}
    kept.write({"peak_bytes_by_rows": sorted(known.items())[-_KEPT_SIZES:]})


def _kept(kept: KeptFile) -> list[Probe]:
    try:
        pairs = kept.read().get("peak_bytes_by_rows", [])
        return [Probe(int(rows), int(peak)) for rows, peak in pairs if rows > 0 and peak >= 0]
    except (TypeError, ValueError):
        return []


def by_earlier(asked: int, accumulate: int, kept: KeptFile, reader: MemoryReader) -> GuardDecision:
    """Return what to say of a batch size by what earlier trainings took: nothing is tried."""
    probes = _kept(kept)
    if not probes:
        why = "no earlier training of this kind is known. The next one will know this one"
        return skipped(asked, accumulate, why)
    decision = decide(
        asked=asked,
        probes=probes,
        budget_bytes=reader.free_bytes() - reserve_bytes(reader.total_bytes()),
        policy="warn",
        accumulate_now=accumulate,
    )
    reason = f"{decision.reason} (By what earlier trainings took; no step was tried.)"
    return replace(decision, reason=reason, probes=tuple(probes))

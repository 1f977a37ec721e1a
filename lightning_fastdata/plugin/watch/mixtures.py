"""What a training had of each part of its mixtures, as scalars."""

from __future__ import annotations

from lightning_fastdata.loading.loader import FastDataLoader
from lightning_fastdata.order.mixture import Mixture
from lightning_fastdata.plugin.seams.loaders import flattened, keyed


class MixtureScalars:
    """Tells the proportions since it was asked last, which arithmetic knows without a sample."""

    def __init__(self) -> None:
        self._before: dict[str, dict[str, int]] = {}

    def since(self, loaders: object) -> dict[str, float]:
        """Return the percentage of each part in the samples since, and its epochs until now."""
        found: dict[str, float] = {}
        labels = [f"{key.label}/" for key, _ in keyed(loaders)] or [""]
        for label, loader in zip(labels, flattened(loaders), strict=True):
            mixture = getattr(loader, "dataset", None)
            if not isinstance(mixture, Mixture) or not isinstance(loader, FastDataLoader):
                continue
            place = loader.progress()
            counts, before = mixture.counts(*place), self._before.get(label, {})
            new = {name: count - before.get(name, 0) for name, count in counts.items()}
            total = sum(new.values())
            for name, epochs in mixture.epochs(*place).items():
                if total > 0:
                    found[f"data_mix/{label}{name}_percent"] = 100 * new[name] / total
                if epochs is not None:
                    found[f"data_mix/{label}{name}_epochs"] = epochs
            self._before[label] = counts
        return found

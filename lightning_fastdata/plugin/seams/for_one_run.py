"""Attributes of single objects that are replaced until the run of a trainer has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import Strategy


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

"""Waits cut one at a time, with their parts in milliseconds."""

from __future__ import annotations

from dataclasses import astuple
from typing import NamedTuple

from lightning_fastdata.insight.waits import WaitCutter, WaitParts
from lightning_fastdata.stamps.batch_stamps import BatchStamps, TaskStamps


class Wait(NamedTuple):
    parts: WaitParts
    slow_task: TaskStamps | None


class Cutter:
    def __init__(self) -> None:
        self.cutter = WaitCutter()

    def cut(self, batch: BatchStamps) -> Wait:
        self.cutter.note(batch)
        ns, slow_task = self.cutter.cut(batch)
        return Wait(WaitParts(*(value / 1e6 for value in ns)), slow_task)


def total(waits: list[Wait]) -> WaitParts:
    return WaitParts(*map(sum, zip(*(astuple(wait.parts) for wait in waits), strict=True)))

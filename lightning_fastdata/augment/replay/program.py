"""The tapes of a batch, packed into one tensor, in the order in which the device runs them."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeAlias

import numpy as np
import torch

from lightning_fastdata.device import reads_page_locked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lightning_fastdata.augment.ops.operation import Encoded, Role, Tape, TapeOp
    from lightning_fastdata.types import SampleKey

_ALIGN: Final = 16
_COLLATION: Final = -1
"""As samplers have no such index, these draws are independent of those of any sample."""
Fuse: TypeAlias = (
    "Callable[[Sequence[ScheduledStep], int, Callable[[np.ndarray], ArrayAt]], tuple[Any, ...]]"
)
"""``(steps, samples, add) -> runs``: finds what kernels carry out; ``add`` packs an array. Each run
has the numbers of its ``first`` and ``last`` step, says whether it is ``idle``, ``takes(batch)``,
and returns a batch after it, ``run(blob, batch)``."""


@dataclass(frozen=True, slots=True)
class ArrayAt:
    """Where one array lies in the blob of its batch."""

    offset: int
    """First byte; a multiple of 16."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes from one sample's part of the array to the next one's."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def view(self, blob: torch.Tensor) -> torch.Tensor:
        """Return the array as a view of the blob, wherever that is."""
        count = math.prod(self.shape) * self.dtype.itemsize
        return blob[self.offset : self.offset + count].view(self.dtype).view(self.shape)


class StepGroup(NamedTuple):
    """Samples that take one step with the same settings and array shapes."""

    rows: Sequence[int]
    encoded: Sequence[Encoded]
    """What each of them drew."""
    arrays: Mapping[str, ArrayAt]
    """Where their numbers lie."""


class ScheduledStep(NamedTuple):
    """One step as the schedule knows it, before it is packed away."""

    name: str
    """Class name of the transform."""
    groups: Sequence[StepGroup]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """Samples that take one step with the same settings and array shapes: one launch."""

    rows: ArrayAt | None
    """Positions of the samples in the batch (int64); None when it is all of them, in order."""
    static: tuple[tuple[str, Any], ...]
    """Settings that they share."""
    arrays: Mapping[str, ArrayAt]
    """Their drawn numbers, stacked to ``[samples, ...]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramStep:
    """One operation of the pipeline on all samples that take it now; none is in two parts."""

    leaf: int
    """Number of the transform in its pipeline."""
    name: str
    """Class name of the transform."""
    parts: tuple[StepPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Everything that is still to be done to one image or mask field of a batch, in order."""

    role: Role
    steps: tuple[ProgramStep, ...]
    runs: tuple[Any, ...] = ()
    """Steps that one kernel can carry out together: what ``Fuse`` has found."""

    @property
    def makes_tensor(self) -> bool:
        """Whether images end up ``[n, C, H, W]``."""
        return any(step.name == "ToTensorV2" for step in self.steps)


class Draws:
    """What the pipeline drew for a batch, on its way to the device beside the batch."""

    __slots__ = ("beside", "blob", "programs", "samples")

    def __init__(
        self,
        samples: int,
        programs: Mapping[Any, Program],
        blob: torch.Tensor,
        beside: Mapping[str, ArrayAt] | None = None,
    ) -> None:
        self.samples = samples
        """Samples in the batch."""
        self.programs = programs
        """One program per image or mask, by what the tapes know it by."""
        self.blob = blob
        """uint8, one dimension: every array of every step."""
        self.beside = beside or {}
        """Where in the blob other arrays lie, by name: what was drawn for the batch as a whole."""

    def pin_memory(self, device: str | None = None) -> Self:  # noqa: ARG002 - torch's signature
        """Return the same draws in page-locked memory."""
        return self._with(self.blob.pin_memory())

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that are moved."""
        return [self.blob]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return the same draws on a device; one copy."""
        kind, blob = torch.device(device).type, self.blob
        if non_blocking and reads_page_locked(kind) and blob.is_cpu and not blob.is_pinned():
            # Out of ordinary memory the host would wait for what the device has still to do. torch
            # uses this memory again only when the copy is done.
            blob = blob.pin_memory()
        # What comes back is read at once.
        return self._with(blob.to(device, non_blocking=non_blocking and kind != "cpu"))

    def _with(self, blob: torch.Tensor) -> Self:
        moved = copy.copy(self)
        moved.blob = blob
        return moved


class BatchDraws(Draws):
    """What was drawn for a batch as a whole: it stays in the host's memory, where it is read.

    Attributes:
        values: seeds, parameters, ... of the batch.
        before: what a pipeline drew that runs first; None: there is none, or nothing is left of it.
    """

    __slots__ = ("before", "values")

    def __init__(self, samples: int, values: Any, before: Draws | None = None) -> None:
        super().__init__(samples, {}, torch.empty(0, dtype=torch.uint8))
        self.values = values
        self.before = before

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that are moved."""
        return [] if self.before is None else self.before.tensors()

    def pin_memory(self, device: str | None = None) -> Self:
        """Return the same draws, with those of the pipeline before in page-locked memory."""
        before = self.before
        return self if before is None else self._behind(before.pin_memory(device))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return the same draws, with those of the pipeline before on a device."""
        before = self.before
        return self if before is None else self._behind(before.to(device, non_blocking))

    def _behind(self, before: Draws) -> Self:
        return type(self)(self.samples, self.values, before)


def key_of_batch(first: SampleKey) -> SampleKey:
    """Return the key of a batch whose first sample has this key.

    It is that of what a ``collate_fn`` draws, too.
    """
    return first._replace(index=(_COLLATION, first.index))  # type: ignore[arg-type]


class Packer:
    """Packs arrays into the blob of a batch, each at a multiple of 16 bytes."""

    def __init__(self) -> None:
        self._chunks: list[np.ndarray] = []
        self._size = 0
        self._known: dict[tuple[int, ...], Mapping[str, ArrayAt]] = {}

    def add(self, array: np.ndarray) -> ArrayAt:
        """Pack an array, and return where it lies."""
        array = np.ascontiguousarray(array)
        slot = ArrayAt(self._size, torch.from_numpy(array[:0]).dtype, array.shape)
        padding = -array.nbytes % _ALIGN
        self._chunks += [array.reshape(-1).view(np.uint8), np.zeros(padding, np.uint8)]
        self._size += array.nbytes + padding
        return slot

    def stack(self, encoded: Sequence[Encoded]) -> Mapping[str, ArrayAt]:
        """Pack what samples have drawn, stacked, and return where each array lies."""
        # An image and the mask beside it share their parameters: packed once.
        key = tuple(map(id, encoded))
        if key not in self._known:
            self._known[key] = {
                name: self.add(np.array([one.arrays[name] for one in encoded]))
                for name in encoded[0].arrays
            }
        return self._known[key]

    def blob(self) -> torch.Tensor:
        """Return everything that was packed."""
        if not self._chunks:
            return torch.empty(0, dtype=torch.uint8)
        return torch.from_numpy(np.concatenate(self._chunks))


def compile_tapes(
    tapes: Sequence[Tape],
    beside: Mapping[str, np.ndarray] | None = None,
    fuse: Fuse | None = None,
) -> Draws:
    """Order and pack the tapes of a batch, and the arrays ``beside`` them, by name.

    Each sample keeps its own order of operations; a step takes the operation that is written first
    among those that come next, with all samples whose turn it is. Without ``fuse`` no kernel
    carries out several.
    """
    packer = Packer()
    programs = {}
    for key in dict.fromkeys(name for tape in tapes for name in tape):
        role = next(tape[key].role for tape in tapes if key in tape)
        notes = [tape[key].ops if key in tape else () for tape in tapes]
        runs: tuple[Any, ...] = ()
        if fuse is not None and role == "image":
            known: list[ScheduledStep] = []
            steps = _schedule(notes, packer, known)
            runs = fuse(known, len(tapes), packer.add)
        else:
            steps = _schedule(notes, packer)
        programs[key] = Program(role=role, steps=steps, runs=runs)
    slots = {name: packer.add(array) for name, array in (beside or {}).items()}
    return Draws(len(tapes), programs, packer.blob(), slots)


def _schedule(
    tracks: Sequence[Sequence[TapeOp]], packer: Packer, known: list[ScheduledStep] | None = None
) -> tuple[ProgramStep, ...]:
    """Return the steps of a program, packed; ``known`` takes them as they were before that."""
    # What each sample has still to do, last to first.
    waiting = {row: list(reversed(track)) for row, track in enumerate(tracks) if track}
    steps = []
    while waiting:
        leaf, name = min((left[-1].leaf, left[-1].name) for left in waiting.values())
        alike: dict[object, tuple[list[int], list[Encoded]]] = {}
        for row, left in waiting.items():
            op = left[-1]
            if op.leaf == leaf and op.name == name:
                rows, encoded = alike.setdefault(_form(op.encoded), ([], []))
                rows.append(row)
                encoded.append(left.pop().encoded)
        waiting = {row: left for row, left in waiting.items() if left}
        parts = []
        for rows, encoded in alike.values():
            at = None if len(rows) == len(tracks) else packer.add(np.array(rows, np.int64))
            arrays = packer.stack(encoded)
            parts.append(StepPart(rows=at, static=encoded[0].static, arrays=arrays))
        steps.append(ProgramStep(leaf=leaf, name=name, parts=tuple(parts)))
        if known is not None:
            drawn = zip(alike.values(), parts, strict=True)
            groups = [StepGroup(*samples, part.arrays) for samples, part in drawn]
            known.append(ScheduledStep(name, groups))
    return tuple(steps)


def _form(encoded: Encoded) -> object:
    if not encoded.arrays:
        return encoded.static
    shapes = [(name, one.shape, one.dtype.char) for name, one in encoded.arrays.items()]
    return encoded.static, tuple(shapes)

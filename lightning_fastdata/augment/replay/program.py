"""The tapes of a batch, packed into one tensor, in the order in which the device runs them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self, TypeAlias

import numpy as np
import torch

from lightning_fastdata.augment.ops.operation import Encoded, Role, Tape, TapeOp
from lightning_fastdata.device.backend import reads_page_locked
from lightning_fastdata.types import SampleKey

_ALIGN: Final = 16
_COLLATION: Final = -1
"""Mark of the index in a batch's key; no sample has such an index, so draws are independent."""
Fuse: TypeAlias = (
    "Callable[[Sequence[ScheduledStep], int, Callable[[np.ndarray], ArrayAt]], tuple[Any, ...]]"
)
"""``(steps, samples, add) -> runs``: finds runs of steps for kernels; ``add`` packs an array. A run
has the numbers of its ``first`` and ``last`` step and is ``idle`` if it changes nothing;
``takes(batch)`` says whether it can run, and ``run(blob, batch)`` returns the batch after it."""


@dataclass(frozen=True, slots=True)
class ArrayAt:
    """Where one array lies in the blob of its batch."""

    offset: int
    """Number of the first byte of the array; a multiple of 16."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes from one sample's part of the array to the next one's."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def view(self, blob: torch.Tensor) -> torch.Tensor:
        """Return the array as a view of the blob, on whatever device the blob is."""
        count = math.prod(self.shape) * self.dtype.itemsize
        return blob[self.offset : self.offset + count].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """Samples that take one step with the same settings and array shapes: one launch."""

    rows: ArrayAt | None
    """Positions of the samples in the batch (int64); None: all samples of the batch, in order."""
    static: tuple[tuple[str, Any], ...]
    """Settings that the samples share."""
    arrays: Mapping[str, ArrayAt]
    """Drawn numbers of the samples, by name, stacked to ``[samples, ...]``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramStep:
    """One operation of the pipeline on all samples whose turn it is; no sample is in two parts."""

    name: str
    """Class name of the transform."""
    parts: tuple[StepPart, ...]


class ScheduledStep(NamedTuple):
    """One step, and the draws of its samples before they are packed."""

    step: ProgramStep
    drawn: Sequence[tuple[Sequence[int], Sequence[Encoded]]]
    """For each part of the step, the positions of its samples, and what each sample drew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Everything that is still to be done to one image or mask field of a batch, in order."""

    role: Role
    steps: tuple[ProgramStep, ...]
    runs: tuple[Any, ...] = ()
    """Runs of steps that ``Fuse`` found, each of which one kernel can carry out."""

    @property
    def makes_tensor(self) -> bool:
        """Whether images end up ``[n, C, H, W]``."""
        return any(step.name == "ToTensorV2" for step in self.steps)


class Draws:
    """What the pipeline drew for a batch, on its way to the device beside the batch."""

    __slots__ = ("beside", "blob", "key", "programs", "samples")

    def __init__(
        self,
        samples: int,
        programs: Mapping[Any, Program],
        blob: torch.Tensor,
        beside: Mapping[str, ArrayAt] | None = None,
    ) -> None:
        self.samples = samples
        """Number of samples in the batch."""
        self.programs = programs
        """One program for each image or mask, by its key in the tapes."""
        self.blob = blob
        """The bytes of all arrays of all steps: uint8, one dimension."""
        self.beside = beside or {}
        """Where in the blob arrays that are part of no program lie, by name: those of mixing."""
        self.key: SampleKey | None = None
        """Key by which the batch draws as a whole, in the host's memory; None: it does not."""

    def pin_memory(self, device: str | None = None) -> Self:  # noqa: ARG002 - torch's signature
        """Return the same draws in page-locked memory."""
        return self._with(self.blob.pin_memory()) if self.tensors() else self

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that move to the device."""
        return [self.blob] if self.blob.numel() else []

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Return the same draws on a device; one copy."""
        if not self.tensors():
            return self
        kind, blob = torch.device(device).type, self.blob
        if non_blocking and reads_page_locked(kind) and blob.is_cpu and not blob.is_pinned():
            # To copy from ordinary memory, the host would wait for the device to finish its work.
            # torch reuses page-locked memory only when the copy is done.
            blob = blob.pin_memory()
        # Draws that come back to the CPU are read at once.
        return self._with(blob.to(device, non_blocking=non_blocking and kind != "cpu"))

    def _with(self, blob: torch.Tensor) -> Self:
        moved = copy.copy(self)
        moved.blob = blob
        return moved


def key_of_batch(first: SampleKey) -> SampleKey:
    """Return the key of a batch whose first sample has this key.

    A ``collate_fn`` draws by the same key, but other numbers.
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

    Each sample keeps its own order of operations. Each step takes, of the operations that are next
    for some sample, the one that is written first, with all samples for which it is next. Without
    ``fuse`` no kernel carries out several steps.
    """
    packer = Packer()
    programs = {}
    for key in dict.fromkeys(name for tape in tapes for name in tape):
        role = next(tape[key].role for tape in tapes if key in tape)
        notes = [tape[key].ops if key in tape else () for tape in tapes]
        scheduled = _schedule(notes, packer)
        runs = fuse(scheduled, len(tapes), packer.add) if fuse and role == "image" else ()
        steps = tuple(step for step, _ in scheduled)
        programs[key] = Program(role=role, steps=steps, runs=runs)
    slots = {name: packer.add(array) for name, array in (beside or {}).items()}
    return Draws(len(tapes), programs, packer.blob(), slots)


def _schedule(tracks: Sequence[Sequence[TapeOp]], packer: Packer) -> list[ScheduledStep]:
    """Return the steps of a program, packed, each with the draws of its samples."""
    # The operations that each sample has still to take, last to first.
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
        step = ProgramStep(name=name, parts=tuple(parts))
        steps.append(ScheduledStep(step, tuple(alike.values())))
    return steps


def _form(encoded: Encoded) -> object:
    if not encoded.arrays:
        return encoded.static
    shapes = [(name, one.shape, one.dtype.char) for name, one in encoded.arrays.items()]
    return encoded.static, tuple(shapes)

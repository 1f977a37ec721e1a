"""Geometric operations of a sample, joined to one resampling: ``geometry="fused"``.

Albumentations resamples an image once for each operation, and each time it gets less sharp. Here
operations that follow each other are multiplied to one map, and the image is read once. Positions
and borders are those of the separate operations; values between the pixels are not.

The rules, for each image or mask of a sample:

1. A run is a row of geometric operations without another operation between: symmetries, crops,
   pads, resizes and warps. Their order is kept.
2. All operations of a run that interpolate do it alike: linear, or by the nearest pixel.
3. Operations of a run that read outside of their image have the same border, and the same fill if
   it is constant. An operation that stays inside fits any border. (A border that wraps around is
   met only in the first image.)
4. What a crop or a warp has cut off stays cut off: positions that leave an intermediate image meet
   its border, not what lay beyond it (:mod:`~lightning_fastdata.augment.ops.joint_warp`).
5. A run is joined if it has two operations or more, and a warp or two resizes among them. All other
   runs stay what they are: symmetries and crops move whole pixels, and lose nothing.

A warp of an image alone is carried out along with the joined runs of its batch, where there are
any. Its pixels are the same either way. Cubic warps stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np

from lightning_fastdata.augment.geometry_moves import Move, Rectangle, carried, move_of, whole
from lightning_fastdata.augment.ops.border import CONSTANT, REPLICATE, WRAP
from lightning_fastdata.augment.ops.joint_warp import EVERYWHERE, IDLE, NAME, in_order
from lightning_fastdata.augment.ops.operation import Encoded
from lightning_fastdata.augment.ops.resample import CUBIC
from lightning_fastdata.augment.tape import TapeOp, Track

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from lightning_fastdata.augment.geometry_moves import Size
    from lightning_fastdata.augment.tape import Role, Tape

GeometryMode: TypeAlias = Literal["exact", "fused"]
"""``exact``: each geometric operation by itself, with Albumentations' pixels. ``fused``: joined."""
MODES: Final[tuple[GeometryMode, ...]] = ("exact", "fused")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of a map, up to an image whose borders count."""

    matrix: np.ndarray
    """float64 ``[3, 3]``: from the stage that comes after it, or the output, to this image."""
    rectangle: Rectangle
    """The pixels of the image that can be seen."""
    held: Rectangle
    """Positions are held in this rectangle, which is how a resize treats its edges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Geometric operations of one sample that follow each other, and the map that they make."""

    ops: tuple[TapeOp, ...]
    """The operations themselves."""
    joins: bool
    """Whether they are to be joined."""
    warps: int
    """How many of them read their image at any position."""
    stages: tuple[Stage, ...]
    """From the output to the image that is read."""
    size: Size
    """Height and width of the result."""
    source: Size
    """Height and width of the image that is read."""
    is_image: bool
    """Whether it is an image, not a mask."""
    changes_size: bool
    """Whether some operation makes an image of another size."""
    interpolation: int | None
    """OpenCV's number; None if they only move whole pixels."""
    border: int
    """``BORDER_*`` of all stages."""
    fill: np.ndarray
    """float32 ``[channels]``: the colour of a constant border."""

    @property
    def leaves(self) -> range:
        """Numbers of the transforms of the pipeline from the first that takes part to the last."""
        numbers = [op.leaf for op in self.ops]
        return range(min(numbers), max(numbers) + 1)


class _OpenRun:
    def __init__(self, size: Size, role: Role) -> None:
        self._role = role
        self.ops: list[TapeOp] = []
        self.size = self._source = size
        self.interpolation: int | None = None
        self._kinds: list[str] = []
        self._changes_size = False
        self._outside: tuple[int, np.ndarray | None] | None = None
        self._warp: tuple[int, np.ndarray | None] | None = None
        self._done: list[Stage] = []
        self._begin_stage()

    def _begin_stage(self) -> None:
        self._matrix = np.eye(3)
        self._rectangle = whole(self.size)
        self._held: Rectangle = EVERYWHERE
        self._whole_pixels = True

    def _end_stage(self) -> None:
        self._done.append(Stage(matrix=self._matrix, rectangle=self._rectangle, held=self._held))
        self._begin_stage()

    def takes(self, op: TapeOp, move: Move) -> bool:
        """Take an operation and return True, or leave the run as it is and return False."""
        interpolation = move.interpolation
        if interpolation is not None and self.interpolation not in (None, interpolation):
            return False
        meets_border = move.leaves and move.border is not None
        if meets_border and not self._same_border(move):
            return False
        if move.leaves and not self._whole_pixels:
            self._end_stage()
        if meets_border:
            self._outside = move.border or 0, move.fill
        elif move.leaves:
            self._rectangle = self._held = carried(self._matrix, move.reads)
        self._matrix = self._matrix @ move.inverse
        self._whole_pixels &= move.kind == "index" and not move.leaves
        self._changes_size |= move.size != self.size
        self.size = move.size
        if self._whole_pixels:
            self._rectangle = carried(self._matrix, whole(self.size))
        self.interpolation = self.interpolation if interpolation is None else interpolation
        if move.kind == "warp" and self._warp is None:
            self._warp = move.border or 0, move.fill
        self._kinds.append(move.kind)
        self.ops.append(op)
        return True

    def _same_border(self, move: Move) -> bool:
        if move.border == WRAP and (self._done or not self._whole_pixels):
            return False
        if self._outside is None:
            return True
        border, fill = self._outside
        same_fill = move.border != CONSTANT or np.array_equal(fill, move.fill)  # type: ignore[arg-type]
        return move.border == border and same_fill

    def close(self) -> Run:
        self._end_stage()
        # Where nothing meets a border any will do: that of the warp, as in other samples.
        border, fill = self._outside or self._warp or (REPLICATE, None)
        warps, resizes = self._kinds.count("warp"), self._kinds.count("resize")
        return Run(
            ops=tuple(self.ops),
            joins=len(self.ops) > 1 and (warps > 0 or resizes > 1),
            warps=warps,
            stages=tuple(reversed(self._done)),
            size=self.size,
            source=self._source,
            is_image=self._role == "image",
            changes_size=self._changes_size,
            interpolation=self.interpolation,
            border=border,
            fill=np.zeros(1, np.float32) if fill is None else fill,
        )


def split(track: Track) -> list[TapeOp | Run]:
    """Return the operations of a track in order, the geometric ones in runs as long as can be.

    Args:
        track: its ``size`` is that of its image before any of them.
    """
    pieces: list[TapeOp | Run] = []
    size, run = track.size, None
    for op in track.ops:
        move = None if size is None else move_of(op, size, track.role)
        if move is None or size is None or move.interpolation == CUBIC:
            pieces += [run.close()] if run else []
            pieces.append(op)
            run, size = None, size if move is None else move.size
            continue
        run = run or _OpenRun(size, track.role)
        if not run.takes(op, move):
            pieces.append(run.close())
            run = _OpenRun(size, track.role)
            run.takes(op, move)
        size = move.size
    return pieces + ([run.close()] if run else [])


def join_tapes(tapes: Sequence[Tape]) -> list[Tape]:
    """Return the tapes of a batch with their geometric operations joined."""
    joined: list[dict[str, Track]] = [dict(tape) for tape in tapes]
    for name in dict.fromkeys(name for tape in tapes for name in tape):
        rows = [row for row, tape in enumerate(tapes) if name in tape]
        tracks = join_tracks([tapes[row][name] for row in rows])
        for row, track in zip(rows, tracks, strict=True):
            joined[row][name] = track
    return list(joined)


def join_tracks(tracks: Sequence[Track]) -> list[Track]:
    """Return what a batch still has to do to one of its fields, with joined operations.

    A joined run takes the number of the last operation that any sample has in a run that overlaps
    with it, so that all of them are one launch. Where images change their size in such a run, what
    other samples do meanwhile, one operation after the other, becomes part of the same step.

    Args:
        tracks: of all samples that have any.
    """
    pieces = [split(track) for track in tracks]
    runs = [piece for listed in pieces for piece in listed if isinstance(piece, Run)]
    spans = _united(run.leaves for run in runs if run.joins)
    found: dict[int, range] = {}
    for run in runs:
        span = next((span for span in spans if run.leaves[0] in span), None)
        if span is not None and (run.joins or _is_plain_warp(run)):
            found[id(run)] = span
    made = _as_ops([(run, found[id(run)]) for run in runs if id(run) in found])
    resizing = [
        span for span in spans if any(run.changes_size and run.leaves[0] in span for run in runs)
    ]
    results = []
    for track, listed in zip(tracks, pieces, strict=True):
        ops: list[TapeOp] = []
        for piece in listed:
            if not isinstance(piece, Run):
                ops.append(piece)
            elif id(piece) in made:
                ops.append(made[id(piece)])
            else:
                ops.extend(piece.ops)
        for span in resizing:
            ops = _in_one_step(ops, span)
        results.append(track._replace(ops=tuple(ops)))
    return results


def _is_plain_warp(run: Run) -> bool:
    """Return whether a run is one warp of an image, which a chain of one stage carries out alike.

    Masks are read on OpenCV's grid of positions, which depends on their dtype, and so are images
    of two channels, and all images with OpenCV 4.
    """
    if len(run.ops) > 1 or run.warps != 1 or not run.is_image:
        return False
    encoded = run.ops[0].encoded
    return not dict(encoded.static)["cells"] and len(encoded.arrays["fill"]) != 2


def _in_one_step(ops: list[TapeOp], span: range) -> list[TapeOp]:
    """Return the operations with those of a span as one, so that all images change size at once."""
    places = [place for place, op in enumerate(ops) if op.leaf in span]
    if not places or (len(places) == 1 and ops[places[0]].name == NAME):
        return ops
    first, end = places[0], places[-1] + 1
    encoded = in_order([(op.name, op.encoded) for op in ops[first:end]])
    return [*ops[:first], TapeOp(span[-1], NAME, encoded), *ops[end:]]


def _united(spans: Iterable[range]) -> list[range]:
    """Return the unions of spans that overlap."""
    united: list[range] = []
    for span in sorted(spans, key=lambda span: span.start):
        if united and span.start < united[-1].stop:
            united[-1] = range(united[-1].start, max(united[-1].stop, span.stop))
        else:
            united.append(span)
    return united


def _as_ops(runs: Sequence[tuple[Run, range]]) -> dict[int, TapeOp]:
    """Return each run as one operation; chains that are launched together are of one length."""
    groups: dict[object, list[tuple[Run, range]]] = {}
    for run, span in runs:
        settings = run.size, run.interpolation, run.border, len(run.fill)
        groups.setdefault((span, settings), []).append((run, span))
    made = {}
    for group in groups.values():
        length = max(len(run.stages) for run, _ in group)
        matrices = [stage.matrix for run, _ in group for stage in run.stages]
        projective = any((matrix[2] != (0, 0, 1)).any() for matrix in matrices)
        for run, span in group:
            encoded = _encode(run, length, projective=projective)
            made[id(run)] = TapeOp(span[-1], NAME, encoded)
    return made


def _encode(run: Run, length: int, *, projective: bool) -> Encoded:
    static: tuple[tuple[str, Any], ...] = (
        ("size", run.size),
        ("source", run.source),
        ("interpolation", run.interpolation),
        ("border", run.border),
        ("projective", projective),
    )
    # Stages that do nothing come first, where positions are whole numbers.
    chain = np.tile(np.array(IDLE, np.float32), (length, 1))
    for row, stage in zip(chain[length - len(run.stages) :], run.stages, strict=True):
        row[:] = (*stage.matrix.flat, *stage.rectangle, *stage.held)
    return Encoded(static, {"chain": chain, "fill": run.fill.astype(np.float32)})

"""Images that wait for the device while code of the user's makes a batch of them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from lightning_fastdata import tree
from lightning_fastdata.errors import BatchError
from lightning_fastdata.torch_internals import (
    DisableTorchFunction,
    TorchDispatchMode,
    collate_tensor_fn,
)

if TYPE_CHECKING:
    from lightning_fastdata.augment import Rows, WorkerTransform
    from lightning_fastdata.types import Batch


class Waiting(TorchFunctionMode):
    """Within its ``with`` block, images and masks wait as long as they are only stacked.

    All tensors of a field, in order, may be given to one ``torch.stack`` or to torch's collation.
    Before anything else is done to one of them, all are finished: the tensors, and what was
    stacked of them, then hold finished pixels, wherever the code keeps them.
    """

    def __init__(
        self, transform: WorkerTransform, samples: list[Any], drawn: list[Any], rows: Rows
    ) -> None:
        super().__init__()
        self._transform, self._given, self._first_drawn = transform, samples, drawn
        self.rows: dict[str, list[Any]] = {
            name: [one.clone() for one in row] for name, row in rows.items()
        }
        """Copies of what waits, which no dataset holds: by field, sample by sample."""
        self.samples = samples
        """The samples with these copies."""
        if self.rows:
            columns = ({n: row[at] for n, row in self.rows.items()} for at in range(len(samples)))
            self.samples = list(map(transform.put, samples, columns))
        self.drawn = drawn
        """What was drawn and is still left to the device."""
        self.over = False
        """Whether all were finished here."""
        self._stacked: dict[Any, torch.Tensor] = {}
        self._collated: Any = None
        """All tensors of a field, which torch's own collation is about to stack; or None."""
        # By address, with a tensor each that keeps the unfinished pixels there.
        self._known: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {}
        self._note(one for row in self.rows.values() for one in row)
        self._operations, self._quiet = _Operations(self._look), False

    def __enter__(self) -> Self:
        self._operations.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._operations.__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, before which images are finished unless it stacks them."""
        kwargs = kwargs or {}
        name = self._field(*args, **kwargs) if func is torch.stack else None
        if func is torch.as_tensor and len(args) == 1 and not kwargs and _address(*args):
            return args[0]
        self._quiet = name is not None
        try:
            self._look(_tensors((args, kwargs)))
            result = func(*args, **kwargs)
        finally:
            self._quiet = False
        if name is not None:
            self._stacked[name], self._collated = result, None
            self._note([result])
        return result

    def settle(self, batch: Batch) -> None:
        """Finish what waits, unless the device finds all in the batch and code keeps none of it."""
        leaves = list(tree.leaves(batch))
        known = sum(_address(leaf) in self._known for leaf in leaves)
        alone = known == len(self.rows) == len(self._stacked) and all(map(_is_plain, leaves))
        try:
            alone = alone or not self.rows
            holds = alone and self._transform.holds(batch, self._first_drawn, self._stacked)
        except BatchError:  # it has no image
            holds = False
        if not holds or self._is_kept(isinstance(batch, torch.Tensor)):
            self._finish()
        if self.over:
            self._look(leaves)

    def _is_kept(self, alone: bool) -> bool:
        """Return whether code keeps what waits, beside the batch. ``alone``: that is a tensor."""
        rows = {name: list(map(weakref.ref, row)) for name, row in self.rows.items()}
        self.samples, self.rows, self._known = [], {}, {}
        self.rows = {name: [one() for one in row] for name, row in rows.items()}
        mine = {"": torch.empty(0)}  # held as often as what was stacked
        _beside = [*mine.values()] * (3 if alone else 2)  # the leaves, and the batch or its callers
        most, *_ = map(sys.getrefcount, mine.values())
        stacked = any(count > most for count in map(sys.getrefcount, self._stacked.values()))
        return stacked or any(one is not None for row in self.rows.values() for one in row)

    def _finish(self) -> None:
        if self.over:
            return
        self.over = bool(self.rows)
        done, self.drawn = self._transform.finish_each(self._given, self._first_drawn)
        for name, row in (self._transform.rows(done, self._first_drawn) or {}).items():
            for one, finished in zip(self.rows[name], row, strict=True):
                if one is not None:
                    one.data = finished
            if name in self._stacked:
                self._stacked[name].data = torch.stack(row)

    def _look(self, values: Iterable[Any]) -> None:
        """Finish all if one of these values is a tensor that waits."""
        with DisableTorchFunction():
            for one in () if self._quiet else values:
                known = self._known.get(_address(one))
                if known is not None and not self._is_collated():
                    self._finish()
                    one.data = known[1].data  # ``as_subclass`` makes others of the same pixels

    def _is_collated(self) -> bool:
        """Return whether torch's own collation has all tensors of a field, and will stack them."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not collate_tensor_fn.__code__:
            frame = frame.f_back
        given = None if frame is None else frame.f_locals[frame.f_code.co_varnames[0]]
        if given is not self._collated:  # asked for each sample, and compared once
            whole = given is not None and self._field(given) is not None
            self._collated = given if whole else None
        return given is not None and given is self._collated

    def _field(self, tensors: Any, dim: int = 0, **_: object) -> Any:
        """Return the name of the field that these tensors are, to be stacked; None: of none."""
        given = list(map(_address, tensors)) if dim == 0 and not self.over else []
        rows = ((name, list(map(_address, row))) for name, row in self.rows.items())
        return next((n for n, row in rows if row == given and n not in self._stacked), None)

    def _note(self, waiting: Iterable[torch.Tensor]) -> None:
        self._known |= {_address(one): (one.data, one) for one in waiting}


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows what torch's operations are given, those of compiled functions among them."""

    def __init__(self, look: Callable[[Iterable[Any]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._look = look

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._look(_tensors((args, kwargs)))
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments of a function of torch, which are mostly numbers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            if not isinstance(one, int | float):
                yield from _tensors(one)


def _address(value: object) -> int | None:
    try:
        return value.data_ptr() if isinstance(value, torch.Tensor) else None
    except RuntimeError:  # another layout, or a stand-in of torch's
        return None


def _is_plain(leaf: object) -> bool:
    """Return whether no tensor can be hidden in a part of a batch."""
    if isinstance(leaf, torch.Tensor):
        return _address(leaf) is not None
    if isinstance(leaf, np.ndarray | np.generic):
        return not leaf.dtype.hasobject
    return isinstance(leaf, tree.HOLD_NOTHING)

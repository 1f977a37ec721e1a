"""Operations of many steps, which ``torch.compile`` makes a few kernels of, once it was compared.

Each rounding half-way is an operator of torch, and each operator a launch. What is compiled rounds
in its own way, so that the first batch of each form is computed both ways. Where they differ, or
nothing can be compiled, the operators go on, and a warning says so, once. No error of a compiler
ends a training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from lightning_fastdata.augment.ops.operation import Arrays, Run, Values
from lightning_fastdata.augment.replay.warm_up import has_kernels
from lightning_fastdata.errors import FastDataWarning
from lightning_fastdata.torch_internals import count_operators

Told: TypeAlias = Callable[[Tensor, Values, Arrays], tuple[Tensor, bool]]
"""An operation that tells of its result whether it was compiled."""
_NEAR: Final = 1e-5
"""By how much floats may differ, as a share of their range, which is 1 or more."""
_LEFT: Final = (
    "{count} operators of torch compute {name} on {device} one after the other, without kernels of "
    "torch.compile: {why}. The images are the same, but it is slower."
)


def by_inductor(run: Told) -> Told:
    """Return an operation compiled for batches of any size, wholly or not at all."""
    made: Told = torch.compile(run, fullgraph=True, dynamic=True)
    return made


def suits_kernels(batch: Tensor) -> bool:
    """Return whether to compile for a batch: on CUDA, where Triton works, of a few samples."""
    return batch.device.type == "cuda" and len(batch) > 2 and has_kernels(batch.device)


class Compiled:
    """An operation on batches, compiled for those that suit; called as the operation itself.

    It writes to none of its arguments. ``exact``: all values have to be equal; else bytes may be a
    level apart, and floats 1e-5 of their range. ``suits``: whether to compile for a batch, of three
    samples or more.
    """

    def __init__(
        self,
        run: Run,
        *,
        exact: bool = False,
        compiler: Callable[[Told], Told] = by_inductor,
        suits: Callable[[Tensor], bool] = suits_kernels,
    ) -> None:
        self.run = run
        self._exact, self._compiler, self._suits = exact, compiler, suits
        self._compiled: Told | None = None
        self._right: dict[object, bool] = {}
        """Whether what was compiled is used, by the form of a batch; what is not there is tried."""
        self.left: str | None = None
        """What goes on where what was compiled was refused last, and why; None: it never was."""

    def __call__(self, batch: Tensor, static: Values, arrays: Arrays) -> Tensor:
        """Return a batch after the operation."""
        form = _form(batch, static, arrays) if self._suits(batch) else None
        right = self._right.get(form, form is not None)
        if not right:
            return self.run(batch, static, arrays)
        made, why = None, ""
        try:
            if self._compiled is None:
                self._compiled = self._compiler(self._told)
                # Of one sample less, as torch takes numbers that are equal by chance for the same.
                self._compiled(*_alone(batch, static, arrays, len(batch) - 1))
            made, compiled = self._compiled(*_alone(batch, static, arrays, len(batch)))
            if form in self._right or not compiled:  # in a block in which torch compiles nothing
                return made
        except torch.OutOfMemoryError:  # the next batch may fit
            return self.run(batch, static, arrays)
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
        wanted, operators = count_operators(partial(self.run, batch, static, arrays))
        if made is not None and not self.same(made, wanted):
            why = "they made other pixels"
        self._right[form] = not why
        if why:
            self._leave(operators, why, batch)
        return wanted

    def _told(self, batch: Tensor, static: Values, arrays: Arrays) -> tuple[Tensor, bool]:
        return self.run(batch, static, arrays), torch.compiler.is_compiling()

    def same(self, made: Tensor, wanted: Tensor) -> bool:
        """Return whether a result is as near to another one as is asked for."""
        if made.shape != wanted.shape or made.dtype != wanted.dtype:
            return False
        if self._exact:
            return torch.equal(made, wanted)
        if wanted.is_floating_point():
            widest = max(1.0, float(wanted.abs().nan_to_num(0.0, 0.0).max()))
            return torch.allclose(made, wanted, rtol=0, atol=_NEAR * widest, equal_nan=True)
        return int(torch.where(made > wanted, made - wanted, wanted - made).max()) <= 1

    def _leave(self, operators: int, why: str, batch: Tensor) -> None:
        said, self.left = self.left, f"{operators} operators of torch on {batch.device}: {why}"
        if said is None:
            text = _LEFT.format(
                name=self.run.__name__, count=operators, device=batch.device, why=why
            )
            warnings.warn(text, FastDataWarning, stacklevel=2)


def _alone(batch: Tensor, static: Values, arrays: Arrays, count: int) -> Any:
    """Return so many samples as no views: torch would compile again for what is viewed."""
    made = {}
    for name, one in {"": batch, **arrays}.items():
        where = one.storage_offset(), (count, *one.shape[1:]), one.stride()
        made[name] = one.new_empty(0).set_(one.untyped_storage(), *where)
    return made.pop(""), static, made


def _form(batch: Tensor, static: Values, arrays: Arrays) -> object:
    """Return what batches have in common of which one alone is compared: all but their number."""
    numbers = ((name, one.shape[1:], one.dtype) for name, one in {"": batch, **arrays}.items())
    return batch.device, batch.is_contiguous(), tuple(static.items()), tuple(numbers)

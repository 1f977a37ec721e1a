"""Compile operations of many steps to few kernels with ``torch.compile``, and compare the results.

Uncompiled, each rounding half-way is an operator of torch, and each operator a launch. Compiled
code rounds in its own way, so the first batch of each form is computed both ways. If the results
differ, or nothing can be compiled, the operators stay in use, and one warning says so. No error of
a compiler ends a training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from lightning_fastdata.augment.ops.operation import Arrays, Run, Values
from lightning_fastdata.augment.replay.warm_up import has_kernels
from lightning_fastdata.errors import FastDataWarning

Told: TypeAlias = Callable[[Tensor, Values, Arrays], tuple[Tensor, bool]]
"""An operation that returns its result, and whether compiled code made it."""
_NEAR: Final = 1e-5
"""Allowed difference of floats, as a share of their largest absolute value, taken as 1 or more."""
_LEFT: Final = (
    "Operators of torch compute {name} on {device} one after the other, without kernels of "
    "torch.compile: {why}. The images are the same, but it is slower."
)


def by_inductor(run: Told) -> Told:
    """Return an operation compiled for batches of any size, wholly or not at all."""
    made: Told = torch.compile(run, fullgraph=True, dynamic=True)
    return made


def suits_kernels(batch: Tensor) -> bool:
    """Return whether to compile for a batch: one of 3 samples or more on CUDA, if Triton works."""
    return batch.device.type == "cuda" and len(batch) > 2 and has_kernels(batch.device)


class Compiled:
    """An operation on batches, compiled for batches that suit it, and called like the operation.

    The operation must not write to its arguments. ``exact``: compiled values must equal the others;
    else bytes may be a level apart, and floats 1e-5 of the largest. ``suits`` returns whether to
    compile for a batch; it may do so only for three samples or more.
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
        """Whether compiled code is used, by the form of a batch; other forms are still untried."""
        self._has_said = False
        """Whether it was said that compiled code is refused."""

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
                # First for one sample less: torch takes sizes equal by chance for one size.
                self._compiled(*_alone(batch, static, arrays, len(batch) - 1))
            made, compiled = self._compiled(*_alone(batch, static, arrays, len(batch)))
            if form in self._right or not compiled:  # compiling is off here
                return made
        except torch.OutOfMemoryError:  # the next batch may fit
            return self.run(batch, static, arrays)
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
        wanted = self.run(batch, static, arrays)
        if made is not None and not self.same(made, wanted):
            why = "they made other pixels"
        self._right[form] = not why
        if why and not self._has_said:
            self._has_said = True
            text = _LEFT.format(name=self.run.__name__, device=batch.device, why=why)
            warnings.warn(text, FastDataWarning, stacklevel=2)
        return wanted

    def _told(self, batch: Tensor, static: Values, arrays: Arrays) -> tuple[Tensor, bool]:
        return self.run(batch, static, arrays), torch.compiler.is_compiling()

    def same(self, made: Tensor, wanted: Tensor) -> bool:
        """Return whether a compiled result is near enough to the wanted one."""
        if made.shape != wanted.shape or made.dtype != wanted.dtype:
            return False
        if self._exact:
            return torch.equal(made, wanted)
        if wanted.is_floating_point():
            widest = max(1.0, float(wanted.abs().nan_to_num(0.0, 0.0).max()))
            return torch.allclose(made, wanted, rtol=0, atol=_NEAR * widest, equal_nan=True)
        return int(torch.where(made > wanted, made - wanted, wanted - made).max()) <= 1


def _alone(batch: Tensor, static: Values, arrays: Arrays, count: int) -> Any:
    """Return the first ``count`` samples, not as views, for which torch would compile again."""
    made = {}
    for name, one in {"": batch, **arrays}.items():
        where = one.storage_offset(), (count, *one.shape[1:]), one.stride()
        made[name] = one.new_empty(0).set_(one.untyped_storage(), *where)
    return made.pop(""), static, made


def _form(batch: Tensor, static: Values, arrays: Arrays) -> object:
    """Return the form of a batch, without its number of samples: one batch of each is compared."""
    numbers = ((name, one.shape[1:], one.dtype) for name, one in {"": batch, **arrays}.items())
    return batch.device, batch.is_contiguous(), tuple(static.items()), tuple(numbers)

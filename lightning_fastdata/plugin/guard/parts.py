"""A training batch that runs out of memory is trained on in parts.

Lightning does all of a batch in one call: training step, backward, optimizer step. On an
out-of-memory error that call is unwound, so that nothing of it holds memory; the state of before is
put back, and the call is made again with a training step that takes the batch in parts.

It brings a batch to the device in one call, too: hooks before the transfer, the transfer, hooks
after it, which augment. Where memory runs out there, the call is made again in a way that takes
less memory, from the batch in host memory.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import nn

from lightning_fastdata.batches.staged import StagedBatch
from lightning_fastdata.device.backend import free_memory, is_out_of_memory
from lightning_fastdata.errors import BatchSizeError, FastDataWarning
from lightning_fastdata.plugin import seams
from lightning_fastdata.plugin.guard.snapshots import Snapshot, Undo
from lightning_fastdata.plugin.transforms import carry_out_draws
from lightning_fastdata.randomness.global_generators import snapshot_random_states
from lightning_fastdata.tree import Path, children, is_named_tuple, leaves, replace_leaves

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_fastdata.plugin.module import DataModule
    from lightning_fastdata.types import Batch


Run: TypeAlias = Callable[[Any, int, Mapping[str, Any]], object]
_Logged: TypeAlias = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""Value of a call of ``log``, and what stood behind it: arguments by position and by name."""

_NORMALISED: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_TOLD: Final = (
    "A training batch ran out of memory before its step, while it was moved or transformed "
    "({said}). {how}. A smaller batch_size does without."
)


def normalises(pl_module: LightningModule) -> bool:
    """Return whether a module has batch normalisation that looks at the batches of a training."""
    return any(isinstance(m, _NORMALISED) and m.training for m in pl_module.modules())


def rows_of(batch: Batch) -> int | None:
    """Return how many samples a batch has; None: it cannot be told.

    That is the first dimension of its tensors, or the length of its lists where it has no tensors.
    Lists may be views or fields, and no samples, where all tensors in them have as many rows.
    """
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else None
    parts = [part for _, part in children(batch) or []]
    sizes = {len(part) for part in parts if isinstance(part, torch.Tensor) and part.dim()}
    if not sizes:
        sizes = {len(part) for part in parts if isinstance(part, list | tuple)}
        rows = {
            len(leaf) for leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()
        }
        sizes |= rows if sizes and len(rows) == 1 else set()
    if not sizes:
        sizes = {each for part in parts if (each := rows_of(part)) is not None}
    return sizes.pop() if len(sizes) == 1 else None


def part_of(batch: Batch, begin: int, end: int, rows: int) -> Batch:
    """Return some samples of a batch: of tensors and lists as long as it; the rest stays whole."""
    return _with_columns(batch, rows, lambda column: column[begin:end])


def samples_of(batch: Batch, indices: Sequence[int], rows: int) -> Batch:
    """Return the samples at the indices, which may repeat, of a batch that has ``rows``."""
    at = torch.tensor(indices)

    def picked(column: Batch) -> Batch:
        if isinstance(column, torch.Tensor):
            return column[at]
        return type(column)([column[index] for index in indices])

    return _with_columns(batch, rows, picked)


def joined(parts: Sequence[Batch]) -> Batch:
    """Return one batch made of parts: columns are joined, the rest is taken from the first part."""
    forms = [partial(_is_column, rows_of(part)) for part in parts]
    others = [leaves(part, form) for part, form in zip(parts[1:], forms[1:], strict=True)]

    def whole(_: Path, leaf: Any) -> Any:
        column = [leaf, *(next(other) for other in others)]
        if not forms[0](leaf):
            return leaf
        return torch.cat(column) if isinstance(leaf, torch.Tensor) else sum(column, type(leaf)())

    return replace_leaves(parts[0], whole, depth=-1, is_leaf=forms[0])


def _with_columns(batch: Batch, rows: int, change: Callable[[Any], Any]) -> Batch:
    is_column = partial(_is_column, rows)
    return replace_leaves(
        batch, lambda _, leaf: change(leaf) if is_column(leaf) else leaf, is_leaf=is_column
    )


def _is_column(rows: int | None, value: Batch) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() > 0 and len(value) == rows
    listed = isinstance(value, list | tuple) and len(value) == rows
    inside = partial(_is_column, rows)
    return listed and not is_named_tuple(value) and not any(map(inside, value))


class RunsInParts:
    """Optimizes on one batch at a time, and takes batches in parts that do not fit at once.

    The loss has to be a mean over the samples, as the parts' gradients are weighted by their sizes.
    Layers that look at the whole batch, as batch normalisation does, see a part of it. Callbacks
    see a backward pass for each part. For a batch no larger than one that was trained on before,
    what the failed try drew and counted (running statistics, metrics) is not put back.

    Args:
        trainer: Trains on one device, with one optimizer that Lightning steps.
        pl_module: The module that it trains.
        run: Lightning's own function; takes the optimizer, the batch's number and the arguments of
            the training step.
        datamodule: Its ``guard`` is the policy; ``"raise"``: a batch that does not fit is an error.
            What it has sent ahead is dropped before a batch is taken in parts.
    """

    def __init__(
        self, trainer: Trainer, pl_module: LightningModule, run: Run, datamodule: DataModule
    ) -> None:
        self.trainer, self.pl_module, self.run = trainer, pl_module, run
        self.datamodule = datamodule
        self.most: int | None = None
        """Tensor elements in the largest part that fits, since a batch did not; None: all did."""
        self.is_stepping = False
        """Whether the optimizer has begun to change the parameters."""
        self.has_logged = False
        """Whether the training step came to its end."""
        self._fitted = 0
        """Tensor elements in the largest batch that was trained on."""

    def __call__(self, optimizer: object, batch_idx: int, kwargs: Mapping[str, Any]) -> object:
        """Optimize on one batch, in as few parts as fit.

        Raises:
            BatchSizeError: Memory runs out where the batch cannot be taken in parts.
        """
        batch = next(iter(kwargs.values()), None)
        rows = rows_of(batch)
        numbers = sum(leaf.numel() for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
        if rows is None:
            return self.run(optimizer, batch_idx, kwargs)
        size = rows
        if self.most is not None and numbers > self.most:
            size = max(1, rows * self.most // numbers)  # of longer samples, fewer fit
        first = not batch_idx % self.trainer.accumulate_grad_batches
        # A batch no larger than one before may still fail, if others take memory, too. To remember
        # everything for each batch would take longer than some steps.
        undo = self._remembered(first=first) if numbers > self._fitted else None
        logged, said = False, ""
        while True:
            self.is_stepping = self.has_logged = False
            in_parts = self._in_parts(rows, size, first=first, silent=logged)
            with nullcontext() if size == rows else in_parts:
                try:
                    result = self.run(optimizer, batch_idx, kwargs)
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                    dropped = self.datamodule._prefetching.drop_ahead()
                    smallest = size == 1 and not dropped
                    why = self._why_not(smallest=smallest, lost=undo is None and not first)
                    if why is not None:
                        raise BatchSizeError(_REFUSED.format(rows=rows, why=why)) from error
                    said = str(error).partition("\n")[0]
                else:
                    break
            # Not within the except clause, which keeps the frames of what has failed.
            logged = logged or (self.has_logged and size == rows and undo is None)
            if undo is not None:
                undo()
            free_memory()
            if not dropped:
                size = -(-size // 2)
        self._fitted = max(self._fitted, numbers)
        if said and size < rows:
            if self.most is None:
                self._warn(rows, size, said)
            self.most = numbers * size // rows
        return result

    @contextmanager
    def _in_parts(self, rows: int, size: int, *, first: bool, silent: bool) -> Iterator[None]:
        """Have the module do its training step, backward passes included, in parts of a batch.

        ``first``: earlier gradients are dropped. ``silent``: an earlier try has logged everything.
        """
        trainer, module, attributes = self.trainer, self.pl_module, vars(self.pl_module)
        step, zero, log = module.training_step, module.optimizer_zero_grad, module.log
        logged: dict[tuple[str, int], list[_Logged]] = {}

        def keep(
            part_rows: int, calls: Counter[str], name: str, value: object, *args: Any, **how: Any
        ) -> None:
            # Kept until all parts have logged, as the step may be tried again.
            if len(args) <= _BATCH_SIZE_AT and how.get("batch_size") is None:
                how = {**how, "batch_size": part_rows}
            value = value.detach() if isinstance(value, torch.Tensor) else value
            calls[name] += 1
            logged.setdefault((name, calls[name]), []).append((value, args, how))

        def step_in_parts(batch: Batch, *rest: object) -> object:
            optimizer = trainer.strategy.optimizers[0]
            if first:
                zero(trainer.current_epoch, trainer.fit_loop.batch_idx, optimizer)
            outputs = []
            for begin in range(0, rows, size):
                end = min(begin + size, rows)
                attributes["log"] = partial(keep, end - begin, Counter())
                output = step(part_of(batch, begin, end, rows), *rest)
                loss = output.get("loss") if isinstance(output, Mapping) else output
                if loss is None:
                    continue
                weighted = loss * ((end - begin) / rows)
                trainer.strategy.backward(weighted / trainer.accumulate_grad_batches, optimizer)
                outputs.append((end - begin, output, weighted.detach()))
                del output, loss, weighted
            attributes.pop("log", None)
            for (name, _), of_parts in ({} if silent else logged).items():
                value, args, how = _of_whole(of_parts)
                log(name, value, *args, **how)
            return _joined(outputs)

        # Lightning looks there for the arguments that the step takes.
        step_in_parts.__wrapped__ = step  # type: ignore[attr-defined]
        names = ("training_step", "optimizer_zero_grad", "log")
        before = {name: attributes[name] for name in names if name in attributes}
        attributes["training_step"] = step_in_parts
        attributes["optimizer_zero_grad"] = lambda *_: None  # would undo the parts
        try:
            yield
        finally:
            for name in names:
                attributes.pop(name, None)
            attributes.update(before)

    def _remembered(self, *, first: bool) -> Undo:
        """Return what undoes all that a try changes; ``first``: earlier gradients are not kept."""
        module = self.pl_module
        random = snapshot_random_states()
        buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
        kept = () if first else [(p, p.grad) for p in module.parameters()]
        grads = [(p, None if g is None else g.detach().to("cpu", copy=True)) for p, g in kept]
        results = seams.results_of(self.trainer)
        names = set(results)
        metrics = (m for m in module.modules() if hasattr(type(m), "metric_state"))
        counted = Snapshot(*metrics, *results.values())

        def undo() -> None:
            for name in results.keys() - names:
                del results[name]
            counted()
            random()
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            for parameter, grad in grads:
                parameter.grad = None if grad is None else grad.to(parameter.device)

        return undo

    def _why_not(self, *, smallest: bool, lost: bool) -> str | None:
        """Return why the batch is not tried again with less memory; None: it is.

        ``lost``: the gradients of the batches before it were not kept.
        """
        if self.datamodule.guard == "raise":
            return 'guard="raise" was set'
        if self.is_stepping:
            return "it ran out while the optimizer changed the parameters, which cannot be undone"
        if lost:
            return "gradients of the batches before were accumulated, and not kept"
        return "not even one sample fits" if smallest else None

    def _warn(self, rows: int, size: int, said: str) -> None:
        normalised = normalises(self.pl_module)
        note = " Batch normalisation then averages over a part." if normalised else ""
        warnings.warn(
            f"A training batch of {rows} samples ran out of memory ({said}). It was trained on in "
            f"parts of {size}, and so are all batches of more from now on: the same optimizer "
            f"steps, if the loss is a mean over the samples.{note} A batch_size of {size} and "
            f"accumulate_grad_batches={-(-rows // size)} do the same without the first try.",
            FastDataWarning,
            stacklevel=2,
        )


_REFUSED: Final = (
    "A training batch of {rows} samples ran out of memory, and is not tried again in parts: {why}. "
    "Set a smaller batch_size, with accumulate_grad_batches to keep the optimizer steps."
)
_BATCH_SIZE_AT: Final = 9
"""Position of ``batch_size`` in ``LightningModule.log`` behind name and value, from 0."""
_REDUCE_FX_AT: Final = 4
"""Position of ``reduce_fx`` there."""
_REDUCED: Final[Mapping[str, Callable[[list[Any]], Any]]] = {"sum": sum, "max": max, "min": min}
"""Name of a ``reduce_fx`` that is no mean -> what does the same to the values of parts."""


def can_be_in_parts(trainer: Trainer, pl_module: LightningModule) -> bool:
    """Return whether batches of a training can be taken in parts."""
    # One rank that runs out of memory would leave the others waiting in a collective.
    alone = trainer.world_size == 1 and "SingleDeviceStrategy" in strategies_of(trainer)
    return alone and why_not_stepped(trainer, pl_module) is None


def why_not_stepped(trainer: Trainer, pl_module: LightningModule) -> str | None:
    """Return why a training step cannot be made again by itself; None: it can."""
    optimizers = trainer.strategy.optimizers
    arguments = inspect.signature(pl_module.training_step).parameters
    reasons = {
        "the module optimizes by hand": not pl_module.automatic_optimization,
        f"there are {len(optimizers)} optimizers, not one": len(optimizers) != 1,
        "training_step takes the loader's iterator": "dataloader_iter" in arguments,
        "LBFGS runs training_step several times per step": any(
            isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers
        ),
    }
    return first_that_holds(reasons)


def strategies_of(trainer: Trainer) -> list[str]:
    """Return the names of the classes of a trainer's strategy, the most derived first."""
    return [kind.__name__ for kind in type(trainer.strategy).__mro__]


def first_that_holds(reasons: Mapping[str, bool]) -> str | None:
    """Return the first of some reasons that holds; None: none does."""
    return next((why for why, holds in reasons.items() if holds), None)


def _of_whole(of_parts: Sequence[_Logged]) -> _Logged:
    """Return what is logged of a whole batch for what its parts have logged.

    It is their mean by samples, or the sum or extreme where that is how steps are reduced. A metric
    object has seen all parts.
    """
    value, args, how = of_parts[-1]
    values = [one for one, _, _ in of_parts]
    if not all(isinstance(one, int | float | torch.Tensor) for one in values):
        return value, args, how
    reduce_fx = how.get("reduce_fx", "mean") if len(args) <= _REDUCE_FX_AT else args[_REDUCE_FX_AT]
    reduced = str(getattr(reduce_fx, "__name__", reduce_fx)).lower()
    at, named = _BATCH_SIZE_AT, len(args) <= _BATCH_SIZE_AT
    sizes = [one["batch_size"] if named else by_position[at] for _, by_position, one in of_parts]
    if reduced in _REDUCED:
        value = _REDUCED[reduced](values)
    else:
        weighted = [one * size for one, size in zip(values, sizes, strict=True)]
        value = sum(weighted) / (sum(sizes) or 1)
    if named:
        return value, args, {**how, "batch_size": sum(sizes)}
    return value, (*args[:at], sum(sizes), *args[at + 1 :]), how


def _joined(outputs: list[tuple[int, Any, torch.Tensor]]) -> object:
    """Return the step's output for the whole batch, with a loss that has no graph behind it."""
    if not outputs:
        return None
    total = torch.stack([loss for _, _, loss in outputs]).sum().requires_grad_()
    _, last, _ = outputs[-1]
    if not isinstance(last, Mapping):
        return total
    joined: dict[str, Any] = {}
    for name, value in last.items():
        pieces = [output.get(name) for _, output, _ in outputs]
        of_samples = all(
            isinstance(piece, torch.Tensor) and piece.dim() and len(piece) == rows
            for (rows, _, _), piece in zip(outputs, pieces, strict=True)
        )
        joined[name] = torch.cat([piece.detach() for piece in pieces]) if of_samples else value
    return {**joined, "loss": total}


class ArrivesInParts:
    """Brings training batches to the device, with less memory where they do not fit.

    First, batches that were sent ahead are dropped. Then what workers drew is carried out in host
    memory, with the same draws. Then the batch is moved and transformed in parts, half as large
    each time, and joined: a transform that looks at the whole batch sees a part, and draws anew for
    each part. ``move`` is Lightning's own ``batch_to_device``.
    """

    def __init__(
        self, trainer: Trainer, move: Callable[..., Batch], datamodule: DataModule
    ) -> None:
        self.trainer, self.move, self.datamodule = trainer, move, datamodule
        self.largest: int | None = None
        """Most samples of a part, as larger ones did not fit; None: all batches did."""
        self.on_host = False
        """Whether draws are carried out in host memory."""

    def __call__(self, batch: Batch, *where: Any, **named: Any) -> Batch:
        """Return the batch on the device, transformed; raise torch's error if nothing helps."""
        if not self.trainer.training:
            return self.move(batch, *where, **named)
        while True:
            try:
                parts = [self.move(part, *where, **named) for part in self._parts(batch)]
                return parts[0] if len(parts) == 1 else joined(parts)
            except Exception as error:
                how = self._less(batch) if is_out_of_memory(error) else None
                if how is None:
                    raise
                said = str(error).partition("\n")[0]
            finally:
                self.datamodule.part_begin = 0
            # Not within the except clause, which keeps the frames of what has failed.
            free_memory()
            if how:
                warnings.warn(_TOLD.format(said=said, how=how), FastDataWarning, stacklevel=2)

    def _parts(self, batch: Batch) -> Iterator[Batch]:
        if not self.on_host and self.largest is None:
            yield batch
            return
        batch = _as_loaded(batch)
        if self.on_host:
            batch = carry_out_draws(batch, self.datamodule._transforms)
        plain = batch.batch if isinstance(batch, StagedBatch) else batch
        rows = rows_of(plain)
        size = rows if self.largest is None else self.largest
        if rows is None or size is None or rows <= size or _has_draws(batch):
            yield batch
            return
        for begin in range(0, rows, size):
            self.datamodule.part_begin = begin
            part = part_of(plain, begin, min(begin + size, rows), rows)
            yield batch.with_batch(part) if isinstance(batch, StagedBatch) else part

    def _less(self, batch: Batch) -> str | None:
        """Go over to what takes less memory, and return it in words; None: there is nothing."""
        if self.datamodule._prefetching.drop_ahead():
            return ""
        batch = _as_loaded(batch)
        if _has_draws(batch) and not self.on_host:
            self.on_host = True
            return "From now on the pipeline's draws are carried out in host memory"
        rows = rows_of(batch.batch if isinstance(batch, StagedBatch) else batch)
        size = None if rows is None else min(rows, self.largest or rows)
        if size is None or size == 1:
            return None
        self.largest = -(-size // 2)
        return f"From now on it is done in parts of {self.largest} samples, which are then joined"


def _as_loaded(batch: Batch) -> Batch:
    if isinstance(batch, StagedBatch) and batch.crossing is not None:
        return batch.crossing.source
    return batch


def _has_draws(batch: Batch) -> bool:
    return isinstance(batch, StagedBatch) and batch.draws is not None

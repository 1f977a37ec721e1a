"""Tensors on a pretended CUDA, and what torch's operations do with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from rig.late_cuda import Block, LateCuda, Stream, installed

_DRAWS = (
    *("rand", "normal", "uniform", "bernoulli", "exponential", "multinomial", "dropout"),
    *("geometric", "cauchy", "log_normal", "poisson"),
)
"""Words in the names of operations that draw random numbers."""
_HOST_READS = frozenset(
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select"),
        *("unique_dim", "_unique2", "unique_consecutive", "repeat_interleave"),
    )
)
"""Operations whose result, or its size, the host has to know: it waits for the device."""
_VIEWS = frozenset({"aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh"})
_UNWRITTEN = ("aten::empty", "aten::new_empty")


class LateTensor(torch.Tensor):
    """A tensor on a device; ``memory`` has what the device has written by now."""

    memory: torch.Tensor
    block: Block

    @staticmethod
    def __new__(cls, memory: torch.Tensor, block: Block, device: torch.device) -> LateTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            layout=memory.layout,
            device=device,
            requires_grad=False,
        )
        tensor.memory, tensor.block = memory, block
        return tensor

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return carry_out(installed(), function, args, kwargs or {})

    def record_stream(self, stream: Stream) -> None:
        self.block.used_by[stream] = None

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.memory.untyped_storage()

    def tolist(self) -> Any:
        machine = installed()
        machine.host_waits("tolist", machine.current_stream(self.device))
        return self.memory.tolist()

    def read(self) -> torch.Tensor:
        """Return a copy of what is in it when all queued work is done; no wait of the program."""
        with _disable_current_modes():
            installed().finish()
            return self.memory.clone()

    def __repr__(self) -> str:
        return f"LateTensor({tuple(self.shape)}, {self.dtype}, {self.device})"


class LateMode(TorchDispatchMode):
    """Has what is made on CUDA, or moved there, be a :class:`LateTensor`."""

    def __init__(self, machine: LateCuda) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return carry_out(self._machine, function, args, kwargs or {})


def carry_out(machine: LateCuda, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Queue an operation, or carry it out on the host if nothing of it is on a device."""
    with _disable_current_modes():
        return _Operation(machine, function, args, kwargs).result()


class _Operation:
    """One call of an operation of torch."""

    def __init__(self, machine: LateCuda, function: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.machine = machine
        self.function, self.args, self.kwargs = function, args, kwargs
        self.schema = function._schema
        self.name = self.schema.name
        self.given = tree_leaves((args, kwargs))
        self.late = [each for each in self.given if isinstance(each, LateTensor)]
        named = kwargs.get("device")
        self.to_cuda = named is not None and torch.device(named).type == "cuda"
        self.leaves_cuda = named is not None and not self.to_cuda

    def result(self) -> Any:
        if not self.late and not self.to_cuda:
            return self.function(*self.args, **self.kwargs)
        machine = self.machine
        self.device = self.late[0].device if self.late else machine.device(self.kwargs["device"])
        self.stream = machine.current_stream(self.device)
        if self.name == "aten::_to_copy" and (self.leaves_cuda or not self.late):
            return self._to_host() if self.late else self._from_host()
        if self.name == "aten::copy_" and not all(
            isinstance(each, LateTensor) for each in self.args[:2]
        ):
            return self._copied_between_host_and_device()
        if not self.late:
            return self._made()
        self._refuse_other_devices()
        if self.to_cuda:
            self.kwargs = {**self.kwargs, "device": "cpu"}
        self.here = tree_map(_memory_of, self.args), tree_map(_memory_of, self.kwargs)
        if self._is_view():
            return self._view()
        if self._host_reads():
            return self._read_by_host()
        if any(argument.alias_info is not None for argument in self.schema.arguments):
            return self._written_in_place()
        return self._computed()

    # Between host and device

    def _from_host(self) -> LateTensor:
        source = self.args[0]
        how = {name: self.kwargs.get(name) for name in ("dtype", "memory_format")}
        # torch converts and lays out on the host what it copies from there.
        form = {name: value for name, value in how.items() if value is not None}
        if form.get("dtype", source.dtype) != source.dtype or form.get("memory_format") not in (
            None,
            torch.preserve_format,
        ):
            source = source.to(**form)
        strides = torch.empty_like(source, device="meta").stride()
        target = self._allocate(source.shape, strides, source.dtype)
        blocks = not self.kwargs.get("non_blocking", False)
        self.machine.copy_from_host(source, target.memory, self.stream, non_blocking=not blocks)
        return target

    def _to_host(self) -> torch.Tensor:
        self.machine.host_waits("copy to the host", self.stream)
        kwargs = {**self.kwargs, "device": "cpu", "non_blocking": False}
        return self.function(self.args[0].memory, **kwargs).clone()

    def _copied_between_host_and_device(self) -> torch.Tensor:
        target, source, *rest = self.args
        non_blocking = rest[0] if rest else self.kwargs.get("non_blocking", False)
        if isinstance(target, LateTensor):
            whole = source if source.shape == target.shape else source.expand(target.shape)
            self.machine.copy_from_host(
                whole, target.memory, self.stream, non_blocking=non_blocking
            )
        else:
            self.machine.host_waits("copy to the host", self.stream)
            target.copy_(source.memory)
        return target

    def _refuse_other_devices(self) -> None:
        indexes = self.name in ("aten::index", "aten::index_put_", "aten::index_put")
        for each in self.given:
            if not isinstance(each, torch.Tensor) or not each.ndim:
                continue
            if isinstance(each, LateTensor):
                assert each.device == self.device, f"{self.name}: between devices is not pretended"
            elif indexes:
                self.machine.host_waits("index in ordinary memory", self.stream)
            else:
                raise RuntimeError(
                    f"{self.name}: expected all tensors on the same device, got cuda and cpu"
                )

    # On the device

    def _allocate(self, shape: Any, strides: Any, dtype: torch.dtype) -> LateTensor:
        memory = torch.empty_strided(shape, strides, dtype=dtype)
        return LateTensor(memory, self.machine.allocate(memory, self.stream), self.device)

    def _like(self, form: Any) -> Any:
        if not isinstance(form, torch.Tensor):
            return form
        return self._allocate(form.shape, form.stride(), form.dtype)

    def _queue(self, work: Callable[[], object]) -> None:
        self.machine.push(self.stream, work)

    def _made(self) -> LateTensor:
        kwargs = {**self.kwargs, "device": "cpu"}
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        with self._drawing():
            values = self.function(*self.args, **kwargs)
        made = self._like(values)
        if not self.name.startswith(_UNWRITTEN):
            target = made.memory
            self._queue(lambda: target.copy_(values))
        return made

    def _is_view(self) -> bool:
        returned = (each.alias_info for each in self.schema.returns)
        return self.name in _VIEWS or any(
            alias is not None and not alias.is_write for alias in returned
        )

    def _view(self) -> Any:
        base = self.late[0]

        def on_device(view: Any) -> Any:
            if isinstance(view, torch.Tensor):
                return LateTensor(view, base.block, base.device)
            return view

        return tree_map(on_device, self.function(*self.here[0], **self.here[1]))

    def _host_reads(self) -> bool:
        if self.name in _HOST_READS:
            # With the size of its result, the host has nothing to wait for.
            return self.kwargs.get("output_size") is None
        return self.name == "aten::index" and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in self.args[1]
        )

    def _read_by_host(self) -> Any:
        self.machine.host_waits(self.name, self.stream)

        def on_device(value: Any) -> Any:
            made = self._like(value)
            if isinstance(made, LateTensor):
                made.memory.copy_(value)
            return made

        return tree_map(on_device, self.function(*self.here[0], **self.here[1]))

    def _draws(self) -> bool:
        return any(word in self.name for word in _DRAWS)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Have random numbers be those of the device's generator, unless one was given."""
        if not self._draws() or self.kwargs.get("generator") is not None:
            yield
            return
        generator, of_host = self.machine.generators[self.device.index], torch.get_rng_state()
        torch.set_rng_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(torch.get_rng_state())
            torch.set_rng_state(of_host)

    def _written_in_place(self) -> Any:
        args, kwargs = self.here
        function = self.function
        if self._draws():
            # What is drawn depends on the order of the host's calls.
            target = args[0]
            drawn = target.clone()
            with self._drawing():
                function(drawn, *args[1:], **kwargs)
            self._queue(lambda: target.copy_(drawn))
        else:
            self._queue(lambda: function(*args, **kwargs))
        names = [argument.name for argument in self.schema.arguments]
        written = [
            self.args[place] if place < len(self.args) else self.kwargs[name]
            for place, name in enumerate(names)
            if (alias := self.schema.arguments[place].alias_info) is not None and alias.is_write
        ]
        returned = len(self.schema.returns)
        return written[0] if returned == 1 else tuple(written[:returned]) or None

    def _computed(self) -> Any:
        args, kwargs = self.here
        function = self.function
        if self._draws():
            with self._drawing():
                values = function(*args, **kwargs)
            made = self._like(values)
            target = made.memory
            self._queue(lambda: target.copy_(values))
            return made
        made = tree_map(self._like, self._forms())
        targets = [each.memory for each in tree_leaves(made) if isinstance(each, LateTensor)]
        if self.name.startswith(_UNWRITTEN):
            return made

        def work() -> None:
            values = tree_leaves(function(*args, **kwargs))
            found = [each for each in values if isinstance(each, torch.Tensor)]
            for target, value in zip(targets, found, strict=True):
                target.copy_(value)

        self._queue(work)
        return made

    def _forms(self) -> Any:
        """Return results without values: their shapes, strides and dtypes."""

        def without_values(value: Any) -> Any:
            # A number in host memory is handed to a kernel as it is.
            if not isinstance(value, torch.Tensor) or not (
                isinstance(value, LateTensor) or value.ndim
            ):
                return value
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device="meta"
            )

        args, kwargs = tree_map(without_values, self.args), tree_map(without_values, self.kwargs)
        if "device" in kwargs:
            kwargs["device"] = "meta"
        return self.function(*args, **kwargs)


def _memory_of(value: Any) -> Any:
    return value.memory if isinstance(value, LateTensor) else value

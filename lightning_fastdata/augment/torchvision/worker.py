"""The part of a v2 pipeline that runs on each sample in the side process."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_fastdata.augment.pipeline.fields import Fields
from lightning_fastdata.augment.replay.program import Draws, compile_tapes
from lightning_fastdata.augment.replay.torch import are_rows, replay
from lightning_fastdata.augment.stage_transform import WorkerTransform, plain_tensors
from lightning_fastdata.augment.torchvision.operations import device_ops
from lightning_fastdata.augment.torchvision.pipeline import is_own, leaves_of
from lightning_fastdata.augment.torchvision.samples import (
    check_roles,
    field_at,
    functions_in,
    mover_of,
    only_image,
    typed,
)
from lightning_fastdata.augment.torchvision.tape import Recorder
from lightning_fastdata.randomness.global_generators import GENERATORS
from lightning_fastdata.randomness.seeds import keyed_draws
from lightning_fastdata.tree import replace_leaves

if TYPE_CHECKING:
    import numpy as np

    from lightning_fastdata.augment.ops.operation import Tape
    from lightning_fastdata.augment.torchvision.plan import Plan
    from lightning_fastdata.tree import Path
    from lightning_fastdata.types import Batch, SampleKey


class PipelineWorker(WorkerTransform):
    """The part of a pipeline that runs on each sample in the side process; picklable.

    ``plan`` is that of a device; None: all of the pipeline runs here, as v2 runs it.
    """

    def __init__(self, pipeline: Any, fields: Fields, plan: Plan | None) -> None:
        self._pipeline = pipeline
        self._fields = fields
        self._plan = plan
        leaves = leaves_of(pipeline)
        self._mover = mover_of(leaves)
        self._generators = generators_of(pipeline)
        self._image_alone = bool(functions_in(leaves))
        self._local = threading.local()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_local"}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state, _local=threading.local())

    def __call__(self, sample: Batch, key: SampleKey) -> tuple[Batch, Tape | None]:
        """Return the sample as the worker leaves it, and what the device has still to do to it.

        The tape is None when everything was done here.

        Raises:
            BatchError: a named field is missing, or one would be left behind by its image.
        """
        sample = typed(sample, self._fields)
        check_roles(sample, self._fields, self._mover)
        alone = only_image(sample) if self._image_alone else None
        given = sample if alone is None else field_at(sample, alone)
        with plain_tensors(), keyed_draws(key, self._generators):
            if self._plan is None:
                made, tape = self._pipeline(given), None
            else:
                made, tape = self._recorder()(given)
        if alone is None:
            return made, tape
        whole = replace_leaves(sample, lambda path, own: made if path == alone else own, depth=-1)
        return whole, tape and {(*alone, *path): track for path, track in tape.items()}

    def collate(
        self, tapes: Sequence[Tape | None], beside: Mapping[str, np.ndarray] | None = None
    ) -> Draws:
        """Return the tapes of a batch, packed in the order of its samples, and what goes beside."""
        return compile_tapes([tape or {} for tape in tapes], beside=beside)

    def stacks(
        self, samples: Sequence[Batch], tapes: Sequence[Tape | None], batch: Batch = None
    ) -> bool:
        """Return whether the tensors that wait for the device can be stacked; in a batch, are so.

        They cannot if some samples lack one, or have it in another shape or dtype. A
        ``collate_fn`` may keep them in lists, pad, sort or convert them, or leave them out.
        """
        for path in {path for tape in tapes for path in tape or ()}:
            rows = [field_at(sample, path) for sample in samples]
            if not all(isinstance(row, torch.Tensor) for row in rows):
                return False
            if len({(row.shape, row.dtype) for row in rows}) > 1:
                return False
            if batch is not None and not are_rows(field_at(batch, path), rows):
                return False
        return True

    def finish_each(
        self, samples: Sequence[Batch], tapes: Sequence[Tape | None]
    ) -> tuple[list[Batch], list[Tape]]:
        """Return samples of which nothing waits for the device, for their batch is no tensor."""
        with plain_tensors():
            done = [
                self._finished(sample, tape or {})
                for sample, tape in zip(samples, tapes, strict=True)
            ]
        return done, [{} for _ in done]

    def _finished(self, sample: Batch, tape: Tape) -> Batch:
        draws, ops = compile_tapes([tape]), device_ops(self._pipeline)

        def finished(path: Path, value: Any) -> Any:
            program = draws.programs.get(path)
            if program is None:
                return value
            made = replay(program, draws.blob, value.as_subclass(torch.Tensor)[None], ops)[0]
            return made.as_subclass(type(value))

        return replace_leaves(sample, finished, depth=-1)

    def _recorder(self) -> Recorder:
        if not hasattr(self._local, "recorder"):
            assert self._plan is not None
            self._local.recorder = Recorder(self._pipeline, self._plan)
        recorder: Recorder = self._local.recorder
        return recorder


def generators_of(pipeline: Any) -> tuple[str, ...]:
    """Return the global generators that a pipeline may draw from."""
    leaves = leaves_of(pipeline)
    foreign = any(not is_own(leaf.transform) or leaf.name == "Lambda" for leaf in leaves)
    return GENERATORS if foreign else ("torch",)

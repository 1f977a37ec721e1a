"""The part of a v2 pipeline that runs on each sample in the side process."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_fastdata.augment.pipeline.fields import Fields
from lightning_fastdata.augment.replay.program import compile_tapes
from lightning_fastdata.augment.replay.torch import replay
from lightning_fastdata.augment.stage_transform import plain_tensors
from lightning_fastdata.augment.taped import TapedWorker
from lightning_fastdata.augment.torchvision.operations import device_ops, plain
from lightning_fastdata.augment.torchvision.pipeline import leaves_of
from lightning_fastdata.augment.torchvision.samples import Traits, check_roles, only_image, typed
from lightning_fastdata.augment.torchvision.tape import Recorder
from lightning_fastdata.randomness.seeds import keyed_draws
from lightning_fastdata.tree import at_path, put_leaves

if TYPE_CHECKING:
    from lightning_fastdata.augment.ops.operation import Tape
    from lightning_fastdata.augment.torchvision.plan import Plan
    from lightning_fastdata.tree import Path
    from lightning_fastdata.types import Batch, SampleKey


class PipelineWorker(TapedWorker):
    """The part of a pipeline that runs on each sample in the side process; picklable.

    ``plan`` is that of a device; None: all of the pipeline runs here, as v2 runs it.
    """

    def __init__(self, pipeline: Any, fields: Fields, plan: Plan | None) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._fields = fields
        self._plan = plan
        self._traits = Traits.of(leaves_of(pipeline))

    def __call__(self, sample: Batch, key: SampleKey) -> tuple[Batch, Tape | None]:
        """Return the sample as the worker leaves it, and what the device has still to do to it.

        The tape is None when everything was done here.

        Raises:
            BatchError: a named field is missing, or one would be left behind by its image.
        """
        sample = typed(sample, self._fields)
        check_roles(sample, self._fields, self._traits)
        alone = None if self._traits.function is None else only_image(sample)
        given = sample if alone is None else at_path(sample, alone)
        if self._traits.writes:  # the dataset may hold these tensors, and hand them out again
            given = tree_map_only(Tensor, lambda tensor: tensor.clone(), given)
        with plain_tensors(), keyed_draws(key, self._traits.generators):
            made, tape = self._run(given)
        if alone is None:
            return made, tape
        whole = put_leaves(sample, {alone: made})
        return whole, tape and {(*alone, *path): track for path, track in tape.items()}

    def _run(self, given: Batch) -> tuple[Batch, Tape | None]:
        if self._plan is None:
            return self._pipeline(given), None
        if not hasattr(self._local, "recorder"):
            self._local.recorder = Recorder(self._pipeline, self._plan)
        recorder: Recorder = self._local.recorder
        return recorder(given)

    def waiting(self, item: Batch, names: Collection[Path], **_: bool) -> Mapping[Path, Tensor]:
        """Return the tensors that lie in a sample or batch at these paths."""
        found = {path: at_path(item, path) for path in names}
        return {path: value for path, value in found.items() if isinstance(value, Tensor)}

    def finished(self, sample: Batch, tape: Tape) -> Batch:
        """Return a sample after what its tape says."""
        draws, ops = compile_tapes([tape]), device_ops(self._pipeline)
        done = {}
        for path, program in draws.programs.items():
            value = at_path(sample, path)
            [made] = replay(program, draws.blob, plain(value)[None], ops)
            done[path] = made.as_subclass(type(value))
        return put_leaves(sample, done)

"""The libraries whose pipelines become transforms of batches, each a front end of its own.

A front end records what a pipeline draws for each sample in the worker, as a tape of operations
(:data:`~lightning_fastdata.augment.ops.operation.Tape`). The tapes of a batch are packed into one
program (:mod:`~lightning_fastdata.augment.replay.program`) that the device carries out. Its module
has one function ``stage_transform(transform, fields)``, which returns the transform of batches, or
None of what is no pipeline of its library.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from lightning_fastdata.augment.pipeline.fields import Fields
    from lightning_fastdata.augment.stage_transform import StageTransform

FRONT_ENDS: Final = (
    ("albumentations", "lightning_fastdata.augment.transform"),
    ("torchvision.transforms", "lightning_fastdata.augment.torchvision"),
    ("kornia.augmentation", "lightning_fastdata.augment.kornia"),
)
"""What a pipeline of a library has been imported from, and the module of its front end."""


def pipeline_transform(transform: object, fields: Fields) -> StageTransform | None:
    """Return the transform of batches that a front end makes of a pipeline; None: it is none.

    Raises:
        TransformError: it is a pipeline that its front end cannot take.
    """
    for library, home in FRONT_ENDS:
        if library not in sys.modules:
            continue
        try:
            front_end = import_module(home)
        except ImportError:  # the library is older than what its front end is for
            continue
        made: StageTransform | None = front_end.stage_transform(transform, fields)
        if made is not None:
            return made
    return None

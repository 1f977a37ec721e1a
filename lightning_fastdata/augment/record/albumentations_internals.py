"""What is asked of Albumentations beyond its documentation: a private name, and what is replaced.

- ``_key2func`` of a transform: by the key of a target, the function that it calls with it. Where a
  version has no such name, the self-check fails and every pipeline runs whole on the CPU.
- ``apply_with_params``, ``update_transform_params`` and ``get_params_dependent_on_data`` of a
  transform, ``preprocess`` and ``postprocess`` of a Compose: replaced on single objects, never on a
  class. Those of a copy stay; those of a pipeline that a dataset calls itself are put back by
  ``PipelineRecorder.unhook``.
- ``transforms`` of any composition that a dataset holds: replaced while one task of a worker is
  timed, and put back when it ends (:mod:`lightning_fastdata.stamps.operations`).

``tests/augment/test_albumentations_internals.py`` pins each against the installed Albumentations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def function_by_key(transform: Any) -> Mapping[str, Callable[..., Any]]:
    """Return what a transform calls with the value of each key of a sample that it knows."""
    return transform._key2func  # type: ignore[no-any-return]

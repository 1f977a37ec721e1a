"""A trial kernel, which shows whether Triton can compile and launch anything."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def trial_kernel(target):
    """Write a number."""
    tl.store(target, 1)

"""The kernels of fused runs, in Triton: CUDA, or Triton's own interpreter for tests.

The arithmetic is that of the operations in :mod:`lightning_fastdata.augment.ops` on a CPU, step by
step, so that both give the same bytes: halves to even by adding and taking away ``1.5 * 2**23``,
divisions that are rounded once, and a product and a sum rounded together only where torch does it,
in its ``lerp`` and ``addcmul``: there ``tl.fma`` is written out.
"""

from __future__ import annotations

from lightning_fastdata.augment.replay.kernels.filters import across_kernel
from lightning_fastdata.augment.replay.kernels.fused import fused_kernel
from lightning_fastdata.augment.replay.kernels.masks import mask_kernel
from lightning_fastdata.augment.replay.kernels.numbers import trial_kernel

__all__ = ["across_kernel", "fused_kernel", "mask_kernel", "trial_kernel"]

"""Compile the kernels for CUDA GPUs, which takes none; run by `test_kernels.py` on its own."""

from __future__ import annotations

import itertools
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_fastdata.augment.kernels import fused_kernel

POINTERS = {"source": "u8", "bytes_": "u8", "ints": "i32", "floats": "fp32", "doubles": "fp64"}


def assembly(capability, geometry, sums, normalize, channels_first):
    constants = {
        "GEOMETRY": geometry, "SUMS": sums, "NORMALIZE": normalize,
        "CHANNELS_FIRST": channels_first, "WHERE": 4, "BLOCK": 1024,
    }  # fmt: skip
    pointers = {**POINTERS, "sums": "i64", "target": "fp32" if normalize else "u8"}
    names = fused_kernel.arg_names
    kinds = {name: f"*{kind}" for name, kind in pointers.items()} | dict.fromkeys(
        constants, "constexpr"
    )
    signature = {name: kinds.get(name, "i32") for name in names}
    source = ASTSource(
        fn=fused_kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False}
    )
    if not compiled.asm["cubin"]:
        sys.exit("nothing was compiled")
    return compiled.asm["ptx"]


for geometry, sums in itertools.product(range(3), (False, True)):
    normalize = not sums and geometry != 2
    ptx = assembly(80 + 10 * (geometry == 2), geometry, sums, normalize, geometry == 1)
    if "fma.rn.f32" in ptx:
        sys.exit("a multiply-add was fused")
    if "div.full" in ptx or "div.approx" in ptx:
        sys.exit("a division is not rounded once")

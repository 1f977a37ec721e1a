"""Compile the kernels for CUDA GPUs, which takes none; run by `test_kernels.py` on its own.

They are compiled as a launch has it done: what may be specialized is a multiple of 16, or 1.
"""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_fastdata.augment.replay.kernels.fused import across_kernel, fused_kernel

POINTERS = {
    "source": "u8",
    "bytes_": "u8",
    "ints": "i32",
    "floats": "fp32",
    "doubles": "fp64",
    "sums": "i64",
    "middle": "fp32",
}
WARPS, BLOCK = 4, 512
PER_THREAD = BLOCK // (32 * WARPS)
LERPS, TERMS = 3 * 3 * PER_THREAD, 3 * PER_THREAD
"""Explicit multiply-adds: three lerps a channel; in a filter, one a channel for each term."""


def assembly(kernel, capability, target, constants, *, one_pixel=False):
    names = kernel.arg_names
    kinds = {name: f"*{kind}" for name, kind in (POINTERS | {"target": target}).items()}
    special = [name for name in names if name not in kernel.do_not_specialize]
    special = [name for name in special if name not in constants]
    ones = dict.fromkeys([name for name in special if name not in kinds and one_pixel], 1)
    constants = constants | ones
    kinds |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature={name: kinds.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name in special
            if name not in constants
        },
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"enable_fp_fusion": False, "num_warps": WARPS},
    )
    if not compiled.asm["cubin"]:
        sys.exit("nothing was compiled")
    return compiled.asm["ptx"]


def check(ptx, fused, what):
    if "fma.rn.f64" in ptx:
        sys.exit(f"{what}: a multiply-add of float64 was fused")
    if not fused(ptx.count("fma.rn.f32")):
        sys.exit(f"{what}: {ptx.count('fma.rn.f32')} multiply-adds of float32")
    if "div.full" in ptx or "div.approx" in ptx:
        sys.exit(f"{what}: a division is not rounded once")


CASES = [
    # capability, geometry, sums, ends, planes, target
    (80, 0, False, 1, True, "fp32"),
    (80, 1, True, 0, False, "u8"),
    (90, 2, False, 1, False, "fp32"),
    (90, 3, False, 2, True, "fp32"),
    (80, 4, False, 0, False, "u8"),
    (90, 4, True, 0, False, "u8"),
]
for capability, geometry, sums, ends, planes, target in CASES:
    constants = {
        "GEOMETRY": geometry, "SUMS": sums, "ENDS": ends, "PLANES": planes,
        "BLOCK": BLOCK,
    }  # fmt: skip
    ptx = assembly(fused_kernel, capability, target, constants)
    wanted = {
        3: lambda count: count == LERPS,
        4: lambda count: count > 0 and count % TERMS == 0,
    }.get(geometry, lambda count: count == 0)
    check(ptx, wanted, f"geometry {geometry}")
# An image of one pixel.
assembly(fused_kernel, 90, "u8", {
    "GEOMETRY": 2, "SUMS": False, "ENDS": 0, "PLANES": True, "BLOCK": BLOCK,
}, one_pixel=True)  # fmt: skip
for capability in (80, 90):
    ptx = assembly(across_kernel, capability, "fp32", {"BLOCK": BLOCK})
    check(ptx, lambda count: count > 0 and count % TERMS == 0, "across")

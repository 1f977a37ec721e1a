"""Compile the kernels for CUDA GPUs, which takes none; run by `test_kernels.py` on its own."""

from __future__ import annotations

import sys

from benchmarks.gpu_architectures import compiled

POINTERS = ("uint8", "int32", "float32", "float64", "int64")
BLOCK, PER_THREAD = 512, 4
LERPS = 3 * 3 * PER_THREAD
"""Explicit multiply-adds: three lerps a channel."""


def assembly(capability, arguments, **constants):
    kernel = {"arguments": arguments, "constants": {"BLOCK": BLOCK, **constants}}
    made = compiled(kernel, capability)
    if not made.asm["cubin"]:
        sys.exit("nothing was compiled")
    return made.asm["ptx"]


def check(ptx, fused, what):
    if "fma.rn.f64" in ptx:
        sys.exit(f"{what}: a multiply-add of float64 was fused")
    if not fused(ptx.count("fma.rn.f32")):
        sys.exit(f"{what}: {ptx.count('fma.rn.f32')} multiply-adds of float32")
    if "div.full" in ptx or "div.approx" in ptx:
        sys.exit(f"{what}: a division is not rounded once")


CASES = [
    # capability, geometry, sums, ends, planes, target, pixels
    (80, 0, False, 1, True, "float32", 16),
    (80, 1, True, 0, False, "uint8", 16),
    (90, 2, False, 1, False, "float32", 16),
    (90, 3, False, 2, True, "float32", 16),
    (90, 2, False, 0, True, "uint8", 1),
]
for capability, geometry, sums, ends, planes, target, pixels in CASES:
    given = ["uint8", target, *POINTERS, *[0] * 11, pixels]
    ptx = assembly(capability, given, GEOMETRY=geometry, SUMS=sums, ENDS=ends, PLANES=planes)
    wanted = LERPS if geometry == 3 else 0
    check(ptx, lambda count, wanted=wanted: count == wanted, f"geometry {geometry}")

"""Compile the kernels for CUDA GPUs, which takes none; run by `test_kernels.py` on its own."""

from __future__ import annotations

import sys

from benchmarks.gpu_architectures import compiled

POINTERS = ("uint8", "int32", "float32", "float64", "int64", "float32")
BLOCK, PER_THREAD = 512, 4
LERPS, TERMS = 3 * 3 * PER_THREAD, 3 * PER_THREAD
"""Explicit multiply-adds: three lerps a channel; in a filter, one a channel for each term."""


def assembly(name, capability, arguments, **constants):
    kernel = {"name": name, "arguments": arguments, "constants": {"BLOCK": BLOCK, **constants}}
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
    (80, 4, False, 0, False, "uint8", 16),
    (90, 4, True, 0, False, "uint8", 16),
    (90, 2, False, 0, True, "uint8", 1),
]
for capability, geometry, sums, ends, planes, target, pixels in CASES:
    given = ["uint8", target, *POINTERS, *[0] * 11, pixels]
    ptx = assembly(
        "fused", capability, given, GEOMETRY=geometry, SUMS=sums, ENDS=ends, PLANES=planes
    )
    wanted = {
        3: lambda count: count == LERPS,
        4: lambda count: count > 0 and count % TERMS == 0,
    }.get(geometry, lambda count: count == 0)
    check(ptx, wanted, f"geometry {geometry}")
for capability in (80, 90):
    ptx = assembly("across", capability, ["uint8", "float32", "int32", "float32", *[0] * 5])
    check(ptx, lambda count: count > 0 and count % TERMS == 0, "across")

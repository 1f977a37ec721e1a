"""What the kernels become on each architecture of GPUs, which takes no GPU.

python benchmarks/gpu_architectures.py
python benchmarks/gpu_architectures.py --kernels resize warp --architectures 90

Each kernel is compiled for each architecture, and the machine code counted: registers and stack
(bytes that spilled, or that arrays take) of a thread; loads of one byte and of 16 bytes; float64
instructions; all instructions. A thread computes four pixels. ``seconds`` is what compiling took,
with nothing in Triton's cache. An architecture that this Triton or its assembler does not know is
left out, with a line that says so.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ARCHITECTURES = (75, 80, 90, 100, 120)

_GEOMETRIES = ("as it is", "window", "resize", "warp")
_POINTERS = ("uint8", "int32", "float32", "float64", "int64")


def fused(geometry, *, sums=False, ends=1, planes=True, pixels=16):
    """Return what a fused kernel is compiled for; the name of a dtype stands for a tensor."""
    target = "uint8" if sums or ends == 0 else "float32"
    constants = {"GEOMETRY": geometry, "SUMS": sums, "ENDS": ends, "PLANES": planes, "BLOCK": 512}
    arguments = ["uint8", target, *_POINTERS, *[0] * 11, pixels]
    return {"arguments": arguments, "constants": constants}


KERNELS = {
    **{name: fused(number) for number, name in enumerate(_GEOMETRIES)},
    "resize, luminance": fused(2, sums=True, ends=0, planes=False),
    "resize, bytes": fused(2, ends=0, planes=False),
    "resize, odd size": fused(2, pixels=2),
    "resize, channels last": fused(2, planes=False),
}
"""What images become float32 ``[n, 3, H, W]`` with, by how they are read, and some others."""

COUNTED = {
    "byte loads": r"\bLDG\.\S*U8",
    "16-byte loads": r"\bLDG\.\S*128",
    "stores": r"\bSTG\.",
    "float64": r"\b(?:D(?:ADD|MUL|FMA|SETP)|\S*F64\S*)\b",
    "instructions": r"^\s*/\*[0-9a-f]{4,}\*/",
}
"""Instructions of the machine, as `cuobjdump` writes them."""
COUNTED_IN_PTX = {
    "byte loads": r"\bld\.global\S*\.[bu]8\b",
    "16-byte loads": r"\bld\.global\S*\.v4\.[bfu]32\b",
    "stores": r"\bst\.global",
    "float64": r"\.f64\b",
    "instructions": r";$",
}
"""The same in PTX, for a Triton that comes without `cuobjdump`."""


class _Device:
    """Stands for Triton's driver where there is no GPU, or none that is to be touched."""

    def __init__(self, capability):
        from triton.backends.compiler import GPUTarget

        self.get_current_target = lambda: GPUTarget("cuda", capability, 32)
        self.get_current_device = lambda: capability
        self.get_current_stream = lambda _device: 0


class _Tensor:
    """Stands for a tensor, of which Triton wants to know the dtype and where it lies."""

    def __init__(self, dtype):
        self.dtype = dtype

    def data_ptr(self):
        return 0


def compiled(kernel, capability):
    """Return a kernel as Triton has compiled it for GPUs of a capability, such as 90."""
    from triton.runtime import driver

    from lightning_fastdata.ext.kernels.fused import OPTIONS, fused_kernel

    driver.set_active(_Device(capability))
    arguments = [_Tensor(one) if isinstance(one, str) else one for one in kernel["arguments"]]
    return fused_kernel.warmup(*arguments, grid=(1,), **kernel["constants"], **OPTIONS)


def measure(kernel, architecture):
    """Return what a kernel is on an architecture, by name; ValueError: it is not known."""
    with tempfile.TemporaryDirectory() as cache, environment(TRITON_CACHE_DIR=cache):
        began = time.perf_counter()
        try:
            made = compiled(kernel, architecture)
        except Exception as error:  # of Triton, LLVM or the assembler
            raise ValueError(str(error).strip().splitlines()[0]) from error
        took_s = time.perf_counter() - began
        cubin = Path(cache) / "kernel.cubin"
        cubin.write_bytes(made.asm["cubin"])
        if not tools().exists():
            counts = counted(COUNTED_IN_PTX, made.asm["ptx"])
            return {"registers": "-", "stack": "-", **counts, "seconds": took_s}
        usage, code = of_tool("--dump-resource-usage", cubin), of_tool("--dump-sass", cubin)
    [(registers, stack)] = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
    counts = counted(COUNTED, code)
    return {"registers": int(registers), "stack": int(stack), **counts, "seconds": took_s}


def counted(rules, code):
    return {name: len(re.findall(rule, code, re.MULTILINE)) for name, rule in rules.items()}


@contextlib.contextmanager
def environment(**changes):
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def tools():
    """Return where `cuobjdump` comes with Triton, or would."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def of_tool(what, cubin):
    """Return what `cuobjdump` prints; it starts `nvdisasm`, which lies beside it."""
    path = {**os.environ, "PATH": f"{tools().parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    command = [str(tools()), what, str(cubin)]
    done = subprocess.run(command, env=path, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(f"cuobjdump: {(done.stderr or done.stdout).strip()[:200]}")
    return done.stdout


def table(rows):
    """Return rows, which are dicts, as a Markdown table."""
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", f"| {' | '.join('---' for _ in names)} |"]
    for row in rows:
        shown = (f"{one:.1f}" if isinstance(one, float) else str(one) for one in row.values())
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", choices=KERNELS, nargs="+", default=list(KERNELS))
    parser.add_argument("--architectures", type=int, nargs="+", default=ARCHITECTURES)
    given = parser.parse_args(arguments)
    os.environ.pop("TRITON_INTERPRET", None)
    import triton

    rows = []
    for architecture in given.architectures:
        for name in given.kernels:
            try:
                found = measure(KERNELS[name], architecture)
            except ValueError as error:
                print(f"sm_{architecture} is left out: {error}", file=sys.stderr)
                break
            rows.append({"kernel": name, "sm": architecture, **found})
    print(f"Triton {triton.__version__}, {time.strftime('%Y-%m-%d', time.gmtime())}", end="\n\n")
    if rows and not tools().exists():
        print("Counted in PTX: this Triton comes without cuobjdump.", end="\n\n")
    print(table(rows) if rows else "Nothing could be compiled.")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())

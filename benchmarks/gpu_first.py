"""The sections of tools/gpu.py that decide whether the package is right on a device."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from gpu_run import Skipped, failure
from gpu_training import fit_pictures

from lightning_fastdata.device import is_out_of_memory

ROOT = Path(__file__).resolve().parents[1]
BYTES = ("tests/gpu/test_augment.py", "tests/gpu/test_explicit.py", "tests/augment")
KERNELS = ("tests/kernels/test_launches.py",)
CHECKS = ("memcheck", "racecheck", "initcheck", "synccheck")


def try_everything(run):
    """Try the smallest of each thing that is done on a device."""
    tried = {
        "a kernel is compiled and run": _kernel,
        "a batch is augmented where it lies": _augmented,
        "prefetch() brings batches": _prefetched,
        **{
            f"a training, prefetch={way!r}": lambda run, way=way: fit_pictures(run, prefetch=way)
            for way in ("off", "auto")
        },
        "a training that augments on the device": lambda run: fit_pictures(run, augment_on="gpu"),
    }
    failed = []
    for what, work in tried.items():
        try:
            work(run)
            run.settle()
            run.add("running", what, "yes", "")
        except Exception as error:
            failed.append(error)
            run.add("running", what, "no", "", failure(error))
    if failed:
        raise failed[0]


def _kernel(run):
    from lightning_fastdata.augment.replay.warm_up import kernel_fault

    run.begin()
    fault = kernel_fault(run.device) if run.cuda else None
    if fault is not None:
        raise RuntimeError(fault)


def _augmented(run):
    import albumentations as A

    from lightning_fastdata import SampleKey, as_batch_transform

    steps = [A.HorizontalFlip(), A.ColorJitter(), A.Affine(), A.Normalize(), A.ToTensorV2()]
    images = torch.randint(0, 256, (8, 64, 64, 3), dtype=torch.uint8).to(run.device)
    transform = as_batch_transform(A.Compose(steps))
    transform.apply_unprepared({"image": images}, SampleKey(0, 0, 0))


def _prefetched(run):
    from lightning_fastdata import prefetch

    batches = [torch.full((4,), number) for number in range(4)]
    seen = [batch.sum().item() for batch in prefetch(batches, run.device)]
    if seen != [0, 4, 8, 12]:
        raise RuntimeError(f"other batches came: {seen}")


def compare_bytes(run):
    """Run the tests that compare images of the device with Albumentations'."""
    _pytest(run, *BYTES)


def run_tests(run):
    """Run all tests that need a device."""
    _pytest(run, "tests")


def _pytest(run, *paths):
    run.begin()
    command = _command(*paths)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            run.add("tests", line[:200], "no", "")
    run.add("tests", "pytest -m gpu", done.stdout.strip().splitlines()[-1], "")
    # 5: nothing was collected, as without a device.
    if done.returncode not in (0, 5) or (run.cuda and " passed" not in done.stdout):
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stderr[-500:]}")


def _command(*paths):
    quiet = ["-q", "--no-header", "--disable-warnings", "-p", "no:randomly", "-p", "no:xdist"]
    return [sys.executable, "-m", "pytest", *quiet, "-m", "gpu", *paths]


def look_for_races(run):
    """Run kernels of usual pipelines under the sanitizer of CUDA."""
    found = shutil.which("compute-sanitizer", path=f"{os.environ['PATH']}:/usr/local/cuda/bin")
    run.begin()
    if found is None:
        raise Skipped("compute-sanitizer is not installed; it is in CUDA's toolkit")
    bad = []
    for check in CHECKS:
        command = [found, "--tool", check, "--target-processes", "all", *_command(*KERNELS)]
        limit_s = max(1.0, run.left_s() / 2)
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            run.add("races", check, None, "", f"took longer than {limit_s:.0f} s")
            continue
        told = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", done.stdout + done.stderr)
        clean = bool(told) and all(re.search(r"SUMMARY: 0 ", line) for line in told)
        run.add("races", check, "clean" if clean else "NOT CLEAN", "", "; ".join(told)[:200])
        bad += [] if clean else [check]
    if bad:
        raise RuntimeError(f"not clean: {', '.join(bad)}")


def provoke_errors(run):
    """Run out of memory in each way that is known, and note the words."""
    run.begin()
    if not run.cuda:
        raise Skipped("a memory error needs a CUDA device")
    unknown = []
    for what, provoke in ERRORS.items():
        torch.cuda.empty_cache()
        try:
            provoke(run.device)
        except (RuntimeError, MemoryError) as error:
            known = is_out_of_memory(error)
            unknown += [] if known else [what]
            told = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
            run.add("errors", what, "known" if known else "NOT KNOWN", "", told)
        else:
            run.add("errors", what, "no error", "")
    if unknown:
        raise RuntimeError(f"the guard does not know: {', '.join(unknown)}")


def _filled(device):
    """Return all memory of a device, in pieces."""
    kept, size = [], 1 << 34
    while size >= 1 << 20:
        try:
            kept.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            size //= 2
    return kept


def _more_than_there_is(device):
    return torch.empty(2 * torch.cuda.mem_get_info(device)[1], dtype=torch.uint8, device=device)


def _product(device):
    factor = torch.ones(512, 512, device=device)
    kept = _filled(device)
    return kept, factor @ factor


def _convolution(device):
    layer, image = torch.nn.Conv2d(64, 64, 3).to(device), torch.ones(64, 64, 128, 128).to(device)
    kept = _filled(device)
    return kept, layer(image)


def _backward(device):
    weight = torch.ones(1 << 24, device=device, requires_grad=True)
    loss = (weight * weight).sum()
    kept = _filled(device)
    loss.backward()
    return kept


ERRORS = {
    "an allocation larger than the device": _more_than_there_is,
    "a product on a full device (cuBLAS)": _product,
    "a convolution on a full device (cuDNN)": _convolution,
    "a backward pass on a full device": _backward,
    "page-locked memory that is not there": lambda _: torch.empty(1 << 50, pin_memory=True),
}

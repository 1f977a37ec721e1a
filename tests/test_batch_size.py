from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from misses import each
from thoroughness import max_examples

from lightning_fastdata.device.backend import is_out_of_memory
from lightning_fastdata.host.memory import reserve_bytes
from lightning_fastdata.plugin.guard.callback import Probe, accumulated, chosen, doubled, halved

MIB, GIB = 2**20, 2**30


def test_the_reserve_is_five_percent_but_at_least_half_a_gibibyte():
    assert reserve_bytes(80 * GIB) == 4 * GIB
    assert reserve_bytes(6 * GIB) == 512 * MIB


def device(per_row, total, *, fixed=0, fixed_s=0.01, per_row_s=0.0, wide=0):
    """Return what measures steps on a device; a step on more than ``wide`` rows takes longer."""
    budget = total - reserve_bytes(total)

    def measure(rows):
        needed = fixed + per_row * rows
        seconds = fixed_s + per_row_s * max(0, rows - wide)
        return Probe(rows, needed if needed <= total else None, budget, seconds)

    return measure


devices = st.builds(
    device,
    per_row=st.integers(MIB // 4, 4 * GIB),
    total=st.integers(GIB, 80 * GIB),
    fixed=st.integers(0, 8 * GIB),
    fixed_s=st.floats(1e-4, 1.0),
    per_row_s=st.floats(1e-7, 1e-2),
    wide=st.integers(1, 4096),
)
sizes = st.integers(1, 20_000)


@given(devices, sizes, st.integers(1, 8))
@max_examples(300)
def test_what_is_accumulated_fits_has_run_and_keeps_the_rows_of_an_optimizer_step(
    measure, asked, now
):
    probes = halved(asked, measure)
    decision = accumulated(asked, probes, now)
    assert len(probes) <= 2 + math.log2(asked)
    if decision.action == "raise":
        assert not measure(1).fits
        return
    assert measure(decision.batch_size).fits
    assert decision.batch_size in [probe.rows for probe in probes]
    if decision.action == "keep":
        assert (decision.batch_size, decision.accumulate_grad_batches) == (asked, now)
        return
    assert not measure(min(asked, 2 * decision.batch_size)).fits
    parts, rest = divmod(decision.accumulate_grad_batches, now)
    assert rest == 0
    surplus = decision.batch_size * parts - asked
    assert 0 <= surplus < decision.batch_size
    assert ("instead of" in decision.reason) == (surplus > 0)


@given(devices, sizes)
@max_examples(300)
def test_what_is_chosen_fits_has_run_and_is_nearly_as_fast_as_anything_that_ran(measure, most):
    probes = doubled(most, measure)
    decision = chosen(probes, 1)
    if decision.action == "raise":
        assert not measure(1).fits
        return
    rates = {probe.rows: probe.rows / probe.step_s for probe in probes if probe.fits}
    fast = [rows for rows, rate in rates.items() if rate >= 0.95 * max(rates.values())]
    assert decision.batch_size == min(fast)
    assert str(decision.batch_size) in decision.reason
    assert max(rates) <= most


def test_no_larger_size_is_tried_where_larger_ones_train_no_more_rows_a_second():
    wide = device(MIB, 80 * GIB, fixed_s=0.01, per_row_s=0.01 / 64, wide=64)
    assert [probe.rows for probe in doubled(10_000, wide)] == [4, 8, 16, 32, 64, 128, 256]


def test_the_reason_tells_need_budget_and_what_changes():
    measure = device(GIB // 8, 20 * GIB, fixed=GIB)
    assert accumulated(256, halved(256, measure), 1).reason == (
        "A training step on 256 samples needs more GPU memory than there is, but 19.00 GiB may be "
        "used: the loader now gives 128 samples at a time and gradients accumulate over 2 batches. "
        "Each optimizer step still sees 256 samples."
    )
    assert accumulated(151, halved(151, measure), 2).reason == (
        "A training step on 151 samples needs 19.88 GiB of GPU memory, but 19.00 GiB may be used: "
        "the loader now gives 76 samples at a time and gradients accumulate over 4 batches. Each "
        "optimizer step sees 304 instead of 302 samples."
    )


# --- errors ------------------------------------------------------------------------------------


OF_MEMORY = """
CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; ...)
CUDA error: out of memory. CUDA kernel errors might be asynchronously reported at some other call
CUDA driver error: out of memory
cuda runtime error (2) : out of memory
Triton Error [CUDA]: out of memory
HIP out of memory. Tried to allocate 20.00 MiB
XPU out of memory. Tried to allocate 20.00 MiB
MPS backend out of memory (MPS allocated: 18.1 GB, max allowed: 18.1 GB)
Invalid buffer size: 19.38 GiB
Invalid buffer size: 8.21 GB
Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)
level_zero backend failed with error: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)
NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1154
CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`
CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`
CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`
CUDA error: CUSPARSE_STATUS_INSUFFICIENT_RESOURCES when calling `cusparseCreate(handle)`
cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`
cuFFT error: CUFFT_ALLOC_FAILED
cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a
cuDNN error: CUDNN_STATUS_ALLOC_FAILED
cuDNN error: CUDNN_STATUS_INTERNAL_ERROR
cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED
Unable to find a valid cuDNN algorithm to run convolution
GET was unable to find an engine to execute this computation
FIND was unable to find an engine to execute this computation
[enforce fail at alloc_cpu.cpp:75] DefaultCPUAllocator: can't allocate memory: you tried to allocate
DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes
""".strip().splitlines()
OF_OTHER_THINGS = """
CUDA error: an illegal memory access was encountered
CUDA error: device-side assert triggered
CUDA error: misaligned address
CUDA error: unspecified launch failure
CUDA error: uncorrectable ECC error encountered
CUDA error: too many resources requested for launch
CUDA error: invalid configuration argument
CUDA error: no kernel image is available for execution on the device
CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k)`
CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmEx(handle, opa, opb, m, n, k)`
CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm( handle, opa, opb, m, n, k)`
CUDNN_BACKEND_OPERATION: cudnnFinalize Failed cudnn_status: CUDNN_STATUS_BAD_PARAM
cuDNN error: CUDNN_STATUS_EXECUTION_FAILED
CUDA driver initialization failed, you might not have a CUDA gpu.
out of resource: shared memory, Required: 147456, Hardware limit: 101376.
Bus error. It is possible that dataloader's workers are out of shared memory.
Native API failed. Native API returns: 20 (UR_RESULT_ERROR_DEVICE_LOST)
NCCL error in: ProcessGroupNCCL.cpp:1275, unhandled system error, NCCL version 2.21.5
Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!
mat1 and mat2 shapes cannot be multiplied (4x8 and 9x2)
index 12 is out of bounds for dimension 0 with size 12
Placeholder storage has not been allocated on MPS device!
""".strip().splitlines()


def test_errors_of_full_devices_are_known_by_their_type():
    assert is_out_of_memory(torch.OutOfMemoryError("anything"))


@each("words", OF_MEMORY)
def test_errors_of_full_devices_are_known_by_their_words(words):
    assert is_out_of_memory(RuntimeError(words))
    assert not is_out_of_memory(ValueError(words))


@each("words", OF_OTHER_THINGS)
def test_other_errors_are_not_taken_for_a_full_device(words):
    assert not is_out_of_memory(RuntimeError(words))


def test_a_real_host_allocation_that_cannot_succeed_is_known():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**62, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from misses import each
from thoroughness import max_examples

from lightning_fastdata.device.backend import is_out_of_memory
from lightning_fastdata.host.memory import reserve_bytes
from lightning_fastdata.plugin.guard.prediction import (
    GuardDecision,
    Probe,
    decide,
    predict_peak_bytes,
    probe_sizes,
)

GIB = 2**30
MIB = 2**20


@dataclass
class Device:
    """A device on which a step of ``rows`` rows takes ``cost(rows)`` bytes."""

    fixed: int
    per_row: int
    capacity: int
    knee_rows: int = 0
    noise: dict[int, int] = field(default_factory=dict)

    def cost(self, rows: int) -> int:
        # each row above the knee takes 3 % more than one below: a convex curve
        above = max(0, rows - self.knee_rows) if self.knee_rows else 0
        noise = self.noise.get(rows, 0)
        return self.fixed + self.per_row * rows + self.per_row * above * 3 // 100 + noise

    def measure(self, rows: int) -> Probe:
        cost = self.cost(rows)
        return Probe(rows, cost if cost <= self.capacity else None)


devices = st.builds(
    Device,
    fixed=st.integers(0, 8 * GIB),
    per_row=st.integers(0, 4 * GIB),
    capacity=st.integers(0, 64 * GIB),
)
sizes = st.integers(3, 5000)


# --- measuring ---------------------------------------------------------------------------------


# --- predicting --------------------------------------------------------------------------------


def test_the_reserve_is_five_percent_but_at_least_half_a_gibibyte():
    assert reserve_bytes(80 * GIB) == 4 * GIB
    assert reserve_bytes(6 * GIB) == 512 * MIB


# --- running the chosen size ---------------------------------------------------------------------


def run_through(device: Device, asked: int, policy: str, budget: int):
    """Return the probes on the way to the chosen size, and the decision by all of them."""

    def now(probes):
        return decide(asked=asked, probes=probes, budget_bytes=budget, policy=policy)

    def chosen(probes):
        decision = now(probes)
        return decision.batch_size if decision.action in ACTED else None

    probes = probe_sizes(asked, device.measure, chosen)
    return probes, now(probes)


ACTED = ("keep", "accumulate", "chosen")
convex = st.builds(
    Device,
    fixed=st.integers(0, 4 * GIB),
    per_row=st.integers(MIB // 4, GIB),
    capacity=st.integers(4 * GIB, 80 * GIB),
    knee_rows=st.integers(0, 200),
    noise=st.dictionaries(st.integers(1, 600), st.integers(0, 64 * MIB), max_size=40),
)


@given(convex, st.integers(3, 20_000), st.sampled_from(["accumulate", None]))
@max_examples(300)
def test_a_size_is_trained_with_only_if_as_large_a_one_has_run(device, asked, policy):
    budget = device.capacity - reserve_bytes(device.capacity)
    probes, decision = run_through(device, asked, policy, budget)
    rows = [probe.rows for probe in probes]
    assert len(rows) == len(set(rows)) <= 6 + 2 * math.log2(asked)
    if decision.action in ACTED:
        ran = [probe.rows for probe in probes if probe.peak_bytes is not None]
        assert max(ran) >= decision.batch_size
        assert device.cost(decision.batch_size) <= device.capacity


@given(convex, st.integers(3, 20_000))
@max_examples(300)
def test_the_chosen_size_is_at_least_85_percent_of_the_largest_that_fits(device, asked):
    device.noise = {}
    budget = device.capacity - reserve_bytes(device.capacity)
    _, decision = run_through(device, asked, None, budget)
    fits = max((n for n in range(1, asked + 1) if device.cost(n) <= budget), default=0)
    if decision.action in ACTED:
        assert decision.batch_size >= 0.85 * fits - 1
    else:
        assert fits <= 4


# --- deciding ----------------------------------------------------------------------------------

policies = st.sampled_from(["accumulate", None, "raise", "warn"])


def decision_on(device: Device, asked: int, policy: str, budget: int, **more) -> GuardDecision:
    probes = probe_sizes(asked, device.measure)
    return decide(asked=asked, probes=probes, budget_bytes=budget, policy=policy, **more)


@given(devices, sizes, policies, st.integers(0, 64 * GIB), st.integers(1, 8))
@max_examples(300)
def test_the_chosen_size_fits_by_prediction_and_is_never_above_the_asked_one(
    device, asked, policy, budget, accumulate_now
):
    probes = probe_sizes(asked, device.measure)
    decision = decision_on(device, asked, policy, budget, accumulate_now=accumulate_now)
    assert 1 <= decision.batch_size <= asked
    if decision.action in ("keep", "accumulate", "chosen"):
        assert predict_peak_bytes(probes, decision.batch_size) <= budget
        assert not any(p.peak_bytes is None and p.rows <= decision.batch_size for p in probes)
    else:
        assert decision.batch_size == asked
        assert decision.accumulate_grad_batches == accumulate_now
    if decision.action == "keep":
        assert decision.accumulate_grad_batches == accumulate_now
    assert decision.predicted_peak_bytes == predict_peak_bytes(probes, asked)


@given(devices, sizes, st.integers(0, 64 * GIB), st.integers(1, 8))
@max_examples(300)
def test_accumulation_keeps_the_effective_batch_exactly_where_a_divisor_allows_it(
    device, asked, budget, accumulate_now
):
    largest = decision_on(device, asked, None, budget)
    decision = decision_on(device, asked, "accumulate", budget, accumulate_now=accumulate_now)
    if decision.action != "accumulate":
        assert decision.action == ("raise" if largest.action == "raise" else "keep")
        return
    parts, rest = divmod(decision.accumulate_grad_batches, accumulate_now)
    assert rest == 0
    fewest = math.ceil(asked / largest.batch_size)
    divisors = [k for k in range(fewest, 2 * fewest + 1) if asked % k == 0]
    assert parts == (divisors[0] if divisors else fewest)
    surplus = decision.batch_size * parts - asked
    assert surplus == 0 if divisors else 0 < surplus < parts
    word = "still sees" if surplus == 0 else "instead of"
    assert word in decision.reason


def test_a_dataset_smaller_than_the_batch_is_judged_by_its_own_rows():
    device = Device(fixed=0, per_row=MIB, capacity=GIB)
    assert decision_on(device, 4096, "raise", 100 * MIB, dataset_rows=100).action == "keep"
    assert decision_on(device, 4096, "raise", 99 * MIB, dataset_rows=100).action == "raise"
    cut = decision_on(device, 4096, "accumulate", 60 * MIB, dataset_rows=100)
    assert (cut.batch_size, cut.accumulate_grad_batches) == (50, 2)


@each(
    ("asked", "fits", "rows", "batches"),
    [(256, 100, 64, 4), (256, 128, 128, 2), (96, 40, 32, 3), (127, 64, 64, 2), (10, 4, 2, 5)],
)
def test_accumulation_table(asked, fits, rows, batches):
    device = Device(fixed=0, per_row=MIB, capacity=GIB)
    decision = decision_on(device, asked, "accumulate", fits * MIB)
    assert (decision.batch_size, decision.accumulate_grad_batches) == (rows, batches)


def test_the_reason_tells_need_budget_and_what_changes():
    device = Device(fixed=GIB, per_row=GIB // 8, capacity=80 * GIB)
    assert decision_on(device, 256, "accumulate", 20 * GIB).reason == (
        "A training step on 256 rows needs about 33.00 GiB of GPU memory, but 20.00 GiB may be "
        "used: the loader now gives 128 rows at a time and gradients accumulate over 2 batches. "
        "Each optimizer step still sees 256 rows."
    )
    assert decision_on(device, 127, "accumulate", 10 * GIB, accumulate_now=2).reason.endswith(
        "gives 64 rows at a time and gradients accumulate over 4 batches. Each optimizer step "
        "sees 256 instead of 254 rows."
    )
    small = Device(fixed=0, per_row=GIB, capacity=3 * GIB)
    assert "a step on 4 rows ran out of memory" in decision_on(small, 64, "raise", GIB).reason


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

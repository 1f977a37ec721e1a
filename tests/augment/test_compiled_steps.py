"""What is compiled is used only once it was compared, and no error of a compiler ends anything."""

from __future__ import annotations

import shutil

import pytest
import torch
from misses import each

from lightning_fastdata.augment.replay.compiled import Compiled
from lightning_fastdata.errors import FastDataWarning

IMAGES = torch.arange(4 * 3 * 6 * 5).remainder(256).to(torch.uint8).view(4, 3, 6, 5)


def halved(batch, static, arrays):
    return (batch.float() * arrays["by"].view(-1, 1, 1, 1)).to(batch.dtype)


class Stub:
    """Stands for a compiler: what it makes is ``changed``, or raises as ``error`` says."""

    def __init__(self, changed=lambda out: out, *, error=None, compiles=True):
        self.changed, self.error, self.compiles = changed, error, compiles
        self.compilations = self.calls = 0

    def __call__(self, run):
        self.compilations += 1

        def made(*given):
            self.calls += 1
            if self.error is not None:
                raise self.error
            return self.changed(run(*given)[0]), self.compiles

        return made


def operation(stub, *, exact=False):
    counted = []

    def run(*given):
        counted.append(len(given[0]))
        return halved(*given)

    run.__name__ = "halved"
    made = Compiled(run, exact=exact, compiler=stub, suits=lambda batch: len(batch) > 1)
    made.runs = counted
    return made


def given(count=4, dtype=torch.uint8, size=6):
    batch = IMAGES[:count, :, :size].to(dtype) / (1 if dtype == torch.uint8 else 255)
    return batch.to(dtype), {"mode": "any"}, {"by": torch.full((count,), 0.5)}


def check(made, *how, **named):
    batch = given(*how, **named)
    assert torch.equal(made(*batch), halved(*batch))


def test_what_is_right_is_used_after_the_first_batch_and_compiled_once():
    stub = Stub()
    made = operation(stub)
    for count in (4, 3, 2, 4):
        check(made, count)
    assert stub.compilations == 1
    assert made.runs == [3, 4, 4, 3, 2, 4]  # by the stub, too; it begins with a sample less


def test_each_form_of_a_batch_is_compared():
    stub = Stub()
    made = operation(stub)
    forms = [{}, {"size": 4}, {"dtype": torch.float32}]
    for form in forms * 2:
        check(made, **form)
    assert stub.compilations == 1
    assert len(made.runs) == stub.calls + len(forms)  # by the stub, too
    batch, static, arrays = given()
    made(batch, {"mode": "other"}, arrays)
    made(batch.to(memory_format=torch.channels_last), static, arrays)
    made(batch, static, {"by": arrays["by"].double()})
    assert len(made.runs) == stub.calls + len(forms) + 3


@each(
    ("stub", "why", "calls"),
    [
        (Stub(error=RuntimeError("no compiler\nat all")), "RuntimeError: no compiler", 2),
        (Stub(lambda out: out + 2), "other pixels", 3),
        (Stub(lambda out: out.int()), "other pixels", 3),
        (Stub(lambda out: out[..., 1:]), "other pixels", 3),
    ],
)
def test_what_fails_or_is_wrong_is_left_and_said_once(stub, why, calls):
    made = operation(stub)
    with pytest.warns(FastDataWarning, match=f"halved on cpu.*{why}") as told:
        check(made)
    check(made, 3)
    check(made, size=4)
    assert len(told) == 1
    assert stub.calls == calls  # one for each form, and one that compiles


def test_what_fails_later_is_left_then():
    stub = Stub()
    made = operation(stub)
    check(made)
    stub.error = RuntimeError("recompile")
    with pytest.warns(FastDataWarning, match="recompile"):
        check(made, 3)
    stub.error = None
    check(made)
    assert stub.calls == 3


def plus(by):
    return lambda out: (out.float() + by).to(out.dtype)


@each(
    ("exact", "dtype", "by", "used"),
    [
        (False, torch.uint8, 1, True),
        (False, torch.uint8, 2, False),
        (False, torch.uint8, -1, False),  # of a black pixel it makes 255
        (True, torch.uint8, 1, False),
        (True, torch.uint8, 0, True),
        (False, torch.float32, 5e-6, True),
        (False, torch.float32, 3e-5, False),
        (True, torch.float32, 5e-6, False),
    ],
)
@pytest.mark.filterwarnings("ignore::lightning_fastdata.errors.FastDataWarning")
def test_bytes_may_be_a_level_apart_and_floats_nearly_nothing(exact, dtype, by, used):
    stub = Stub(plus(by))
    made = operation(stub, exact=exact)
    for _ in range(3):
        made(*given(dtype=dtype))
    assert stub.calls == (4 if used else 2)  # one compiles


def test_what_was_not_compiled_is_no_proof():
    """In a block in which torch compiles nothing, operators would be compared with themselves."""
    stub = Stub(compiles=False)
    made = operation(stub)
    check(made)
    check(made)
    stub.compiles, stub.changed = True, plus(9)
    with pytest.warns(FastDataWarning, match="other pixels"):
        check(made)


def test_a_full_memory_is_no_fault_of_the_compiler():
    stub = Stub(error=torch.OutOfMemoryError("full"))
    made = operation(stub)
    check(made)
    stub.error = None
    check(made)
    check(made)
    assert stub.calls == 3


def test_one_sample_and_what_lies_on_the_cpu_is_not_compiled():
    stub = Stub()
    check(operation(stub), 1)
    batch = given()
    assert torch.equal(Compiled(halved, compiler=stub)(*batch), halved(*batch))
    assert stub.compilations == 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_torch_compiles_one_operation_for_batches_of_any_size(tmp_path, monkeypatch):
    from benchmarks.v2_launches import fused_batches

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    made = fused_batches("saturation", 24, torch.uint8, (9, 7, 32))
    assert made.right
    assert (made.launches, made.compilations) == (1, 1)

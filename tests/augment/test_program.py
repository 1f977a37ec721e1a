from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thoroughness import max_examples

from lightning_fastdata.augment.ops.operation import DeviceOp, Encoded, TapeOp, Track
from lightning_fastdata.augment.replay.program import Draws, compile_tapes
from lightning_fastdata.augment.replay.torch import replay
from lightning_fastdata.errors import TransformError


def _affine(batch, static, arrays):
    factor = static["factor"]
    return (batch * factor + arrays["offset"][:, None, None, None]).to(batch.dtype)


def _halve(batch, static, arrays):
    return batch[:, ::2]


OPS = {
    "Affine": DeviceOp(name="Affine", encode=lambda *_: None, image=_affine, mask=_affine),
    "Halve": DeviceOp(name="Halve", encode=lambda *_: None, image=_halve),
}


def affine(leaf: int, factor: int, offset: int) -> TapeOp:
    arrays = {"offset": np.asarray(offset, np.int64)}
    return TapeOp(leaf, "Affine", Encoded((("factor", factor),), arrays))


def halve(leaf: int, note: int = 0) -> TapeOp:
    return TapeOp(leaf, "Halve", Encoded((("note", note),), {}))


def tapes_of(*tracks: list[TapeOp]) -> list[dict[str, Track]]:
    return [{"image": Track("image", tuple(ops))} for ops in tracks]


def run(draws: Draws, batch: torch.Tensor) -> torch.Tensor:
    return replay(draws.programs["image"], draws.blob, batch, OPS)


tracks = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(-9, 9)), max_size=5
).map(lambda ops: [affine(*op) for op in ops])


@max_examples(60)
@given(st.lists(tracks, min_size=1, max_size=6))
def test_each_sample_takes_its_own_operations_in_its_own_order(batch_tracks) -> None:
    batch = torch.arange(len(batch_tracks) * 4).reshape(-1, 2, 2, 1)
    expected = batch.clone()
    for row, track in enumerate(batch_tracks):
        for op in track:
            factor = dict(op.encoded.static)["factor"]
            expected[row] = expected[row] * factor + int(op.encoded.arrays["offset"])
    before = batch.clone()
    assert torch.equal(run(compile_tapes(tapes_of(*batch_tracks)), batch), expected)
    assert torch.equal(batch, before)


@max_examples(40)
@given(st.lists(tracks, min_size=2, max_size=6))
def test_a_sample_does_not_depend_on_the_batch_it_is_in(batch_tracks) -> None:
    batch = torch.arange(len(batch_tracks) * 4).reshape(-1, 2, 2, 1)
    together = run(compile_tapes(tapes_of(*batch_tracks)), batch)
    for row, track in enumerate(batch_tracks):
        alone = run(compile_tapes(tapes_of(track)), batch[row : row + 1])
        assert torch.equal(alone[0], together[row])


@max_examples(20)
@given(st.integers(1, 5), st.lists(st.integers(-9, 9), min_size=1, max_size=4))
def test_it_does_not_matter_whether_samples_share_what_they_drew_or_drew_the_same(count, numbers):
    shared = [affine(0, 2, np.asarray(numbers))] * count
    equal = [affine(0, 2, np.asarray(numbers)) for _ in range(count)]
    one, other = (compile_tapes(tapes_of(*([op] for op in ops))) for ops in (shared, equal))
    assert torch.equal(one.blob, other.blob)
    assert one.programs == other.programs
    (part,) = one.programs["image"].steps[0].parts
    slot = part.arrays["offset"]
    for row in range(count):
        start = slot.offset + row * slot.row_bytes
        found = one.blob[start : start + slot.row_bytes].view(torch.int64)
        assert found.tolist() == numbers


def test_a_step_that_all_samples_take_alike_is_one_launch() -> None:
    draws = compile_tapes(tapes_of([affine(0, 2, 1)], [affine(0, 2, 5)]))
    (step,) = draws.programs["image"].steps
    (part,) = step.parts
    assert part.rows is None


def test_arrays_of_every_dtype_come_back_from_the_blob_aligned() -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "a": rng.integers(0, 256, 3, np.uint8),
        "b": rng.normal(size=(2, 3)).astype(np.float32),
        "c": np.asarray(True),
        "d": rng.normal(size=5),
        "e": np.zeros((0, 4), np.float32),
        "f": np.arange(7, dtype=np.int64),
    }
    op = TapeOp(0, "Affine", Encoded((), arrays))
    draws = pickle.loads(pickle.dumps(compile_tapes(tapes_of([op], [op]))))
    slots = draws.programs["image"].steps[0].parts[0].arrays
    for name, array in arrays.items():
        view = slots[name].view(draws.blob)
        assert slots[name].offset % 16 == 0
        assert np.array_equal(view.numpy(), np.stack([array, array]))
        assert view.numpy().dtype == array.dtype


def test_a_mask_shares_the_arrays_of_the_image_beside_it() -> None:
    op = affine(0, 2, 1)
    both = [{"image": Track("image", (op,)), "mask": Track("mask", (op,))}]
    assert len(compile_tapes(both).blob) == len(compile_tapes(tapes_of([op])).blob)


def test_samples_with_other_settings_may_change_shape_together() -> None:
    batch = torch.arange(3 * 4).reshape(3, 4, 1, 1)
    draws = compile_tapes(tapes_of([halve(0, 0)], [halve(0, 1)], [halve(0, 0)]))
    assert torch.equal(run(draws, batch), batch[:, ::2])


def test_a_step_that_changes_the_shape_of_some_samples_only_is_an_error_that_names_it() -> None:
    draws = compile_tapes(tapes_of([halve(0)], []))
    with pytest.raises(TransformError, match="Halve would turn some images"):
        run(draws, torch.zeros(2, 4, 1, 1))


def test_a_batch_made_in_inference_mode_can_be_written_to_afterwards() -> None:
    with torch.inference_mode():
        batch = torch.zeros(2, 1, 1, 1, dtype=torch.int64)
        draws = compile_tapes(tapes_of([affine(0, 1, 3)], []))
        draws = draws.to("cpu")
    with torch.inference_mode(False), torch.no_grad():
        out = run(draws, batch)
    assert out.flatten().tolist() == [3, 0]
    assert not out.is_inference()


def test_a_batch_without_operations_has_draws_without_bytes() -> None:
    draws = compile_tapes([{}, {}])
    assert len(draws.blob) == 0
    assert draws.samples == 2

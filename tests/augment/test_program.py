from __future__ import annotations

import numpy as np
import pytest
import torch

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

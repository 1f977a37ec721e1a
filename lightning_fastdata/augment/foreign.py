"""A pipeline on a batch that another loader has collated."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lightning_fastdata.augment.fields import (
    Found,
    Location,
    channels_first,
    describe,
    get_field,
    put_fields,
)
from lightning_fastdata.augment.geometry import join_tapes
from lightning_fastdata.augment.plan import analyse
from lightning_fastdata.augment.program import compile_tapes
from lightning_fastdata.augment.replay_torch import replay
from lightning_fastdata.augment.seeds import reseed
from lightning_fastdata.augment.tape import Recorder, phantom
from lightning_fastdata.errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning_fastdata.augment.geometry import GeometryMode
    from lightning_fastdata.augment.ops.operation import DeviceOp
    from lightning_fastdata.augment.tape import Tape
    from lightning_fastdata.types import Batch, SampleKey


class ForeignBatches:
    """Runs one pipeline on batches that another loader has collated."""

    def __init__(
        self,
        compose: Any,
        ops: Mapping[str, DeviceOp],
        refusal: str | None,
        *,
        same_pixels: bool = False,
        geometry: GeometryMode = "exact",
    ) -> None:
        self._compose = copy.deepcopy(compose)
        self._ops = ops
        self._refusal = refusal
        self._same_pixels = same_pixels
        self._geometry = geometry
        self._recorders: dict[object, Recorder | None] = {}

    def run(self, batch: Batch, found: Found, key: SampleKey) -> Batch:
        """Return the batch with the pipeline carried out on its images and masks.

        Args:
            batch: a collated batch, on any device.
            found: where its image ``[n, C, H, W]`` or ``[n, H, W, C]`` and its mask are.
            key: key of the first sample; sample ``i`` draws with ``key.index + i``.

        Raises:
            BatchError: the image is no batch of uint8, or of float32 in [0, 1].
        """
        image = get_field(batch, found.image)
        _check_image(image)
        first = image.ndim == 4 and channels_first(tuple(image.shape[1:]))
        tensors = {"image": image.permute(0, 2, 3, 1).contiguous() if first else image}
        height, width = (int(length) for length in tensors["image"].shape[1:3])
        mask_first = False
        if found.mask is not None:
            mask = get_field(batch, found.mask)
            mask_first = mask.ndim == 4 and tuple(mask.shape[1:3]) != (height, width)
            tensors["mask"] = mask.permute(0, 2, 3, 1).contiguous() if mask_first else mask
        recorder = (
            None
            if image.device.type == "cpu"
            else self.recorder(
                (height, width), tensors["image"].shape[3] if tensors["image"].ndim == 4 else None
            )
        )
        if recorder is None:
            results, is_chw = run_each(tensors, key, self._compose)
        else:
            results, is_chw = replay_all(tensors, key, recorder, self._ops, geometry=self._geometry)
        values: dict[Location, Any] = {
            found.image: _restored(results["image"], first and not is_chw)
        }
        if found.mask is not None:
            as_given = mask_first and results["mask"].ndim == 4
            values[found.mask] = _restored(results["mask"], as_given)
        return put_fields(batch, values)

    def recorder(self, size: tuple[int, int], channels: int | None = 3) -> Recorder | None:
        """Return the recorder for images of one shape, or None if nothing may be deferred."""
        form = (size, channels)
        if form not in self._recorders:
            plan = analyse(
                self._compose,
                self._ops,
                size=size,
                refusal=self._refusal,
                same_pixels=self._same_pixels,
                channels=channels,
            )
            possible = plan.defers and plan.opaque_until < 0
            self._recorders[form] = Recorder(self._compose, plan, self._ops) if possible else None
        return self._recorders[form]


def _restored(tensor: torch.Tensor, to_channels_first: bool) -> torch.Tensor:
    return tensor.permute(0, 3, 1, 2).contiguous() if to_channels_first else tensor


def run_each(
    tensors: Mapping[str, torch.Tensor], key: SampleKey, compose: Any
) -> tuple[dict[str, torch.Tensor], bool]:
    """Run a pipeline on every sample on the CPU; also say whether images came out as CHW."""
    device = tensors["image"].device
    arrays = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
    outs: dict[str, list[torch.Tensor]] = {name: [] for name in tensors}
    is_chw = False
    for row in range(len(tensors["image"])):
        reseed((compose,), key._replace(index=key.index + row))
        result = compose(**{name: array[row] for name, array in arrays.items()})
        is_chw = isinstance(result["image"], torch.Tensor)
        for name in tensors:
            outs[name].append(torch.as_tensor(np.asarray(result[name])))
    return {name: torch.stack(rows).to(device) for name, rows in outs.items()}, is_chw


def replay_all(
    tensors: Mapping[str, torch.Tensor],
    key: SampleKey,
    recorder: Recorder,
    ops: Mapping[str, DeviceOp],
    *,
    geometry: GeometryMode = "exact",
) -> tuple[dict[str, torch.Tensor], bool]:
    """Draw every sample here and carry the draws out where the batch lies.

    Samples in which an operation needs real pixels are fetched, one by one, and put back.
    """
    samples = len(tensors["image"])
    shown = {
        name: phantom(tuple(tensor.shape[1:]), np.dtype(str(tensor.dtype).removeprefix("torch.")))
        for name, tensor in tensors.items()
    }
    tapes: list[Tape] = []
    is_chw = False
    ran: dict[str, dict[int, torch.Tensor]] = {name: {} for name in tensors}
    for row in range(samples):
        reseed((recorder.compose,), key._replace(index=key.index + row))
        sources = {
            name: lambda tensor=tensor, row=row: tensor[row].cpu().numpy()
            for name, tensor in tensors.items()
        }
        result, tape = recorder(shown, sources)
        tapes.append(tape)
        is_chw = is_chw or isinstance(result["image"], torch.Tensor)
        for name in tensors:
            if not callable(result[name]):
                ran[name][row] = torch.as_tensor(np.asarray(result[name]))
    tapes = join_tapes(tapes) if geometry == "fused" else tapes
    draws = compile_tapes(tapes, ops).to(tensors["image"].device, non_blocking=True)
    results = {}
    for name, tensor in tensors.items():
        current = _with_rows(tensor, ran[name])
        program = draws.programs.get(name)
        results[name] = current if program is None else replay(program, draws.blob, current, ops)
        if name == "image" and program is not None:
            is_chw = is_chw or any(step.name == "ToTensorV2" for step in program.steps)
    return results, is_chw


def _with_rows(tensor: torch.Tensor, rows: Mapping[int, torch.Tensor]) -> torch.Tensor:
    if not rows:
        return tensor
    stacked = torch.stack(list(rows.values())).to(tensor.device)
    if len(rows) == len(tensor):
        return stacked
    return tensor.clone().index_copy_(0, torch.tensor(list(rows), device=tensor.device), stacked)


def _check_image(image: Any) -> None:
    ok = isinstance(image, torch.Tensor) and image.ndim in {3, 4}
    if not ok or image.dtype not in {torch.uint8, torch.float32}:
        raise BatchError(
            f"The image field is {describe(image)}. Expected a tensor [n, C, H, W] or "
            "[n, H, W, C], uint8 or float32 in [0, 1]."
        )
    if image.dtype == torch.float32 and image.numel():
        low, high = (float(value) for value in image.aminmax())
        if low < 0 or high > 1:
            raise BatchError(
                f"The images are float32 with values from {low:g} to {high:g}, so they look "
                "normalised already. Albumentations needs uint8, or float32 in [0, 1]: leave "
                "Normalize out of the dataset and put it at the end of this pipeline."
            )

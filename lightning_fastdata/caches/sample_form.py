"""A sample as a record: its bytes, and in JSON what they are. No code is read from a file.

The form of a sample says what containers it is made of, and of each leaf its kind, type and shape:
all but its numbers. A record has the bytes of the leaves, in order, each from a multiple of 16 on.
Records of one form are of one size, so that they can be rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch

from lightning_fastdata.errors import DatasetError
from lightning_fastdata.types import Batch

if TYPE_CHECKING:
    from numpy.typing import NDArray

Form: TypeAlias = dict[str, Any]
"""Of one container or leaf: ``{"is": kind, ...}``, of JSON's types alone."""
Raw: TypeAlias = "NDArray[np.uint8]"
"""The bytes of a leaf, in one row."""

_NUMBERS: Final = {"int": np.int64, "float": np.float64, "bool": np.bool_}
_PICTURE_MODES: Final = frozenset({"L", "RGB", "RGBA", "CMYK", "YCbCr", "HSV"})
"""Modes of PIL images that are nothing but bytes."""
_SUPPORTED: Final = (
    "tensors in host memory, NumPy arrays and scalars, PIL images, numbers, strings, bytes and "
    "None, in tuples, lists and dicts"
)


def taken_apart(sample: object) -> tuple[Form, bytes]:
    """Return the form of a sample, and its record.

    Raises:
        DatasetError: It holds something that is none of the kinds above.
    """
    raws: list[Raw] = []
    form = _form(sample, raws, "")
    parts: list[Any] = []
    for raw in raws:
        parts += [raw.data, b"\0" * (_padded(raw.size) - raw.size)]
    return form, b"".join(parts)


def put_together(form: Form, record: Raw) -> Batch:
    """Return the sample of a record; tensors and arrays share its memory."""
    raws = (record[at : at + leaf["bytes"]] for at, leaf in leaves_of(form))
    return _made(form, raws.__next__)


def leaves_of(form: Form) -> list[tuple[int, Form]]:
    """Return where in a record each leaf begins, and its form."""
    found: list[tuple[int, Form]] = []
    at = 0
    for leaf in _leaves_in(form):
        found.append((at, leaf))
        at += _padded(leaf["bytes"])
    return found


def record_bytes(form: Form) -> int:
    """Return the size of a record."""
    return sum(_padded(leaf["bytes"]) for leaf in _leaves_in(form))


def column_of(form: Form) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """Return what the default collation makes of a leaf: its type and shape; None: no numbers."""
    kind = form["is"]
    if kind == "tensor":
        return getattr(torch, form["dtype"]), tuple(form["shape"])
    if kind in ("array", "scalar"):
        array = np.empty(0, form["dtype"])
        return torch.from_numpy(array).dtype, tuple(form["shape"])
    if kind in ("int", "float"):
        return (torch.int64 if kind == "int" else torch.float64), ()
    return None


def with_form(form: Form, record: bytes) -> bytes:
    """Return a record behind its form, and that behind its length in 4 bytes."""
    text = json.dumps(form, separators=(",", ":")).encode()
    header = len(text).to_bytes(4, "little") + text
    return header.ljust(_padded(len(header)), b"\0") + record


def split(whole: Raw) -> tuple[Form, Raw]:
    """Return form and record; the inverse of :func:`with_form`."""
    start = whole[:4].tobytes()
    text = whole[4 : 4 + int.from_bytes(start, "little")].tobytes()
    return json.loads(text), whole[first_leaf_at(start) :]


def first_leaf_at(start: bytes) -> int:
    """Return where the leaves begin in a record behind its form; ``start``: its first 4 bytes."""
    return _padded(4 + int.from_bytes(start, "little"))


def _leaves_in(form: Form) -> Iterator[Form]:
    if "of" not in form:
        yield form
        return
    for part in form["of"]:
        yield from _leaves_in(part)


def _form(value: object, raws: list[Raw], path: str) -> Form:
    kind = type(value)
    if kind in (tuple, list):
        parts = [_form(part, raws, f"{path}[{i}]") for i, part in enumerate(value)]  # type: ignore[arg-type, var-annotated]
        return {"is": kind.__name__, "of": parts}
    if kind is dict:
        named: Any = value
        if not all(type(key) in (str, int) for key in named):
            raise _unsupported(path, f"a dict with the keys {list(named)!r:.200}")
        parts = [_form(part, raws, f"{path}[{key!r}]") for key, part in named.items()]
        return {"is": "dict", "keys": list(named), "of": parts}
    form, raw = _leaf(value, path)
    raws.append(raw)
    form["bytes"] = raw.size
    return form


def _leaf(value: object, path: str) -> tuple[Form, Raw]:
    kind = type(value)
    if value is None:
        return {"is": "None"}, np.empty(0, np.uint8)
    if isinstance(value, torch.Tensor):
        return _tensor(value, path)
    if kind.__name__ in _NUMBERS and kind in (int, float, bool):
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise _unsupported(path, f"the number {value}, which needs more than 64 bits")
        return {"is": kind.__name__}, _raw(np.array(value, _NUMBERS[kind.__name__]))
    if isinstance(value, str | bytes) and kind in (str, bytes):
        data = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
        return {"is": kind.__name__}, np.frombuffer(data, np.uint8)
    if isinstance(value, np.generic | np.ndarray) and (
        isinstance(value, np.generic) or kind in (np.ndarray, np.memmap)
    ):
        if value.dtype.kind not in "biufc" or not value.dtype.isnative:
            raise _unsupported(path, f"an array of {value.dtype}")
        name = "scalar" if isinstance(value, np.generic) else "array"
        form = {"is": name, "dtype": value.dtype.str, "shape": list(value.shape)}
        return form, _raw(np.asarray(value))
    picture: Any = value
    if kind.__module__.startswith("PIL.") and getattr(picture, "mode", "") in _PICTURE_MODES:
        form = {"is": "picture", "mode": picture.mode, "size": list(picture.size)}
        return form, np.frombuffer(picture.tobytes(), np.uint8)
    raise _unsupported(path, f"a {kind.__module__}.{kind.__qualname__}")


def _tensor(value: torch.Tensor, path: str) -> tuple[Form, Raw]:
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    tv = kind.__module__.startswith("torchvision.tv_tensors") and kind.__name__ in ("Image", "Mask")
    plain = value.layout is torch.strided and value.device.type == "cpu"
    if not (kind is torch.Tensor or tv) or not plain or value.requires_grad or value.is_quantized:
        raise _unsupported(path, f"a tensor of {name} on {value.device}, {value.layout}")
    dense = value.detach().as_subclass(torch.Tensor).contiguous()
    form: Form = {
        "is": "tensor",
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
    }
    if tv:
        form["class"] = kind.__name__
    # View as bytes: numpy has not all of torch's types.
    raw = dense.reshape(-1).view(torch.uint8).numpy() if dense.numel() else np.empty(0, np.uint8)
    return form, raw


def _raw(array: NDArray[Any]) -> Raw:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _made(form: Form, take: Callable[[], Raw]) -> Batch:
    kind = form["is"]
    if kind in ("tuple", "list"):
        parts = [_made(part, take) for part in form["of"]]
        return tuple(parts) if kind == "tuple" else parts
    if kind == "dict":
        return {key: _made(part, take) for key, part in zip(form["keys"], form["of"], strict=True)}
    raw = take()
    if kind == "tensor":
        return _made_tensor(form, raw)
    if kind in ("array", "scalar"):
        array = raw.view(form["dtype"]).reshape(form["shape"])
        return array if kind == "array" else array[()]
    if kind in _NUMBERS:
        return raw.view(_NUMBERS[kind])[0].item()
    if kind == "str":
        return raw.tobytes().decode("utf-8", "surrogateescape")
    if kind == "bytes":
        return raw.tobytes()
    if kind == "picture":
        from PIL import Image

        # Bytes of its own: what shares memory with an array is read-only to Pillow.
        return Image.frombytes(form["mode"], tuple(form["size"]), raw.tobytes())
    return None


def _made_tensor(form: Form, raw: Raw) -> torch.Tensor:
    dtype, shape = getattr(torch, form["dtype"]), form["shape"]
    if math.prod(shape):
        tensor = torch.from_numpy(raw).view(dtype).reshape(shape)
    else:
        tensor = torch.empty(shape, dtype=dtype)
    if "class" not in form:
        return tensor
    from torchvision import tv_tensors

    kind: type[torch.Tensor] = {"Image": tv_tensors.Image, "Mask": tv_tensors.Mask}[form["class"]]
    return tensor.as_subclass(kind)


def _unsupported(path: str, what: str) -> DatasetError:
    where = f"at sample{path}" if path else "as a sample"
    return DatasetError(
        f"The dataset returns {what} {where}, which cannot be cached. What can be: {_SUPPORTED}."
    )


def _padded(size: int) -> int:
    return -(-size // 16) * 16

"""Pictures in forms that are quicker to read than their files: pixels, planes, smaller JPEGs.

Each is one row of bytes, a head of 16 and the picture:

====== ============================================= ============================ ===============
form   what follows the head                         bytes a pixel                against the RGB
====== ============================================= ============================ ===============
rgb    ``[height, width, 3]``                        3                            equal
yuv    brightness ``[height, width]``, colours of    1.5                          38 to 40 dB
       half the height and width (NV12)
jpeg   a JPEG of quality 90, 4:2:0                   0.2 to 0.3                   35 to 38 dB
====== ============================================= ============================ ===============

(The last column: of five photographs with a shorter side of 256 px.) Of the first two, no more is
read than the crop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np

from lightning_fastdata.images import Box
from lightning_fastdata.images.decoders import choose_decoder
from lightning_fastdata.images.reading import EncodedImage
from lightning_fastdata.images.resized_crop import (
    Placement,
    plan_resample,
    render,
    shorter_side_to,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from lightning_fastdata.images import Pixels, Scale
    from lightning_fastdata.images.resized_crop import Picture

StoredForm: TypeAlias = Literal["rgb", "yuv", "jpeg"]
FORMS: Final[tuple[StoredForm, ...]] = ("rgb", "yuv", "jpeg")
"""The quickest to read first, and the largest."""

_BYTES_A_PIXEL: Final[dict[StoredForm, float]] = {"rgb": 3.0, "yuv": 1.5, "jpeg": 0.3}
_HEAD: Final = np.dtype([("height", "<u4"), ("width", "<u4"), ("form", "<u4"), ("bytes", "<u4")])
_QUALITY: Final = 90


@dataclass(frozen=True, slots=True)
class StoredPicture:
    """One picture in one of the forms; :func:`open_stored` makes it."""

    height: int
    width: int
    form: StoredForm
    data: NDArray[np.uint8]
    """What follows the head; read-only."""
    name: str
    """What errors call it."""

    @property
    def scalable(self) -> bool:
        """Whether decoding at a scale above 1 is cheaper than decoding fully."""
        return self.form == "jpeg"

    def decode(self, *, scale: Scale = 1) -> Pixels:
        """Return the picture, ``[height, width, 3]`` uint8 RGB; scaled if it is a JPEG."""
        return self.decode_part(Box(0, 0, -(-self.height // scale), -(-self.width // scale)), scale)

    def decode_part(self, box: Box, scale: Scale = 1) -> Pixels:
        """Return what the picture has within ``box``; maybe a view.

        Raises:
            DatasetError: If a JPEG is damaged.
        """
        if self.form == "jpeg":
            data = self.data.tobytes()
            decoder = choose_decoder("auto")
            image = EncodedImage(self.name, data, self.height, self.width, decoder)
            return image.decode_part(box, scale=scale)
        top, left, height, width = box
        if self.form == "rgb":
            pixels = self.data.reshape(self.height, self.width, 3)
            return pixels[top : top + height, left : left + width]
        return self._from_planes(box)

    def _from_planes(self, box: Box) -> Pixels:
        import cv2

        top, left, height, width = box
        row, rows = _even(self.width), _even(self.height)
        bright = self.data[: rows * row].reshape(rows, row)
        colours = self.data[rows * row :].reshape(rows // 2, row // 2, 2)
        # Colours belong to two rows and two columns.
        first, last = top // 2, -(-(top + height) // 2)
        start, stop = left // 2, -(-(left + width) // 2)
        pixels: Pixels = cv2.cvtColorTwoPlane(
            bright[2 * first : 2 * last, 2 * start : 2 * stop],
            colours[first:last, start:stop],
            cv2.COLOR_YUV2RGB_NV12,
        )
        top, left = top - 2 * first, left - 2 * start
        return pixels[top : top + height, left : left + width]


def encoded(pixels: Pixels, form: StoredForm) -> NDArray[np.uint8]:
    """Return a picture in a form, with its head: one row of bytes.

    Args:
        pixels: ``[height, width, 3]`` uint8 RGB, C-contiguous.
        form: The form.
    """
    data = {"rgb": _flat, "yuv": _planes, "jpeg": _jpeg}[form](pixels)
    head = np.array([(*pixels.shape[:2], FORMS.index(form), data.size)], _HEAD)
    return np.concatenate([head.view(np.uint8), data])


def open_stored(row: NDArray[np.uint8], name: str) -> StoredPicture:
    """Return a picture that :func:`encoded` made; bytes that follow it make no difference."""
    height, width, form, size = row[: _HEAD.itemsize].view(_HEAD)[0].item()
    data = row[_HEAD.itemsize : _HEAD.itemsize + size]
    return StoredPicture(height, width, FORMS[form], data, name)


def stored_bytes(height: int, width: int, form: StoredForm) -> float:
    """Return about how many bytes a picture takes in a form."""
    return _HEAD.itemsize + _BYTES_A_PIXEL[form] * height * width


def size_of_shrunk(height: int, width: int, shorter_side: int | None) -> tuple[int, int]:
    """Return ``(height, width)`` with a shorter side of at most so many pixels; None: any."""
    if shorter_side is None or min(height, width) <= shorter_side:
        return height, width
    return shorter_side_to(shorter_side, height, width)


def shrunk(image: Picture, shorter_side: int | None) -> Pixels:
    """Return all of a picture, with a shorter side of at most so many pixels.

    It is decoded at the power of two that leaves a factor of at least 1, and the rest is resized
    with torchvision's antialiased filter.

    Raises:
        DatasetError: If the file is damaged.
    """
    height, width = size_of_shrunk(image.height, image.width, shorter_side)
    if (height, width) == (image.height, image.width):
        return np.ascontiguousarray(image.decode())
    whole = Placement(Box(0, 0, image.height, image.width), height, width, 0, 0, flip=False)
    plan = plan_resample(whole, "auto", scalable=image.scalable)._replace(filter="antialias")
    out: Pixels = np.empty((height, width, 3), np.uint8)
    render(image, whole, plan, out)
    return out


def _even(number: int) -> int:
    return -(-number // 2) * 2


def _flat(pixels: Pixels) -> NDArray[np.uint8]:
    return pixels.reshape(-1)


def _planes(pixels: Pixels) -> NDArray[np.uint8]:
    import cv2

    height, width = pixels.shape[:2]
    if height % 2 or width % 2:
        pixels = np.pad(pixels, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        height, width = pixels.shape[:2]
    bright = cv2.cvtColor(pixels, cv2.COLOR_RGB2YUV_I420).reshape(-1)[: height * width]
    # OpenCV takes the colour of one pixel in four; the mean of the four is nearer to each.
    means = cv2.resize(pixels, (width // 2, height // 2), interpolation=cv2.INTER_AREA)
    means = means.repeat(2, axis=0).repeat(2, axis=1)
    colours = cv2.cvtColor(means, cv2.COLOR_RGB2YUV_I420).reshape(-1)[height * width :]
    # The two colours of a pixel side by side, so that rows can be cut out of one plane.
    return np.concatenate([bright, colours.reshape(2, -1).T.reshape(-1)])


def _jpeg(pixels: Pixels) -> NDArray[np.uint8]:
    import simplejpeg

    data = simplejpeg.encode_jpeg(
        np.ascontiguousarray(pixels), quality=_QUALITY, colorsubsampling="420"
    )
    return np.frombuffer(data, np.uint8)

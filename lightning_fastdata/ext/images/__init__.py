"""Encoded images to uint8 arrays: decoders, and a fast image folder."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Pixels: TypeAlias = npt.NDArray[np.uint8]
"""``[height, width, 3]`` uint8, red-green-blue."""

Scale: TypeAlias = Literal[1, 2, 4, 8]
"""Divisor of height and width. libjpeg has others (8/7, 4/3, 8/5, ...), all slower than 1."""


class Box(NamedTuple):
    """A rectangle of pixels."""

    top: int
    left: int
    height: int
    width: int

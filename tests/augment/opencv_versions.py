"""What depends on the version of OpenCV that is installed."""

from __future__ import annotations

import cv2
import numpy as np


def counts_under_boolean_masks() -> bool:
    """Return whether this OpenCV takes what Albumentations gives it for ``AutoContrast(ignore=)``.

    OpenCV 4 does not: Albumentations raises there.
    """
    square: np.ndarray = np.zeros((2, 2), np.uint8)
    try:
        cv2.calcHist([square], [0], square == 0, [256], [0, 256])
    except cv2.error:
        return False
    return True

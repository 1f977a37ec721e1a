"""What the files in ``mds`` hold, and how they were written: by mosaicml-streaming 0.13.

``python tests/sources/mds_samples.py`` writes them anew. That library asks for other releases of
half of what the tests need, so it is not installed with them.
"""

from pathlib import Path

import numpy as np

COUNT = 30
FOLDER = Path(__file__).parent / "mds"


def sample(index):
    """Return what was written as sample ``index``."""
    rng = np.random.default_rng(index)
    return {
        "raw": rng.integers(0, 256, 20 + index, np.uint8).tobytes(),
        "name": f"naïve {index}",
        "number": index - 5,
        "small": np.uint8(index),
        "half": np.float16(index / 4),
        "long_number": 10**30 + index,
        "text": {"of": [index, "x"]},
        "array": rng.random((2, 1 + index % 3)).astype(np.float32),
        "typed": rng.integers(0, 9, (index % 4 + 1,)).astype(np.int16),
        "fixed": rng.random((3, 2)),
    }


if __name__ == "__main__":
    from streaming import MDSWriter

    columns = {
        "raw": "bytes",
        "name": "str",
        "number": "int",
        "small": "uint8",
        "half": "float16",
        "long_number": "str_int",
        "text": "json",
        "array": "ndarray",
        "typed": "ndarray:int16",
        "fixed": "ndarray:float64:3,2",
    }
    with MDSWriter(out=str(FOLDER), columns=columns, size_limit=3000, exist_ok=True) as writer:
        for index in range(COUNT):
            writer.write(sample(index))

"""Draw what a pipeline makes of a photograph: Albumentations' pixels, a device's, the difference.

python examples/show_augment.py [photo.jpg]
"""

import sys

import numpy as np
import torch
from albumentations import ColorJitter, Compose, RandomResizedCrop, Rotate
from PIL import Image

from demo.photos import photograph_path
from lightning_fastdata import BatchTransform, SampleKey

PIPELINE = Compose([RandomResizedCrop((192, 192)), Rotate(p=0.7), ColorJitter(p=0.8)])
DRAWS = 4
GAIN = 100  # brightness of one level in the picture of the differences

if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) > 1 else photograph_path("cat")
    photo = torch.from_numpy(np.array(Image.open(path).convert("RGB")))
    batch = photo.expand(DRAWS, *photo.shape)  # uint8 [4, H, W, 3]
    key = SampleKey(seed=0, epoch=0, index=0)  # one key, so both draw the same
    # "torch" is the code that runs on a GPU.
    theirs, ours = (
        BatchTransform.from_albumentations(PIPELINE, on_cpu=by)(batch, key=key).int()
        for by in ("albumentations", "torch")
    )
    apart = (theirs - ours).abs()
    rows = torch.cat([theirs, ours, (apart * GAIN).clamp(max=255)], dim=2)
    Image.fromarray(rows.flatten(0, 1).to(torch.uint8).numpy()).save("augmented.png")
    print(BatchTransform.from_albumentations(PIPELINE).explain())
    print(f"augmented.png: {DRAWS} draws, at most {apart.max()} levels apart")

"""Draw what a pipeline makes of a photograph: Albumentations' pixels, a device's, the difference.

python examples/show_augment.py [photo.jpg]
"""

import sys

import numpy as np
import torch
from albumentations import ColorJitter, Compose, RandomResizedCrop, Rotate
from PIL import Image

from demo.photos import photograph_path
from lightning_fastdata import FastDataLoader, as_batch_transform, prefetch

PIPELINE = Compose([RandomResizedCrop((192, 192)), Rotate(p=0.7), ColorJitter(p=0.8)])
DRAWS = 4
GAIN = 100  # brightness of one level in the picture of the differences


def drawn(photo, on_device):
    """Return draws of one photograph, [n, H, W, C]: by the workers, or by the code of a device."""
    transform, staged = as_batch_transform(PIPELINE), "train" if on_device else None
    loader = FastDataLoader(
        [{"image": photo}] * DRAWS, DRAWS, transform=transform, on_device=on_device, staged=staged
    )
    [batch] = prefetch(loader, "cpu")
    return batch["image"].int()


if __name__ == "__main__":
    path = sys.argv[1] if len(sys.argv) > 1 else photograph_path("cat")
    photo = np.array(Image.open(path).convert("RGB"))
    theirs, ours = (drawn(photo, on_device) for on_device in (False, True))
    apart = (theirs - ours).abs()
    rows = torch.cat([theirs, ours, (apart * GAIN).clamp(max=255)], dim=2)
    Image.fromarray(rows.flatten(0, 1).to(torch.uint8).numpy()).save("augmented.png")
    print(as_batch_transform(PIPELINE).explain())
    print(f"augmented.png: {DRAWS} draws, at most {apart.max()} levels apart")

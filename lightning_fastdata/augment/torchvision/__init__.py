"""The user's own torchvision v2 pipeline: its draws by sample, its pixels on batches.

- :mod:`pipeline`: what such a pipeline is, and its transforms.
- :mod:`plan`: where each of them runs.
- :mod:`tape`: the pipeline itself runs for a sample, and what it would do to pixels is noted.
- :mod:`operations`, :mod:`forms`: what is noted, carried out on a batch.
- :mod:`transform`: the transform of batches; :mod:`worker` its part in the workers,
  :mod:`collated` on batches of other loaders.
"""

from lightning_fastdata.augment.torchvision.transform import stage_transform as stage_transform

"""The user's own torchvision v2 pipeline: its draws by sample, its pixels on batches.

- :mod:`pipeline`: what such a pipeline is, and its transforms.
- :mod:`kinds`: what each transform is to images; :mod:`plan`: where it runs.
- :mod:`tape`: the pipeline itself runs for a sample, and what it would do to pixels is noted.
- :mod:`operations`, :mod:`forms`: what is noted, carried out on a batch.
- :mod:`transform`: the transform of batches; :mod:`worker` its part in the workers,
  :mod:`collated` on batches of other loaders; :mod:`mixes` what mixes the samples of a batch.
"""

from lightning_fastdata.augment.torchvision.mixes import stage_transform as stage_transform

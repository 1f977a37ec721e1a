"""The user's own torchvision v2 pipeline: its draws by sample, its pixels on batches.

- :mod:`plan`: what such a pipeline is made of, and where each transform of it runs.
- :mod:`tape`: the pipeline itself runs for a sample, and what it would do to pixels is noted.
- :mod:`forms`, :mod:`kernels`: what is noted, carried out on a batch; :mod:`costs`: its costs.
- :mod:`transform`: the transform of batches, and its part in the workers, with what that is given
  of a sample; :mod:`mixes`: what mixes the samples of a batch; :mod:`rewrite`: code of v1 in v2.
"""

from lightning_fastdata.augment.torchvision.mixes import stage_transform as stage_transform

"""The user's own torchvision v2 pipeline: its draws by sample, its pixels on batches.

- :mod:`plan`: what such a pipeline is made of, and where each transform of it runs.
- :mod:`tape`: the pipeline itself runs for a sample, and what it would do to pixels is noted.
- :mod:`forms`: what is noted, carried out on a batch.
- :mod:`transform`: the transform of batches, and its part in the workers.
"""

"""The user's own torchvision v2 pipeline: its draws by sample, its pixels on batches.

- :mod:`plan`: what a pipeline is made of, and where each of its transforms runs.
- :mod:`tape`: runs the pipeline itself for a sample, and notes what it would do to pixels.
- :mod:`forms`: carries out on a batch what was noted.
- :mod:`transform`: the transform of batches, and its part in the workers.
"""

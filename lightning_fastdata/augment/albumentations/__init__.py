"""The front end for Albumentations: what a pipeline is, where it runs, what it draws for a sample.

- :mod:`plan`: what a pipeline is made of, and where each of its operations runs.
- :mod:`tape`: runs the pipeline itself for a sample, and notes what it would do to pixels.
- :mod:`worker`: the part of a pipeline that runs in the workers.
- :mod:`collated_batches`: runs a pipeline on batches of another loader.
"""

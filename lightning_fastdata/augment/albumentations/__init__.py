"""The front end for Albumentations: what a pipeline is, where it runs, what it draws for a sample.

- :mod:`plan`: what such a pipeline is made of, and where each operation of it runs.
- :mod:`tape`: the pipeline itself runs for a sample, and what it would do to pixels is noted.
- :mod:`worker`: its part in the workers; :mod:`collated_batches`: batches of another loader.
"""

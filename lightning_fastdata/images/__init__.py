"""Encoded images to uint8 arrays: decoders, a fast image folder, and its distance to torchvision.

Beside ``augment``, above ``host``. The modules in the order in which a sample passes them:
``index`` (which file), ``reading`` (bytes and header), ``crops`` (which part), ``resample`` (how
much to decode, which filter), ``decoders`` (the pixels), ``folder`` (all of it, as a dataset),
``parity`` (how far the result is from torchvision's).
"""

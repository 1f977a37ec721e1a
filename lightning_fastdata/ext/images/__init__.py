"""Encoded images to uint8 arrays: decoders, and a fast image folder."""

"""Kernels in Triton: runs of Albumentations operations on uint8 RGB images, each in one launch."""

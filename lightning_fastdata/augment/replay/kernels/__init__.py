"""The kernels of fused runs, in Triton."""

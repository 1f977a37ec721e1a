"""Whether a batch fits the memory of the GPU."""

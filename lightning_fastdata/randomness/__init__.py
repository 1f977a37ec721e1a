"""Randomness of samples: the draws of a sample depend on its key alone, (seed, epoch, index)."""

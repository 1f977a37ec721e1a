"""Batches gathered from tensors and arrays, one call for each column."""

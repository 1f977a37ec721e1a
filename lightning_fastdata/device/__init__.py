"""Batches on their way to the device, or on it already."""

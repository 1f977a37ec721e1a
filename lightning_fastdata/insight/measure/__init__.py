"""Clocks, and what they say of the steps of a stage."""

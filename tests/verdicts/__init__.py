"""Findings, against causes that are planted."""

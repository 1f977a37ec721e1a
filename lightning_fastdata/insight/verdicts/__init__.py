"""Findings: one module for each family of causes."""

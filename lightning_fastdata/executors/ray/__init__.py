"""Actors of a Ray cluster that fetch: on this machine, or on others."""

"""Trainings as users write them, each slow for one known reason or for none, and how one is run."""

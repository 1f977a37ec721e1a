"""Trainings that run now: what each tells of itself, and how that is shown."""

"""Trainings that run now: what each tells of itself, and the page that shows it."""

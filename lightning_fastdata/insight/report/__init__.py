"""A measured run, reported to people and to programs."""

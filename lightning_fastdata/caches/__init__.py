"""Samples kept on disk or in memory, so that later epochs and runs do not make them again."""

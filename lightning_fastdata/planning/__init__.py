"""Which loader fits a dataset and this machine, and why."""

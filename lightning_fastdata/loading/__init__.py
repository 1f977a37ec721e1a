"""FastDataLoader: chosen for a dataset and this machine, read, timed, and tuned meanwhile."""

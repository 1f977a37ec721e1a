"""FastDataLoader: chosen for a dataset and this machine, read, timed, and tuned while it is read."""

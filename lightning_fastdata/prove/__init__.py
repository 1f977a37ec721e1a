"""Whether a change of the loader makes a training faster, tried on the training itself."""

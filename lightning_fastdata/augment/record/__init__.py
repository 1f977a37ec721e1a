"""What a pipeline draws for one sample, recorded without its pixel work."""

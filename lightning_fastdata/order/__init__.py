"""Which sample is read when."""

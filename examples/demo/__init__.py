"""One training on real photographs, loaded the usual way and with FastDataModule."""

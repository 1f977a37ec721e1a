"""FastDataModule."""

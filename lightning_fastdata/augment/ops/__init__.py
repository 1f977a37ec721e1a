"""Albumentations transforms in the form that runs on a batch on the device."""

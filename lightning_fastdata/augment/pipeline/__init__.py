"""What an Albumentations pipeline is, and what of it can run on a device."""

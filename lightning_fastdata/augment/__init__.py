"""The user's own Albumentations pipeline, its pixels on the device."""

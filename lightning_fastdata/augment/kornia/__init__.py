"""The front end for Kornia: its own modules compute, and each sample draws under its own key."""

from lightning_fastdata.augment.kornia.transform import stage_transform as stage_transform

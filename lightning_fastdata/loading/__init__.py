"""From dataset to batch on the device."""

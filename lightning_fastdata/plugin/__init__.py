"""The only room that imports Lightning."""

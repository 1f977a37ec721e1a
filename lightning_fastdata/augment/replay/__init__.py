"""What was drawn for a batch, computed on its device."""

"""What was drawn for a batch, carried out on its device."""

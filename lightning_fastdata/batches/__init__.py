"""What a batch is: how it is collated, packed, shared between processes and moved."""

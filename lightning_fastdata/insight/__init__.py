"""Where the step went."""

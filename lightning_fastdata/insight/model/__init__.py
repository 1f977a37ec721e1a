"""What a step would take with another loader."""

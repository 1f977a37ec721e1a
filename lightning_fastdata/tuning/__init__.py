"""What a step would take with another loader, and the change of a running loader that pays."""

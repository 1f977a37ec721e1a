"""Who did what when: stamps of batches, operations and lines."""

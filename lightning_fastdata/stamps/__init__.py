"""Who did what when: stamps of batches and lines."""

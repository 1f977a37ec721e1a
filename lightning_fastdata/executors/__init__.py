"""Who fetches the batches: one contract, several executors."""

"""Why batches were late: waits cut into parts, added up and named."""

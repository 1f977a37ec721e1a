"""DataThroughputCallback."""

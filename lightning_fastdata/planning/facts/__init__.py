"""What is found out about a dataset before its workers start."""

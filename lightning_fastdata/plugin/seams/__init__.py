"""What is asked of Lightning beyond its documented hooks."""

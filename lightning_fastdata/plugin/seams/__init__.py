"""Everything that is asked of Lightning beyond its documented hooks, and nothing anywhere else."""

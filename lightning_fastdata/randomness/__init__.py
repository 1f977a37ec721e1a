"""What a sample draws depends on its key alone: seed, epoch and index."""

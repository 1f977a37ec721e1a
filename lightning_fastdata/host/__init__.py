"""What this machine allows."""

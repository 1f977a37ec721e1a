"""Sources of bytes, against real files and a real server."""

"""What goes to loggers: scalars, texts, pictures and reports."""

"""What goes to loggers: scalars, texts, the picture of a step, and reports."""

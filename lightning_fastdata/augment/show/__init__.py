"""Pictures and pages that show what pipelines make of images."""
